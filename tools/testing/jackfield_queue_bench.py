"""A queue over the memory backend on a virtual clock, and samples for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import msgspec
import torch

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.meta import Batch, BatchMeta, GroupKey, Lineage, NewGroup, RolloutReport
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.queue.values import MemoryBackend, MemoryConfig, Values
from jackfield.sdk.cells import column_from_rows, dense_column
from jackfield_virtual_clock import VirtualClock


class Memory(MemoryBackend):
    """A store that outlives the queue."""

    def __init__(self) -> None:
        super().__init__(MemoryConfig(), TransferQueueContext())

    async def close(self) -> None:
        return


@attrs.define(eq=False)
class Bench:
    """What most tests do, in short."""

    queue: TransferQueue
    clock: VirtualClock

    @property
    def values(self) -> Values:
        return Values(self.queue.backend)

    async def claim(
        self, groups: int = 1, explorer: str = "explorer-0", rollouts: int = 2, partition: str = "train"
    ) -> Batch:
        batch = await self.queue.claim_batch(partition, explorer, groups, rollouts=rollouts)
        assert batch is not None
        return batch

    async def vacant(self, batch: Batch) -> list[GroupKey]:
        """The groups that are to be made now."""
        found: list[GroupKey] = []
        try:
            async for keys in self.queue.groups_to_fill(batch, 0.0, until="published"):
                found += keys
        except (DeadlineExceeded, QueueError) as error:
            if error.code not in ("deadline", "queue.full"):
                raise
        return found

    async def open(self, key: GroupKey, rollouts: int = 2, task: str | None = None, **tags: Any) -> str:
        task = f"task-{key.index}" if task is None else task
        new = NewGroup(key=key, task_id=task, rollouts=rollouts, tags=tags)
        await self.queue.open_groups([new])
        return str(key)

    async def end(self, group: str, rollout: int, samples: int = 1, **tags: Any) -> tuple[str, ...]:
        """End a rollout; the returned keys are those of its samples."""
        return await self.report(group, rollout, self.columns(samples) if samples else {}, samples, **tags)

    async def report(
        self,
        group: str,
        rollout: int,
        columns: Mapping[str, Any],
        samples: int = 1,
        made: Lineage | None = None,
        **tags: Any,
    ) -> tuple[str, ...]:
        """Write the columns of a rollout's samples, and end it."""
        keys = tuple(GroupKey.of(group).sample(rollout, sequence) for sequence in range(samples))
        report = RolloutReport(group=group, rollout=rollout)
        if keys:
            derived = {} if made is None else {"operation": made.operation, "parents": list(made.parents)}
            shown = ({**tags, **derived},) * samples
            written = await self.values.put(GroupKey.of(group).partition, keys, columns, shown)
            lineage = {} if made is None else dict.fromkeys(keys, made)
            report = msgspec.structs.replace(report, keys=keys, written=written, lineage=lineage)
        await self.queue.end_rollouts([report])
        return keys

    async def fail(self, group: str, rollout: int, error: str) -> None:
        await self.queue.end_rollouts([RolloutReport(group=group, rollout=rollout, error=error)])

    @staticmethod
    def columns(samples: int, length: int = 3) -> dict[str, Any]:
        return {"ids": column_from_rows([torch.full((length,), index) for index in range(samples)])}

    async def publish(self, batch: Batch, rollouts: int = 2, keys: Sequence[GroupKey] | None = None) -> list[str]:
        """Make all vacant groups, with one sample per rollout."""
        groups = []
        for key in await self.vacant(batch) if keys is None else keys:
            groups.append(await self.open(key, rollouts))
            for rollout in range(rollouts):
                await self.end(str(key), rollout)
        return groups

    async def reward(self, target: BatchMeta | Sequence[str]) -> tuple[str, ...]:
        keys = target.keys if isinstance(target, BatchMeta) else tuple(target)
        written = await self.values.put("train", keys, {"reward": dense_column(torch.ones(len(keys)))})
        return await self.queue.add_columns(target, written)

    async def trainer(self, *columns: str, **options: Any) -> None:
        await self.queue.register_consumer("trainer", "train", columns or ("ids",), **options)

    async def stage(self) -> None:
        await self.queue.register_consumer("reward", "train", ("ids",), writes=("reward",))

    async def lease(self, batch: int, seconds: float = 0.0) -> BatchMeta:
        return await self.queue.lease("trainer", batch=batch, deadline_seconds=seconds)

    async def some(self, groups: int) -> BatchMeta:
        return await self.queue.lease("trainer", groups, deadline_seconds=0)

    async def counts(self, *names: str) -> Mapping[str, int]:
        found = await self.queue.stats()
        return {name: found[name] for name in names}


def with_queue(test: Callable[[Any], Awaitable[None]], backend: Any = None, **options: Any) -> None:
    """Run an asynchronous test with a started queue, on virtual time."""
    clock = VirtualClock()

    async def main() -> None:
        queue = TransferQueue(backend or Memory(), clock, **options)
        await queue.start()
        try:
            await test(Bench(queue, clock))
        finally:
            await queue.close()

    clock.run(main())
