"""The explorer: tasks to token sequences, ticket by ticket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.data.tasks import Task
from jackfield.errors import JackfieldError, WorkerLost
from jackfield.queue import GroupSlot, Ticket, TransferQueue
from jackfield.runtime.agent_worker import AgentWorker, RunOrder
from jackfield.runtime.samples import TRAIN, run_seed
from jackfield.runtime.workers import Workers, resubmitted
from jackfield.trainer.placement import PlacementLease
from jackfield.trainer.schedule import Progress, Schedule
from jackfield.trainer.stages import Stages

__all__ = ["Explorer"]


@attrs.define(kw_only=True, eq=False)
class Explorer:
    """Has agent loops run for the tickets that the schedule lets it start."""

    name: str
    queue: TransferQueue
    schedule: Schedule
    version: Progress  #: of the weights that the replicas serve
    placement: PlacementLease
    clock: Clock
    stages: Stages
    task_for: Callable[[GroupSlot], Task]
    agents: Workers[AgentWorker]
    sampling: Mapping[str, Any]
    groups: int  #: tasks in a ticket
    runs: int  #: agent runs of a task
    seed: int
    run_seconds: float
    batch_seconds: float
    _running: int = attrs.field(default=0, init=False)
    _idle: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    async def run(self, first_ticket: int = 0) -> None:
        """Explore until every ticket of the schedule is complete."""
        async with asyncio.TaskGroup() as tickets:
            for _ in range(first_ticket, self.schedule.steps):
                ticket = self.queue.claim_ticket(TRAIN, explorer=self.name, groups=self.groups)
                await self.version.until(
                    lambda version, number=ticket.number: self.schedule.may_start(number, version),  # type: ignore[misc]
                    self.batch_seconds,
                    f"the trainer's weights, by {self.name} to start batch {ticket.number}",
                )
                self._idle.clear()
                async with self.stages.measure("generate", "explorer", ticket.number):
                    tickets.create_task(self._explore(ticket))
                    # the next batch starts when every run of this one has ended; its rewards may still be pending
                    runs = f"the agent runs of batch {ticket.number}"
                    await self.clock.wait_for(self._idle.wait(), self.batch_seconds, runs)

    async def _explore(self, ticket: Ticket) -> None:
        """Fill the ticket's slots; one that is dropped later, for want of a reward, comes again."""
        async with asyncio.TaskGroup() as groups:
            async for slot in self.queue.slots(ticket, self.batch_seconds):
                self._running += 1
                groups.create_task(self._run_group(slot))

    async def _run_group(self, slot: GroupSlot) -> None:
        try:
            task = self.task_for(slot)
            group = self.queue.open_group(slot, task_id=task.id, runs=self.runs)
            async with self.placement.hold("rollout"):
                await asyncio.gather(*(self._run(slot, group, task, run) for run in range(self.runs)))
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _run(self, slot: GroupSlot, group: str, task: Task, run: int) -> None:
        seed = run_seed(self.seed, slot.ticket, slot.index, slot.attempt, run)
        order = RunOrder(
            id=f"{group}/{run}",
            task=task,
            run=run,
            sampling={**self.sampling, "seed": seed},
            seconds=self.run_seconds,
        )
        await resubmitted(lambda: self._make(group, order), lambda error: self._fail(group, order, error))

    async def _make(self, group: str, order: RunOrder) -> None:
        """Have a worker make a sample, then have it written under the keys that the queue gives it."""
        worker = self.agents.of(order.id)
        # the worker has the run's own deadline; ours adds its way to us
        seconds, who = 1.1 * order.seconds + 10, f"the agent worker of sample {order.id}, task {order.task.id}"
        try:
            product = await self.clock.wait_for(worker.run(order), seconds, who)
        except WorkerLost:
            raise
        except JackfieldError as error:
            self._fail(group, order, error)
            return
        async with self.queue.ending_run(group, order.run, product.written, product.tags) as keys:
            await self.clock.wait_for(worker.store(order.id, TRAIN, keys), seconds, f"{who} to store it")

    def _fail(self, group: str, order: RunOrder, error: JackfieldError) -> None:
        self.queue.fail_run(group, order.run, reason=f"{error.code}: {error}")
