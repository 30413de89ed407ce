"""The explorer: tasks to samples, batch by batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import count
from typing import Any

import attrs

from jackfield.cluster.device import DeviceLease
from jackfield.data.tasks import Task
from jackfield.errors import JackfieldError, WorkerLost
from jackfield.queue import Batch, GroupKey, NewGroup, RolloutReport
from jackfield.runtime.agent_worker import RolloutJob, ends_the_run
from jackfield.runtime.samples import TRAIN, rollout_seed
from jackfield.runtime.workers import resubmitted
from jackfield.trainer.role import Role

_AHEAD = 2  #: batches that are filled with answers of the data before the trainer asks for them


@attrs.frozen(kw_only=True)
class Answers:
    """Groups of a batch that copy an answer of the data: those of an expert, or all of an offline run."""

    groups: int  #: of each batch
    task_for: Callable[[GroupKey], Task]


@attrs.define(kw_only=True, eq=False)
class Explorer:
    """Fills the batches that the schedule lets it start: with rollouts of agents, and with answers of the data."""

    role: Role
    name: str
    placement: DeviceLease
    task_for: Callable[[GroupKey], Task]
    answers: Answers | None = None  #: behind the groups for which agents run
    _groups: int = attrs.field(init=False)  #: of a batch for which agents run
    _rollouts: int = attrs.field(init=False)  #: of a group, without the greedy one whose reward is the others' baseline
    _greedy: bool = attrs.field(init=False)
    _sampling: Mapping[str, Any] = attrs.field(init=False)
    _seed: int = attrs.field(init=False)
    _running: int = attrs.field(default=0, init=False)
    _idle: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        """Read what a batch consists of: an offline run has no rollouts."""
        data, explores = self.role.config.data, self.role.explores
        self._groups, self._rollouts = (data.groups_per_batch, data.rollouts_per_group) if explores else (0, 1)
        self._greedy = self.role.algorithm.greedy_baseline
        config = self.role.config
        self._sampling, self._seed = attrs.asdict(config.sampling, recurse=False), config.seed_of(config.sampling)

    async def run(self) -> None:
        """Explore until every batch of the schedule is finished; what others have given back comes first."""
        async with asyncio.TaskGroup() as batches:
            while (batch := await self._next()) is not None:
                await self._wait_for_turn(batch.number)
                if not self._groups or not batch.vacant:  # restored with all its groups: it may still lose one
                    batches.create_task(self._fill(batch))
                    continue
                self._idle.clear()
                async with self.role.stages.measure("rollout", "explorer", batch.number):
                    batches.create_task(self._fill(batch))
                    # the next batch starts when every rollout of this one has ended; its rewards may still be pending
                    rollouts = f"the rollouts of batch {batch.number}"
                    await self.role.clock.wait_for(self._idle.wait(), self.role.config.deadlines.batch, rollouts)

    async def _next(self) -> Batch | None:
        return await self.role.queue.claim_batch(
            TRAIN,
            self.name,
            self._groups + (self.answers.groups if self.answers else 0),
            rollouts=self._rollouts + self._greedy,
            below=self.role.schedule.steps,
            deadline_seconds=self.role.config.deadlines.batch,
        )

    async def _wait_for_turn(self, number: int) -> None:
        """Wait for the weights that a batch is generated with; without rollouts, stay a little ahead of the trainer."""
        role, seconds = self.role, self.role.config.deadlines.batch
        if self._groups:
            weights = f"the trainer's weights, by {self.name} to start batch {number}"
            await role.version.until(lambda version: role.schedule.may_start(number, version), seconds, weights)
        else:
            taken = f"the trainer, to take batch {number - _AHEAD}"
            await self.role.steps_done.until(
                lambda done: number < done + _AHEAD, self.role.config.deadlines.batch, taken
            )

    async def _fill(self, batch: Batch) -> None:
        """Make the groups of a batch; one that is dropped later, for want of a reward, comes again."""
        async with asyncio.TaskGroup() as groups:
            async for keys in self.role.queue.groups_to_fill(batch, self.role.config.deadlines.batch):
                self._running += len(keys)
                for key in keys:
                    groups.create_task(self._make_group(key))

    async def _make_group(self, key: GroupKey) -> None:
        try:
            if self.answers is not None and key.index >= self._groups:
                await self._copy_answer(self.answers, key)
                return
            task, rollouts = self.task_for(key), self._rollouts + self._greedy
            tags = {"greedy_rollout": self._rollouts} if self._greedy else {}
            await self.role.queue.open_groups([NewGroup(key=key, task_id=task.id, rollouts=rollouts, tags=tags)])
            await asyncio.gather(*(self._roll_out(key, task, rollout) for rollout in range(rollouts)))
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _roll_out(self, key: GroupKey, task: Task, rollout: int) -> None:
        sampling = {**self._sampling, "seed": rollout_seed(self._seed, key.batch, key.index, key.retry, rollout)}
        if rollout == self._rollouts:
            sampling["temperature"] = 0.0  # the baseline
        await self._end(key, task, rollout, sampling)

    async def _copy_answer(self, answers: Answers, key: GroupKey) -> None:
        """Make a group of one rollout, which the data has."""
        task, tags = answers.task_for(key), {"expert": True} if self._groups else {}
        await self.role.queue.open_groups([NewGroup(key=key, task_id=task.id, rollouts=1, tags=tags)])
        await self._end(key, task, 0, None)

    async def _end(self, key: GroupKey, task: Task, rollout: int, sampling: Mapping[str, Any] | None) -> None:
        """Have a worker make the samples of a rollout, again where workers die, and report how it ended."""
        attempts = count()

        def job() -> RolloutJob:
            name = key.rollout(rollout, next(attempts))
            return RolloutJob(
                id=name, partition=key.partition, group=str(key), rollout=rollout, task=task,
                sampling=sampling, seconds=self.role.config.deadlines.rollout, expert=bool(self._groups),
            )  # fmt: skip

        try:
            report = await resubmitted(lambda: self._make(job()), f"sample {key.rollout(rollout)}")
        except WorkerLost as error:
            report = RolloutReport(group=str(key), rollout=rollout, error=_summary(error))
        await self.role.queue.end_rollouts([report])

    async def _make(self, job: RolloutJob) -> RolloutReport:
        worker = self.role.workers.agents.of(f"{job.group}/{job.rollout}")
        # the worker keeps the rollout's own deadline; this one adds RPC slack to it
        seconds, who = 1.1 * job.seconds + 10, f"the agent worker of sample {job.id}, task {job.task.id}"
        async with nullcontext() if job.sampling is None else self.placement.hold("rollout"):
            try:
                return await self.role.clock.wait_for(worker.run(job), seconds, who)
            except WorkerLost:
                raise
            except JackfieldError as error:
                if job.sampling is None or ends_the_run(error):
                    raise
                return RolloutReport(group=job.group, rollout=job.rollout, error=_summary(error))


def _summary(error: JackfieldError) -> str:
    """Say what went wrong without the place, so that equal failures have equal texts."""
    found = "" if error.found is None else f", found {error.found}"
    return f"{error.message}{found} [{error.code}]"
