"""A row of a column as bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from jackfield.abc.transfer_queue import Column
from jackfield.errors import QueueError
from jackfield.queue import column_from_rows, dense_column, rows_of

__all__ = ["Cell", "cells_of", "column_of"]


@attrs.frozen
class Cell:
    """One row of one column: ``dense``, ``jagged`` or ``json``, its dtype, shape and little-endian bytes."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    content: bytes


def cells_of(column: Column) -> list[Cell]:
    """The rows of a column. JSON texts stay the bytes that they are."""
    kind = "dense" if column.offsets is None else "json" if column.encoding == "json" else "jagged"
    plain = attrs.evolve(column, encoding="tensor")
    return [_cell(kind, row) for row in rows_of(plain)]


def _cell(kind: str, row: torch.Tensor) -> Cell:
    content = row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if row.numel() else b""
    return Cell(kind, str(row.dtype).removeprefix("torch."), tuple(row.shape), content)


def column_of(name: str, cells: Sequence[Cell]) -> Column:
    """Rows as one column.

    Raises:
        QueueError: ``queue.column`` for rows of different dtypes, encodings or trailing shapes.
    """
    kinds: set[Any] = {(c.kind, c.dtype, c.shape if c.kind == "dense" else c.shape[1:]) for c in cells}
    if len(kinds) > 1:
        raise QueueError(f"rows of column {name!r} do not fit together", code="queue.column", found=sorted(kinds))
    tensors = [_tensor(cell) for cell in cells]
    if cells[0].kind == "dense":
        return dense_column(torch.stack(tensors))
    column = column_from_rows(tensors)
    return attrs.evolve(column, encoding="json") if cells[0].kind == "json" else column


def _tensor(cell: Cell) -> torch.Tensor:
    dtype = getattr(torch, cell.dtype)
    if not cell.content:
        return torch.empty(cell.shape, dtype=dtype)
    return torch.frombuffer(bytearray(cell.content), dtype=torch.uint8).view(dtype).reshape(cell.shape)
