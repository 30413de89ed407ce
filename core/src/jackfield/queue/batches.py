"""Batches: assignment of groups to explorers, and backpressure."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import attrs

from jackfield.errors import DeadlineExceeded, QueueError, QueueFull
from jackfield.queue.groups import Groups
from jackfield.queue.leases import missing
from jackfield.queue.meta import Batch, GroupKey
from jackfield.queue.records import BatchState, Group, Status
from jackfield.queue.store import Controller


@attrs.define(eq=False)
class Batches:
    """The part of the queue that hands out batches and groups and applies backpressure."""

    core: Controller
    groups: Groups
    max_samples: int | None
    max_bytes: int | None
    _mean: float = attrs.field(default=0.0, init=False)  # last known mean bytes of a sample

    async def claim_batch(
        self,
        partition: str,
        explorer: str,
        groups: int,
        *,
        rollouts: int = 1,
        below: int | None = None,
        deadline_seconds: float = 600.0,
    ) -> Batch | None:
        """Claim the next batch to generate. Return None when all batches below ``below`` are final.

        Released batches come first; they keep their published groups and their own number of groups. If all batches
        below ``below`` are claimed, wait, since another explorer's batch may be released. Without ``below`` it never
        waits.

        ``rollouts`` is the expected number of rollouts per group of a new batch, for backpressure. The deadline runs
        only while no batch changes and no consumer works with complete batches.
        """
        if groups < 1 or rollouts < 1 or not explorer:
            found = f"explorer {explorer!r}, {groups} groups, {rollouts} rollouts"
            raise QueueError("a batch is for a named explorer and one group or more", found=found)
        since = self.core.clock.time()
        while True:
            mine = self.core.state.partition(partition)
            offered = (each for each in mine.batches.values() if each.is_offered and not each.failure)
            batch = next((each for each in offered if not each.is_final()), None)
            if below is None or (mine.next_batch if batch is None else batch.number) < below:
                if batch is None:
                    batch = mine.batches[mine.next_batch] = BatchState(mine, mine.next_batch, rollouts)
                    mine.next_batch += 1
                    batch.groups = [Group(batch, index) for index in range(groups)]
                    for group in batch.groups:
                        self.core.touch(group)
                batch.is_offered, batch.explorers[explorer] = False, self.core.caller()
                return Batch(partition, batch.number, len(batch.groups), explorer, len(batch.vacant()))
            left = [each for number, each in mine.batches.items() if number < below and not each.is_final()]
            for each in left:
                each.require_well()
            if not left:
                return None
            await self.core.wait(self._until(left, since, deadline_seconds), functools.partial(missing, left[:1]))

    def _until(self, batches: Sequence[BatchState], since: float, seconds: float) -> float:
        """Return the end of a wait, which restarts at each change of a batch and is infinite while one is leased."""
        held = [consumer.held for batch in batches for consumer in batch.partition.ends() if consumer.held]
        made = [group for batch in batches if batch.is_complete for group in batch.groups]
        is_leased = any(group in groups for groups in held for group in made)
        return float("inf") if is_leased else max(since, *(batch.moved for batch in batches)) + seconds

    async def end_holder(self, client: str) -> None:
        """End the leases of a client that is gone, and release its explorers' batches, which are handed out again.

        Open groups are dropped, which does not count as a retry; published groups are kept.
        """
        for batch in self.core.state.batches():
            for explorer in sorted(name for name, each in batch.explorers.items() if each == client):
                del batch.explorers[explorer]
                if batch.is_complete or batch.failure is not None:
                    continue
                reason = f"explorer {explorer!r} was released"
                again = [group for group in batch.groups if group.explorer == explorer and not group.is_made]
                for group in again:
                    if group.status == Status.OPEN:
                        self.core.fail(group.name, reason)
                        self.groups.leases.forget(group)
                    group.reissue += 1
                    self.groups.vacate(group)
                batch.is_offered = batch.is_offered or (not batch.explorers and bool(batch.vacant()))
                where = {"partition": batch.partition.name, "batch": batch.number}
                self.core.record("release", **where, groups=[group.index for group in again], reason=reason)
        self.groups.leases.end(lambda consumer, hold: hold.client == client)

    async def groups_to_fill(
        self, batch: Batch, deadline_seconds: float, *, until: Literal["final", "published"] = "final"
    ) -> AsyncIterator[tuple[GroupKey, ...]]:
        """Yield lists of groups to generate: first all vacant ones that have room, later the retries.

        With ``until="final"`` it ends when a consumer has acked all groups, so that none can be dropped any more; else
        when all are published: if one is dropped afterwards, the batch is offered to the next claimant. The deadline
        runs only while the batch does not change and no consumer works with its groups. If there was no room for a
        group in time, raise ``QueueFull``; if the batch was released, ``QueueError``.
        """
        partition = self.core.state.partition(batch.partition)
        state, since = partition.batches.get(batch.number), self.core.clock.time()
        if not 0 <= batch.number < partition.next_batch:
            raise QueueError(f"batch {batch.number} has not been claimed", where=batch.partition)
        if state is None:
            return  # consumed
        state.readers += 1
        try:
            while True:
                await asyncio.sleep(0)  # let a woken consumer run first: it may not need the groups any more
                if self._is_over(state, batch.explorer, until):
                    return
                if keys := self._take(state, batch.explorer):
                    self.core.store.write(self.core.state)
                    yield keys
                    since = self.core.clock.time()
                else:
                    await self._wait_to_fill(state, since, deadline_seconds)
        finally:
            state.readers -= 1
            state.offer()
            self.core.wake()

    def _is_over(self, batch: BatchState, explorer: str, until: Literal["final", "published"]) -> bool:
        """Return whether an explorer will get no more groups of a batch."""
        self.core.require_open()
        batch.require_well()
        now = self.core.state.partition(batch.partition.name).batches.get(batch.number)
        if now is None or (batch.is_final() if until == "final" else batch.is_complete):
            return True
        if now is not batch or explorer not in batch.explorers:
            message = f"batch {batch.number} of partition {batch.partition.name!r} was taken from explorer {explorer!r}"
            expected = f"one of {sorted(now.explorers)}"
            raise QueueError(message, where=batch.name, expected=expected, found=explorer, fix="claim a batch")
        return False

    def _take(self, batch: BatchState, explorer: str) -> tuple[GroupKey, ...]:
        """Assign the vacant groups for which there is room."""
        taken, vacant = [], batch.vacant()
        room = self._room() if vacant else 0
        for group in vacant:
            if room < batch.rollouts and not self._is_demanded(batch):
                break
            group.status, group.explorer = Status.ASSIGNED, explorer
            room -= batch.rollouts
            self.core.touch(group)
            taken.append(group.key)
        return tuple(taken)

    async def _wait_to_fill(self, batch: BatchState, since: float, seconds: float) -> None:
        """Wait until the batch changes or there may be room for its vacant groups."""
        until = self._until([batch], max(since, self.core.moved) if batch.vacant() else since, seconds)
        try:
            await self.core.wait(until, lambda: missing([batch]))
        except DeadlineExceeded as error:
            if not batch.vacant():
                raise
            raise QueueFull(
                f"the queue stayed full for {seconds:.6g} s",
                where=batch.name,
                expected=f"room for a group within {self.max_samples} samples and {self.max_bytes} bytes",
                found=f"{self.core.state.samples} samples, {self.core.state.bytes} bytes",
                fix="look at why consumers do not ack and commit, or raise max_samples, max_bytes or the deadline",
            ) from error

    def _room(self) -> float:
        """Return how many samples fit in addition to those that exist or are being generated."""
        state = self.core.state
        if self.max_samples is None and self.max_bytes is None:
            return float("inf")
        if state.samples:
            self._mean = state.bytes / state.samples
        coming = 0
        for group in (group for batch in state.batches() for group in batch.groups):
            if group.status == Status.ASSIGNED:
                coming += group.batch.rollouts
            elif group.status == Status.OPEN:
                coming += max(0, group.rollouts - len(group.samples))
        room = float("inf") if self.max_samples is None else self.max_samples - state.samples - coming
        if self.max_bytes is not None and self._mean:
            room = min(room, (self.max_bytes - state.bytes) / self._mean - coming)
        return room

    def _is_demanded(self, batch: BatchState) -> bool:
        """Return whether a consumer waits for the batch, or for any group while no other consumer has work."""
        consumers = batch.partition.consumers
        if any(batch.number in consumer.awaited for consumer in consumers):
            return True
        busy = {
            consumer.name for consumer in consumers if consumer.held or any(map(consumer.is_fresh, consumer.usable))
        }
        starving = any(None in consumer.awaited and busy <= {consumer.name} for consumer in consumers)
        batches = batch.partition.batches.values()
        return starving and batch is next((each for each in batches if not each.is_complete and not each.failure), None)
