"""The explorer: tasks to samples, batch by batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
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
    _rollouts: int = attrs.field(init=False)  #: of such a group
    _running: int = attrs.field(default=0, init=False)
    _idle: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        """Read what a batch consists of: an offline run has no rollouts, and a greedy one may be the baseline."""
        data, explores = self.role.config.data, self.role.explores
        self._groups, self._rollouts = (data.groups_per_batch, data.rollouts_per_group) if explores else (0, 1)
        self._rollouts += self.role.algorithm.greedy_baseline

    async def run(self) -> None:
        """Explore until every batch of the schedule is finished; what others have given back comes first."""
        role, seconds = self.role, self.role.config.deadlines.batch
        progress = role.version if self._groups else role.steps_done
        async with asyncio.TaskGroup() as batches:
            while (batch := await self._claim()) is not None:
                number = batch.number
                who = f"the trainer, by {self.name} to start batch {number}"
                await progress.until(partial(role.schedule.may_start, number), seconds, who)
                if not self._groups or not batch.vacant:  # restored with all its groups: it may still lose one
                    batches.create_task(self._fill(batch))
                    continue
                self._idle.clear()
                async with role.measure("rollout", "explorer", number):
                    batches.create_task(self._fill(batch))
                    # the next batch starts when every rollout of this one has ended; its rewards may still be pending
                    await role.clock.wait_for(self._idle.wait(), seconds, f"the rollouts of batch {number}")

    async def _claim(self) -> Batch | None:
        return await self.role.queue.claim_batch(
            TRAIN,
            self.name,
            self._groups + (self.answers.groups if self.answers else 0),
            rollouts=self._rollouts,
            below=self.role.schedule.steps,
            deadline_seconds=self.role.config.deadlines.batch,
        )

    async def _fill(self, batch: Batch) -> None:
        """Make the groups of a batch; one that is dropped later, for want of a reward, comes again."""
        async with asyncio.TaskGroup() as groups:
            async for keys in self.role.queue.groups_to_fill(batch, self.role.config.deadlines.batch):
                self._running += len(keys)
                for key in keys:
                    groups.create_task(self._make_group(key))

    async def _make_group(self, key: GroupKey) -> None:
        answers = self.answers if key.index >= self._groups else None
        task = (answers.task_for if answers else self.task_for)(key)
        rollouts, tags = 1 if answers else self._rollouts, dict[str, Any]()
        if answers and self._groups:
            tags = {"expert": True}
        elif not answers and self.role.algorithm.greedy_baseline:
            tags = {"greedy_rollout": rollouts - 1}
        try:
            await self.role.queue.open_groups([NewGroup(key=key, task_id=task.id, rollouts=rollouts, tags=tags)])
            await asyncio.gather(*(self._roll_out(key, task, number, answers is None) for number in range(rollouts)))
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _roll_out(self, key: GroupKey, task: Task, rollout: int, generates: bool) -> None:
        """Have a worker make the samples of a rollout, again where workers die, and report how it ended."""
        config, attempts, sampling = self.role.config, count(), None
        if generates:
            seed = rollout_seed(config.seed_of(config.sampling), key.batch, key.index, key.retry, rollout)
            sampling = {**attrs.asdict(config.sampling, recurse=False), "seed": seed}
            if self.role.algorithm.greedy_baseline and rollout == self._rollouts - 1:
                sampling["temperature"] = 0.0
        job = RolloutJob(
            id=key.rollout(rollout),
            partition=key.partition,
            group=str(key),
            rollout=rollout,
            task=task,
            sampling=sampling,
            seconds=config.deadlines.rollout,
            expert=bool(self._groups),
        )
        try:
            report = await resubmitted(
                lambda: self._make(attrs.evolve(job, id=key.rollout(rollout, next(attempts)))), f"sample {job.id}"
            )
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
