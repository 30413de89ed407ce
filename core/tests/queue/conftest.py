"""A queue over the memory backend on a virtual clock, and rows for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import pytest

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.clock import VirtualClock
from jackfield.queue import GroupSlot, LocalQueue, Ticket, TransferQueue, column_from_rows, dense_column
from jackfield.queue.memory import MemoryBackend, MemoryConfig

torch = pytest.importorskip("torch")


@attrs.define(eq=False)
class Bench:
    """What most tests do, in short."""

    queue: TransferQueue
    clock: VirtualClock

    async def claim(self, groups: int = 1, explorer: str = "explorer-0") -> Ticket:
        return await self.queue.claim_ticket("train", explorer=explorer, groups=groups)

    async def vacant(self, ticket: Ticket) -> list[GroupSlot]:
        """The slots that are to be filled now."""
        from jackfield.errors import DeadlineExceeded

        found: list[GroupSlot] = []
        try:
            async for slot in self.queue.slots(ticket, 0.0, until="published"):
                found.append(slot)  # noqa: PERF401
        except DeadlineExceeded:
            pass
        return found

    async def put(self, group: str, run: int, rows: int = 1, **more: Any) -> tuple[str, ...]:
        """End a run; the text of each row's id is its content."""
        return await self.queue.put_run(group, run, self.columns(rows, **more))

    @staticmethod
    def columns(rows: int, length: int = 3) -> dict[str, Any]:
        return {"ids": column_from_rows([torch.full((length,), index) for index in range(rows)])}

    async def publish(self, ticket: Ticket, runs: int = 2, slots: Sequence[GroupSlot] | None = None) -> list[str]:
        """Fill all vacant slots with groups of one row per run."""
        groups = []
        for slot in await self.vacant(ticket) if slots is None else slots:
            group = await self.queue.open_group(slot, task_id=f"task-{slot.index}", runs=runs)
            for run in range(runs):
                await self.put(group, run)
            groups.append(group)
        return groups

    async def reward(self, keys: Sequence[str]) -> None:
        await self.queue.put(list(keys), {"reward": dense_column(torch.ones(len(keys)))})


Test = Callable[[Bench], Awaitable[None]]


@pytest.fixture
def run() -> Callable[..., None]:
    """``run(test, **options)``: run an asynchronous test with a started queue, on virtual time."""

    def start(test: Test, **options: Any) -> None:
        clock = VirtualClock()

        async def main() -> None:
            backend = MemoryBackend(MemoryConfig(), TransferQueueContext())
            queue = LocalQueue(backend, clock, **options)
            await queue.start()
            try:
                await test(Bench(queue, clock))
            finally:
                await queue.close()

        clock.run(main())

    return start
