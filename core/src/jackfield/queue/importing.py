"""Import of samples from files into a partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import attrs

from jackfield.abc.transfer_queue import (
    PutRequest,
    PutResult,
    SnapshotRequest,
    SnapshotResult,
    TransferQueueContext,
)
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.meta import Batch, GroupKey, Lineage, NewGroup, RolloutReport
from jackfield.queue.sample_files import read_samples
from jackfield.queue.store import STORE_FILE, VALUES_FOLDER
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.queue.values import MemoryBackend, MemoryConfig, Values
from jackfield.sdk.archive import BATCH_BYTES, BATCH_ROWS, ArchiveWriter, SavedSample, read_archive
from jackfield.sdk.cells import join

_WHO = "import"
_SECONDS = 600.0  #: deadline of a wait for room in the queue


@attrs.define(eq=False)
class ImportedSamples:
    """The samples of a file or of a queue's folder, imported as one batch of published groups.

    Samples of one group form one group again, each as a rollout of its own. A sample's parent is ``ORIGIN:KEY``, or
    ``ORIGIN`` if it had no key, and the parent's lineage is kept. Samples are read one by one; only the names of their
    groups stay in memory. Lost samples are imported again.
    """

    queue: TransferQueue  #: a started queue
    values: Values  #: of the queue's backend
    partition: str  #: the partition that gets the samples
    read: Callable[[], Iterable[SavedSample]]  #: reads all samples, each time in the same order
    origin: str  #: the file or folder of the samples
    complete: Callable[[SavedSample], SavedSample] = lambda sample: sample  #: adds missing columns to a sample
    _sizes: Counter[object] = attrs.field(factory=Counter, init=False)  # group sizes in the order of first samples

    async def put(self) -> int:
        """Put all samples and return their number.

        Raises:
            QueueError: If a sample cannot be put.
        """
        batch = await self._claim()
        while batch is not None and not batch.vacant:  # of an earlier import, offered again after a restore
            batch = await self._claim()
        if batch is not None:
            await self._fill(batch)
        return sum(self._sizes.values())

    async def keep(self) -> None:
        """Put groups again whose samples were lost with a part of the store. It runs until it is cancelled.

        Raises:
            QueueError: If a group was lost too often.
        """
        while True:
            with suppress(DeadlineExceeded):
                batch = await self._claim(below=1)
                if batch is None:
                    return  # all its groups were consumed
                await self._fill(batch)

    async def _claim(self, below: int | None = None) -> Batch | None:
        """Claim the batch of these samples. Return None if there are none, or no group is left to put."""
        if not self._sizes:
            self._sizes = Counter(_group_of(sample, number) for number, sample in enumerate(self.read()))
        groups, partition = len(self._sizes), self.partition
        if not groups:
            return None
        return await self.queue.claim_batch(partition, _WHO, groups, below=below, deadline_seconds=_SECONDS)

    async def _fill(self, batch: Batch) -> None:
        """Fill the vacant places of a batch, as many at a time as there is room for."""
        places = {group: place for place, group in enumerate(self._sizes)}
        async for keys in self.queue.groups_to_fill(batch, _SECONDS, until="published"):
            wanted, opened = {key.index: key for key in keys}, Counter[int]()
            for number, sample in enumerate(self.read()):
                place = places[name := _group_of(sample, number)]
                if place not in wanted:
                    continue
                if not opened[place]:
                    task = sample.task if sample.task is not None else f"row-{place}"
                    new = NewGroup(key=wanted[place], task_id=task, rollouts=self._sizes[name])
                    await self.queue.open_groups([new])
                await self._put(wanted[place], opened[place], self.complete(sample))
                opened[place] += 1

    async def _put(self, group: GroupKey, rollout: int, sample: SavedSample) -> None:
        key, parent = group.sample(rollout, 0), f"{self.origin}:{sample.key}" if sample.key else self.origin
        lineage = {key: Lineage(_WHO, (parent,))}
        if "operation" in sample.tags and "parents" in sample.tags:
            lineage[parent] = Lineage(sample.tags["operation"], tuple(sample.tags["parents"]))
        columns = {name: join(name, [cell]) for name, cell in sample.cells.items()}
        tags = {**sample.tags, "operation": _WHO, "parents": [parent]}
        written = await self.values.put(self.partition, [key], columns, [tags])
        report = RolloutReport(group=str(group), rollout=rollout, keys=(key,), written=written, lineage=lineage)
        await self.queue.end_rollouts([report])


def _group_of(sample: SavedSample, number: int) -> object:
    return number if sample.group is None else (sample.partition, sample.group)


class _AppendingBackend(MemoryBackend):
    """A backend that appends whole samples to a folder's checkpoint; only column names stay in memory.

    The folder's previous checkpoint stays valid until :meth:`checkpoint`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(MemoryConfig(), TransferQueueContext())
        self._folder, self._archive = folder, ArchiveWriter(folder)
        self._pending: list[SavedSample] = []  #: samples that are not in the file yet, at most one batch

    def _append(self, samples: Iterable[SavedSample]) -> None:
        """Append samples to the file, and keep the names of their columns."""

        def appended() -> Iterator[SavedSample]:
            for sample in samples:
                yield sample
                self._cells[sample.partition, sample.key] = dict.fromkeys(sample.cells, ("", b""))

        self._archive.add(appended())
        self._bytes = 0

    async def put(self, request: PutRequest) -> PutResult:
        """Append samples to the file. Each sample is put once, with all its columns."""
        result = await super().put(request)
        for key in request.keys:
            cells = self._cells[request.partition, key]
            self._pending.append(SavedSample(partition=request.partition, key=key, cells=cells))
        if len(self._pending) >= BATCH_ROWS or self._bytes >= BATCH_BYTES:
            self._append(self._pending)
            self._pending = []
        return result

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        self._append(self._pending)
        return self._archive.finish()

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        self._append(read_archive(self._folder))
        return SnapshotResult(samples=len(self._cells), bytes=0)

    async def close(self) -> None:
        self._archive.close()


async def import_file(file: Path, folder: Path, partition: str) -> int:
    """Put the samples of a JSONL or Parquet file into a folder's checkpointed queue; return their number.

    The file may be larger than memory: values are copied batch by batch; tags and keys stay in memory.

    Raises:
        QueueError: If the file is not a file of samples, or the folder holds something other than a queue.
    """
    is_kept = (folder / STORE_FILE).is_file()
    if not is_kept and folder.is_dir() and any(folder.iterdir()):
        raise QueueError("the folder holds something else than a queue", where=str(folder), expected=STORE_FILE)
    backend = _AppendingBackend(folder / VALUES_FOLDER)
    queue = TransferQueue(backend, Clock())
    await queue.start()
    try:
        if is_kept:
            await queue.restore(folder)
        imported = ImportedSamples(queue, Values(backend), partition, lambda: read_samples(file), str(file))
        count = await imported.put()
        await queue.checkpoint(folder)
    finally:
        await queue.close()
    return count
