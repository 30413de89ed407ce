"""The explorer, the reward pipeline, and the evaluation of held-out tasks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import attrs

from jackfield.abc.transfer_queue import DeleteRequest
from jackfield.cluster.pool import DeviceLease
from jackfield.data.tasks import Task
from jackfield.errors import DeadlineExceeded, JackfieldError, QueueError, RewardError, WorkerLost
from jackfield.plugins.hooks import EvaluationEnded, SampleRecord, SamplesRecorded
from jackfield.queue.meta import Batch, BatchMeta, GroupKey, NewGroup, RolloutReport
from jackfield.runtime.agent_worker import RolloutJob, ends_the_run
from jackfield.runtime.reward_worker import REWARD_INPUTS, RewardWorker, Scored
from jackfield.runtime.samples import TRAIN, is_baseline, is_expert, metric_tags, said, said_metrics, sampling_seed
from jackfield.runtime.workers import is_lost, one_line, resubmitted
from jackfield.trainer.role import FINISHED, Role

REWARD = "reward"  #: the name under which the reward pipeline leases groups
EVAL = "eval"  #: the partition of an evaluation's samples; they are deleted with it, and the controller never sees them


@attrs.define(kw_only=True, eq=False)
class Explorer:
    """Fills the batches that may start with rollouts and with answers from the data."""

    role: Role
    name: str
    placement: DeviceLease
    task_for: Callable[[GroupKey], Task]
    expert_for: Callable[[GroupKey], Task] | None = None  #: the expert's tasks; None in an offline run
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

    async def _make_group(self, key: GroupKey) -> None:
        copies = key.index >= self._groups
        task = (self.expert_for if copies and self.expert_for else self.task_for)(key)
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
        """Run a rollout on a worker, again if workers die, and report its outcome."""
        config, retries, sampling = self.role.config, itertools.count(), None
        if generates:
            seed = sampling_seed(config.seed_of(config.sampling), key.batch, key.index, key.retry, rollout)
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

        async def run() -> RolloutReport:
            async with self.placement.hold("rollout") if generates else nullcontext():
                return await _run(self.role, attrs.evolve(job, id=key.rollout(rollout, next(retries))))

        try:
            report = await resubmitted(run, f"sample {job.id}")
        except WorkerLost as error:
            report = RolloutReport(group=str(key), rollout=rollout, error=_summary(error))
        await self.role.queue.end_rollouts([report])


async def _run(role: Role, job: RolloutJob) -> RolloutReport:
    """Run a job on an agent worker; return errors of this rollout only in the report."""
    worker = role.workers.agents.of(f"{job.group}/{job.rollout}")
    # the worker enforces the rollout's deadline; this one adds slack for the RPC
    seconds, who = 1.1 * job.seconds + 10, f"the agent worker of sample {job.id}, task {job.task.id}"
    try:
        return await role.clock.wait_for(worker.run(job), seconds, who)
    except JackfieldError as error:
        generates, lost = job.sampling is not None, job.partition == EVAL and is_lost(error)
        if isinstance(error, WorkerLost) or lost or not generates or ends_the_run(error):
            raise
        text = str(error) if job.partition == EVAL else _summary(error)
        return RolloutReport(group=job.group, rollout=job.rollout, error=text)


def _summary(error: JackfieldError) -> str:
    """Describe an error without its location, so that equal failures have equal texts."""
    found = "" if error.found is None else f", found {error.found}"
    return f"{error.message}{found} [{error.code}]"


@attrs.define(kw_only=True, eq=False)
class RewardPipeline:
    """Starts to score samples as soon as they arrive, and writes ``reward`` for whole groups.

    A score that fails or misses its deadline fails its sample; the group policy then decides about the group.
    """

    role: Role
    groups: int = attrs.field(default=0, init=False)  #: number of rewarded groups
    _scoring: dict[tuple[int, int], list[str]] = attrs.field(factory=dict, init=False)  #: keys by batch and index
    #: the last groups in a row without any score
    _unscored: list[Sequence[Scored]] = attrs.field(factory=list, init=False)

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
                    for group, mine in itertools.groupby(sorted(keys, key=_group_of), _group_of):
                        tasks.create_task(self._begin(group, list(mine)))

            tasks.create_task(score_early())
            while True:
                try:
                    batch = await queue.lease_groups(REWARD, deadline_seconds=seconds)
                except DeadlineExceeded:
                    continue  # an idle queue is no failure; consumers of rewards have their own deadlines
                for indexes in batch.by_group().values():
                    tasks.create_task(self._finish(batch.select(indexes)))

    async def until_finished(self) -> None:
        """Wait until a trainer elsewhere has finished; each new group extends the deadline."""
        seconds = self.role.config.deadlines.batch + self.role.config.deadlines.engine
        who = "the trainer to finish, or the explorers to bring a group"
        while True:
            before = self.groups
            try:
                return await self.role.noticed(FINISHED, seconds, who)
            except DeadlineExceeded:
                if self.groups == before:
                    raise

    def _worker(self, group: str) -> RewardWorker:
        assert self.role.workers.rewards is not None
        return self.role.workers.rewards.of(group)

    async def _begin(self, group: str, keys: list[str]) -> None:
        """Start scores. Errors surface when the group is rewarded."""
        key = GroupKey.of(group)
        before = self._scoring.get((key.batch, key.index), [])
        dropped = before if before and _group_of(before[0]) != group else []  # these scores are no longer needed
        self._scoring[key.batch, key.index] = keys if dropped else before + keys
        try:
            if dropped:
                await self._worker(_group_of(dropped[0])).forget(dropped)
            await self._worker(group).score(TRAIN, keys)
        except WorkerLost as error:
            lost = f"{one_line(error)}; the score of samples {', '.join(keys)} is made again"
            logging.getLogger("jackfield").warning(lost)
        except QueueError:  # the group was dropped while its sample came
            pass

    async def _finish(self, group: BatchMeta) -> None:
        """Write the rewards of a whole group."""
        tags = group.tags[0]
        async with self.role.measure("reward", "reward", tags["batch"]):
            try:
                await resubmitted(lambda: self._reward(group), f"the reward of samples {', '.join(group.keys)}")
            except WorkerLost as error:
                await self.role.queue.fail_samples(dict.fromkeys(group.keys, f"reward failed: {error}"))
            except QueueError as error:
                if not await self.role.give_back_lost(group, error):
                    raise
                return  # it is leased again if enough samples are left
        self._scoring.pop((tags["batch"], tags["group"]), None)
        self.groups += 1

    async def _reward(self, group: BatchMeta) -> None:
        # the reward worker enforces the deadline of each score; this one adds the time around it
        seconds, name = 2 * self.role.score_seconds + self.role.config.deadlines.batch, group.groups[0]
        tagged = zip(group.keys, group.tags, strict=True)
        uncompared = sorted(key for key, tags in tagged if is_expert(tags) or is_baseline(tags))
        who = f"the reward worker of group {name}, samples {', '.join(group.keys)}"
        rewarding = self._worker(name).reward(TRAIN, group.keys, uncompared)
        scored, written = await self.role.clock.wait_for(rewarding, seconds, who)
        self._require_some_score(group, scored)
        compared = [each for each in scored if each.key not in uncompared and each.error is None]
        last = group.tags[0]["retry"] >= self.role.config.schedule.max_retries  # it is used as it is
        complete = len(compared) == len(scored) - len(uncompared)
        equal = len({each.score for each in compared}) == 1  # no gradient (DAPO, eq. 11)
        if self.role.algorithm.dynamic_sampling and complete and equal and not last:
            await self.role.queue.drop_groups([name], "all rewards of the group are equal")
            return
        tags = tuple(metric_tags("reward", each.metrics) for each in scored if each.error is None)
        good = group.select(index for index, each in enumerate(scored) if each.error is None)
        await self.role.queue.add_columns(good, attrs.evolve(written, tags=tags))
        if failed := {each.key: each.error for each in scored if each.error is not None}:
            await self.role.queue.fail_samples(failed)

    def _require_some_score(self, group: BatchMeta, scored: Sequence[Scored]) -> None:
        """Raise if several groups in a row have no score: the reward itself is at fault."""
        if any(each.error is None for each in scored):
            self._unscored.clear()
            return
        self._unscored.append(scored)
        most_failed, failed = self.role.config.schedule.max_retries, len(self._unscored)
        if failed > most_failed:
            texts = [str(each.error).removeprefix("reward failed: ") for group in self._unscored for each in group]
            errors = Counter(text.partition("\n")[0] for text in texts)
            most, *others = (f"{count} × {error}" for error, count in errors.most_common(5))
            frames = texts[-1].partition("\n")[2]
            raise RewardError(
                f"{most}: {failed} groups in a row ended without a single score",
                code="reward.too-many-failures",
                where=f"group {group.groups[0]}, task {group.tags[0]['task_id']}",
                expected=f"at most {most_failed} (schedule.max_retries)",
                found="\n".join(others) or frames or None,
                fix="correct the reward; where it only needs longer, raise deadlines.reward or its number of workers",
            )


def _group_of(key: str) -> str:
    return key.rsplit("/", 2)[0]


#: The score of a held-out task, and the tags of its sample; None if there is no sample.
_Outcome: TypeAlias = tuple[Scored, Mapping[str, Any] | None]


@attrs.define(kw_only=True, eq=False)
class Evaluator:
    """Runs every held-out task once and reports the mean score to the hooks."""

    role: Role
    tasks: Sequence[Task] = ()  #: the held-out tasks; if empty, no evaluation runs
    placement: DeviceLease

    def is_due(self, steps_done: int) -> bool:
        """Return whether to evaluate: at both ends of the run and at due weight syncs."""
        schedule, every = self.role.schedule, self.role.config.evaluation.every
        return bool(self.tasks) and (steps_done in (0, schedule.steps) or schedule.is_due(every, steps_done))

    async def evaluate(self, version: int) -> dict[str, float]:
        """Evaluate the weights that the replicas serve now, which are those of ``version``.

        Return ``score``, the mean over the tasks that have one, ``failed``, the fraction of tasks without one, and
        ``response_tokens``, the mean length of the responses. A task that fails for a reason that every task shares
        (``ends_the_run``) raises its error; if no task has a score, ``reward.too-many-failures`` is raised.
        """
        async with self.role.measure("evaluate", "trainer", version), self.placement.hold("rollout"):
            outcomes = await asyncio.gather(*(self._evaluate(task, version) for task in self.tasks))
        scores = [scored.score for scored, _ in outcomes if scored.score is not None]
        if not scores:
            raise RewardError(
                "no task of the evaluation has a score",
                code="reward.too-many-failures",
                where=f"evaluation of weights {version}",
                expected="a score for one task at least",
                found=outcomes[0][0].error,
                fix="correct what the first task met",
            )
        tags = {scored.key: found for scored, found in outcomes if found is not None}
        metrics = {
            "score": sum(scores) / len(scores),
            "failed": 1.0 - len(scores) / len(outcomes),
            "response_tokens": sum(each["response_tokens"] for each in tags.values()) / len(outcomes),
            "tasks": float(len(outcomes)),
            **said_metrics(tags.values()),
        }
        shown = outcomes[: self.role.config.observe.samples_per_evaluation]
        keys = [scored.key for scored, found in shown if found is not None]
        records = {record.key: record for record in await self.role.records(EVAL, keys, [{}] * len(keys))}
        samples = []
        for task, (scored, found) in zip(self.tasks, shown, strict=False):
            key, error = f"{EVAL}/{task.id}", {} if scored.error is None else {"error": scored.error}
            empty = SampleRecord(key=key, prompt="", response="", reward=None, response_ids=(), response_mask=())
            shown_tags = {"task": task.id, "ground_truth": task.ground_truth, **said(found or {}), **error}
            record = records.get(scored.key, empty)
            samples.append(attrs.evolve(record, key=key, reward=scored.score, tags=shown_tags))
        await self.role.workers.backend.delete(DeleteRequest(partition=EVAL, keys=tuple(tags)))
        hooks = self.role.hooks
        hooks.emit(SamplesRecorded(step=version, partition=EVAL, samples=tuple(samples)))
        hooks.emit(EvaluationEnded(step=version, metrics=metrics))
        return metrics

    async def _evaluate(self, task: Task, version: int) -> _Outcome:
        """Run and score a task. An error that concerns this task only becomes its outcome."""
        group, config, workers = f"{EVAL}/{version}/{task.id}", self.role.config, self.role.workers
        key, rewards = f"{group}/0", workers.rewards
        assert rewards is not None
        seed = sampling_seed(config.seed_of(config.evaluation.sampling), "evaluation", version, task.id)
        sampling = {**attrs.asdict(config.evaluation.sampling, recurse=False), "seed": seed}
        seconds, who = config.deadlines.rollout, f"the reward worker of held-out task {task.id}"
        job = RolloutJob(
            id=group, partition=EVAL, group=group, task=task, sampling=sampling, seconds=seconds, last=True
        )

        async def outcome() -> _Outcome:
            report = await _run(self.role, job)
            if not report.keys:
                return Scored(key=key, score=None, error=report.error or "the agent loop returned no sequence"), None
            worker = rewards.of(group)
            longest = 2 * self.role.score_seconds * len(self.tasks)  # if all are scored one after the other
            (scored,) = await self.role.clock.wait_for(worker.score(EVAL, [key]), longest, who)
            await worker.forget([key])
            return scored, {**report.written.tags[0], **metric_tags("reward", scored.metrics)}

        try:
            return await resubmitted(outcome, f"sample {key}")
        except WorkerLost as error:
            return Scored(key=key, score=None, error=str(error)), None
