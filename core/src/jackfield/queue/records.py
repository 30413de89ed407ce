"""The queue's records of samples, groups, batches and consumers, and their JSON rows. Internal to the package.

The rows of a state are kept by the store and by checkpoints. Leases are not saved, and open groups become vacant.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

import attrs
import msgspec

from jackfield.errors import QueueError
from jackfield.queue.meta import GroupKey, Reuse, Sampler, Sequential, group_of

FORMAT = 8
HEAD = "head"  #: key of the row that has everything but groups
_MARKS = 8  #: number of checkpoint ids that a state keeps
_ONCE = Reuse(max_uses=1)
Row = tuple[str, str]  #: key and JSON


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else attrs.asdict(value, recurse=False)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain).encode


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

    def is_spent(self, reuse: Reuse) -> bool:
        """Return whether the consumer may not use the group again."""
        return self.retired is not None or (reuse.max_uses is not None and len(self.steps) >= reuse.max_uses)


class Status(IntEnum):
    """The state of a group. A dropped group becomes vacant again; a consumed one is deleted."""

    VACANT = 0  #: to be handed out
    ASSIGNED = 1  #: an explorer has it
    OPEN = 2  #: rollouts are running
    PUBLISHED = 3  #: consumers may lease, use and ack it
    CONSUMED = 4  #: every consumer was done with it


@attrs.define(eq=False, repr=False)
class Group:
    """A group index of a batch with its current retry: sibling rollouts of one task.

    It is leased, acked and deleted as a whole.
    """

    batch: BatchState
    index: int
    status: Status = Status.VACANT
    retry: int = 0
    reissue: int = 0
    explorer: str | None = None  #: generates, or generated, the group
    reasons: list[str] = attrs.field(factory=list)  #: why earlier retries were dropped
    name: str = ""  #: the key of the retry that is open or published, as text
    task_id: str = ""
    rollouts: int = 0
    tags: Mapping[str, Any] = attrs.field(factory=dict)  #: tags of all its samples
    ended: dict[int, str | None] = attrs.field(factory=dict)  #: ended rollouts; None, or why the rollout failed
    samples: dict[str, Sample] = attrs.field(factory=dict)
    uses: dict[str, Use] = attrs.field(factory=dict)  #: by consumer
    version: int | None = None  #: the weight version at its start, in memory only

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.batch.partition.name, self.batch.number, self.index, self.retry, self.reissue)

    @property
    def is_made(self) -> bool:
        return self.status >= Status.PUBLISHED

    def has(self, columns: frozenset[str]) -> bool:
        return all(columns <= sample.columns for sample in self.samples.values())

    def holders(self) -> list[str]:
        """Return the acking consumers that have leased or acked the group. A group with holders does not change."""
        return [consumer.name for consumer in self.batch.partition.ends() if consumer.has_had(self)]

    def is_acked(self) -> bool:
        """Return whether a consumer has acked the group, possibly provisionally."""
        return any(consumer.name in self.uses for consumer in self.batch.partition.ends())

    def all_tags(self) -> list[dict[str, Any]]:
        """Return the tags of each sample and of the group, and those that the queue adds."""
        own = {"task_id": self.task_id, "batch": self.batch.number, "group": self.index, "retry": self.retry}
        made = [({"rollout": one.rollout, "sequence": sequence_of(key)}, one.tags) for key, one in self.samples.items()]
        return [{**own, **place, **self.tags, **tags} for place, tags in made]

    def running(self) -> list[int]:
        return [rollout for rollout in range(self.rollouts) if rollout not in self.ended]

    def row_key(self) -> str:
        return f"{self.batch.name}/{self.index}"

    def row(self) -> Row:
        """Return the group's row; the samples of an open group are not saved."""
        status = Status.ASSIGNED if self.status == Status.OPEN else self.status
        made = (self.task_id, self.rollouts, self.tags, self.ended, self.samples, self.uses) if self.is_made else None
        return self.row_key(), _encode((status, self.retry, self.reissue, self.explorer, self.reasons, made))

    def load(self, row: str) -> None:
        """Take over a row that :meth:`row` returned; what was not published is generated again."""
        found = msgspec.convert(json.loads(row), _GroupRow, str_keys=True)
        self.status, self.retry, self.reissue, self.explorer, self.reasons, made = found
        self.name = str(self.key)
        if made is not None:
            self.task_id, self.rollouts, self.tags, self.ended, self.samples, self.uses = made
        elif self.status == Status.ASSIGNED:
            self.status, self.explorer, self.reissue = Status.VACANT, None, self.reissue + 1


_Made = tuple[str, int, dict[str, Any], dict[int, str | None], dict[str, Sample], dict[str, Use]]
_GroupRow = tuple[Status, int, int, str | None, list[str], _Made | None]


