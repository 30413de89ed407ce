"""Rows in files that people and other programs read and write: JSON lines and Parquet.

A line of JSONL, like a record of Parquet, has a row's key, group, task, tags and columns. What the queue wrote carries
each column's encoding, dtype and shape and comes back bit for bit. What somebody else wrote may leave out everything
but the columns: their encoding then follows from the values.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import QueueError
from jackfield.files import replacing
from jackfield.queue.cells import Cell, cells_of
from jackfield.queue.columns import dense_column, json_column

__all__ = ["EXACT", "StoredRow", "cell_of", "from_plain", "read_rows", "to_plain", "write_rows"]

#: Dtypes whose finite values are the same numbers in JSON.
EXACT = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"})

#: Dtypes of well-known columns, where a file does not say them.
_KNOWN = {"prompt_ids": "int64", "response_ids": "int64", "response_mask": "bool", "task": "json"}
_FLOATS = ("rollout_log_probs", "reward", "reward_dimensions", "old_log_probs", "ref_log_probs", "values", "advantages")
_KNOWN |= dict.fromkeys((*_FLOATS, "returns"), "float32")


@attrs.frozen(kw_only=True, eq=False)
class StoredRow:
    """One row of a file or of a checkpoint."""

    cells: Mapping[str, Cell]  #: by column
    tags: Mapping[str, Any] = attrs.field(factory=dict)
    partition: str | None = None
    key: str | None = None  #: that it had in the queue that wrote it
    ticket: int | None = None  #: of a checkpoint; None: nobody knows the row any more, it waited to be deleted
    group: str | None = None  #: rows of one group come together again
    task: str | None = None
    acked_by: tuple[str, ...] = ()  #: consumers that are done with it

    @property
    def bytes(self) -> int:
        """Of values."""
        return sum(len(cell.content) for cell in self.cells.values())


def write_rows(file: Path, rows: Callable[[], Iterable[StoredRow]]) -> int:
    """Write rows to a JSONL file, or to a Parquet file where its name ends so; returns their number.

    Args:
        file: is replaced when it is whole.
        rows: yields them; it is called twice for Parquet, whose schema comes first.

    Raises:
        QueueError: ``queue.extra`` where pyarrow is missing.
    """
    with replacing(file) as partial:
        if file.suffix == ".parquet":
            from jackfield.queue.parquet import write_parquet

            count = write_parquet(partial, rows)
        else:
            count = 0
            with partial.open("w", encoding="utf-8") as lines:
                for row in rows():
                    lines.write(json.dumps(_as_json(row), ensure_ascii=False, allow_nan=False) + "\n")
                    count += 1
    return count


def read_rows(file: Path) -> Iterator[StoredRow]:
    """The rows of a JSONL or Parquet file.

    Raises:
        QueueError: ``queue.invalid`` where the file, or a line of it, is not what it should be; ``queue.extra`` where
            pyarrow is missing.
    """
    if not file.is_file():
        raise QueueError("there is no such file of rows", where=str(file), expected="a .jsonl or .parquet file")
    if file.suffix == ".parquet":
        from jackfield.queue.parquet import read_parquet

        yield from read_parquet(file)
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _from_json(line, f"{file}, line {number}")


def to_plain(cell: Cell) -> Any:
    """A cell as JSON that is exactly its value: the value of a JSON column, nested lists, a number, or base64."""
    if cell.kind == "json":
        value = json.loads(bytes(cell.content))
        if _json_cell(value).content == cell.content and not _is_base64(value):
            return value
    elif cell.dtype in EXACT:
        values = cell.tensor()
        if not values.is_floating_point() or bool(values.isfinite().all()):
            return (values.double() if values.is_floating_point() else values).tolist()
    return {"base64": base64.b64encode(cell.content).decode()}


def from_plain(header: list[Any], value: Any) -> Cell:
    """What :func:`to_plain` wrote.

    Raises:
        QueueError: ``queue.store`` where header and value do not fit together; whatever torch raises for a wrong dtype
            or shape.
    """
    import torch

    kind, dtype, shape = header
    if _is_base64(value):
        return Cell.checked(kind, dtype, shape, base64.b64decode(value["base64"]))
    if kind == "json":
        return _json_cell(value)
    made = torch.tensor(value, dtype=getattr(torch, dtype)).reshape(shape)
    return Cell.checked(kind, dtype, shape, Cell.of(made, kind).content)


def cell_of(name: str, value: Any) -> Cell:
    """A cell of a column whose encoding nobody has said: lists of numbers are jagged tensors, numbers are dense.

    Integers are int64, others float32, but for well-known columns; anything else is JSON.
    """
    import torch

    wanted = _KNOWN.get(name)
    if wanted == "json" or not _is_numeric(value):
        return _json_cell(value)
    made = torch.tensor(value)
    dtype = wanted or ("float32" if made.is_floating_point() else str(made.dtype).removeprefix("torch."))
    made = made.to(getattr(torch, dtype))
    return cells_of(dense_column(made.unsqueeze(0)))[0] if made.dim() == 0 else Cell.of(made, "jagged")


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_numeric(each) for each in value)
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"base64"}


def _json_cell(value: Any) -> Cell:
    return cells_of(json_column([value]))[0]


def _as_json(row: StoredRow) -> dict[str, Any]:
    return {
        **{name: getattr(row, name) for name in ("partition", "key", "ticket", "group", "task")},
        "tags": dict(row.tags),
        "acked_by": list(row.acked_by),
        "columns": {name: to_plain(cell) for name, cell in row.cells.items()},
        "types": {name: [cell.kind, cell.dtype, list(cell.shape)] for name, cell in row.cells.items()},
    }


def _from_json(line: bytes, where: str) -> StoredRow:
    try:
        record = json.loads(line.decode("utf-8"))
        columns, types = record["columns"], record.get("types", {})
        cells = {
            name: from_plain(types[name], value) if name in types else cell_of(name, value)
            for name, value in columns.items()
        }
        names = {field.name for field in attrs.fields(StoredRow)} - {"cells", "acked_by"}
        given = {name: record[name] for name in names & record.keys() if record[name] is not None}
        return StoredRow(cells=cells, acked_by=tuple(record.get("acked_by", ())), **given)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, QueueError) as error:
        raise QueueError(
            "a line is no row of a queue",
            where=where,
            expected='{"columns": {"prompt_ids": [1, 2], …}, "tags": {…}, "group": …, "task": …}',
            found=f"{type(error).__name__}: {error}",
        ) from error
