"""The reward pipeline: samples to scores as they come, whole groups to rewards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import attrs

from jackfield.errors import DeadlineExceeded, QueueError, RewardError, WorkerLost
from jackfield.queue import BatchMeta, GroupKey
from jackfield.runtime.reward_worker import REWARD_INPUTS, RewardWorker, Scored
from jackfield.runtime.samples import TRAIN, is_baseline, is_expert, metric_tags
from jackfield.runtime.workers import lost_keys, resubmitted
from jackfield.trainer.distributed import FINISHED, noticed
from jackfield.trainer.role import Role

CONSUMER = "reward"


@attrs.define(kw_only=True, eq=False)
class RewardPipeline:
    """Has samples scored the moment they are there, and ``reward`` written for whole groups.

    A score that fails or misses its deadline fails its sample by name; the group's policy then decides.
    """

    role: Role
    groups: int = attrs.field(default=0, init=False)  #: that have been rewarded
    _scoring: dict[tuple[int, int], list[str]] = attrs.field(factory=dict, init=False)  #: keys by batch and index
    _unscored: list[Sequence[Scored]] = attrs.field(
        factory=list, init=False
    )  #: the last groups, while none has a score

    async def register(self) -> None:
        """Register the stage with the queue, and take over the groups of a process that did this before."""
        dimensions = ("reward_dimensions",) if self.role.config.algorithm.reward_dimensions else ()
        await self.role.queue.register_consumer(CONSUMER, TRAIN, REWARD_INPUTS, writes=("reward", *dimensions))
        await self.role.queue.take_over(CONSUMER)

    async def run(self) -> None:
        """Score until cancelled."""
        queue, seconds = self.role.queue, self.role.config.deadlines.batch
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._score_early(tasks))
            while True:
                try:
                    batch = await queue.lease_groups(CONSUMER, deadline_seconds=seconds)
                except DeadlineExceeded:
                    continue  # an idle queue is no failure; consumers that need a reward have deadlines of their own
                for indexes in batch.by_group().values():
                    tasks.create_task(self._finish(batch.select(indexes)))

    async def until_finished(self) -> None:
        """Wait until the trainer in another process has done its last step; while groups come, the wait goes on."""
        seconds = self.role.config.deadlines.batch + self.role.config.deadlines.engine
        who = "the trainer to finish, or the explorers to bring a group"
        while True:
            before = self.groups
            try:
                return await noticed(self.role, FINISHED, seconds, who)
            except DeadlineExceeded:
                if self.groups == before:
                    raise

    def _worker(self, group: str) -> RewardWorker:
        assert self.role.workers.rewards is not None
        return self.role.workers.rewards.of(group)

    async def _score_early(self, tasks: asyncio.TaskGroup) -> None:
        """Have samples scored before their siblings are there."""
        async for keys in self.role.queue.new_samples(TRAIN):
            groups: dict[str, list[str]] = {}
            for key in keys:
                groups.setdefault(_group_of(key), []).append(key)
            for group, mine in groups.items():
                tasks.create_task(self._begin(group, mine))

    async def _begin(self, group: str, keys: list[str]) -> None:
        """Start scores. Whatever goes wrong shows when the group is rewarded."""
        key = GroupKey.of(group)
        before = self._scoring.get((key.batch, key.index), [])
        dropped = before if before and _group_of(before[0]) != group else []  # these scores will never be asked for
        self._scoring[key.batch, key.index] = keys if dropped else before + keys
        with suppress(WorkerLost, QueueError):  # the worker died, or the group was dropped while its sample came
            if dropped:
                await self._worker(_group_of(dropped[0])).forget(dropped)
            await self._worker(group).score(TRAIN, keys)

    async def _finish(self, group: BatchMeta) -> None:
        """Reward a whole group."""
        tags, queue = group.tags[0], self.role.queue
        async with self.role.measure("reward", "reward", tags["batch"]):
            try:
                await resubmitted(lambda: self._reward(group), f"the reward of samples {', '.join(group.keys)}")
            except WorkerLost as error:
                await queue.fail_samples(dict.fromkeys(group.keys, f"reward failed: {error}"))
            except QueueError as error:
                if not set(await queue.fail_lost(group, lost_keys(error))) & set(group.keys):
                    raise
                await queue.release(group)  # where enough of it is left, it is leased again
                return
        self._scoring.pop((tags["batch"], tags["group"]), None)
        self.groups += 1

    async def _reward(self, group: BatchMeta) -> None:
        # each score has its own deadline where it is made; this one adds the rest
        seconds, name = 2 * self.role.score_seconds + self.role.config.deadlines.batch, group.groups[0]
        tagged = zip(group.keys, group.tags, strict=True)
        uncompared = sorted(key for key, tags in tagged if is_expert(tags) or is_baseline(tags))
        who = f"the reward worker of group {name}, samples {', '.join(group.keys)}"
        rewarding = self._worker(name).reward(TRAIN, group.keys, uncompared)
        scored, written = await self.role.clock.wait_for(rewarding, seconds, who)
        self._require_some_score(group, scored)
        if self._gives_nothing(group, [each for each in scored if each.key not in uncompared]):
            await self.role.queue.drop_groups([name], "all rewards of the group are equal")
            return
        tags = tuple(metric_tags("reward", each.metrics) for each in scored if each.error is None)
        good = group.select(index for index, each in enumerate(scored) if each.error is None)
        await self.role.queue.add_columns(good, attrs.evolve(written, tags=tags))
        if failed := {each.key: each.error for each in scored if each.error is not None}:
            await self.role.queue.fail_samples(failed)

    def _require_some_score(self, group: BatchMeta, scored: Sequence[Scored]) -> None:
        """Groups are made again, but not when it is the reward that is wrong."""
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

    def _gives_nothing(self, group: BatchMeta, siblings: Sequence[Scored]) -> bool:
        """Tell whether a group is replaced: equal rewards have no group-relative gradient (DAPO, equation 11)."""
        last = group.tags[0]["retry"] >= self.role.config.schedule.max_retries  # it is taken as it is
        if last or not self.role.algorithm.dynamic_sampling or any(each.error is not None for each in siblings):
            return False
        return bool(siblings) and len({each.score for each in siblings}) == 1


def _group_of(key: str) -> str:
    return key.rsplit("/", 2)[0]
