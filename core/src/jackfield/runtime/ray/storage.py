"""A queue backend in an actor: values go from worker to actor as raw buffers, in Ray's channel."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from jackfield.abc.transfer_queue import (
    Column,
    DeleteRequest,
    DeleteResult,
    GetRequest,
    GetResult,
    KeysRequest,
    KeysResult,
    PutRequest,
    PutResult,
    SnapshotRequest,
    SnapshotResult,
    StatsResult,
    TagsRequest,
    TransferQueueBackend,
    TransferQueueContext,
)
from jackfield.errors import WorkerLost
from jackfield.runtime.ray.stub import Stub

if TYPE_CHECKING:
    from jackfield.runtime.advantages import AdvantageWorker

__all__ = ["RemoteBackend", "Storage"]


@attrs.frozen(kw_only=True, eq=False)
class _Buffers:
    """A column without torch: numpy arrays, which Ray moves without copies."""

    dtype: str
    shape: tuple[int, ...]
    content: Any  #: uint8 ``[bytes]``; None without any
    offsets: Any  #: int64 ``[rows + 1]``, or None
    encoding: Any


class Storage:
    """Lives in an actor: any backend, and the worker that estimates advantages beside the rows."""

    def __init__(self, backend: TransferQueueBackend, estimator: AdvantageWorker | None) -> None:
        self._backend = backend
        self.estimator = estimator

    async def start(self) -> None:
        """Start the backend."""
        await self._backend.start()

    async def put(self, partition: str, keys: tuple[str, ...], columns: Mapping[str, _Buffers]) -> PutResult:
        """Store."""
        values = {name: _column(buffers) for name, buffers in columns.items()}
        return await self._backend.put(PutRequest(partition=partition, keys=keys, columns=values))

    async def get(self, request: GetRequest) -> dict[str, _Buffers]:
        """Read."""
        result = await self._backend.get(request)
        return {name: _buffers(column) for name, column in result.columns.items()}

    async def put_tags(self, request: TagsRequest) -> None:
        """Show tags."""
        await self._backend.put_tags(request)

    async def keys(self, request: KeysRequest) -> KeysResult:
        """List."""
        return await self._backend.keys(request)

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Forget."""
        return await self._backend.delete(request)

    async def stats(self) -> StatsResult:
        """Count."""
        return await self._backend.stats()

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Write everything."""
        return await self._backend.checkpoint(request)

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Read everything."""
        return await self._backend.restore(request)

    async def close(self) -> None:
        """Close the backend."""
        await self._backend.close()


class RemoteBackend(TransferQueueBackend):
    """Stands for the backend in a :class:`Storage`. Controllers and workers hold one each; it can be sent around."""

    durable: ClassVar[bool] = False

    def __init__(self, storage: Stub) -> None:
        super().__init__(None, TransferQueueContext())
        self._storage = storage

    async def start(self) -> None:
        """Start the backend there."""
        await self._storage.start()

    async def put(self, request: PutRequest) -> PutResult:
        """Store there."""
        columns = {name: _buffers(column) for name, column in request.columns.items()}
        stored: PutResult = await self._storage.put(request.partition, request.keys, columns)
        return stored

    async def get(self, request: GetRequest) -> GetResult:
        """Read there."""
        columns = await self._storage.get(request)
        return GetResult(columns={name: _column(buffers) for name, buffers in columns.items()})

    async def keys(self, request: KeysRequest) -> KeysResult:
        """List what is there."""
        listed: KeysResult = await self._storage.keys(request)
        return listed

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Forget there."""
        deleted: DeleteResult = await self._storage.delete(request)
        return deleted

    async def stats(self) -> StatsResult:
        """Count there."""
        counted: StatsResult = await self._storage.stats()
        return counted

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Write there."""
        written: SnapshotResult = await self._storage.checkpoint(request)
        return written

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Read there."""
        read: SnapshotResult = await self._storage.restore(request)
        return read

    async def put_tags(self, request: TagsRequest) -> None:
        """Show tags there."""
        await self._storage.put_tags(request)

    async def close(self) -> None:
        """Close it; a dead one is closed."""
        with suppress(WorkerLost):
            await self._storage.close()


def _buffers(column: Column) -> _Buffers:
    import torch

    values = column.values
    return _Buffers(
        dtype=str(values.dtype).removeprefix("torch."),
        shape=tuple(values.shape),
        content=values.detach().reshape(-1).view(torch.uint8).numpy() if values.numel() else None,
        offsets=None if column.offsets is None else column.offsets.numpy(),
        encoding=column.encoding,
    )


def _column(buffers: _Buffers) -> Column:
    import torch

    # Ray's own memory is read-only
    values = torch.empty(buffers.shape, dtype=getattr(torch, buffers.dtype))
    if values.numel():
        values.reshape(-1).view(torch.uint8).numpy()[:] = buffers.content
    offsets = None if buffers.offsets is None else torch.from_numpy(buffers.offsets.copy())
    return Column(values=values, offsets=offsets, encoding=buffers.encoding)
