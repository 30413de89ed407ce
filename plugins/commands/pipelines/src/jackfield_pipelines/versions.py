"""Late labels of a set of rows: each file of them makes another version, whose source is the version before."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from jackfield.clock import Clock
from jackfield.errors import DataError, did_you_mean
from jackfield_pipelines.guards import disk_errors, locked
from jackfield_pipelines.lines import reader, updated
from jackfield_pipelines.row_sets import KEY, MANIFEST, ROWS, RowSet, RowSetWriter

LABELS = "labels"  #: the operator in the manifest of a version
_MARK = f"-{LABELS}-"
_PART = 4096  #: rows that are written together
_LOCK_SECONDS = 600.0
_encode = msgspec.json.Encoder().encode


def versions(folder: Path) -> list[RowSet]:
    """Return a set and its versions with labels, the oldest first; ``folder`` is that of any of them.

    Raise ``data.missing`` if there is no set.
    """
    root = folder.with_name(folder.name.partition(_MARK)[0])
    first = RowSet.open(root)
    if first is None:
        expected, fix = "the folder of a set of rows", "look at the names that `jackfield data sets` shows"
        raise DataError("there is no set of rows", code="data.missing", where=str(folder), expected=expected, fix=fix)
    opened = (RowSet.open(each) for each in root.parent.glob(f"{root.name}{_MARK}*"))
    later, found = {str(each.manifest["source"]): each for each in opened if each is not None}, [first]
    while (after := later.get(found[-1].digest)) is not None:
        found.append(after)
    return found


def version_of(folder: Path) -> RowSet:
    """Return the newest version of a set, or the version that ``folder`` is."""
    found = versions(folder)
    pinned = [each for each in found if _MARK in folder.name and each.folder.name == folder.name]
    return (pinned or found)[-1]


def rows_of(folder: Path) -> Path:
    """Return the file with the rows of a set: of its newest version, or of the version that ``folder`` is."""
    return version_of(folder).folder / ROWS


def set_at(path: Path) -> RowSet | None:
    """Return the set whose rows are at a path, which is its folder or the file of its rows; None: another file."""
    if path.is_dir() and (path / MANIFEST).exists():
        return version_of(path)
    if path.name != ROWS or not path.exists():
        return None
    try:
        return RowSet.open(path.parent)
    except DataError:  # a file of this name beside a manifest of another program
        return None


async def label(folder: Path, file: Path, by: str, clock: Clock) -> tuple[RowSet, int]:
    """Add the labels of a file to the newest version of a set; return the newest version, and how many rows changed.

    Each line of the file has the ``key`` of a row, and columns with their values. Labels that rows have already make
    no version. Raise ``data.malformed`` for lines that are no labels, and ``data.missing`` for keys that the set lacks.
    """
    labels, parent = read_labels(file), folder.parent
    with disk_errors(parent):
        async with locked(parent, clock, _LOCK_SECONDS):
            newest = versions(folder)[-1]
            changed = _changed(newest, labels, file)
            if not changed:
                return newest, 0
            about: dict[str, Any] = {"operator": LABELS, "settings": {"by": by}, "source": newest.digest}
            told = _encode([about, sorted(changed.items())])
            digest = xxhash.xxh3_128_hexdigest(told)
            root = newest.folder.name.partition(_MARK)[0]
            with contextlib.closing(RowSetWriter(parent / f"{root}{_MARK}{digest[:12]}")) as writer:
                _write(newest, changed, writer)
                now = datetime.now(UTC).isoformat(timespec="seconds")
                return writer.commit({**about, "digest": digest, "time": now}), len(changed)


def read_labels(file: Path) -> dict[str, dict[str, Any]]:
    """Return the columns of each line by its key."""
    found = dict[str, dict[str, Any]]()
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                record = msgspec.json.decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise _wrong("a line of labels is not JSON", where, str(error)[:200]) from error
            key = record.pop("key", None) if isinstance(record, dict) else None
            if not isinstance(key, str) or not record or KEY in record:
                raise _wrong("a line is no label", where, line.decode(errors="replace").strip()[:200])
            if found.setdefault(key, record) != record:
                raise _wrong("a row has two labels", where, key)
    if not found:
        raise _wrong("there are no labels", str(file), "none")
    return found


def _wrong(what: str, where: str, found: str) -> DataError:
    expected = "an object with the key of a row, and a column or more, on each line"
    return DataError(what, where=where, expected=expected, found=found)


def _changed(newest: RowSet, labels: Mapping[str, Mapping[str, Any]], file: Path) -> dict[str, Mapping[str, Any]]:
    """Return the labels that rows do not have yet."""
    names = {name for each in labels.values() for name in each}
    read, unknown, changed = reader(names), dict(labels), dict[str, Mapping[str, Any]]()
    for line in newest.lines():
        key, values = read(line)
        own = unknown.pop(key, {})
        if any(name not in values or _encode(values[name]) != _encode(value) for name, value in own.items()):
            changed[key] = own
    if unknown:
        key = next(iter(unknown))
        known = [reader(())(line)[0] for line, _ in zip(newest.lines(), range(1000), strict=False)]
        what, found = "labels name rows that the set does not have", f"{len(unknown)}, such as {key!r}"
        expected = "the keys in _row of its rows" + did_you_mean(key, known)
        raise DataError(what, code="data.missing", where=str(file), expected=expected, found=found)
    return changed


def _write(newest: RowSet, changed: Mapping[str, Mapping[str, Any]], writer: RowSetWriter) -> None:
    read, part = reader({name for each in changed.values() for name in each}), list[bytes]()
    for line in newest.lines():
        key, known = read(line)
        part.append(updated(line, known, changed[key]) if key in changed else line)
        if len(part) == _PART:
            writer.append_lines(ROWS, part)
            part = []
    writer.append_lines(ROWS, part)
