"""What the queue knows: samples, groups, batches and consumers. Internal to the package."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs

from jackfield.errors import QueueError
from jackfield.queue.meta import Batch, GroupKey, Reuse
from jackfield.queue.samplers import Sampler, Sequential


class Signal:
    """Wakes every waiter."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def next(self) -> asyncio.Future[None]:
        """Return a future that the next :meth:`notify` sets."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def notify(self) -> None:
        """Wake all waiters."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)


@attrs.define(eq=False, repr=False)
class Sample:
    """One finished sequence. It exists from the end of its rollout until it fails or is consumed."""

    key: str
    rollout: int
    tags: Mapping[str, Any]
    columns: int  #: bits of the columns that are there
    bytes: int

    @property
    def sequence(self) -> int:
        return int(self.key.rsplit("/", 1)[1])


@attrs.define(eq=False, repr=False)
class Use:
    """What one consumer has done with one group."""

    steps: list[int | None] = attrs.field(factory=list)  #: of its acks; None: final at once
    retired: int | None = None  #: the step at which the group was given up
    epoch: int = 0  #: of the lease that holds the group; 0: none

    def noted(self) -> list[int]:
        """Return the steps that need a commit."""
        return [step for step in (*self.steps, self.retired) if step is not None]

    def is_made(self) -> bool:
        """Tell whether the group was used, or given up."""
        return bool(self.steps) or self.retired is not None

    def is_spent(self, reuse: Reuse | None) -> bool:
        """Tell whether the consumer may not use the group again."""
        if reuse is None or self.retired is not None:
            return self.is_made()
        return reuse.max_uses is not None and len(self.steps) >= reuse.max_uses

    def take_back(self, step: int) -> None:
        """Forget what was done after ``step``."""
        self.steps = [each for each in self.steps if each is None or each <= step]
        self.retired = None if self.retired is not None and self.retired > step else self.retired


@attrs.define(eq=False, repr=False)
class Group:
    """Sibling rollouts of one task. It is leased, acked and deleted as a whole."""

    key: GroupKey
    place: Place
    task_id: str
    rollouts: int
    minimum_samples: int | None
    tags: Mapping[str, Any]
    state: Literal["open", "published"] = "open"
    ended: dict[int, str | None] = attrs.field(factory=dict)  #: by rollout: why it failed
    samples: dict[str, Sample] = attrs.field(factory=dict)
    uses: dict[str, Use] = attrs.field(factory=dict)  #: by consumer

    @property
    def batch(self) -> BatchState:
        return self.place.batch

    @property
    def partition(self) -> Partition:
        return self.place.batch.partition

    def common(self) -> int:
        """Return the bits of the columns that every sample has."""
        mask = -1
        for sample in self.samples.values():
            mask &= sample.columns
        return mask

    def is_satisfied(self) -> bool:
        """Tell whether the surviving samples are enough to publish the group."""
        if self.minimum_samples is not None:
            return len(self.samples) >= self.minimum_samples
        return len({sample.rollout for sample in self.samples.values()}) == self.rollouts

    def publish(self) -> None:
        """Order the samples by rollout and sequence, and let consumers see them."""
        ordered = sorted(self.samples.values(), key=lambda sample: (sample.rollout, sample.sequence))
        self.samples = {sample.key: sample for sample in ordered}
        self.state = "published"

    def ends(self) -> Iterator[Use]:
        """Iterate over what consumers that ack have done with the group."""
        stages = {consumer.name for consumer in self.partition.consumers if consumer.writes}
        return (use for name, use in self.uses.items() if name not in stages)

    def is_fixed(self) -> bool:
        """Tell whether a consumer that acks has the group: it does not change any more."""
        return any(True for _ in self.ends())

    def is_acked(self) -> bool:
        """Tell whether a consumer has acked the group, be it provisionally."""
        return any(use.is_made() for use in self.ends())

    def tags_of(self, sample: Sample) -> dict[str, Any]:
        """Return a sample's tags, its group's, and what the queue knows."""
        key = self.key
        own = {"task_id": self.task_id, "batch": key.batch, "group": key.index, "retry": key.retry}
        return {**own, "rollout": sample.rollout, "sequence": sample.sequence, **self.tags, **sample.tags}

    def running(self) -> list[int]:
        """Return the rollouts that have not ended."""
        return [rollout for rollout in range(self.rollouts) if rollout not in self.ended]


@attrs.define(eq=False, repr=False)
class Place:
    """A group index of a batch: which attempt is made there, and by whom."""

    batch: BatchState
    index: int
    retry: int = 0
    reissue: int = 0
    explorer: str | None = None  #: that makes, or made, the group
    group: Group | None = None
    is_consumed: bool = False  #: every consumer was done with the group
    reasons: list[str] = attrs.field(factory=list)  #: of the groups that were dropped

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.batch.partition.name, self.batch.number, self.index, self.retry, self.reissue)

    @property
    def published(self) -> Group | None:
        return self.group if self.group is not None and self.group.state == "published" else None


