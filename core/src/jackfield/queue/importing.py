"""Samples of files into a partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.appending import AppendingBackend
from jackfield.queue.checkpoints import VALUES_FOLDER
from jackfield.queue.meta import Batch, GroupKey, Lineage, NewGroup, RolloutReport
from jackfield.queue.sample_files import read_samples
from jackfield.queue.store import STORE_FILE
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.queue.values import Values
from jackfield.sdk.arrow import SavedSample
from jackfield.sdk.cells import join

_WHO = "import"
_SECONDS = 600.0  #: for room in the queue


class ImportedSamples:
    """Samples of a file, or of a queue's folder, as one batch of published groups, and again where they are lost.

    Samples of one group become one group again, each as a rollout of its own. Its parent is ``ORIGIN:KEY``, or
    ``ORIGIN`` where it had no key, and what that was made of is remembered. Samples are read one by one: of those that
    were read, only the names of their groups are kept.
    """

    def __init__(
        self,
        queue: TransferQueue,
        values: Values,
        partition: str,
        read: Callable[[], Iterable[SavedSample]],
        origin: str,
        complete: Callable[[SavedSample], SavedSample] = lambda sample: sample,
    ) -> None:
        """
        Args:
            queue: started.
            values: writes to the queue's backend.
            partition: where the samples go.
            read: reads the samples from the first one on, in an order that stays.
            origin: the file or folder that they are from.
            complete: adds to each sample what is missing.
        """
        self._queue = queue
        self._values = values
        self._partition = partition
        self._read = read
        self._origin = origin
        self._complete = complete
        self._sizes: list[int] = []  #: of groups, in the order of their first samples
        self._places: dict[object, int] = {}  #: of groups, by what they were called

    def _count(self) -> None:
        """Count groups and their samples."""
        if not self._sizes:
            for number, sample in enumerate(self._read()):
                place = self._places.setdefault(_group_of(sample, number), len(self._sizes))
                self._sizes += [0] * (place == len(self._sizes))
                self._sizes[place] += 1

    async def put(self) -> int:
        """Put all samples. Returns their number.

        Raises:
            QueueError: where a sample cannot be put.
        """
        self._count()
        if not self._sizes:
            return 0
        batch = await self._claim()
        while batch is not None and not batch.vacant:  # of an earlier import: a restored queue offers it again
            batch = await self._claim()
        assert batch is not None  # without a bound there is always a next one
        await self._fill(batch)
        return sum(self._sizes)

    async def keep(self) -> None:
        """Put groups again whose samples were lost with a part of the store; until cancelled.

        Raises:
            QueueError: a group was lost too often.
        """
        while True:
            with suppress(DeadlineExceeded):
                self._count()
                batch = await self._claim(below=1)
                if batch is None:
                    return  # all its groups are used up
                await self._fill(batch)

    async def _claim(self, below: int | None = None) -> Batch | None:
        groups, partition = len(self._sizes), self._partition
        return await self._queue.claim_batch(partition, _WHO, groups, below=below, deadline_seconds=_SECONDS)

    async def _fill(self, batch: Batch) -> None:
        """Fill the places of a batch that have no group, as many at a time as there is room for."""
        async for keys in self._queue.groups_to_fill(batch, _SECONDS, until="published"):
            await self._put(keys)

    async def _put(self, keys: Sequence[GroupKey]) -> None:
        wanted = {key.index: key for key in keys}
        opened: Counter[int] = Counter()
        for number, sample in enumerate(self._read()):
            place = self._places[_group_of(sample, number)]
            if place not in wanted:
                continue
            key = wanted[place]
            if not opened[place]:
                task = sample.task if sample.task is not None else f"row-{place}"
                await self._queue.open_groups([NewGroup(key=key, task_id=task, rollouts=self._sizes[place])])
            await self._put_sample(key, opened[place], self._complete(sample))
            opened[place] += 1

    async def _put_sample(self, group: GroupKey, rollout: int, sample: SavedSample) -> None:
        parent = self._origin if not sample.key else f"{self._origin}:{sample.key}"
        key = group.sample(rollout, 0)
        lineage = {key: Lineage(_WHO, (parent,))}
        if "operation" in sample.tags and "parents" in sample.tags:
            lineage[parent] = Lineage(sample.tags["operation"], tuple(sample.tags["parents"]))
        columns = {name: join(name, [cell]) for name, cell in sample.cells.items()}
        tags = {**sample.tags, "operation": _WHO, "parents": [parent]}
        written = await self._values.put(self._partition, [key], columns, [tags])
        report = RolloutReport(
            group=str(group), rollout=rollout, keys=(key,), columns=written.columns, sizes=written.sizes,
            tags=(sample.tags,), lineage=lineage,
        )  # fmt: skip
        await self._queue.end_rollouts([report])


def _group_of(sample: SavedSample, number: int) -> object:
    return number if sample.group is None else (sample.partition, sample.group)


async def import_file(file: Path, folder: Path, partition: str) -> int:
    """Put the samples of a JSONL or Parquet file into the checkpointed queue of ``folder``. Returns their number.

    The file may be larger than memory: values go from it to the folder batch by batch; tags and keys stay in memory.

    Raises:
        QueueError: where the file is no file of samples, or the folder holds something else than a queue.
    """
    backend = AppendingBackend(folder / VALUES_FOLDER)
    queue = TransferQueue(backend, Clock())
    await queue.start()
    try:
        if (folder / STORE_FILE).is_file():
            await queue.restore(folder)
        elif folder.is_dir() and any(folder.iterdir()):
            raise QueueError("the folder holds something else than a queue", where=str(folder), expected=STORE_FILE)
        imported = ImportedSamples(queue, Values(backend), partition, lambda: read_samples(file), str(file))
        count = await imported.put()
        await queue.checkpoint(folder)
    finally:
        await queue.close()
    return count
