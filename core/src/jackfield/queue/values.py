"""Direct access of workers to values in the backend, without the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.abc.transfer_queue import Column, GetRequest, PutRequest, TagsRequest, TransferQueueBackend
from jackfield.queue.meta import BatchMeta, Written
from jackfield.sdk.columns import check_column, concatenate, take


class Values:
    """A reader and writer of columns of samples by key. It does not check leases; the queue does."""

    def __init__(self, backend: TransferQueueBackend) -> None:
        self._backend = backend
        self._shows_tags = getattr(backend.put_tags, "__func__", None) is not TransferQueueBackend.put_tags

    async def get(self, partition: str, keys: Sequence[str], names: Sequence[str]) -> dict[str, Column]:
        """Read columns, in the order of ``keys``.

        Raises:
            QueueError: ``queue.unknown-sample``, ``queue.column``.
        """
        request = GetRequest(partition=partition, keys=tuple(keys), columns=tuple(names))
        return dict((await self._backend.get(request)).columns)

    async def read(self, meta: BatchMeta, names: Sequence[str]) -> dict[str, Column]:
        """Read columns of a batch in its order. Its samples may be of several partitions.

        Raises:
            QueueError: ``queue.unknown-sample``, ``queue.column``.
        """
        places = meta.by_partition()
        parts = [await self.get(name, [meta.keys[at] for at in ours], names) for name, ours in places.items()]
        if len(parts) == 1:
            return parts[0]
        joined = [at for ours in places.values() for at in ours]
        order = sorted(range(len(joined)), key=joined.__getitem__)
        return {name: take(concatenate([part[name] for part in parts]), order) for name in names}

    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        columns: Mapping[str, Column],
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> Written:
        """Write columns with one sample per key. The caller reports them to the queue afterwards.

        Raises:
            QueueError: ``queue.invalid`` if a column breaks its contract.
        """
        sizes = _check_columns(columns, len(keys))
        if keys and columns:
            await self._backend.put(PutRequest(partition=partition, keys=tuple(keys), columns=columns))
        if keys and tags is not None and self._shows_tags:
            await self._backend.put_tags(TagsRequest(partition=partition, keys=tuple(keys), tags=tuple(tags)))
        return Written(columns=tuple(columns), sizes=sizes, tags=None if tags is None else tuple(tags))

    async def write(self, meta: BatchMeta, columns: Mapping[str, Column]) -> Written:
        """Write columns of a batch; see :meth:`put`."""
        sizes = _check_columns(columns, len(meta))
        for partition, ours in meta.by_partition().items():
            part = columns if len(ours) == len(meta) else {name: take(each, ours) for name, each in columns.items()}
            await self.put(partition, [meta.keys[at] for at in ours], part)
        return Written(columns=tuple(columns), sizes=sizes)


def _check_columns(columns: Mapping[str, Column], samples: int) -> tuple[int, ...]:
    """Check that columns keep their contract; return the bytes of each sample's values."""
    sizes = [check_column(name, column, samples) for name, column in columns.items()]
    return tuple(map(sum, zip(*sizes, strict=True))) if sizes else (0,) * samples