def sequence_of(key: str) -> int:
    return int(key[key.rindex("/") + 1 :])


@attrs.define(eq=False, repr=False)
class BatchState:
    """The state of a batch."""

    partition: Partition
    number: int
    rollouts: int = 1  #: expected number per group
    failure: str | None = None
    groups: list[Group] = attrs.field(factory=list)
    explorers: dict[str, str | None] = attrs.field(factory=dict)  #: clients of the living explorers that claimed it
    is_offered: bool = False  #: whether the next claimant gets it
    readers: int = 0  #: number of iterations that hand out its groups
    moved: float = 0.0  #: time of the last change
    is_handed_out: bool = False  #: whether no group is vacant, so that :meth:`vacant` need not look

    @property
    def name(self) -> str:
        return f"{self.partition.name}/{self.number}"

    @property
    def is_complete(self) -> bool:
        return all(group.is_made for group in self.groups)

    def vacant(self) -> list[Group]:
        found = [] if self.is_handed_out else [group for group in self.groups if group.status == Status.VACANT]
        self.is_handed_out = not found
        return found

    def is_final(self) -> bool:
        """Return whether each group is acked or consumed, so that none can be dropped any more."""
        return all(group.is_made and (group.status == Status.CONSUMED or group.is_acked()) for group in self.groups)

    def offer(self) -> None:
        """Offer the batch to the next claimant if groups are vacant and no iteration hands them out."""
        if self.failure is None and not self.readers and self.vacant():
            self.is_offered = True

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
    reuse: Reuse = _ONCE
    epoch: int = 0
    sampler: Sampler = attrs.field(factory=Sequential)
    usable: dict[Group, None] = attrs.field(factory=dict)  #: groups that it may lease now, unused and used ones
    held: dict[Group, Hold] = attrs.field(factory=dict)  #: leased groups
    awaited: list[int | None] = attrs.field(factory=list)  #: batches that calls wait for; None: groups of any batch

    def has_had(self, group: Group) -> bool:
        """Return whether it holds a group, or has used it."""
        return group in self.held or self.name in group.uses

    def is_fresh(self, group: Group) -> bool:
        """Return whether it may lease a group that it has not used yet."""
        return group in self.usable and self.name not in group.uses

    def is_rested(self, group: Group, step: int | None, fresh: bool) -> bool:
        """Return whether a usable group may be used at ``step``; unused ones only with ``fresh``."""
        use = group.uses.get(self.name)
        last = None if use is None else use.steps[-1]
        return fresh if use is None else step is None or last is None or step - last > self.reuse.cooldown

    def offer(self, group: Group) -> None:
        """Update whether it may lease a group: a published one that has its columns, and that it has not used up.

        A stage has used a group when the columns that it writes exist.
        """
        if self.writes and group.status == Status.PUBLISHED and group.has(self.writes):
            group.uses.setdefault(self.name, Use([None]))
        use = group.uses.get(self.name)
        is_left = group not in self.held and (use is None or not use.is_spent(self.reuse))
        if is_left and group.status == Status.PUBLISHED and group.has(self.columns):
            self.usable[group] = None
        else:
            self.usable.pop(group, None)

    def offer_all(self) -> None:
        for batch in self.partition.batches.values():
            for group in batch.groups:
                self.offer(group)

    def is_done(self, group: Group, committed: int) -> bool:
        """Return whether it will not need the group again after any rollback."""
        use = group.uses.get(self.name)
        is_spent = use is not None and use.is_spent(self.reuse) and use.last_step() <= committed
        return is_spent and group not in self.held


@attrs.define(eq=False, repr=False)
class Partition:
    """The batches and consumers of one partition."""

    name: str
    consumers: list[Consumer] = attrs.field(factory=list)
    batches: dict[int, BatchState] = attrs.field(factory=dict)  #: unconsumed batches in order
    next_batch: int = 0

    def ends(self) -> list[Consumer]:
        return [consumer for consumer in self.consumers if not consumer.writes]


@attrs.frozen
class LedgerEnd:
    """The end of a ledger."""

    number: int = 0
    digest: str = ""  #: digest of the last entry, chained over all entries


#: Partition, columns that are read and written, reuse, epoch and the state of the sampler.
_ConsumerRow = tuple[str, frozenset[str], frozenset[str], Reuse | None, int, dict[str, Any]]
#: The next batch; per batch: number of groups, expected rollouts and failure.
_PartitionRow = tuple[int, dict[int, tuple[int, int, str | None]]]
_Head = tuple[int, list[str], LedgerEnd | None, dict[str, _ConsumerRow], dict[str, _PartitionRow]]


