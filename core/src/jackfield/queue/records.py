"""The queue's records of samples, groups, batches and consumers. Internal to the package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from jackfield.errors import QueueError
from jackfield.queue.meta import Batch, GroupKey, NewGroup, Reuse, group_of
from jackfield.queue.samplers import Sampler, Sequential


@attrs.define(eq=False, repr=False)
class Sample:
    """One finished sequence. It exists from the end of its rollout until it fails or is consumed."""

    rollout: int
    tags: Mapping[str, Any]
    columns: frozenset[str]  #: existing columns
    bytes: int


@attrs.define(eq=False, repr=False)
class Use:
    """The uses of one group by one consumer."""

    steps: list[int | None] = attrs.field(factory=list)  #: steps of its acks; None: final at once
    retired: int | None = None  #: the step at which the group was given up

    def last_step(self) -> int:
        """Return the last step that needs a commit, -1 without any."""
        return max((step for step in (*self.steps, self.retired) if step is not None), default=-1)

    def is_spent(self, reuse: Reuse | None) -> bool:
        """Return whether the consumer may not use the group again."""
        if reuse is None or self.retired is not None:
            return True
        return reuse.max_uses is not None and len(self.steps) >= reuse.max_uses


@attrs.define(eq=False, repr=False)
class Group:
    """Sibling rollouts of one task. It is leased, acked and deleted as a whole."""

    place: Place
    new: NewGroup  #: the request that opened it
    ended: dict[int, str | None] = attrs.field(factory=dict)  #: ended rollouts; None, or why the rollout failed
    samples: dict[str, Sample] = attrs.field(factory=dict)
    uses: dict[str, Use] = attrs.field(factory=dict)  #: by consumer
    is_published: bool = False  #: False: rollouts are running
    name: str = attrs.field(default=attrs.Factory(lambda group: str(group.new.key), takes_self=True), init=False)

    @property
    def batch(self) -> BatchState:
        return self.place.batch

    @property
    def partition(self) -> Partition:
        return self.place.batch.partition

    def has(self, columns: frozenset[str]) -> bool:
        """Return whether every sample has the columns."""
        return all(columns <= sample.columns for sample in self.samples.values())

    def is_satisfied(self) -> bool:
        """Return whether the surviving samples are enough to publish the group."""
        if self.new.minimum_samples is not None:
            return len(self.samples) >= self.new.minimum_samples
        return len({sample.rollout for sample in self.samples.values()}) == self.new.rollouts

    def publish(self) -> None:
        """Sort the samples by rollout and sequence and make them visible to consumers."""
        ordered = sorted(self.samples.items(), key=lambda item: (item[1].rollout, _sequence(item[0])))
        self.samples, self.is_published = dict(ordered), True

    def holders(self) -> list[str]:
        """Return the acking consumers that have leased or acked the group. A group with holders does not change."""
        ends = [consumer for consumer in self.partition.consumers if not consumer.writes]
        return [consumer.name for consumer in ends if consumer.name in self.uses or self in consumer.held]

    def is_acked(self) -> bool:
        """Return whether a consumer has acked the group, possibly provisionally."""
        return any(not each.writes and each.name in self.uses for each in self.partition.consumers)

    def is_done(self, committed: int) -> bool:
        """Return whether the group is published and not deleted, and every consumer is done with it."""
        consumers, is_there = self.partition.consumers, self.place.published is self
        return is_there and bool(consumers) and all(each.is_done(self, committed) for each in consumers)

    def last_step(self) -> int:
        """Return the last step that needs a commit, -1 without any."""
        return max((use.last_step() for use in self.uses.values()), default=-1)

    def tags_of(self, key: str) -> dict[str, Any]:
        """Return the tags of a sample and of its group, and those that the queue adds."""
        sample, place = self.samples[key], self.new.key
        own = {"task_id": self.new.task_id, "batch": place.batch, "group": place.index, "retry": place.retry}
        return {**own, "rollout": sample.rollout, "sequence": _sequence(key), **self.new.tags, **sample.tags}

    def running(self) -> list[int]:
        """Return the rollouts that have not ended."""
        return [rollout for rollout in range(self.new.rollouts) if rollout not in self.ended]


def _sequence(key: str) -> int:
    return int(key.rsplit("/", 1)[1])


@attrs.define(eq=False, repr=False)
class Place:
    """A group index of a batch, with its current attempt and explorer."""

    batch: BatchState
    index: int
    retry: int = 0
    reissue: int = 0
    explorer: str | None = None  #: generates, or generated, the group
    group: Group | None = None
    is_consumed: bool = False  #: every consumer was done with the group
    reasons: list[str] = attrs.field(factory=list)  #: why groups were dropped here

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.batch.partition.name, self.batch.number, self.index, self.retry, self.reissue)

    @property
    def published(self) -> Group | None:
        return self.group if self.group is not None and self.group.is_published else None

    @property
    def is_made(self) -> bool:
        return self.is_consumed or self.published is not None


@attrs.define(eq=False, repr=False)
class BatchState:
    """The state of a batch."""

    partition: Partition
    number: int
    rollouts: int = 1  #: expected number per group
    failure: str | None = None
    places: list[Place] = attrs.field(factory=list)
    explorers: set[str] = attrs.field(factory=set)  #: living explorers that have claimed it
    is_offered: bool = False  #: whether the next claimant gets it
    readers: int = 0  #: number of iterations that hand out its places
    moved: float = 0.0  #: time of the last change

    @property
    def name(self) -> str:
        return f"{self.partition.name}/{self.number}"

    @property
    def is_complete(self) -> bool:
        return all(place.is_made for place in self.places)

    def vacant(self) -> list[Place]:
        """Return the places that are not assigned to an explorer."""
        return [place for place in self.places if place.explorer is None and not place.is_consumed]

    def groups(self) -> list[Group]:
        """Return the open and published groups in the order of the index."""
        return [place.group for place in self.places if place.group is not None]

    def is_final(self) -> bool:
        """Return whether each group is acked or consumed, so that none can be dropped any more."""
        return all(place.is_consumed or ((group := place.published) and group.is_acked()) for place in self.places)

    def is_leased(self) -> bool:
        """Return whether all groups exist and an acking consumer has leased one of them."""
        ends = [consumer.held for consumer in self.partition.consumers if not consumer.writes and consumer.held]
        return bool(ends) and self.is_complete and any(group in held for group in self.groups() for held in ends)

    def offer(self) -> None:
        """Offer the batch to the next claimant if places are vacant and no iteration hands them out."""
        if self.failure is None and not self.readers and self.vacant():
            self.is_offered = True

    def public(self, explorer: str) -> Batch:
        return Batch(self.partition.name, self.number, len(self.places), explorer, len(self.vacant()))

    def require_well(self) -> None:
        if self.failure is not None:
            message = f"{self.failure}: batch {self.number} of partition {self.partition.name!r} has failed"
            fix = "correct what failed; where it fails only now and then, raise schedule.max_retries"
            raise QueueError(message, code="queue.batch-failed", where=self.name, fix=fix)


@attrs.frozen
class Hold:
    """The lease under which a consumer holds a group."""

    epoch: int
    client: str | None  #: the client that leased it


@attrs.define(eq=False, repr=False)
class Consumer:
    """A role that consumes groups of one partition once its columns exist.

    A *stage* writes columns and is done with a group when they exist; its leases do not prevent the group from being
    dropped. Any other consumer acks.
    """

    name: str
    partition: Partition
    columns: frozenset[str]
    writes: frozenset[str] = frozenset()
    reuse: Reuse | None = None
    epoch: int = 0
    sampler: Sampler = attrs.field(factory=Sequential)
    ready: dict[Group, None] = attrs.field(factory=dict)  #: unused groups that can be leased now
    used: dict[Group, None] = attrs.field(factory=dict)  #: used groups that may be used again
    held: dict[Group, Hold] = attrs.field(factory=dict)  #: leased groups
    awaited: list[int | None] = attrs.field(factory=list)  #: batches that calls wait for; None: groups of any batch

    def has_written(self, group: Group) -> bool:
        """Return whether a stage's columns exist."""
        return bool(self.writes) and group.has(self.writes)

    def has_had(self, group: Group) -> bool:
        """Return whether it holds a group, or has used or written it."""
        return group in self.held or self.name in group.uses or self.has_written(group)

    def is_done(self, group: Group, committed: int) -> bool:
        """Return whether it will not need the group again after any rollback."""
        if group in self.held or self.writes:
            return group not in self.held and self.has_written(group)
        use = group.uses.get(self.name)
        return use is not None and use.is_spent(self.reuse) and use.last_step() <= committed


