"""The embedded backend: values in this process's memory, gone with it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
from jackfield.queue.columns import split_rows

if TYPE_CHECKING:
    import torch

__all__ = ["MemoryBackend", "MemoryConfig"]

_INDEX, _VALUES = "index.json", "values.bin"
_FORMAT = 1
_INLINE_BYTES = 1 << 24  #: smaller checkpoints are written without a thread

Kind = Literal["dense", "jagged", "json"]
Cell = tuple["torch.Tensor", Kind]
Cells = dict[tuple[str, str], dict[str, Cell]]


@attrs.frozen(kw_only=True)
class MemoryConfig:
    """It has no settings: limits are the queue's."""


class MemoryBackend(TransferQueueBackend):
    """A dict of row tensors by partition, key and column. Each row is a copy of its own, freed with the row.

    A checkpoint is ``values.bin`` (the rows' raw bytes back to back) and ``index.json`` (which says where each is).
    safetensors would not do: it lacks dtypes that torch has (complex128, float8_e8m0fnu), and names each tensor in one
    header, where we have millions of rows.
    """

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
            kind = _kind(request.columns[name])
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

    def _row(self, partition: str, key: str) -> dict[str, Cell]:
        cells = self._cells.get((partition, key))
        if cells is None:
            raise QueueError(f"no row {key!r} is in the queue", code="queue.unknown-row", where=f"{partition}: {key}")
        return cells

    def _column(self, request: GetRequest, rows: Sequence[dict[str, Cell]], name: str) -> Column:
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
        return DeleteResult(rows=rows, bytes=freed)

    async def stats(self) -> StatsResult:
        """Count."""
        self._check_open()
        return StatsResult(rows=len(self._cells), bytes=self._bytes)

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Write everything that is there at the call; what is large is written by a thread, and producers go on."""
        self._check_open()
        cells = {where: dict(columns) for where, columns in self._cells.items()}  # tensors are never changed in place
        folder, size = Path(request.folder), self._bytes
        if size < _INLINE_BYTES:
            _write(cells, folder)
        else:
            await asyncio.to_thread(_write, cells, folder)
        return SnapshotResult(rows=len(cells), bytes=size)

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Replace everything by a checkpoint."""
        self._check_open()
        self._cells = _read(Path(request.folder))
        self._bytes = sum(values.nbytes for columns in self._cells.values() for values, _ in columns.values())
        return SnapshotResult(rows=len(self._cells), bytes=self._bytes)

    async def close(self) -> None:
        """Forget everything."""
        self._closed = True
        self._cells = {}
        self._bytes = 0

    def _check_open(self) -> None:
        if self._closed:
            raise QueueError("the memory backend is closed", code="queue.closed")


def _kind(column: Column) -> Kind:
    return "dense" if column.offsets is None else "json" if column.encoding == "json" else "jagged"


def _join(cells: Sequence[Cell], name: str) -> Column:
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


def _write(cells: Cells, folder: Path) -> None:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Any] = []
    with (folder / f"{_VALUES}.partial").open("wb") as file:
        for (partition, key), columns in cells.items():
            entry = {}
            for name, (values, kind) in columns.items():
                entry[name] = [kind, str(values.dtype).removeprefix("torch."), list(values.shape)]
                file.write(values.reshape(-1).view(torch.uint8).numpy().data)
            rows.append([partition, key, entry])
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    with (folder / f"{_INDEX}.partial").open("w", encoding="utf-8") as index:
        json.dump({"format": _FORMAT, "bytes": size, "rows": rows}, index, ensure_ascii=False, separators=(",", ":"))
        index.flush()
        os.fsync(index.fileno())
    (folder / f"{_VALUES}.partial").replace(folder / _VALUES)
    (folder / f"{_INDEX}.partial").replace(folder / _INDEX)


def _read(folder: Path) -> Cells:
    import torch

    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        content = (folder / _VALUES).read_bytes()
    except OSError as error:
        message = "the folder holds no checkpoint of the memory backend"
        raise QueueError(message, where=str(folder), found=error) from error
    if index["format"] != _FORMAT or index["bytes"] != len(content):
        raise QueueError(
            "the checkpoint is of another format, or incomplete",
            where=str(folder),
            expected=f"format {_FORMAT}, {index['bytes']} bytes",
            found=f"format {index['format']}, {len(content)} bytes",
        )
    cells: Cells = {}
    start = 0
    for partition, key, entry in index["rows"]:
        columns = cells[partition, key] = {}
        for name, (kind, dtype_name, shape) in entry.items():
            values = torch.empty(shape, dtype=getattr(torch, dtype_name))
            end = start + values.nbytes
            values.reshape(-1).view(torch.uint8).numpy()[:] = memoryview(content)[start:end]
            columns[name] = values, kind
            start = end
    return cells