@attrs.define(eq=False, repr=False)
class State:
    """The state of the queue, which checkpoints keep."""

    partitions: dict[str, Partition] = attrs.field(factory=dict)
    consumers: dict[str, Consumer] = attrs.field(factory=dict)
    groups: dict[str, Group] = attrs.field(factory=dict)  #: open and published groups
    committed: int = -1  #: the last step whose acks are final
    marks: list[str] = attrs.field(factory=list)  #: ids of the last checkpoints, including interrupted ones
    ledger: LedgerEnd | None = None  #: the ledger's end at the last checkpoint; None: it was only in memory
    samplers: dict[str, dict[str, Any]] = attrs.field(factory=dict)  #: saved states, by consumer
    samples: int = 0
    bytes: int = 0

    def partition(self, name: str) -> Partition:
        return self.partitions.setdefault(name, Partition(name))

    def mark(self, ledger: LedgerEnd | None) -> None:
        """Record that a checkpoint begins, at this end of the ledger."""
        self.marks, self.ledger = [*self.marks[1 - _MARKS :], uuid.uuid4().hex], ledger

    def batches(self) -> list[BatchState]:
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
        if (found := self.groups.get(name)) is not None:
            return found
        key = GroupKey.of(name)
        partition, number = self.partitions.get(key.partition, Partition("")), (key.retry, key.reissue)
        batch = partition.batches.get(key.batch)
        same = [] if batch is None else [group for group in batch.groups if group.index == key.index]
        later = any(number < (each.retry, each.reissue + (each.status == Status.CONSUMED)) for each in same)
        if not 0 <= key.batch < partition.next_batch or (batch is not None and not later):
            raise QueueError(f"{name!r} is not in the queue", code="queue.unknown-sample", where=name)
        return None

    def group_with(self, key: str) -> Group | None:
        """Return a sample's group, or None if the sample was deleted; raise an error if the group never existed."""
        group = self.group(group_of(key))
        return None if group is None or key not in group.samples else group

    def knows(self, key: str) -> bool:
        group = self.groups.get(group_of(key))
        return group is not None and key in group.samples

    def keys(self) -> set[str]:
        return {key for group in self.groups.values() for key in group.samples}

    def count(self, samples: int, size: int) -> None:
        """Add to the number of samples and bytes; negative values subtract."""
        self.samples += samples
        self.bytes += size

    def rows(self, below: Mapping[str, int] | None = None) -> Iterator[Row]:
        """Yield the rows: first the head, which has all but groups, then one per group.

        ``below`` has, by partition, the first batch that is saved as not yet begun.
        """
        consumers = {
            name: (each.partition.name, each.columns, each.writes, each.reuse, each.epoch, each.sampler.state_dict())
            for name, each in self.consumers.items()
        }
        partitions, saved = {}, list[BatchState]()
        for name, partition in self.partitions.items():
            first = min(partition.next_batch, (below or {}).get(name, partition.next_batch))
            batches = {number: batch for number, batch in partition.batches.items() if number < first}
            partitions[name] = first, {n: (len(b.groups), b.rollouts, b.failure) for n, b in batches.items()}
            saved += batches.values()
        head = (self.committed, self.marks, self.ledger, consumers, partitions)
        yield HEAD, _encode({"format": FORMAT, "state": head})
        yield from (group.row() for batch in saved for group in batch.groups)

    @classmethod
    def load(cls, rows: Mapping[str, str]) -> State:
        """Return the state of rows by key. Raise an error if one is missing or the format differs."""
        head = json.loads(rows.get(HEAD, "{}"))
        if head.get("format") != FORMAT:
            raise QueueError("the queue's state has another format", expected=FORMAT, found=head.get("format"))
        committed, marks, ledger, consumers, partitions = msgspec.convert(head["state"], _Head, str_keys=True)
        state = cls(committed=committed, marks=marks, ledger=ledger)
        for name, (own, columns, writes, reuse, epoch, sampler) in consumers.items():
            state.add_consumer(Consumer(name, Partition(own), columns, writes, reuse or _ONCE, epoch))
            state.samplers[name] = sampler
        for name, (next_batch, batches) in partitions.items():
            partition = state.partition(name)
            partition.next_batch = next_batch
            for number, (groups, rollouts, failure) in batches.items():
                batch = partition.batches[number] = BatchState(partition, number, rollouts, failure, is_offered=True)
                batch.groups = [Group(batch, index) for index in range(groups)]
        for group in [group for batch in state.batches() for group in batch.groups]:
            if (key := group.row_key()) not in rows:
                message, found = "a queue's saved state is not whole", f"none of {key}"
                raise QueueError(message, expected="all of its rows", found=found)
            group.load(rows[key])
            if group.status == Status.PUBLISHED:
                state.groups[group.name] = group
                state.count(len(group.samples), sum(sample.bytes for sample in group.samples.values()))
        return state
