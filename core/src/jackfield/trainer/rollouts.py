"""The explorer, and the runs of rollouts on agent workers."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from math import ceil, inf
from typing import Literal, cast

import attrs

from jackfield.data.formats import Task
from jackfield.data.tasks import order_of
from jackfield.errors import DeadlineExceeded, JackfieldError, WorkerLost, some
from jackfield.queue.meta import Batch, GroupKey, NewGroup, RolloutReport
from jackfield.runtime.agent_worker import AgentWorker, RolloutJob
from jackfield.runtime.samples import TRAIN, sampling_seed
from jackfield.runtime.workers import ATTEMPTS, handle_each, one_line
from jackfield.trainer.role import Role

_DEATHS = 12  #: of the worker that runs some work; then what one has left fails


@attrs.define(kw_only=True, eq=False)
class Explorer:
    """Fills the batches that may start with rollouts and with answers from the data.

    A group starts as soon as fewer rollouts run than ``schedule.rollouts_in_flight``, the oldest batch first. So a
    batch starts while the last rollouts of earlier ones still run.
    """

    role: Role
    name: str
    _groups: int = attrs.field(init=False)  #: groups per batch that agents generate; groups of given answers follow
    _rollouts: int = attrs.field(init=False)  #: rollouts per generated group, the greedy baseline included
    _most: float = attrs.field(init=False)  #: rollouts in flight from which no group is started
    _running: int = attrs.field(default=0, init=False)
    _waiting: list[tuple[int, int, GroupKey]] = attrs.field(factory=list, init=False)  #: groups to start, a heap
    #: by batch: when its rollouts began, and how many groups are waiting or running
    _begun: dict[int, tuple[float, set[str]]] = attrs.field(factory=dict, init=False)
    _changed: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)
    _lists: asyncio.TaskGroup = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Derive a batch's contents: offline no rollouts; a greedy one may be a baseline."""
        data, explores = self.role.config.data, self.role.explores
        self._groups, self._rollouts = (data.groups_per_batch, data.rollouts_per_group) if explores else (0, 1)
        self._rollouts += self.role.algorithm.greedy_baseline
        limit = self.role.config.schedule.rollouts_in_flight
        self._most = limit or (self._groups * self._rollouts + self.role.algorithm.experts if explores else inf)

    async def run(self) -> None:
        """Explore until all batches are finished; batches that others released come first."""
        async with asyncio.TaskGroup() as self._lists:
            await self._explore(self.role.schedule.steps)

    async def _explore(self, below: int) -> None:
        """Fill the batches below a number; while one waits for weights or room, those before it that others release."""
        role, seconds = self.role, self.role.config.deadlines.batch
        progress = role.version if self._groups else role.steps_done
        groups = role.config.data.groups_per_batch + (role.algorithm.experts if role.explores else 0)
        share = role.config.data.share
        claim = partial(role.queue.claim_batch, TRAIN, self.name, groups, rollouts=self._rollouts, share=share)
        while batch := await claim(below=below, deadline_seconds=seconds):
            self._lists.create_task(self._explore(batch.number))
            may_start = partial(role.schedule.may_start, batch.number)
            if not may_start(progress.value):
                who = f"the trainer, by {self.name} to start batch {batch.number}"
                async with role.measure("wait_for_weights", "explorer", batch.number):
                    await progress.until(may_start, seconds, who)
            self._lists.create_task(self._fill(batch, given := asyncio.Event()))
            await given.wait()  # the queue, the worker and the device have deadlines for what is waited for here
            while self._waiting or self._running >= self._most:
                self._changed.clear()
                await self._changed.wait()

    async def _fill(self, batch: Batch, given: asyncio.Event) -> None:
        """Have a batch's groups generated, and again those that are dropped; set ``given`` after the first ones."""
        left = batch.vacant
        if not left:  # it was restored complete, and may still lose a group
            given.set()
        until: Literal["final", "published"] = "final" if self.role.schedule.trains else "published"
        async for keys in self.role.queue.groups_to_fill(batch, self.role.config.deadlines.batch, until=until):
            _, names = self._begun.setdefault(batch.number, (self.role.clock.time(), set()))
            for key in keys:
                names.add(str(key))
                heapq.heappush(self._waiting, (key.batch, key.index, key))
            self._start()
            left -= len(keys)
            if left <= 0:
                given.set()
        given.set()

    def _start(self) -> None:
        """Start waiting groups while the rollouts in flight allow it."""
        jobs = list[RolloutJob]()
        while self._waiting and self._running < self._most:
            jobs.append(job := self._job(heapq.heappop(self._waiting)[-1]))
            self._running += len(job.rollouts)
        if jobs:
            self._lists.create_task(self._make_groups(jobs))

    async def _ended(self, reports: Sequence[RolloutReport]) -> None:
        """Tell the queue which rollouts have ended, and start further groups in their place."""
        await self.role.queue.end_rollouts(reports)
        self._running -= len(reports)
        self._start()
        self._changed.set()

    def task_of(self, key: GroupKey) -> Task:
        """Return the task of a group, independent of the number of explorers and of resumes.

        Groups beyond those that agents generate get an expert's tasks. A retry gets another task.
        """
        role, seed, which = self.role, self.role.config.seed, "train"
        count, first = role.config.data.groups_per_batch, 0
        if self._groups and key.index >= self._groups:
            which, count, first = "expert", role.algorithm.experts, self._groups
        tasks, position = role.tasks[which], key.batch * count + key.index - first
        if which == "train" and role.curriculum is not None and (number := role.curriculum.number(key)) is not None:
            return cast(Task, tasks[number])
        if key.retry:
            seed, position = seed + 1, position * (role.config.schedule.max_retries + 1) + key.retry
        task: Task = tasks[order_of(tasks, seed).index(position)]
        return task

    async def _make_groups(self, jobs: Sequence[RolloutJob]) -> None:
        """Open groups, run their rollouts on the workers, and report their outcomes."""
        greedy = [{} if job.greedy is None else {"greedy_rollout": job.greedy} for job in jobs]
        tags = [{"expert": True} if job.expert else more for job, more in zip(jobs, greedy, strict=True)]
        version = self.role.version.value if self._groups else None
        opened = [
            NewGroup(key=job.group, task_id=job.task.id, rollouts=len(job.rollouts), tags=own, version=version)
            for job, own in zip(jobs, tags, strict=True)
        ]
        await self.role.queue.open_groups(opened)
        await run_rollouts(self.role, jobs, self._ended)
        for job in jobs:
            start, names = self._begun[job.group.batch]
            names.discard(str(job.group))
            if not names:  # all rollouts of the batch have ended; rewards may still be pending
                del self._begun[job.group.batch]
                self.role.ended("rollout", "explorer", job.group.batch, start)

    def _job(self, key: GroupKey) -> RolloutJob:
        """Return the rollouts of a group; groups beyond those that agents generate copy answers."""
        config, task, copies = self.role.config, self.task_of(key), key.index >= self._groups
        if copies:
            return RolloutJob(group=key, task=task, expert=bool(self._groups), seconds=config.deadlines.rollout)
        seed = f"{config.seed_of(config.sampling)}/{key.batch}/{key.index}/{key.retry}"
        seeds = [sampling_seed(seed, number) for number in range(self._rollouts + config.agent_service.extra_rollouts)]
        return RolloutJob(
            group=key,
            task=task,
            rollouts=dict(enumerate(seeds[: self._rollouts])),
            extra=tuple(seeds[self._rollouts :]),
            sampling=attrs.asdict(config.sampling, recurse=False),
            greedy=self._rollouts - 1 if self.role.algorithm.greedy_baseline else None,
            seconds=config.deadlines.rollout,
        )