@attrs.define(eq=False, repr=False)
class Partition:
    """The batches and consumers of one partition."""

    name: str
    consumers: list[Consumer] = attrs.field(factory=list)
    batches: dict[int, BatchState] = attrs.field(factory=dict)  #: unconsumed batches in order
    next_batch: int = 0

    def groups(self) -> Iterator[Group]:
        """Iterate over open and published groups in the order of batch and index."""
        return (group for batch in self.batches.values() for group in batch.groups())

    def offered(self) -> BatchState | None:
        """Return the first batch that is offered again, if any."""
        for batch in self.batches.values():
            if batch.is_offered and batch.failure is None and not batch.is_final():
                return batch
        return None


@attrs.define(eq=False, repr=False)
class State:
    """The state of the queue, which checkpoints keep."""

    partitions: dict[str, Partition] = attrs.field(factory=dict)
    consumers: dict[str, Consumer] = attrs.field(factory=dict)
    groups: dict[str, Group] = attrs.field(factory=dict)  #: open and published groups
    committed: int = -1  #: the last step whose acks are final
    provisional: dict[Group, None] = attrs.field(factory=dict)  #: groups with acks that a commit makes final
    marks: list[str] = attrs.field(factory=list)  #: ids of the last checkpoints, including interrupted ones
    samples: int = 0
    bytes: int = 0

    def partition(self, name: str) -> Partition:
        return self.partitions.setdefault(name, Partition(name))

    def batches(self) -> list[BatchState]:
        """Return the batches of all partitions."""
        return [batch for partition in self.partitions.values() for batch in partition.batches.values()]

    def consumer(self, name: str) -> Consumer:
        if name not in self.consumers:
            message, fix = f"no consumer {name!r} is registered", "call register_consumer first"
            expected = f"one of {', '.join(sorted(self.consumers)) or '(none)'}"
            raise QueueError(message, code="queue.unknown-consumer", where=name, expected=expected, fix=fix)
        return self.consumers[name]

    def add_consumer(self, consumer: Consumer) -> None:
        """Register a consumer and replace one of the same name."""
        self.consumers[consumer.name] = consumer
        mine = [each for each in self.consumers.values() if each.partition.name == consumer.partition.name]
        consumer.partition = self.partition(consumer.partition.name)
        consumer.partition.consumers = mine

    def group(self, name: str) -> Group | None:
        """Return a group, or None if it was deleted; raise an error if it never existed."""
        found = self.groups.get(name)
        if found is None and not self._was_there(GroupKey.of(name)):
            raise QueueError(f"{name!r} is not in the queue", code="queue.unknown-sample", where=name)
        return found

    def group_with(self, key: str) -> Group | None:
        """Return a sample's group, or None if the sample was deleted; raise an error if the group never existed."""
        group = self.group(group_of(key))
        return None if group is None or key not in group.samples else group

    def knows(self, key: str) -> bool:
        """Return whether a sample exists."""
        group = self.groups.get(group_of(key))
        return group is not None and key in group.samples

    def keys(self) -> set[str]:
        """Return the keys of all samples."""
        return {key for group in self.groups.values() for key in group.samples}

    def _was_there(self, key: GroupKey) -> bool:
        partition = self.partitions.get(key.partition)
        if partition is None or not 0 <= key.batch < partition.next_batch:
            return False
        batch = partition.batches.get(key.batch)
        if batch is None or not 0 <= key.index < len(batch.places):
            return batch is None
        place = batch.places[key.index]
        return (key.retry, key.reissue) < (place.retry, place.reissue + place.is_consumed)

    def count(self, samples: int, size: int) -> None:
        """Add to the number of samples and bytes; negative values subtract."""
        self.samples += samples
        self.bytes += size
