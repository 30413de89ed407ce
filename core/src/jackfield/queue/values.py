"""The values of samples: direct access of workers without the controller, and the backend in this process's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

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
from jackfield.errors import QueueError
from jackfield.queue.meta import BatchMeta, Written
from jackfield.queue.records import Group
from jackfield.sdk.archive import SavedSample, read_archive, write_archive
from jackfield.sdk.cells import Cell, check_column, join, lacking_column, layouts, split, unknown_sample

_SMALL = 1 << 20  #: bytes of a column up to which copying it twice takes no time
_INLINE_BYTES = 1 << 24  #: checkpoints below this size are written without a thread


class Values:
    """A reader and writer of columns of samples by key. It does not check leases; the queue does.

    Reading raises ``queue.unknown-sample`` and ``queue.column``; writing raises ``queue.invalid`` if a column breaks
    its contract.
    """

    def __init__(self, backend: TransferQueueBackend) -> None:
        self._backend = backend
        self._shows_tags = getattr(backend.put_tags, "__func__", None) is not TransferQueueBackend.put_tags

    async def get(self, partition: str, keys: Sequence[str], names: Sequence[str]) -> dict[str, Column]:
        """Read columns, in the order of ``keys``."""
        request = GetRequest(partition=partition, keys=tuple(keys), columns=tuple(names))
        return dict((await self._backend.get(request)).columns)

    async def read(self, meta: BatchMeta, names: Sequence[str]) -> dict[str, Column]:
        """Read columns of a batch in its order. Its samples may be of several partitions."""
        cells: dict[str, dict[int, Cell]] = {name: {} for name in names}
        places = meta.by_partition()
        for partition, ours in places.items():
            part = await self.get(partition, [meta.keys[at] for at in ours], names)
            if len(places) == 1:
                return part
            for name, column in part.items():
                text, contents = split(column)
                cells[name] |= {at: (text, content) for at, content in zip(ours, contents, strict=True)}
        return {name: join(name, [each[at] for at in range(len(meta))]) for name, each in cells.items()}

    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        columns: Mapping[str, Column],
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> Written:
        """Write columns with one sample per key. The caller reports them to the queue afterwards."""
        sizes = _check_columns(columns, len(keys))
        if keys and columns:
            await self._backend.put(PutRequest(partition=partition, keys=tuple(keys), columns=columns))
        if keys and tags is not None and self._shows_tags:
            await self._backend.put_tags(TagsRequest(partition=partition, keys=tuple(keys), tags=tuple(tags)))
        return Written(columns=tuple(columns), sizes=sizes, tags=tuple(tags or ()))

    async def write(self, meta: BatchMeta, columns: Mapping[str, Column]) -> Written:
        """Write columns of a batch; see :meth:`put`."""
        sizes, places = _check_columns(columns, len(meta)), meta.by_partition()
        cells = {name: split(column) for name, column in columns.items()} if len(places) > 1 else {}
        for partition, ours in places.items():
            part = {name: join(name, [(text, parts[at]) for at in ours]) for name, (text, parts) in cells.items()}
            await self.put(partition, [meta.keys[at] for at in ours], part or columns)
        return Written(columns=tuple(columns), sizes=sizes)


def _check_columns(columns: Mapping[str, Column], samples: int) -> tuple[int, ...]:
    """Check that columns keep their contract; return the bytes of each sample's values."""
    sizes = [check_column(name, column, samples) for name, column in columns.items()]
    return tuple(map(sum, zip(*sizes, strict=True))) if sizes else (0,) * samples