async def in_parts(
    work: Sequence[str], run: Callable[[Sequence[str]], Awaitable[object]], left: Container[str], what: str
) -> AsyncIterator[tuple[list[str], WorkerLost]]:
    """Run work, given by names, on a worker, and again what its death has ``left``: first together, then in halves.

    So what kills the worker is soon alone. Yield it then, or what is left after too many deaths.
    """
    parts, deaths = [work], 0
    while parts:
        part = parts.pop()
        try:
            await run(part)
        except WorkerLost as error:
            deaths, rest = deaths + 1, [name for name in part if name in left]
            if rest and deaths >= (ATTEMPTS if len(rest) == 1 else _DEATHS):
                yield rest, error
            elif rest:
                logging.getLogger("jackfield").warning("%s; %s %s are made again", one_line(error), what, some(rest))
                middle = len(rest) // 2 if deaths > 1 else 0
                parts += [half for half in (rest[middle:], rest[:middle]) if half]


async def run_rollouts(
    role: Role, jobs: Sequence[RolloutJob], report: Callable[[Sequence[RolloutReport]], Awaitable[object]]
) -> None:
    """Run the rollouts of groups on the agent workers, again if workers die, and pass on reports as they come."""
    shares = role.workers.agents.shares(jobs, lambda job: job.group.index)
    await asyncio.gather(*(_Rollouts(role, worker, mine, report).run() for worker, mine in shares))


