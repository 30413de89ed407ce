"""The embedded backend: values in this process's memory, gone with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import attrs

from jackfield.abc.transfer_queue import (
    Column,
    DeleteRequest,
    DeleteResult,
    GetRequest,
    GetResult,
    PutRequest,
    PutResult,
    SnapshotRequest,
    SnapshotResult,
    StatsResult,
    TransferQueueBackend,
    TransferQueueContext,
)
from jackfield.errors import QueueError
from jackfield.queue.archive import ArchivedRow, read_archive, write_archive
from jackfield.queue.cells import Cell, Kind, column_kind
from jackfield.queue.columns import split_rows

if TYPE_CHECKING:
    import torch

__all__ = ["MemoryBackend", "MemoryConfig"]

_INLINE_BYTES = 1 << 24  #: smaller checkpoints are written without a thread

Kept = tuple["torch.Tensor", Kind]
Cells = dict[tuple[str, str], dict[str, Kept]]


@attrs.frozen(kw_only=True)
class MemoryConfig:
    """It has no settings: limits are the queue's."""


class MemoryBackend(TransferQueueBackend):
    """A dict of row tensors by partition, key and column. Each row is a copy of its own, freed with the row."""

    durable: ClassVar[bool] = False

    def __init__(self, config: MemoryConfig, context: TransferQueueContext) -> None:
        super().__init__(config, context)
        self._cells: Cells = {}
        self._bytes = 0
        self._closed = False

    async def put(self, request: PutRequest) -> PutResult:
        """Store copies."""
        self._check_open()
        if len(set(request.keys)) != len(request.keys):
            raise QueueError("a row is named twice", expected="distinct keys", found=list(request.keys)[:4])
        rows = {name: split_rows(column) for name, column in request.columns.items()}
        for name, tensors in rows.items():
            if len(tensors) != len(request.keys):
                raise QueueError(f"column {name!r} has {len(tensors)} rows", expected=len(request.keys), where=name)
        stored = 0
        cells = [self._cells.setdefault((request.partition, key), {}) for key in request.keys]
        for name, tensors in rows.items():
            kind = column_kind(request.columns[name])
            for cell, values in zip(cells, tensors, strict=True):
                stored += values.nbytes
                if name in cell:
                    self._bytes -= cell[name][0].nbytes
                cell[name] = (values.detach() if values.requires_grad else values).clone(), kind
        self._bytes += stored
        return PutResult(bytes=stored)

    async def get(self, request: GetRequest) -> GetResult:
        """Read copies."""
        self._check_open()
        rows = [self._row(request.partition, key) for key in request.keys]
        return GetResult(columns={name: self._column(request, rows, name) for name in request.columns})

    def _row(self, partition: str, key: str) -> dict[str, Kept]:
        cells = self._cells.get((partition, key))
        if cells is None:
            raise QueueError(
                f"no row {key!r} is in the queue", code="queue.unknown-sample", where=f"{partition}: {key}"
            )
        return cells

    def _column(self, request: GetRequest, rows: Sequence[dict[str, Kept]], name: str) -> Column:
        if not rows:
            raise QueueError("no rows are named", expected="one key at least")
        try:
            cells = [row[name] for row in rows]
        except KeyError:
            lacking = [key for key, row in zip(request.keys, rows, strict=True) if name not in row]
            raise QueueError(
                f"column {name!r} is not there in {len(lacking)} rows, {lacking[0]} first",
                code="queue.column",
                where=f"{request.partition}: {lacking[0]}",
                expected=f"one of {', '.join(sorted(rows[request.keys.index(lacking[0])])) or '(none)'}",
                found=name,
            ) from None
        return _join(cells, name)

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Forget."""
        self._check_open()
        rows, freed = 0, 0
        for key in request.keys:
            cells = self._cells.pop((request.partition, key), None)
            if cells is not None:
                rows += 1
                freed += sum(values.nbytes for values, _ in cells.values())
        self._bytes -= freed
        return DeleteResult(samples=rows, bytes=freed)

    async def stats(self) -> StatsResult:
        """Count."""
        self._check_open()
        return StatsResult(samples=len(self._cells), bytes=self._bytes)

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Write everything that is there at the call; what is large is written by a thread, and producers go on."""
        self._check_open()
        cells = {where: dict(columns) for where, columns in self._cells.items()}  # tensors are never changed in place
        folder, size = Path(request.folder), self._bytes
        if size < _INLINE_BYTES:
            write_archive(folder, _archived(cells))
        else:
            await asyncio.to_thread(write_archive, folder, _archived(cells))
        return SnapshotResult(samples=len(cells), bytes=size)

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Replace everything by a checkpoint."""
        self._check_open()
        self._cells = _read(Path(request.folder))
        self._bytes = sum(values.nbytes for columns in self._cells.values() for values, _ in columns.values())
        return SnapshotResult(samples=len(self._cells), bytes=self._bytes)

    async def close(self) -> None:
        """Forget everything."""
        self._closed = True
        self._cells = {}
        self._bytes = 0

    def _check_open(self) -> None:
        if self._closed:
            raise QueueError("the memory backend is closed", code="queue.closed")


def _join(cells: Sequence[Kept], name: str) -> Column:
    import torch

    values, kind = cells[0]
    shape = values.shape if kind == "dense" else values.shape[1:]
    for other, other_kind in cells:
        other_shape = other.shape if other_kind == "dense" else other.shape[1:]
        if (other_kind, other.dtype, other_shape) != (kind, values.dtype, shape):
            raise QueueError(
                f"rows of column {name!r} do not fit together",
                code="queue.column",
                where=name,
                expected=f"{kind}, {values.dtype}, {list(shape)}",
                found=f"{other_kind}, {other.dtype}, {list(other_shape)}",
                fix="put all rows of a column with one dtype, encoding and trailing shape, all jagged or all dense",
            )
    tensors = [cell[0] for cell in cells]
    if kind == "dense":
        return Column(values=torch.stack(tensors))
    offsets = torch.zeros(len(tensors) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor([len(tensor) for tensor in tensors], dtype=torch.int64), 0, out=offsets[1:])
    return Column(values=torch.cat(tensors), offsets=offsets, encoding="json" if kind == "json" else "tensor")


def _archived(cells: Cells) -> Iterator[ArchivedRow]:
    for (partition, key), columns in cells.items():
        archived = {name: Cell.of(values, kind) for name, (values, kind) in columns.items()}
        yield ArchivedRow(partition=partition, key=key, cells=archived)


def _read(folder: Path) -> Cells:
    return {
        (row.partition, row.key): {name: (cell.tensor(), cell.kind) for name, cell in row.cells.items()}
        for row in read_archive(folder)
    }
