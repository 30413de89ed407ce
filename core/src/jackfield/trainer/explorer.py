"""The explorer: tasks to token sequences, ticket by ticket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.cluster.device import DeviceLease
from jackfield.data.tasks import Task
from jackfield.errors import JackfieldError, WorkerLost
from jackfield.queue import GroupSlot, Ticket, TransferQueue
from jackfield.runtime.agent_worker import AgentWorker, RunOrder, ends_the_run
from jackfield.runtime.samples import TRAIN, rollout_seed
from jackfield.runtime.workers import Workers, resubmitted, written_again
from jackfield.trainer.schedule import Progress, Schedule
from jackfield.trainer.stages import Stages

__all__ = ["Experts", "Explorer"]


@attrs.frozen(kw_only=True)
class Experts:
    """An expert's answers: each ticket has a few of them behind the groups that are explored."""

    rows: int  #: in each ticket
    task_for: Callable[[GroupSlot], Task]


@attrs.define(kw_only=True, eq=False)
class Explorer:
    """Has agent loops run for the tickets that the schedule lets it start."""

    name: str
    queue: TransferQueue
    schedule: Schedule
    version: Progress  #: of the weights that the replicas serve
    placement: DeviceLease
    clock: Clock
    stages: Stages
    task_for: Callable[[GroupSlot], Task]
    agents: Workers[AgentWorker]
    sampling: Mapping[str, Any]
    groups: int  #: tasks in a ticket
    runs: int  #: rollouts of a task
    seed: int
    run_seconds: float
    batch_seconds: float
    greedy_baseline: bool = False  #: one more run in each group, greedy: its reward is the others' baseline
    experts: Experts | None = None
    _running: int = attrs.field(default=0, init=False)
    _idle: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    async def run(self) -> None:
        """Explore until every ticket of the schedule is finished; what others have given back comes first."""
        async with asyncio.TaskGroup() as tickets:
            while (ticket := await self._next()) is not None:
                await self.version.until(
                    lambda version, number=ticket.number: self.schedule.may_start(number, version),  # type: ignore[misc]
                    self.batch_seconds,
                    f"the trainer's weights, by {self.name} to start batch {ticket.number}",
                )
                if not await self.queue.vacancies(ticket):  # restored with all its groups: it may still lose one
                    tickets.create_task(self._explore(ticket))
                    continue
                self._idle.clear()
                async with self.stages.measure("rollout", "explorer", ticket.number):
                    tickets.create_task(self._explore(ticket))
                    # the next batch starts when every run of this one has ended; its rewards may still be pending
                    runs = f"the rollouts of batch {ticket.number}"
                    await self.clock.wait_for(self._idle.wait(), self.batch_seconds, runs)

    async def _next(self) -> Ticket | None:
        groups, steps = self.groups + (self.experts.rows if self.experts else 0), self.schedule.steps
        return await self.queue.wait_ticket(TRAIN, self.name, groups, steps, self.batch_seconds)

    async def _explore(self, ticket: Ticket) -> None:
        """Fill the ticket's slots; one that is dropped later, for want of a reward, comes again."""
        async with asyncio.TaskGroup() as groups:
            async for slot in self.queue.slots(ticket, self.batch_seconds):
                self._running += 1
                groups.create_task(self._run_group(slot))

    async def _run_group(self, slot: GroupSlot) -> None:
        try:
            if self.experts is not None and slot.index >= self.groups:
                await self._copy_expert(self.experts, slot)
                return
            task = self.task_for(slot)
            runs = self.runs + self.greedy_baseline
            tags = {"greedy_rollout": self.runs} if self.greedy_baseline else {}
            group = await self.queue.open_group(slot, task_id=task.id, runs=runs, tags=tags)
            await asyncio.gather(*(self._run(slot, group, task, run) for run in range(runs)))
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _run(self, slot: GroupSlot, group: str, task: Task, run: int) -> None:
        sampling = {**self.sampling, "seed": rollout_seed(self.seed, slot.ticket, slot.index, slot.attempt, run)}
        if run == self.runs:
            sampling["temperature"] = 0.0  # the baseline
        order = RunOrder(
            id=f"{group}/{run}",
            task=task,
            run=run,
            sampling=sampling,
            seconds=self.run_seconds,
        )
        await self._made(group, order)

    async def _copy_expert(self, experts: Experts, slot: GroupSlot) -> None:
        """A group of one run, which an expert did."""
        task = experts.task_for(slot)
        group = await self.queue.open_group(slot, task_id=task.id, runs=1, tags={"expert": True})
        order = RunOrder(id=f"{group}/0", task=task, seconds=self.run_seconds)
        await self._made(group, order, expert=True)

    async def _made(self, group: str, order: RunOrder, *, expert: bool = False) -> None:
        """Make a sample; workers may die."""
        try:
            await resubmitted(lambda: self._make(group, order, expert=expert), f"sample {order.id}")
        except WorkerLost as error:
            await self._fail(group, order, error)

    async def _make(self, group: str, order: RunOrder, *, expert: bool = False) -> None:
        """Have a worker make a sample, then have it written under the keys that the queue gives it."""
        worker = self.agents.of(order.id)
        # the worker has the run's own deadline; ours adds its way to us
        seconds, who = 1.1 * order.seconds + 10, f"the agent worker of sample {order.id}, task {order.task.id}"
        # the devices are needed for this alone: a sample may then have to wait for room in the queue
        async with nullcontext() if expert else self.placement.hold("rollout"):
            try:
                making = worker.answer(order, expert=True) if expert else worker.run(order)
                product = await self.clock.wait_for(making, seconds, who)
            except WorkerLost:
                raise
            except JackfieldError as error:
                if ends_the_run(error):
                    raise
                await self._fail(group, order, error)
                return

        async def store() -> None:
            async with self.queue.ending_run(group, order.run, product.written, product.tags) as keys:
                await self.clock.wait_for(worker.store(order.id, TRAIN, keys), seconds, f"{who} to store it")

        await written_again(store)

    async def _fail(self, group: str, order: RunOrder, error: JackfieldError) -> None:
        await self.queue.fail_run(group, order.run, reason=_summary(error))


def _summary(error: JackfieldError) -> str:
    """What is equal where the same thing went wrong: without the place."""
    found = "" if error.found is None else f", found {error.found}"
    return f"{error.message}{found} [{error.code}]"
