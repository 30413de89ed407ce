"""The explorer, the reward pipeline, and the evaluation of held-out tasks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs

from jackfield.abc.reward import ScoreResult
from jackfield.abc.transfer_queue import DeleteRequest
from jackfield.data.tasks import SeededOrder, Task
from jackfield.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    JackfieldError,
    PluginError,
    QueueError,
    RewardError,
    WorkerLost,
)
from jackfield.plugins.hooks import EvaluationEnded, SampleRecord, SamplesRecorded
from jackfield.queue.meta import Batch, BatchMeta, GroupKey, NewGroup, RolloutReport, group_of
from jackfield.runtime.samples import TRAIN, is_baseline, is_expert, metric_tags, said, said_metrics, sampling_seed
from jackfield.runtime.workers import REWARD_INPUTS, RewardWorker, RolloutJob, is_lost, one_line, resubmitted
from jackfield.trainer.role import Role

REWARD = "reward"  #: the name under which the reward pipeline leases groups
EVAL = "eval"  #: the partition of an evaluation's samples; they are deleted with it, and the controller never sees them


@attrs.define(kw_only=True, eq=False)
class Explorer:
    """Fills the batches that may start with rollouts and with answers from the data."""

    role: Role
    name: str
    _groups: int = attrs.field(init=False)  #: groups per batch that agents generate; groups of given answers follow
    _rollouts: int = attrs.field(init=False)  #: rollouts per generated group, the greedy baseline included
    _running: int = attrs.field(default=0, init=False)
    _idle: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        """Derive a batch's contents: offline no rollouts; a greedy one may be a baseline."""
        data, explores = self.role.config.data, self.role.explores
        self._groups, self._rollouts = (data.groups_per_batch, data.rollouts_per_group) if explores else (0, 1)
        self._rollouts += self.role.algorithm.greedy_baseline

    async def run(self) -> None:
        """Explore until all batches are finished; batches that others released come first."""
        role, seconds = self.role, self.role.config.deadlines.batch
        progress = role.version if self._groups else role.steps_done
        groups = role.config.data.groups_per_batch + (role.algorithm.experts if role.explores else 0)
        claim = partial(role.queue.claim_batch, TRAIN, self.name, groups, rollouts=self._rollouts)
        async with asyncio.TaskGroup() as batches:
            while batch := await claim(below=role.schedule.steps, deadline_seconds=seconds):
                number = batch.number
                who = f"the trainer, by {self.name} to start batch {number}"
                await progress.until(partial(role.schedule.may_start, number), seconds, who)
                batches.create_task(self._fill(batch))
                if self._groups and batch.vacant:  # else it was restored complete, and may still lose a group
                    self._idle.clear()
                    # the next batch starts when all rollouts of this one have ended; rewards may still be pending
                    async with role.measure("rollout", "explorer", number):
                        await role.clock.wait_for(self._idle.wait(), seconds, f"the rollouts of batch {number}")

    async def _fill(self, batch: Batch) -> None:
        """Generate the groups of a batch, and again those that are dropped without a reward."""
        async with asyncio.TaskGroup() as groups:
            async for keys in self.role.queue.groups_to_fill(batch, self.role.config.deadlines.batch):
                self._running += len(keys)
                for key in keys:
                    groups.create_task(self._make_group(key))

    def task_of(self, key: GroupKey) -> Task:
        """Return the task of a group, independent of the number of explorers and of resumes.

        Groups beyond those that agents generate get an expert's tasks. A retry gets another task.
        """
        role, seed, which = self.role, self.role.config.seed, "train"
        count, first = role.config.data.groups_per_batch, 0
        if self._groups and key.index >= self._groups:
            which, count, first = "expert", role.algorithm.experts, self._groups
        tasks, position = role.tasks[which], key.batch * count + key.index - first
        if key.retry:
            seed, position = seed + 1, position * (role.config.schedule.max_retries + 1) + key.retry
        task: Task = tasks[SeededOrder(size=len(tasks), seed=seed).index(position)]
        return task

    async def _make_group(self, key: GroupKey) -> None:
        copies, task = key.index >= self._groups, self.task_of(key)
        rollouts, tags = 1 if copies else self._rollouts, dict[str, Any]()
        if copies and self._groups:
            tags = {"expert": True}
        elif not copies and self.role.algorithm.greedy_baseline:
            tags = {"greedy_rollout": rollouts - 1}
        try:
            await self.role.queue.open_groups([NewGroup(key=key, task_id=task.id, rollouts=rollouts, tags=tags)])
            await asyncio.gather(*(self._roll_out(key, task, number, not copies) for number in range(rollouts)))
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _roll_out(self, key: GroupKey, task: Task, rollout: int, generates: bool) -> None:
        """Run a rollout on a worker, and report its outcome."""
        config, sampling = self.role.config, None
        if generates:
            seed = sampling_seed(config.seed_of(config.sampling), key.batch, key.index, key.retry, rollout)
            sampling = {**attrs.asdict(config.sampling, recurse=False), "seed": seed}
            if self.role.algorithm.greedy_baseline and rollout == self._rollouts - 1:
                sampling["temperature"] = 0.0
        seconds, expert = config.deadlines.rollout, bool(self._groups)
        job = RolloutJob(group=key, rollout=rollout, task=task, sampling=sampling, seconds=seconds, expert=expert)
        await self.role.queue.end_rollouts([await _run(self.role, job)])