@attrs.define(eq=False, repr=False)
class BatchState:
    """A batch to make, or made."""

    partition: Partition
    number: int
    rollouts: int = 1  #: that a group probably has
    places: list[Place] = attrs.field(factory=list)
    explorers: set[str] = attrs.field(factory=set)  #: that have claimed it and live
    vacant: list[int] = attrs.field(factory=list)  #: heap of places that no explorer was given
    readers: int = 0  #: iterations that hand out its places
    published: int = 0  #: groups, also those that are consumed
    failure: str | None = None
    ready: dict[Consumer, dict[int, Group]] = attrs.field(factory=dict)  #: groups that could be leased, by index
    changed: Signal = attrs.field(factory=Signal)

    @property
    def name(self) -> str:
        return f"{self.partition.name}/{self.number}"

    @property
    def is_complete(self) -> bool:
        return self.published == len(self.places)

    def is_final(self) -> bool:
        """Tell whether no group can be dropped any more: each is acked or consumed."""
        return self.is_complete and all(
            place.is_consumed or (place.group is not None and place.group.is_acked()) for place in self.places
        )

    def is_leased(self) -> bool:
        """Tell whether all groups are there and a consumer that acks works with one of them."""
        groups = [place.group for place in self.places if place.group is not None]
        return self.is_complete and any(use.epoch for group in groups for use in group.ends())

    def vacate(self, place: Place) -> None:
        """Let a place be handed out again."""
        place.explorer = place.group = None
        heapq.heappush(self.vacant, place.index)
        self.offer()
        self.notify()

    def offer(self) -> None:
        """Offer the batch to the next claimant if places are vacant and no iteration hands them out."""
        if self.vacant and not self.readers and self.failure is None:
            self.partition.offer(self.number)

    def notify(self) -> None:
        """Wake the waiters for this batch, or for any that is offered or final."""
        self.changed.notify()
        self.partition.offers.notify()

    def public(self, explorer: str) -> Batch:
        return Batch(self.partition.name, self.number, len(self.places), explorer, len(self.vacant))

    def error(self) -> QueueError:
        return QueueError(
            f"{self.failure}: batch {self.number} of partition {self.partition.name!r} has failed",
            code="queue.batch-failed",
            where=self.name,
            fix="correct what failed; where it fails only now and then, raise schedule.max_retries",
        )


@attrs.define(eq=False, repr=False)
class Consumer:
    """A role that takes groups of one partition once its columns are there.

    A *stage* writes columns and is done with a group when they are there; its leases do not keep the group from being
    dropped. Any other consumer acks.
    """

    name: str
    partition: Partition
    columns: tuple[str, ...]
    writes: tuple[str, ...] = ()
    sampler: Sampler = attrs.field(factory=Sequential)
    saved_sampler: Mapping[str, Any] = attrs.field(factory=dict)  #: its state, where the consumer was restored
    reuse: Reuse | None = None
    epoch: int = 0
    ready: dict[Group, None] = attrs.field(factory=dict)  #: never used, and could be leased now
    used: dict[Group, None] = attrs.field(factory=dict)  #: may be used again
    leases: dict[int, dict[Group, None]] = attrs.field(factory=dict)  #: by epoch
    holders: dict[int, str | None] = attrs.field(factory=dict)  #: clients, by epoch
    pending: dict[int, dict[Group, None]] = attrs.field(factory=dict)  #: acks that need a commit, by step
    waiting: int = 0  #: calls that wait for any groups
    awaited: list[int] = attrs.field(factory=list)  #: batches that calls wait for
    changed: Signal = attrs.field(factory=Signal)

    @property
    def needs(self) -> int:
        return self.partition.mask(self.columns)

    def has_written(self, group: Group) -> bool:
        """Tell whether a stage's columns are there."""
        mask = self.partition.mask(self.writes)
        return bool(self.writes) and group.common() & mask == mask

    def is_done(self, group: Group, committed: int | None) -> bool:
        """Tell whether it will not need the group again, whatever is rolled back."""
        use = group.uses.get(self.name)
        if self.writes:
            return self.has_written(group) and (use is None or not use.epoch)
        if use is None or use.epoch or not use.is_spent(self.reuse):
            return False
        return all(committed is not None and step <= committed for step in use.noted())


@attrs.define(eq=False, repr=False)
class Partition:
    """Batches and consumers of one name."""

    name: str
    bits: dict[str, int] = attrs.field(factory=dict)  #: a bit per column
    consumers: list[Consumer] = attrs.field(factory=list)
    batches: dict[int, BatchState] = attrs.field(factory=dict)  #: until they are consumed
    next_batch: int = 0
    offered: list[int] = attrs.field(factory=list)  #: heap of batches to hand out again
    offers: Signal = attrs.field(factory=Signal)
    announced: Signal = attrs.field(factory=Signal)  #: samples have come
    feeds: list[list[str]] = attrs.field(factory=list)  #: keys to come, of each ``new_samples`` iteration

    def mask(self, columns: Iterable[str]) -> int:
        """Return the bits of ``columns``; new names get new bits."""
        mask = 0
        for name in columns:
            mask |= self.bits.setdefault(name, 1 << len(self.bits))
        return mask

    def names(self, mask: int) -> tuple[str, ...]:
        return tuple(name for name, bit in self.bits.items() if mask & bit)

    def groups(self) -> Iterator[Group]:
        """Iterate over what is open or published, in the order of batch and index."""
        for batch in self.batches.values():
            yield from (place.group for place in batch.places if place.group is not None)

    def offer(self, number: int) -> None:
        """Let the next claimant have a batch that was claimed before."""
        if number not in self.offered:
            heapq.heappush(self.offered, number)
            self.offers.notify()

    def next_offered(self) -> BatchState | None:
        """Return the first batch that is to be handed out again; those that became final are forgotten."""
        while self.offered:
            batch = self.batches.get(self.offered[0])
            if batch is not None and not batch.is_final():
                return batch
            heapq.heappop(self.offered)
        return None
