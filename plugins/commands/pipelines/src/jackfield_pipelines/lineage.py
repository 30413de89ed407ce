"""From a row back to the raw lines that it was made from, and on to what was made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import DataError, did_you_mean
from jackfield_pipelines.row_sets import KEY, LINEAGE, REMOVED, ROWS, SET_ASIDE, RowSet
from jackfield_pipelines.versions import LABELS


@attrs.frozen(kw_only=True)
class Event:
    """What a stage did with a row."""

    row: str
    stage: str  #: name of the folder
    operator: str
    version: str  #: of the operator's distribution
    settings: Mapping[str, Any]
    what: str  #: read, made, changed, labelled, removed, set aside, or ordered
    detail: Any = None  #: of read the place, of made the parents, of changed the columns, otherwise the reason


def chains(folder: Path) -> list[list[RowSet]]:
    """Return the sets of a folder in chains, each from a source to a set that no other one was made from."""
    sets = _sets(folder)
    if not sets:
        fix = "give the folder `data` of a run with data.pipeline, or that of `jackfield data run`"
        raise DataError("there are no sets of rows", code="data.missing", where=str(folder), fix=fix)
    last = sets.keys() - {each.manifest.get("source") for each in sets.values()}
    return [_to(sets, sets[digest]) for digest in sorted(last)]


def _to(sets: Mapping[str, RowSet], last: RowSet) -> list[RowSet]:
    chain = [last]
    while (source := sets.get(str(chain[-1].manifest.get("source")))) is not None:
        chain.append(source)
    before = chain[-1].manifest.get("before", {})
    if before and (folder := Path(before["folder"]).parent).is_dir():  # its rows are those of another pipeline
        earlier = _sets(folder)
        if (made := earlier.get(before["digest"])) is not None:
            return [*_to(earlier, made), *chain[::-1]]
    return chain[::-1]


def _sets(folder: Path) -> dict[str, RowSet]:
    found = (RowSet.open(each) for each in sorted(folder.iterdir()) if not each.name.startswith("."))
    return {each.digest: each for each in found if each is not None}


def trace(chain: Sequence[RowSet], row: str) -> list[Event]:
    """Return what happened to a row, to all rows from which it was made, and to all that were made from it, in order.

    Raise ``data.missing`` if there is no such row in any set.
    """
    family = _family(chain, row)
    events, before = list[Event](), dict[str, dict[str, Any]]()
    for made in chain:
        now = {record[KEY]: record for record in made.records(ROWS) if record[KEY] in family}
        parents = {record[KEY]: record["parents"] for record in made.records(LINEAGE) if record[KEY] in family}
        for name, what in ((REMOVED, "removed"), (SET_ASIDE, "set aside")):
            gone = (record for record in made.records(name) if record[KEY] in family)
            events += [_event(made, record[KEY], what, record["why"]) for record in gone]
        for key, record in now.items():
            if key in parents:
                events.append(_event(made, key, "made", parents[key]))
            elif key not in before:
                stem, _, line = key.rpartition(":")
                events.append(_event(made, key, "read", f"{made.manifest.get('files', {}).get(stem, stem)}:{line}"))
            elif changed := {name: value for name, value in record.items() if before[key].get(name, ...) != value}:
                what = "labelled" if made.manifest["operator"] == LABELS else "changed"
                events.append(_event(made, key, what, changed))
        before = now
    if not events:
        known = [record[KEY] for _, record in zip(range(1000), chain[0].records(), strict=False)]
        what, details = "there is no such row", {"found": repr(row), "expected": f"a key such as {known[0]}"}
        raise DataError(what + did_you_mean(row, known), code="data.missing", **details)
    return events


def _family(chain: Sequence[RowSet], row: str) -> set[str]:
    parents = {record[KEY]: record["parents"] for made in chain for record in made.records(LINEAGE)}
    older, newer = {row}, {row}
    pending = [row]
    while pending:
        for parent in parents.get(pending.pop(), ()):
            if parent not in older:
                older.add(parent)
                pending.append(parent)
    for key, own in parents.items():  # parents come before what was made of them
        if newer.intersection(own):
            newer.add(key)
    return older | newer


def _event(made: RowSet, row: str, what: str, detail: Any) -> Event:
    about = made.manifest
    named = {"operator": str(about["operator"]), "version": str(about.get("version", ""))}
    return Event(row=row, stage=made.folder.name, settings=about.get("settings", {}), what=what, detail=detail, **named)