async def _run(role: Role, job: RolloutJob) -> RolloutReport:
    """Run a job on an agent worker, again if workers die; return errors of this rollout only in the report."""
    restarts, generates, evaluates = itertools.count(), job.sampling is not None, job.group.partition == EVAL

    async def run() -> RolloutReport:
        again = attrs.evolve(job, restart=next(restarts))
        worker = role.workers.agents.of(f"{job.group}/{job.rollout}")
        # the worker enforces the rollout's deadline; this one adds slack for the RPC
        seconds, sample = 1.1 * job.seconds + 10, job.group.rollout(job.rollout, again.restart)
        who = f"the agent worker of sample {sample}, task {job.task.id}"
        # an evaluation holds the devices from its beginning to its end
        async with role.rollout_devices.hold("rollout") if generates and not evaluates else nullcontext():
            return await role.clock.wait_for(worker.run(again), seconds, who)

    try:
        return await resubmitted(run, f"sample {job.group.rollout(job.rollout)}")
    except JackfieldError as error:
        every = isinstance(error, ConfigError | DataError | PluginError) or error.code == "rollout.stopped"
        lost = evaluates and is_lost(error)
        if not isinstance(error, WorkerLost) and (every or lost or not generates):  # it would fail every rollout
            raise
        text = str(error) if evaluates else one_line(error, located=False)
        return RolloutReport(group=str(job.group), rollout=job.rollout, error=text)


