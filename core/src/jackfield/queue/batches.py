"""Batches: who makes which groups, and how far producers may run ahead."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable
from typing import Literal

import attrs

from jackfield.errors import DeadlineExceeded, QueueError, QueueFull
from jackfield.queue.meta import Batch, GroupKey
from jackfield.queue.missing import unfinished
from jackfield.queue.records import BatchState, Partition, Place
from jackfield.queue.state import State


@attrs.define(eq=False)
class Batches:
    """Hands out batches and their groups, and holds producers back."""

    state: State
    end_group: Callable[[Place, str], None]  #: drops the group of a place without counting it as a retry
    write: Callable[[], None]  #: brings what has changed to the store
    max_samples: int | None = None
    max_bytes: int | None = None
    _mean: float = attrs.field(default=0.0, init=False)  #: bytes of a sample, the last time that there was one
    _clients: dict[str, set[str]] = attrs.field(factory=dict, init=False)  #: explorers that have batches, by client

    # -- claims

    async def claim(
        self,
        name: str,
        explorer: str,
        groups: int,
        *,
        rollouts: int,
        below: int | None,
        seconds: float,
        client: str | None,
    ) -> Batch | None:
        """See :meth:`TransferQueue.claim_batch`."""
        if groups < 1 or rollouts < 1 or not explorer:
            found = f"explorer {explorer!r}, {groups} groups, {rollouts} rollouts"
            raise QueueError("a batch is for a named explorer and one group or more", found=found)
        partition = self.state.partition(name)
        while True:
            self.state.require_open()
            batch = partition.next_offered()
            number = partition.next_batch if batch is None else batch.number
            if below is None or number < below:
                batch = self._new(partition, groups, rollouts) if batch is None else batch
                if client is not None:
                    self._clients.setdefault(client, set()).add(explorer)
                return self._give(batch, explorer)
            left = _not_final(partition, below)
            if not left:
                return None
            leased = any(each.is_leased() for each in left)
            until = float("inf") if leased else self.state.clock.time() + seconds
            await self.state.wait(partition.offers.next(), until, lambda left=left: _awaited(left))  # type: ignore[misc]

    def _new(self, partition: Partition, groups: int, rollouts: int) -> BatchState:
        batch = BatchState(partition, partition.next_batch, rollouts)
        batch.places = [Place(batch, index) for index in range(groups)]
        batch.vacant = list(range(groups))
        partition.batches[batch.number] = batch
        partition.next_batch += 1
        self.state.batches[batch] = None
        self._touch(batch)
        return batch

    def _touch(self, batch: BatchState) -> None:
        for place in batch.places:
            self.state.touch(place)

    def _give(self, batch: BatchState, explorer: str) -> Batch:
        offered = batch.partition.offered
        if batch.number in offered:
            offered.remove(batch.number)
            heapq.heapify(offered)
        batch.explorers.add(explorer)
        return batch.public(explorer)

    def release(self, explorer: str) -> tuple[Batch, ...]:
        """See :meth:`TransferQueue.release_batches`."""
        batches = [batch for each in self.state.partitions.values() for batch in each.batches.values()]
        mine = [batch for batch in batches if explorer in batch.explorers]
        released = [batch for batch in mine if not batch.is_complete and batch.failure is None]
        for batch in mine:
            batch.explorers.discard(explorer)
        for batch in released:
            self._release(batch, explorer)
        return tuple(batch.public(explorer) for batch in released)

    def release_client(self, client: str) -> None:
        """Let others have the batches of the explorers of a client that is gone."""
        for explorer in sorted(self._clients.pop(client, ())):
            self.release(explorer)

    def _release(self, batch: BatchState, explorer: str) -> None:
        reason = f"explorer {explorer!r} was released"
        again = [place for place in batch.places if place.explorer == explorer and not _is_made(place)]
        for place in again:
            if place.group is not None:
                self.end_group(place, reason)
            place.reissue += 1
            self.state.touch(place, whole=True)
            batch.vacate(place)
        if not batch.explorers and batch.vacant:
            batch.partition.offer(batch.number)
        batch.notify()
        self.state.room.notify()  # what was to be made is not made here any more
        indexes = [place.index for place in again]
        self.state.record("release", partition=batch.partition.name, batch=batch.number, groups=indexes, reason=reason)

    def offer_unfinished(self) -> frozenset[str]:
        """Offer every batch that could still lose a group; return the clients that had batches."""
        clients = frozenset(self._clients)
        self._clients.clear()
        for partition in self.state.partitions.values():
            for batch in partition.batches.values():
                if batch.failure is None and not batch.is_final():
                    partition.offer(batch.number)
        return clients

    # -- groups to make

    async def groups_to_fill(
        self, batch: Batch, seconds: float, until: Literal["final", "published"]
    ) -> AsyncIterator[tuple[GroupKey, ...]]:
        """See :meth:`TransferQueue.groups_to_fill`."""
        state = self._find(batch)
        if state is None:
            return  # consumed
        state.readers += 1
        try:
            while True:
                await asyncio.sleep(0)  # a consumer that was woken looks first: it may not wait any more
                if _ended(state, until):
                    return
                self._require_explorer(state, batch.explorer)
                keys = self._take(state, batch.explorer)
                if keys:
                    self.write()
                    yield keys
                else:
                    await self._wait(state, seconds)
        finally:
            state.readers -= 1
            state.offer()

    def _find(self, batch: Batch) -> BatchState | None:
        partition = self.state.partition(batch.partition)
        found = partition.batches.get(batch.number)
        if found is None and not 0 <= batch.number < partition.next_batch:
            raise QueueError(f"batch {batch.number} has not been claimed", where=batch.partition)
        return found

    def _require_explorer(self, batch: BatchState, explorer: str) -> None:
        self.state.require_open()
        if explorer not in batch.explorers:
            raise QueueError(
                f"batch {batch.number} of partition {batch.partition.name!r} was taken from explorer {explorer!r}",
                where=batch.name,
                expected=f"one of {sorted(batch.explorers)}",
                found=explorer,
                fix="claim a batch",
            )

    def _take(self, batch: BatchState, explorer: str) -> tuple[GroupKey, ...]:
        """Hand out the vacant places for which there is room."""
        taken = []
        room = self._room() if batch.vacant else 0
        while batch.vacant and (room >= batch.rollouts or self._is_demanded(batch)):
            place = batch.places[heapq.heappop(batch.vacant)]
            place.explorer = explorer
            room -= batch.rollouts
            self.state.touch(place)
            taken.append(place.key)
        return tuple(taken)

    async def _wait(self, batch: BatchState, seconds: float) -> None:
        """Wait until something happens to the batch, or there may be room for its vacant places."""
        now = self.state.clock.time()
        until = float("inf") if batch.is_leased() else now + seconds
        if not batch.vacant:
            await self.state.wait(batch.changed.next(), until, lambda: unfinished(batch))
            return
        try:
            await self.state.wait(self.state.room.next(), until, lambda: "room")
        except DeadlineExceeded as error:
            raise self._full(batch, seconds) from error

    # -- room

    def _room(self) -> float:
        """Return how many further samples fit, beside those that are there or being made."""
        state = self.state
        if self.max_samples is None and self.max_bytes is None:
            return float("inf")
        if state.samples:
            self._mean = state.bytes / state.samples
        places = [place for p in state.partitions.values() for b in p.batches.values() for place in b.places]
        coming = sum(_coming(place) for place in places)
        room = float("inf") if self.max_samples is None else self.max_samples - state.samples - coming
        if self.max_bytes is not None and self._mean:
            room = min(room, (self.max_bytes - state.bytes) / self._mean - coming)
        return room

    def _is_demanded(self, batch: BatchState) -> bool:
        """Tell whether a consumer waits for this batch, or in vain for any group while the others have no work."""
        consumers = batch.partition.consumers
        if any(batch.number in consumer.awaited for consumer in consumers):
            return True
        busy = [consumer for consumer in consumers if consumer.ready or consumer.leases]
        starving = any(consumer.waiting and set(busy) <= {consumer} for consumer in consumers)
        return starving and batch is _oldest_unfinished(batch.partition)

    def _full(self, batch: BatchState, seconds: float) -> QueueFull:
        state = self.state
        return QueueFull(
            f"the queue stayed full for {seconds:.6g} s",
            where=batch.name,
            expected=f"room for a group within {self.max_samples} samples and {self.max_bytes} bytes",
            found=f"{state.samples} samples, {state.bytes} bytes",
            fix="look at why consumers do not ack and commit, or raise max_samples, max_bytes or the deadline",
        )


def _coming(place: Place) -> int:
    """Return how many samples will probably come from a place that was handed out."""
    if place.explorer is None or _is_made(place):
        return 0
    group = place.group
    return place.batch.rollouts if group is None else max(0, group.rollouts - len(group.samples))


def _is_made(place: Place) -> bool:
    return place.is_consumed or place.published is not None


def _not_final(partition: Partition, below: int) -> list[BatchState]:
    """Return the batches that could still lose a group.

    Raises:
        QueueError: ``queue.batch-failed`` where one of them has failed.
    """
    left = [batch for number, batch in partition.batches.items() if number < below and not batch.is_final()]
    for batch in left:
        if batch.failure is not None:
            raise batch.error()
    return left


def _awaited(left: list[BatchState]) -> str:
    return f"a batch to be given back, or the last ones to be finished; {unfinished(left[0])}"


def _ended(batch: BatchState, until: Literal["final", "published"]) -> bool:
    if batch.failure is not None:
        raise batch.error()
    if batch.number not in batch.partition.batches:
        return True  # consumed
    return batch.is_final() if until == "final" else batch.is_complete


def _oldest_unfinished(partition: Partition) -> BatchState | None:
    batches = partition.batches.values()
    return next((batch for batch in batches if not batch.is_complete and batch.failure is None), None)
