"""The reward pipeline: rows to scores as they come, whole groups to rewards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import attrs

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError, RewardError, WorkerLost
from jackfield.queue import BatchMeta, GroupView, TransferQueue
from jackfield.runtime.reward_worker import REWARD_INPUTS, RewardWorker, Scored
from jackfield.runtime.samples import TRAIN, metric_tags
from jackfield.runtime.workers import Workers, is_lost, lost_keys, resubmitted
from jackfield.trainer.stages import Stages

__all__ = ["RewardPipeline"]

CONSUMER = "reward"


@attrs.frozen
class _Lease:
    """A row's place in the batch that it was leased with."""

    batch: BatchMeta
    index: int


@attrs.define(kw_only=True, eq=False)
class RewardPipeline:
    """Has rows scored the moment they are there, and ``reward`` written for whole groups.

    A score that fails or misses its deadline fails its row by name; the group's policy then decides.
    """

    queue: TransferQueue
    workers: Workers[RewardWorker]
    clock: Clock
    stages: Stages
    score_seconds: float  #: the longest that a score takes, retries included
    idle_seconds: float  #: how long nothing may come before the wait is begun anew
    max_failed_groups: int = 8  #: in a row without a single score, before the run ends
    #: replace groups whose rewards are all equal, so many times a slot; then the group is taken as it is. 0: never
    equal_groups_replaced: int = 0
    groups: int = attrs.field(default=0, init=False)  #: that have been rewarded
    _leases: dict[str, asyncio.Future[_Lease]] = attrs.field(factory=dict, init=False)
    _failed_groups: int = attrs.field(default=0, init=False)  #: the last ones in a row without a score
    _errors: Counter[str] = attrs.field(factory=Counter, init=False)  #: of their samples
    _pruned: int = attrs.field(default=-1, init=False)  #: the last ticket at which dropped groups were forgotten

    async def register(self) -> None:
        """Announce the consumer to the queue, and take over what another process left that did this before."""
        await self.queue.register_consumer(CONSUMER, TRAIN, REWARD_INPUTS)
        await self.queue.take_over(CONSUMER)

    async def run(self) -> None:
        """Score until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reward_groups(tasks))
            while True:
                try:
                    batch = await self.queue.lease(CONSUMER, deadline_seconds=self.idle_seconds)
                except DeadlineExceeded:
                    continue  # nothing to score is no failure; whoever needs a reward has a deadline of its own
                groups: dict[str, list[int]] = {}
                for index, group in enumerate(batch.group_ids):
                    groups.setdefault(group, []).append(index)
                for group, indexes in groups.items():
                    if await self._has_rewards(group):  # a restored one, whose acks were not saved any more
                        tasks.create_task(self._pass(batch.select(indexes)))
                        continue
                    for index in indexes:
                        self._note_lease(batch.keys[index], _Lease(batch, index))
                    tasks.create_task(self._begin(group, [batch.keys[index] for index in indexes]))

    async def _has_rewards(self, group: str) -> bool:
        return not await self._is_gone(group) and "reward" in (await self.queue.group(group)).columns

    async def _pass(self, rows: BatchMeta) -> None:
        """There is nothing left to do for rows of one group."""
        await self.queue.ack(rows, step=int(rows.tags[0]["batch"]))

    def _lease_of(self, key: str) -> asyncio.Future[_Lease]:
        if key not in self._leases:
            self._leases[key] = asyncio.get_running_loop().create_future()
        return self._leases[key]

    def _note_lease(self, key: str, lease: _Lease) -> None:
        """A row that is leased again has lost its earlier lease."""
        if self._lease_of(key).done():
            del self._leases[key]
        self._lease_of(key).set_result(lease)

    async def _begin(self, group: str, keys: list[str]) -> None:
        """Have rows scored before their siblings are there. Whatever goes wrong shows when the group is rewarded."""
        try:
            await self.workers.of(group).score(TRAIN, keys)
        except (WorkerLost, QueueError):
            return  # the worker died, or the group was dropped while its row was on the way

    async def _reward_groups(self, tasks: asyncio.TaskGroup) -> None:
        async for group in self.queue.settled_groups(TRAIN):
            if "reward" not in group.columns:  # a restored group may have been scored before
                tasks.create_task(self._finish(group))

    async def _finish(self, group: GroupView) -> None:
        async with self.stages.measure("reward", "reward", group.ticket):
            try:
                leases = [await self._lease(key) for key in group.keys]
            except DeadlineExceeded:
                if await self._is_gone(group.id):
                    return  # its rows were lost before anybody could have them
                raise
            await self._reward_what_is_left(group)
        self.groups += 1
        await self._forget_dropped(group.ticket)
        for key in group.keys:
            self._leases.pop(key, None)  # a group that was dropped may be forgotten already
        for batch in {id(lease.batch): lease.batch for lease in leases}.values():
            mine = [lease.index for lease in leases if lease.batch is batch]
            await self.queue.ack(batch.select(mine), step=group.ticket)

    async def _lease(self, key: str) -> _Lease:
        """A row that nobody leases is named here."""
        seconds = self.score_seconds + self.idle_seconds
        return await self.clock.wait_for(self._lease_of(key), seconds, f"the reward of sample {key}")

    async def _reward_what_is_left(self, group: GroupView) -> None:
        """Rows may be lost meanwhile; what is left of the group may be enough of it."""
        while not await self._is_gone(group.id):
            group = await self.queue.group(group.id)
            try:
                samples = f"the reward of samples {', '.join(group.keys)}"
                await resubmitted(lambda: self._reward(group), samples)  # noqa: B023
                return
            except WorkerLost as error:
                await self.queue.fail_rows(group.keys, f"reward failed: {error}")
                return
            except QueueError as error:
                lost = await self.queue.fail_lost(named=lost_keys(error)) if is_lost(error) else ()
                if not await self._is_gone(group.id) and not set(lost) & set(group.keys):
                    raise

    async def _reward(self, group: GroupView) -> None:
        # each score has its own deadline where it is made; ours adds the rest
        seconds = 2 * self.score_seconds + self.idle_seconds
        apart = _apart(group)
        scored, written = await self.clock.wait_for(
            self.workers.of(group.id).reward(TRAIN, group.keys, apart),
            seconds,
            f"the reward worker of group {group.id}, samples {', '.join(group.keys)}",
        )
        self._require_some_score(group, scored)
        if self._gives_nothing(group, [each for each in scored if each.key not in apart]):
            await self.queue.drop_group(group.id, "all rewards of the group are equal")
            return
        good = [each for each in scored if each.error is None]
        tags = [metric_tags("reward", each.metrics) for each in good]
        await self.queue.announce([each.key for each in good], written, tags)
        for each in scored:
            if each.error is not None:
                await self.queue.fail_rows([each.key], each.error)

    def _require_some_score(self, group: GroupView, scored: Sequence[Scored]) -> None:
        """Groups are refilled, but not when it is the reward that is wrong."""
        if any(each.error is None for each in scored):
            self._failed_groups = 0
            self._errors.clear()
            return
        self._failed_groups += 1
        self._errors.update(str(each.error).removeprefix("reward failed: ").partition("\n")[0] for each in scored)
        if self._failed_groups > self.max_failed_groups:
            most, *others = (f"{count} × {error}" for error, count in self._errors.most_common(5))
            frames = str(scored[-1].error).partition("\n")[2]
            raise RewardError(
                f"{most}: {self._failed_groups} groups in a row ended without a single score",
                code="reward.too-many-failures",
                where=f"group {group.id}, task {group.task_id}",
                expected=f"at most {self.max_failed_groups} (schedule.max_retries)",
                found="\n".join(others) or frames or None,
                fix="correct the reward; where it only needs longer, raise deadlines.reward or its number of workers",
            )

    def _gives_nothing(self, group: GroupView, siblings: Sequence[Scored]) -> bool:
        """Whether a group is to be replaced: equal rewards have no group-relative gradient (DAPO, equation 11)."""
        if group.attempt >= self.equal_groups_replaced or any(each.error is not None for each in siblings):
            return False
        return bool(siblings) and len({each.score for each in siblings}) == 1

    async def _forget_dropped(self, ticket: int) -> None:
        """Once a ticket: scores of groups that were dropped, or whose ticket is done, will never be asked for."""
        if ticket <= self._pruned:
            return
        self._pruned = ticket
        for key, future in list(self._leases.items()):
            if not future.done():
                continue
            group = future.result().batch.group_ids[future.result().index]
            if await self._is_gone(group):
                self._leases.pop(key, None)  # unless its own task was faster
                with suppress(WorkerLost):  # it has forgotten
                    await self.workers.of(group).forget([key])

    async def _is_gone(self, group: str) -> bool:
        try:
            return (await self.queue.group(group)).state == "dropped"
        except QueueError:
            return True


def _apart(group: GroupView) -> tuple[str, ...]:
    """Rows that are not compared with the others: an expert's, and the greedy rollout's."""
    if group.tags.get("expert"):
        return group.keys
    greedy = group.tags.get("greedy_rollout")
    return tuple(key for key, run in zip(group.keys, group.key_runs, strict=True) if run == greedy)