@attrs.define(kw_only=True, eq=False)
class RewardPipeline:
    """Starts to score samples as soon as they arrive, and writes ``reward`` for whole groups.

    A score that fails or misses its deadline fails its sample; the group policy then decides about the group.
    """

    role: Role
    groups: int = attrs.field(default=0, init=False)  #: number of rewarded groups
    #: errors of the last groups in a row without any score
    _unscored: list[Iterable[str]] = attrs.field(factory=list, init=False)

    async def register(self) -> None:
        """Register the pipeline with the queue, and take over the leases of an earlier process."""
        dimensions = ("reward_dimensions",) if self.role.config.algorithm.reward_dimensions else ()
        await self.role.queue.register_consumer(REWARD, TRAIN, REWARD_INPUTS, writes=("reward", *dimensions))
        await self.role.queue.take_over(REWARD)

    async def run(self) -> None:
        """Score samples until cancelled."""
        queue, seconds = self.role.queue, self.role.config.deadlines.batch
        async with asyncio.TaskGroup() as tasks:

            async def score_early() -> None:  # before groups are complete
                async for keys in queue.new_samples(TRAIN):
                    for _, mine in itertools.groupby(sorted(keys, key=group_of), group_of):
                        tasks.create_task(self._begin(list(mine)))

            tasks.create_task(score_early())
            while True:
                try:
                    batch = await queue.lease(REWARD, deadline_seconds=seconds)
                except DeadlineExceeded:
                    continue  # an idle queue is no failure; consumers of rewards have their own deadlines
                for indexes in batch.by_group().values():
                    tasks.create_task(self._finish(batch.select(indexes)))

    def _worker(self, key: str) -> RewardWorker:
        """Return the worker of a sample, which is that of all retries of its group."""
        assert self.role.workers.rewards is not None
        return self.role.workers.rewards.of(group_of(key).rpartition("/")[0])

    async def _begin(self, keys: list[str]) -> None:
        """Start the scores of a group. Errors surface when the group is rewarded."""
        try:
            await self._worker(keys[0]).begin(TRAIN, keys)
        except WorkerLost as error:
            lost = f"{one_line(error)}; the score of samples {', '.join(keys)} is made again"
            logging.getLogger("jackfield").warning(lost)

    async def _finish(self, group: BatchMeta) -> None:
        """Write the rewards of a whole group."""
        async with self.role.measure("reward", "reward", group.tags[0]["batch"]):
            try:
                await resubmitted(lambda: self._reward(group), f"the reward of samples {', '.join(group.keys)}")
            except WorkerLost as error:
                await self.role.queue.fail_samples(dict.fromkeys(group.keys, f"reward failed: {error}"))
            except QueueError as error:
                if not await self.role.give_back_lost(group, error):
                    raise
                return  # it is leased again if enough samples are left
        self.groups += 1

    async def _reward(self, group: BatchMeta) -> None:
        # the reward worker enforces the deadline of each score; this one adds the time around it
        seconds, name = 2 * self.role.score_seconds + self.role.config.deadlines.batch, group.groups[0]
        tagged = zip(group.keys, group.tags, strict=True)
        uncompared = sorted(key for key, tags in tagged if is_expert(tags) or is_baseline(tags))
        who = f"the reward worker of group {name}, samples {', '.join(group.keys)}"
        rewarding = self._worker(group.keys[0]).reward(TRAIN, group.keys, uncompared)
        results, written = await self.role.clock.wait_for(rewarding, seconds, who)
        found = dict(zip(group.keys, results, strict=True))
        failed = {key: str(result.error) for key, result in found.items() if result.status != "ok"}
        if len(failed) < len(group):
            self._unscored.clear()
        else:
            self._unscored.append(failed.values())
        most, groups = self.role.config.schedule.max_retries, len(self._unscored)
        if groups > most:  # the reward itself is at fault
            what, where = (
                "groups in a row ended without a single score",
                f"group {name}, task {group.tags[0]['task_id']}",
            )
            expected, errors = f"at most {most} (schedule.max_retries)", itertools.chain(*self._unscored)
            raise _without_scores(f"{groups} {what}", where, expected, errors)
        compared = [result.score for key, result in found.items() if key not in uncompared]
        last = group.tags[0]["retry"] >= most  # it is used as it is
        equal = len(set(compared)) == 1 and None not in compared  # no gradient (DAPO, eq. 11)
        if self.role.algorithm.dynamic_sampling and equal and not last:
            await self.role.queue.drop_groups([name], "all rewards of the group are equal")
            return
        tags = tuple(metric_tags("reward", result.metrics) for key, result in found.items() if key not in failed)
        good = group.select(index for index, key in enumerate(group.keys) if key not in failed)
        await self.role.queue.add_columns(good, attrs.evolve(written, tags=tags))
        if failed:
            await self.role.queue.fail_samples(failed)


def _without_scores(what: str, where: str, expected: str, errors: Iterable[str]) -> RewardError:
    """Return the error for scoring that always fails, with its most frequent errors."""
    texts = [error.removeprefix("reward failed: ") for error in errors]
    counted = Counter(text.partition("\n")[0] for text in texts).most_common(5)
    most, *others = (f"{count} × {error}" for error, count in counted)
    found = "\n".join(others) or texts[-1].partition("\n")[2] or None
    fix = "correct what the errors name; if the reward needs longer, raise deadlines.reward or its number of workers"
    details = {"where": where, "expected": expected, "found": found, "fix": fix}
    return RewardError(f"{most}: {what}", code="reward.too-many-failures", **details)


