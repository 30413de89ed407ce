"""The reward pipeline, which has samples scored as they arrive and decides about those without a score."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import attrs
import msgspec

from jackfield.errors import DeadlineExceeded, QueueError, RewardError, WorkerLost, some
from jackfield.plugins.hooks import RewardsPending, SamplesFailed
from jackfield.queue.meta import BatchMeta, Lineage, NewGroup, RolloutReport, group_of, index_of
from jackfield.runtime.experiences import MADE
from jackfield.runtime.rewards import REWARD_INPUTS, RewardJob, RewardReport, RewardWorker
from jackfield.runtime.samples import TRAIN, is_baseline, is_expert
from jackfield.runtime.tags import metric_tags
from jackfield.runtime.workers import handle_each, one_line
from jackfield.trainer.role import Role
from jackfield.trainer.rollouts import in_parts

REWARD = "reward"  #: the name under which the reward pipeline leases groups
_EARLY_SECONDS = 0.5  #: samples of unfinished groups that end within this time start to be scored together


@attrs.define(kw_only=True, eq=False)
class RewardPipeline:
    """Starts to score samples as soon as they arrive, and writes ``reward`` for whole groups.

    A score that fails or misses its deadline fails its sample; the group policy then decides about the group.
    """

    role: Role
    groups: int = attrs.field(default=0, init=False)  #: number of rewarded groups
    _generates: bool = attrs.field(default=False, init=False)  #: whether scores need the replicas' devices
    #: errors of the last groups in a row without any score
    _unscored: list[Iterable[str]] = attrs.field(factory=list, init=False)

    async def register(self) -> None:
        """Register the pipeline with the queue, and take over the leases of an earlier process."""
        dimensions = ("reward_dimensions",) if self.role.config.algorithm.reward_dimensions else ()
        await self.role.queue.register_consumer(REWARD, TRAIN, REWARD_INPUTS, writes=("reward", *dimensions))
        await self.role.queue.take_over(REWARD)
        assert self.role.workers.rewards is not None
        self._generates = await self.role.workers.rewards.of(0).generates()
        if self._generates and not self.role.generates:
            raise self.role.config.refusal(
                "reward", "the reward generates, and this role has no replicas", "a model's url"
            )

    def _devices(self) -> AbstractAsyncContextManager[None]:
        return self.role.rollout_devices.hold("rollout") if self._generates else nullcontext()

    async def run(self) -> None:
        """Score samples until cancelled."""
        queue, seconds = self.role.queue, self.role.config.deadlines.batch
        async with asyncio.TaskGroup() as tasks:

            async def score_early() -> None:  # before groups are complete
                async for keys in queue.new_samples(TRAIN):
                    for worker, mine in self._shares(keys, group_of):
                        tasks.create_task(self._begin(worker, mine))
                    await self.role.clock.sleep(_EARLY_SECONDS)

            tasks.create_task(score_early())
            while True:
                try:
                    batch = await queue.lease(REWARD, deadline_seconds=seconds)
                except DeadlineExceeded:
                    continue  # an idle queue is no failure; consumers of rewards have their own deadlines
                for worker, names in self._shares(batch.by_group(), str):
                    tasks.create_task(self._finish(worker, batch, names))

    def _shares(self, names: Iterable[str], group: Callable[[str], str]) -> list[tuple[RewardWorker, list[str]]]:
        """Return the share of each worker; all retries of a group go to the same one."""
        assert self.role.workers.rewards is not None
        return self.role.workers.rewards.shares(names, lambda name: index_of(group(name)))

    async def _begin(self, worker: RewardWorker, keys: list[str]) -> None:
        """Start the scores of samples. Errors surface when their groups are rewarded."""
        try:
            async with self._devices():
                await worker.begin(TRAIN, keys)
        except WorkerLost as error:
            logging.getLogger("jackfield").warning("%s; scores of %s are made again", one_line(error), some(keys))

    async def _finish(self, worker: RewardWorker, batch: BatchMeta, names: list[str]) -> None:
        """Write the rewards of whole groups."""
        places = batch.by_group()
        step, left = batch.tags[places[names[0]][0]]["batch"], dict.fromkeys(names)  # groups that have no reward yet

        def some_groups(names: Iterable[str]) -> BatchMeta:
            return batch.select(itertools.chain.from_iterable(places[name] for name in names))

        async def record(report: RewardReport) -> None:
            ended, (scored, running, waiting) = dict.fromkeys(map(group_of, report.results)), report.progress
            event = RewardsPending(step=step, scored=scored, in_progress=running, waiting=waiting)
            self.role.hooks.emit(event)
            if not ended or not ended.keys() <= left.keys():
                return  # a report that has come before, or says that the wait goes on
            await self._record(some_groups(ended), report)
            await self._put_made(worker, batch, report)
            for name in ended:
                del left[name]

        async def reward(names: Sequence[str]) -> None:
            jobs = [_reward_job(batch, places[name]) for name in names]
            # the reward worker enforces the deadline of each score; this one adds the time around it
            seconds = 2 * self.role.score_seconds + self.role.config.deadlines.batch
            reports, who = worker.reward(TRAIN, jobs), "the reward worker of groups"
            async with self._devices():
                await handle_each(
                    self.role.clock, reports, seconds, lambda: f"{who} {some([*left])}", record, each=True
                )

        async with self.role.measure("reward", "reward", step):
            try:
                async for lost, error in in_parts(names, reward, left, "the rewards of groups"):
                    await self.role.queue.fail_samples(dict.fromkeys(some_groups(lost).keys, f"reward failed: {error}"))
                    for name in lost:
                        del left[name]
            except QueueError as error:
                if not await self.role.give_back_lost(some_groups(left), error):
                    raise
                return  # they are leased again if enough samples are left

    async def _put_made(self, worker: RewardWorker, batch: BatchMeta, report: RewardReport) -> None:
        """Put the samples that operators made, each as a group of its own, for ``mixing.made``."""
        queue, seconds = self.role.queue, self.role.config.deadlines.batch
        tasks = dict(zip(batch.keys, (tags["task_id"] for tags in batch.tags), strict=True)) if report.made else {}
        for made in report.made:
            claimed = await queue.claim_batch(MADE, REWARD, 1, deadline_seconds=seconds)
            assert claimed is not None
            async for (group,) in queue.groups_to_fill(claimed, seconds, until="published"):
                await queue.open_groups([NewGroup(key=group, task_id=tasks[made.parents[0]], rollouts=1)])
                key = group.sample(0, 0)
                written = await worker.put_made(made.name, key)
                lineage = {key: Lineage(made.operation, made.parents)}
                told = RolloutReport(group=str(group), rollout=0, keys=(key,), written=written, lineage=lineage)
                await queue.end_rollouts([told])

    async def _record(self, batch: BatchMeta, report: RewardReport) -> None:
        """Report the rewards of whole groups to the queue, and the samples without a score; drop equal groups."""
        results, most = report.results, self.role.config.schedule.max_retries
        failed = {key: str(result.error) for key, result in results.items() if result.status != "ok"}
        removed = {key: f"left out by {why}" for key, why in report.removed.items()}
        dropped, groups = list[str](), batch.by_group()
        for name, indexes in groups.items():
            keys, first = [batch.keys[at] for at in indexes], batch.tags[indexes[0]]
            if not failed or not all(key in failed for key in keys):
                self._unscored.clear()
            else:
                self._unscored.append([failed[key] for key in keys])
            if (unscored := len(self._unscored)) > most:  # the reward itself is at fault
                what, where = "groups in a row ended without a single score", f"group {name}, task {first['task_id']}"
                self.role.hooks.emit(SamplesFailed(step=self.role.steps_done.value + 1, reasons=failed))
                expected, errors = f"at most {most} (schedule.max_retries)", itertools.chain(*self._unscored)
                raise without_scores(f"{unscored} {what}", where, expected, errors)
            if self.role.curriculum is not None:
                compared_ones = [
                    results[key] for key, at in zip(keys, indexes, strict=True) if _is_compared(batch.tags[at])
                ]
                scores = [each.metrics.get("unshaped", each.score) for each in compared_ones if each.status == "ok"]
                self.role.curriculum.hear(name, scores)
            if self.role.algorithm.dynamic_sampling and first["retry"] < most:  # else it is used as it is
                compared = {results[batch.keys[at]].score for at in indexes if _is_compared(batch.tags[at])}
                if len(compared) == 1 and None not in compared:  # no gradient (DAPO, eq. 11)
                    dropped.append(name)
        if dropped:
            await self.role.queue.drop_groups(dropped, "all rewards of the group are equal")
        policy, first_failed = self.role.config.reward_service.on_failure, next(iter(failed), "")
        told = failed if policy in ("stop", "drop_group") else {}  # the queue tells of other failures
        told = told or {key: str(each.error) for key, each in results.items() if each.error and key not in failed}
        if told:
            self.role.hooks.emit(SamplesFailed(step=self.role.steps_done.value + 1, reasons=told))
        if failed and policy == "stop":
            expected, found = "scores (reward_service.on_failure: stop)", failed[first_failed]
            raise RewardError("a sample has no score", where=f"sample {first_failed}", expected=expected, found=found)
        if failed and policy == "drop_group":
            lacking = [name for name in dict.fromkeys(map(group_of, failed)) if name not in dropped]
            await self.role.queue.drop_groups(lacking, failed[first_failed], again=False)
            dropped += lacking
        dropped += await self._drop_emptied(batch, {**failed, **removed}, removed, dropped)
        lacking_score, failed = failed, {**failed, **removed}
        sizes = dict(zip([key for key in results if key not in failed], report.written.sizes, strict=True))
        good = batch
        if failed or dropped:
            places = enumerate(zip(batch.keys, batch.groups, strict=True))
            good = batch.select(at for at, (key, name) in places if key not in failed and name not in dropped)
        tags = tuple([metric_tags("reward", results[key].metrics) for key in good.keys])
        own = {"sizes": tuple(map(sizes.__getitem__, good.keys)), "tags": tags}
        written = msgspec.structs.replace(report.written, **own)
        await self.role.queue.add_columns(good, written)
        if gone := {key: why for key, why in lacking_score.items() if group_of(key) not in dropped}:
            await self.role.queue.fail_samples(gone)
        if gone := {key: why for key, why in removed.items() if group_of(key) not in dropped}:
            await self.role.queue.fail_samples(gone, minimum=1)
        self.groups += len(groups)

    async def _drop_emptied(
        self, batch: BatchMeta, gone: Mapping[str, str], removed: Mapping[str, str], dropped: Sequence[str]
    ) -> list[str]:
        """Drop groups of which operators leave nothing: others come in their places, as often as retries allow."""
        emptied = dict[bool, list[str]]()
        for name, indexes in batch.by_group().items() if removed else ():
            keys = [batch.keys[at] for at in indexes]
            if name not in dropped and not removed.keys().isdisjoint(keys) and gone.keys() >= set(keys):
                again = batch.tags[indexes[0]]["retry"] < self.role.config.schedule.max_retries
                emptied.setdefault(again, []).append(name)
        for again, names in emptied.items():
            why = f"operators left out all of its samples: {next(iter(removed.values()))}"
            await self.role.queue.drop_groups(names, why, again=again)
        return [name for names in emptied.values() for name in names]


async def pipeline_states(role: Role, steps: int) -> list[Any]:
    """Return what the operators of each reward worker had learnt before the first batch that is not trained on."""
    if not role.config.data.pipeline.experiences or role.workers.rewards is None:
        return []
    return [await worker.pipeline_state(steps) for worker in role.workers.rewards.all]


async def restore_pipelines(role: Role, states: Sequence[Any]) -> None:
    """Have the operators of each reward worker continue from its state, if there are as many workers as before."""
    workers = [] if role.workers.rewards is None else role.workers.rewards.all
    if states and len(states) != len(workers):
        what = "the operators of %d reward workers start again: the checkpoint has the states of %d"
        logging.getLogger("jackfield").warning(what, len(workers), len(states))
        return
    for worker, state in zip(workers, states, strict=False):
        await worker.restore_pipeline(state)


def _is_compared(tags: Mapping[str, Any]) -> bool:
    return not (is_expert(tags) or is_baseline(tags))


def _reward_job(batch: BatchMeta, indexes: Sequence[int]) -> RewardJob:
    keys, tags = batch.keys, batch.tags
    uncompared = sorted([keys[at] for at in indexes if not _is_compared(tags[at])])
    return RewardJob(tuple(map(keys.__getitem__, indexes)), tuple(uncompared))


def without_scores(what: str, where: str, expected: str, errors: Iterable[str]) -> RewardError:
    """Return the error for scoring that always fails, with its most frequent errors."""
    texts = [error.removeprefix("reward failed: ") for error in errors]
    counted = Counter(text.partition("\n")[0] for text in texts).most_common(5)
    most, *others = (f"{count} × {error}" for error, count in counted)
    found = "\n".join(others) or texts[-1].partition("\n")[2] or None
    fix = "correct what the errors name; if the reward needs longer, raise deadlines.reward"
    details = {"where": where, "expected": expected, "found": found, "fix": fix}
    return RewardError(f"{most}: {what}", code="reward.too-many-failures", **details)