@attrs.define(eq=False)
class _Rollouts:
    """The rollouts that one agent worker runs."""

    role: Role
    worker: AgentWorker
    jobs: Sequence[RolloutJob]
    report: Callable[[Sequence[RolloutReport]], Awaitable[object]]
    #: the rollouts that have not been reported, each with its number, by name
    left: dict[str, tuple[RolloutJob, int]] = attrs.field(init=False)
    restarts: Iterator[int] = attrs.field(factory=itertools.count)

    async def run(self) -> None:
        """Run all rollouts. Those that kill their worker, or are not in time, are reported as failed."""
        self.left = {f"{job.group}/{number}": (job, number) for job in self.jobs for number in job.rollouts}
        async for rollouts, error in in_parts(list(self.left), self._run, self.left, "samples"):
            await self._fail(rollouts, error)

    async def _run(self, rollouts: Sequence[str]) -> None:
        chosen, restart = dict[GroupKey, tuple[RolloutJob, dict[int, int]]](), next(self.restarts)
        for job, number in map(self.left.__getitem__, rollouts):
            chosen.setdefault(job.group, (job, {}))[1][number] = job.rollouts[number]
        jobs = [attrs.evolve(job, rollouts=own, restart=restart) for job, own in chosen.values()]
        generates = any(job.sampling is not None for job in jobs)
        # the worker enforces the deadline of each rollout; this one adds slack for the RPC
        seconds, most = 1.1 * max(job.seconds for job in jobs) + 10, self.role.config.agent_service.concurrency
        seconds *= 1 if most is None else ceil(sum(len(job.rollouts) + len(job.extra) for job in jobs) / most)
        # an evaluation holds the devices from its beginning to its end
        holds, aside = generates and not jobs[0].evaluates, self.role.config.schedule.partial_rollout
        try:
            async with self.role.rollout_devices.hold("rollout", steps_aside=aside) if holds else nullcontext():
                await handle_each(self.role.clock, self.worker.run(jobs), seconds, self._missing, self._report)
        except DeadlineExceeded as error:
            await self._fail([name for name in rollouts if name in self.left], error)

    def _missing(self) -> str:
        samples = [f"{name}, task {job.task.id}" for name, (job, _) in itertools.islice(self.left.items(), 4)]
        return f"the agent worker of samples {some(samples)}; {len(self.left)} rollouts are not complete"

    async def _fail(self, rollouts: Sequence[str], error: JackfieldError) -> None:
        await self._report([job.failed(number, error) for job, number in map(self.left.__getitem__, rollouts)])

    async def _report(self, reports: Sequence[RolloutReport]) -> None:
        """Pass on reports and forget their rollouts."""
        await self.report(reports)
        for each in reports:
            self.left.pop(f"{each.group}/{each.rollout}", None)