@attrs.define(kw_only=True, eq=False)
class Evaluator:
    """Runs every held-out task once and reports the mean score to the hooks."""

    role: Role

    def is_due(self, steps_done: int) -> bool:
        """Return whether to evaluate, if there are tasks: at both ends of the run and at due weight syncs."""
        schedule, every = self.role.schedule, self.role.config.evaluation.every
        return "eval" in self.role.tasks and (steps_done in (0, schedule.steps) or schedule.is_due(every, steps_done))

    async def evaluate(self, version: int) -> None:
        """Evaluate the weights that the replicas serve now, which are those of ``version``, and report it.

        The metrics are ``score``, the mean over the tasks that have one, ``failed``, the fraction of tasks without one,
        and ``response_tokens``, the mean length of the responses. An error that every task would have is raised; so is
        ``reward.too-many-failures`` if no task has a score.
        """
        tasks = self.role.tasks["eval"]
        async with self.role.measure("evaluate", "trainer", version), self.role.rollout_devices.hold("rollout"):
            groups = (GroupKey(EVAL, version, number) for number in range(len(tasks)))
            records = await asyncio.gather(*map(self._evaluate, tasks, groups))
        scores = [record.reward for record in records if record.reward is not None]
        if not scores:
            where, errors = f"evaluation of weights {version}", (str(record.tags["error"]) for record in records)
            raise _without_scores("no task has a score", where, "a score for one task at least", errors)
        tokens = {each.key: each.tags["response_tokens"] for each in records if "response_tokens" in each.tags}
        metrics = {
            "score": sum(scores) / len(scores),
            "failed": 1.0 - len(scores) / len(records),
            "response_tokens": sum(tokens.values()) / len(records),
            "tasks": float(len(records)),
            **said_metrics(record.tags for record in records),
        }
        shown = records[: self.role.config.observe.samples_per_evaluation]
        keys = [record.key for record in shown if record.key in tokens]
        texts = {text.key: text for text in await self.role.records(EVAL, keys, [{}] * len(keys))}
        samples = [
            attrs.evolve(texts.get(record.key, record), key=f"{EVAL}/{task.id}", reward=record.reward, tags=record.tags)
            for task, record in zip(tasks, shown, strict=False)
        ]
        await self.role.workers.backend.delete(DeleteRequest(partition=EVAL, keys=tuple(tokens)))
        hooks = self.role.hooks
        hooks.emit(SamplesRecorded(step=version, partition=EVAL, samples=tuple(samples)))
        hooks.emit(EvaluationEnded(step=version, metrics=metrics))

    async def _evaluate(self, task: Task, group: GroupKey) -> SampleRecord:
        """Run and score a task; return its sample without the text. An error of this task only becomes a tag."""
        config, rewards = self.role.config, self.role.workers.rewards
        assert rewards is not None
        seed = sampling_seed(config.seed_of(config.evaluation.sampling), "evaluation", group.batch, task.id)
        sampling = {**attrs.asdict(config.evaluation.sampling, recurse=False), "seed": seed}
        job = RolloutJob(group=group, task=task, sampling=sampling, seconds=config.deadlines.rollout, last=True)
        report = await _run(self.role, job)
        result = ScoreResult(status="failed", error=report.error or "the agent loop returned no sequence")
        told: dict[str, Any] = {"task": task.id, "ground_truth": task.ground_truth}
        if report.keys:
            key, tags = report.keys[0], report.written.tags[0]
            longest = 2 * self.role.score_seconds * len(self.role.tasks["eval"])  # if scored in turn
            wait, who = self.role.clock.wait_for, f"the reward worker of held-out task {task.id}"
            try:
                result = await resubmitted(
                    lambda: wait(rewards.of(key).score(EVAL, key), longest, who), f"the score of sample {key}"
                )
            except WorkerLost as error:
                result = ScoreResult(status="failed", error=str(error))
            told |= {"response_tokens": tags["response_tokens"], **said(tags), **metric_tags("reward", result.metrics)}
        if result.error is not None:
            told["error"] = result.error
        key, score = "".join(report.keys), result.score
        return SampleRecord(key=key, prompt="", response="", reward=score, response_ids=(), response_mask=(), tags=told)