def leaving(
    group: Group, reasons: Mapping[str, str | None], status: str | None = None
) -> tuple[list[SavedSample], int, Group | None]:
    """Describe samples of a finished group, or failed or dropped ones, with the size of their values and the group."""
    uses = {each.name: group.uses[each.name] for each in group.batch.partition.ends() if each.name in group.uses}
    own: dict[str, Any] = {"batch": group.batch.number, "group": group.name, "task": group.task_id, "cells": {}}
    own |= {"partition": group.batch.partition.name, "acked_by": sorted(uses)}
    own["steps"] = sorted({step for use in uses.values() for step in use.steps if step is not None})
    own["status"] = status or ("trained" if any(use.steps for use in uses.values()) else "retired")
    samples = []
    for key, why in reasons.items():
        tags = {**group.tags, **group.samples[key].tags, **({} if why is None else {"reason": why})}
        samples.append(SavedSample(key=key, tags=tags, **own))
    return samples, sum(group.samples[key].bytes for key in reasons), None if status else group


@attrs.frozen(kw_only=True)
class MemoryConfig:
    """The settings of the backend. There are none: the queue has the limits."""


class MemoryBackend(TransferQueueBackend):
    """A dict of cells by partition, key and column. Each cell is a separate copy, freed with its sample."""

    durable: ClassVar[bool] = False

    def __init__(self, config: MemoryConfig, context: TransferQueueContext) -> None:
        super().__init__(config, context)
        self._kept: dict[tuple[str, str], dict[str, Cell]] | None = {}

    @property
    def _cells(self) -> dict[tuple[str, str], dict[str, Cell]]:
        if self._kept is None:
            raise QueueError("the memory backend is closed", code="queue.closed")
        return self._kept

    async def put(self, request: PutRequest) -> PutResult:
        columns, everything = layouts(request), self._cells
        samples = [everything.setdefault((request.partition, key), {}) for key in request.keys]
        for name, (text, content, bounds) in columns.items():
            whole = bytes(content) if len(content) < _SMALL else content  # its slices are faster, and copies
            for cells, start, end in zip(samples, bounds, bounds[1:], strict=False):
                cells[name] = text, bytes(whole[start:end])
        return PutResult(bytes=sum(len(content) for _, content, _ in columns.values()))

    async def get(self, request: GetRequest) -> GetResult:
        everything, partition = self._cells, request.partition
        try:
            samples = [everything[partition, key] for key in request.keys]
        except KeyError as error:
            raise unknown_sample(*error.args[0]) from None
        columns = {}
        for name in request.columns:
            try:
                columns[name] = join(name, [cells[name] for cells in samples])
            except KeyError:
                lacking = [(key, cells) for key, cells in zip(request.keys, samples, strict=True) if name not in cells]
                raise lacking_column(partition, name, [key for key, _ in lacking], lacking[0][1]) from None
        return GetResult(columns=columns)

    async def keys(self, request: KeysRequest) -> KeysResult:
        wanted, found = request.partition, self._cells.items()
        return KeysResult(samples={place: tuple(cells) for place, cells in found if wanted in (None, place[0])})

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        removed = [self._cells.pop((request.partition, key), None) for key in request.keys]
        there = [cells for cells in removed if cells is not None]
        return DeleteResult(samples=len(there), bytes=_size(there))

    async def stats(self) -> StatsResult:
        return StatsResult(samples=len(self._cells), bytes=_size(self._cells.values()))

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Write all current samples. A thread writes large checkpoints, and producers continue."""
        samples = [SavedSample(partition=name, key=key, cells={**cells}) for (name, key), cells in self._cells.items()]
        if sum(sample.bytes for sample in samples) < _INLINE_BYTES:
            return write_archive(Path(request.folder), samples)
        return await asyncio.to_thread(write_archive, Path(request.folder), samples)

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        restored, found = self._cells, list(read_archive(Path(request.folder)))
        restored.clear()
        restored |= {(each.partition, each.key): dict(each.cells) for each in found}
        return SnapshotResult(samples=len(found), bytes=sum(each.bytes for each in found))

    async def close(self) -> None:
        self._kept = None


def _size(samples: Iterable[Mapping[str, Cell]]) -> int:
    return sum(map(len, map(itemgetter(1), chain.from_iterable([cells.values() for cells in samples]))))
