"""A row of a column as typed bytes: what stores outside this process keep.

A cell's *header* says what its bytes are: ``["jagged","int64",[3]]``. No pickle, no class names of Python. Stores that
somebody else could change keep a *digest* with it, of the bytes, of the header and of where the cell belongs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

import attrs
import xxhash

from jackfield.abc.transfer_queue import Column
from jackfield.errors import QueueError

if TYPE_CHECKING:
    import torch

__all__ = ["Buffer", "Cell", "Kind", "cells_of", "column_kind", "column_of", "damaged_rows"]

Kind = Literal["dense", "jagged", "json"]
Buffer = bytes | bytearray | memoryview


@attrs.frozen(eq=False)
class Cell:
    """One row of one column.

    ``shape`` is the row's: jagged rows and JSON texts have their length first. ``content`` are the elements' bytes in
    C order, little-endian.
    """

    kind: Kind
    dtype: str  #: torch's name, without ``torch.``
    shape: tuple[int, ...]
    content: Buffer

    @classmethod
    def of(cls, values: torch.Tensor, kind: Kind) -> Cell:
        """A row's tensor; its memory is shared."""
        return cls(kind, _dtype_name(values), tuple(values.shape), _bytes(values))

    @classmethod
    def checked(cls, kind: str, dtype: str, shape: Sequence[int], content: Buffer) -> Cell:
        """A cell that was kept.

        Raises:
            QueueError: ``queue.store`` where its parts do not belong together.
        """
        cell = cls(cast(Kind, kind), dtype, tuple(shape), content)
        try:
            size = cell.size
        except (AttributeError, TypeError) as error:
            raise _damaged("a dtype of torch, and a shape", f"{dtype!r}, {shape!r}") from error
        if kind not in ("dense", "jagged", "json") or size != len(content):
            raise _damaged(f"{size} bytes, dense, jagged or json", f"{len(content)} bytes, {kind!r}")
        return cell

    @classmethod
    def parse(cls, header: str | bytes, content: Buffer) -> Cell:
        """Header and bytes, as they were kept.

        Raises:
            QueueError: ``queue.store`` where they do not belong together.
        """
        try:
            kind, dtype, shape = json.loads(header)
        except (ValueError, TypeError) as error:
            raise _damaged('["dense" | "jagged" | "json", dtype, [length, ...]]', header) from error
        return cls.checked(kind, dtype, shape, content)

    @property
    def header(self) -> str:
        """What :meth:`parse` reads."""
        return json.dumps([self.kind, self.dtype, self.shape], separators=(",", ":"))

    def digest(self, partition: str, key: str, name: str) -> str:
        """Of this cell as the one of a column of a row: xxh3_64, 16 hexadecimal digits."""
        hashed = xxhash.xxh3_64(json.dumps([partition, key, name, self.kind, self.dtype, self.shape]).encode())
        hashed.update(self.content)
        return hashed.hexdigest()

    @property
    def size(self) -> int:
        """Bytes, as dtype and shape have it."""
        return math.prod(self.shape) * int(_dtype(self.dtype).itemsize)

    def tensor(self) -> torch.Tensor:
        """The row, in memory of its own."""
        import torch

        values = torch.empty(self.shape, dtype=_dtype(self.dtype))
        _bytes(values)[:] = self.content
        return values


def cells_of(column: Column) -> list[Cell]:
    """The rows of a column; they share its memory."""
    kind, values = column_kind(column), column.values
    count, *rest = values.shape
    dtype, content, trailing = _dtype_name(values), _bytes(values), tuple(rest)
    unit = values.element_size() * math.prod(trailing)
    if column.offsets is None:
        starts = range(0, count * unit, unit) if unit else [0] * count
        return [Cell(kind, dtype, trailing, content[start : start + unit]) for start in starts]
    bounds = column.offsets.tolist()
    return [
        Cell(kind, dtype, (end - start, *trailing), content[start * unit : end * unit])
        for start, end in pairwise(bounds)
    ]


def column_of(name: str, cells: Sequence[Cell], memory: Callable[[int], torch.Tensor | None] | None = None) -> Column:
    """Rows as one column.

    Args:
        name: of the column, for errors.
        cells: of the rows, one at least.
        memory: asked for uint8 ``[bytes]`` in which the cells' bytes lie already, in order; None from it: they do not.
            Without it, or then, they are copied into memory of the column's own.

    Raises:
        QueueError: ``queue.column`` for rows of different dtypes, encodings or trailing shapes; ``queue.invalid`` for
            no rows.
    """
    import torch

    if not cells:
        raise QueueError("no rows are named", expected="one key at least")
    first = cells[0]
    dense = first.kind == "dense"
    trailing = first.shape if dense else first.shape[1:]
    for cell in cells:
        if (cell.kind, cell.dtype, cell.shape if dense else cell.shape[1:]) != (first.kind, first.dtype, trailing):
            raise QueueError(
                f"rows of column {name!r} do not fit together",
                code="queue.column",
                where=name,
                expected=f"{first.kind}, {first.dtype}, {list(first.shape)}",
                found=f"{cell.kind}, {cell.dtype}, {list(cell.shape)}",
                fix="put all rows of a column with one dtype, encoding and trailing shape, all jagged or all dense",
            )
    bounds = [0]
    for cell in cells:
        bounds.append(bounds[-1] + (1 if dense else cell.shape[0]))
    shape, dtype = (bounds[-1], *trailing), _dtype(first.dtype)
    there = None if memory is None else memory(sum(len(cell.content) for cell in cells))
    values = torch.empty(shape, dtype=dtype) if there is None else there.view(dtype).reshape(shape)
    if there is None:
        content, start = _bytes(values), 0
        for cell in cells:
            end = start + len(cell.content)
            content[start:end] = cell.content
            start = end
    if dense:
        return Column(values=values)
    return Column(values=values, offsets=torch.tensor(bounds), encoding="json" if first.kind == "json" else "tensor")


def column_kind(column: Column) -> Kind:
    """How the rows of a column lie."""
    return "dense" if column.offsets is None else "json" if column.encoding == "json" else "jagged"


def damaged_rows(partition: str, keys: Iterable[str], where: str) -> QueueError:
    """The error of a store in which cells are not what was put: their rows are lost, and can be made again."""
    found = sorted(set(keys))
    shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    return QueueError(
        f"values of {len(found)} rows of partition {partition!r} are not those that were put: {shown}",
        code="queue.lost",
        where=where,
        expected="bytes with the digests that were put with them",
        found=found,
    )


def _bytes(values: torch.Tensor) -> memoryview:
    lies = values.detach().contiguous()
    try:
        content: Any = lies.numpy()
    except TypeError:  # a dtype that numpy lacks
        import torch

        content = lies.reshape(-1).view(torch.uint8).numpy()
    return memoryview(content.reshape(-1).view("u1"))


def _dtype_name(values: torch.Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


def _damaged(expected: object, found: object) -> QueueError:
    return QueueError("a cell is damaged", code="queue.store", expected=expected, found=found)
