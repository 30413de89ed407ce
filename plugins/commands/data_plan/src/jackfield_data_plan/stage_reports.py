"""What the stages of a pipeline left: counts, reasons, and distributions of what they wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.compose.libraries import readers
from jackfield.config.data import DataSet
from jackfield.errors import DataError, did_you_mean
from jackfield_data_plan.distributions import Columns, Distribution, lines_of, reasons
from jackfield_data_plan.parts import pipeline_part, plain

_REASONS = 5


def report_of(place: str, column: str | None) -> list[dict[str, Any]]:
    """Return reports on the stages in a folder of row sets, or one on the rows of a file.

    Raise ``data.missing`` if ``column`` is in none of them.
    """
    folder = Path(place)
    if folder.is_dir() and (found := _sets(folder)):
        reports = list[dict[str, Any]]()
        for chain in found:
            reports += chain_report(chain, column, seen={each["stage"] for each in reports})
    else:
        reports = [_of_file(place, column)]
    if column is not None and not any(each["columns"] for each in reports):
        names = sorted({name for each in reports for name in each["names"]})
        details: Any = {"where": place, "expected": "one of " + ", ".join(names), "found": repr(column)}
        raise DataError(f"no row has the column{did_you_mean(column, names)}", code="data.missing", **details)
    return reports


def _sets(folder: Path) -> list[Any]:
    """Return the chains of row sets in a folder, in its folder ``data``, or the one that it is itself."""
    if (one := pipeline_part("row_sets").RowSet.open(folder)) is not None:
        return [[one]]
    inner = folder / "data"
    for each in (inner, folder):
        if each.is_dir() and any(pipeline_part("row_sets").RowSet.open(path) for path in _folders(each)):
            return list(pipeline_part("lineage").chains(each))
    return []


def _folders(folder: Path) -> list[Path]:
    return [each for each in sorted(folder.iterdir()) if each.is_dir() and not each.name.startswith(".")]


def chain_report(
    chain: Sequence[Any], column: str | None = None, seen: Sequence[str] | set[str] = ()
) -> list[dict[str, Any]]:
    """Report on the stages of a chain: on each what it newly wrote, on the last one all columns."""
    reports, before = list[dict[str, Any]](), set[str]()
    for number, made in enumerate(chain):
        first: dict[str, Any] = next(iter(made.records()), {})
        last = number == len(chain) - 1
        names = {*first} if last or not number else {*first} - before
        before = {*first}
        if made.folder.name in seen:
            continue
        wanted = names if column is None else {column}
        columns = Columns(wanted, sizes=column is not None)
        if column is None or column in first:
            for record in made.records():
                columns.add(record)
        counts = {name: int(count) for name, count in made.manifest["counts"].items()}
        gone = {name: _reasons(made, f"{name}.jsonl") for name in ("removed", "set_aside") if counts[name]}
        report: dict[str, Any] = {"stage": made.folder.name, **counts, "reasons": gone}
        reports.append({**report, "columns": columns.distributions(), "names": sorted(first)})
    return reports


def _reasons(made: Any, file: str) -> dict[str, int]:
    return dict(reasons(str(each["why"]) for each in made.records(file)).most_common(_REASONS))


def _of_file(place: str, column: str | None) -> dict[str, Any]:
    columns = Columns(None if column is None else {column}, sizes=column is not None)
    names = dict[str, None]()
    with readers().open_lines(DataSet(path=place)) as opened:
        for record in _records(opened):
            names.update(dict.fromkeys(record))
            columns.add(record)
    report: dict[str, Any] = {"stage": place, "rows": columns.rows, "reasons": {}}
    return {**report, "columns": columns.distributions(), "names": [*names]}


def _records(opened: Any) -> Iterator[dict[str, Any]]:
    import msgspec

    decode = msgspec.json.Decoder().decode
    opened.seek(0)
    for number, line in enumerate(opened, 1):
        if line.strip():
            try:
                record = decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                details: Any = {"where": f"line {number}", "expected": "a JSON object", "found": plain(error)}
                raise DataError("a line is not JSON", code="data.malformed", **details) from error
            if isinstance(record, dict):
                yield record


def as_json(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return reports as JSON values."""
    return [{**each, "columns": {name: attrs.asdict(one) for name, one in each["columns"].items()}} for each in reports]


def as_lines(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield reports as lines of text."""
    for each in reports:
        names = [name for name in ("rows", "removed", "set_aside", "made") if name == "rows" or each.get(name)]
        counts = [f"{each[name]} {name.replace('_', ' ')}" for name in names]
        yield f"{plain(each['stage'])}: {', '.join(counts)}"
        for what, found in each["reasons"].items():
            told = "; ".join(f"{count} × {plain(why, 100)}" for why, count in found.items())
            yield f"  {what.replace('_', ' ')}: {told}"
        columns: dict[str, Distribution] = each["columns"]
        yield from lines_of(columns)
