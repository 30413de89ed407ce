"""The offline producer: the data's own answers as training samples, through the same tickets and queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import attrs

from jackfield.clock import Clock
from jackfield.data.tasks import Task
from jackfield.queue import GroupSlot, Ticket, TransferQueue
from jackfield.runtime.agent_worker import AgentWorker, RunOrder
from jackfield.runtime.samples import TRAIN
from jackfield.runtime.workers import Workers, resubmitted, written_again
from jackfield.trainer.schedule import Progress, Schedule

__all__ = ["OfflineProducer"]

_AHEAD = 2  #: tickets that are prepared before the trainer asks for them


@attrs.define(kw_only=True, eq=False)
class OfflineProducer:
    """Fills tickets with (prompt, answer) rows, a little ahead of the trainer.

    A task with two answers gives two rows in one group: the better one first.
    """

    queue: TransferQueue
    schedule: Schedule
    steps_done: Progress
    task_for: Callable[[GroupSlot], Task]
    agents: Workers[AgentWorker]
    groups: int
    clock: Clock
    batch_seconds: float

    async def run(self) -> None:
        """Produce until every ticket of the schedule is finished; what a restored queue lacks comes first."""
        async with asyncio.TaskGroup() as tickets:
            while (ticket := await self._next()) is not None:
                await self.steps_done.until(
                    lambda done, number=ticket.number: number < done + _AHEAD,  # type: ignore[misc]
                    self.batch_seconds,
                    f"the trainer, to take batch {ticket.number - _AHEAD}",
                )
                tickets.create_task(self._fill(ticket))

    async def _next(self) -> Ticket | None:
        steps = self.schedule.steps
        return await self.queue.wait_ticket(TRAIN, "offline", self.groups, steps, self.batch_seconds)

    async def _fill(self, ticket: Ticket) -> None:
        """Fill the ticket's slots, until the trainer is done with it: rows may be lost."""
        async for slot in self.queue.slots(ticket, self.batch_seconds):
            task = self.task_for(slot)
            group = await self.queue.open_group(slot, task_id=task.id, runs=1)
            await resubmitted(partial(self._make, task, group), f"sample {group}/0")

    async def _make(self, task: Task, group: str) -> None:
        worker, order = self.agents.of(group), RunOrder(id=f"{group}/0", task=task)
        who = f"the agent worker of sample {order.id}, task {task.id}"
        product = await self.clock.wait_for(worker.answer(order), self.batch_seconds, who)

        async def store() -> None:
            async with self.queue.ending_run(group, 0, product.written, product.tags) as keys:
                await self.clock.wait_for(worker.store(order.id, TRAIN, keys), self.batch_seconds, who)

        await written_again(store)
