"""The controller's records of rows, groups, tickets and consumers. Internal: nobody outside the package holds them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from jackfield.errors import QueueError
from jackfield.queue.changes import Changes
from jackfield.queue.meta import GroupSlot, GroupView, Ticket
from jackfield.queue.reuse import Reuse, Uses
from jackfield.queue.samplers import Sampler, Sequential
from jackfield.queue.waiting import Line, Signal

__all__ = ["Ack", "Consumer", "Group", "GroupWaiter", "Lease", "Partition", "Row", "Slot", "TicketState"]


@attrs.define(eq=False, repr=False)
class Row:
    """One sample. It is recorded from the moment its run has ended, until it fails, expires or is consumed."""

    key: str
    group: Group
    run: int
    sequence: int
    serial: int  #: order of creation
    tags: Mapping[str, Any]
    columns: int = 0  #: bits of the columns that are there
    writing: int = 0  #: bits of the columns that are being written
    bytes: int = 0
    done: int = 0  #: bits of the consumers whose acks are final
    status: Literal["sealed", "failed", "expired", "consumed"] = "sealed"

    def all_tags(self) -> dict[str, Any]:
        """The row's tags, its group's, and what the controller knows."""
        group = self.group
        return {
            "task_id": group.task_id,
            "batch": group.slot.ticket.number,
            "group": group.slot.index,
            "retry": group.attempt,
            "rollout": self.run,
            "sequence": self.sequence,
            **group.tags,
            **self.tags,
        }


@attrs.define(eq=False, repr=False)
class Group:
    """Sibling runs of one task."""

    id: str
    slot: Slot
    attempt: int
    task_id: str
    runs: int
    minimum_rows: int | None
    tags: Mapping[str, Any]
    state: Literal["open", "published", "dropped"] = "open"
    reason: str | None = None
    ended: dict[int, str | None] = attrs.field(factory=dict)  #: by run: why it failed
    writing: set[int] = attrs.field(factory=set)  #: runs whose rows are being put
    broken: dict[int, int] = attrs.field(factory=dict)  #: by run: puts that broke off; the next one uses new keys
    rows: list[Row] = attrs.field(factory=list)  #: surviving ones; by run and sequence once published
    consumed: int = 0  #: rows that all consumers are done with; none of them is in ``rows``
    available: dict[Consumer, int] = attrs.field(factory=dict)  #: surviving rows that a consumer could lease now
    held_by: set[Consumer] = attrs.field(factory=set)  #: who leased or acked it as a whole
    settled: Signal = attrs.field(factory=Signal)

    @property
    def partition(self) -> Partition:
        return self.slot.ticket.partition

    def sort(self) -> None:
        self.rows.sort(key=lambda row: (row.run, row.sequence))

    def satisfied(self) -> bool:
        """Whether the surviving rows are enough to publish the group."""
        if self.minimum_rows is not None:
            return len(self.rows) >= self.minimum_rows
        return len({row.run for row in self.rows}) == self.runs

    def is_acked(self) -> bool:
        """Whether a consumer that had it as a whole is done with it, be it provisionally."""
        if self.consumed:
            return True
        return any(all(row in consumer.acked for row in self.rows) for consumer in self.held_by)

    def view(self) -> GroupView:
        """What a consumer is told of it: rows in order, and the columns that all of them have."""
        ordered = sorted(self.rows, key=lambda row: (row.run, row.sequence))
        common = -1
        for row in ordered:
            common &= row.columns
        return GroupView(
            id=self.id,
            partition=self.partition.name,
            ticket=self.slot.ticket.number,
            index=self.slot.index,
            attempt=self.attempt,
            task_id=self.task_id,
            state=self.state,
            reason=self.reason,
            runs=self.runs,
            failed_runs=tuple((run, reason) for run, reason in sorted(self.ended.items()) if reason is not None),
            keys=tuple(row.key for row in ordered),
            key_runs=tuple(row.run for row in ordered),
            columns=frozenset(self.partition.names(common) if ordered else ()),
            tags=self.tags,
        )


@attrs.define(eq=False, repr=False)
class Slot:
    """A place in a ticket."""

    ticket: TicketState
    index: int
    attempt: int = 0
    claim: int = 0
    explorer: str | None = None  #: that has been given it
    group: Group | None = None  #: open or published
    reasons: list[str] = attrs.field(factory=list)  #: of the groups that were dropped

    def touch(self) -> None:
        """It has changed, or its group, or rows of that: the journal is to have it."""
        self.ticket.partition.changes.touch(self)

    def group_id(self) -> str:
        again = f"r{self.claim}" if self.claim else ""
        return f"{self.ticket.partition.name}/{self.ticket.number}/{self.index}/{self.attempt}{again}"


@attrs.define(eq=False, repr=False)
class TicketState:
    """A ticket and its slots."""

    partition: Partition
    number: int
    slots: list[Slot] = attrs.field(factory=list)
    explorers: set[str] = attrs.field(factory=set)  #: that have claimed it and live
    groups: list[str] = attrs.field(factory=list)  #: all there ever were
    vacant: list[int] = attrs.field(factory=list)  #: heap of slots that no explorer has been given
    iterators: int = 0  #: running ``slots`` iterations
    published: int = 0
    rows: int = 0  #: that are in the backend
    failure: str | None = None
    ready: dict[Consumer, dict[int, Group]] = attrs.field(factory=dict)  #: groups that could be leased now, by slot
    held: dict[Consumer, int] = attrs.field(factory=dict)  #: groups that a consumer leased or acked as a whole
    changed: Signal = attrs.field(factory=Signal)

    @property
    def complete(self) -> bool:
        return self.published == len(self.slots)

    def note_change(self) -> None:
        """Wake those who wait for this ticket, or for any to be offered or finished."""
        self.changed.notify()
        self.partition.offers.notify()

    def final(self) -> bool:
        """Whether no group can be dropped any more: a consumer has acked each as a whole, or it is consumed."""
        return self.complete and all(slot.group is not None and slot.group.is_acked() for slot in self.slots)

    def leased_until(self) -> float:
        """When the last lease of a whole group of a complete ticket ends, on the clock; 0: none is leased."""
        if not self.complete:
            return 0.0
        groups = [slot.group for slot in self.slots if slot.group is not None]
        leases = [consumer.leased.get(row) for each in groups for consumer in each.held_by for row in each.rows[:1]]
        return max((lease.expires for lease in leases if lease is not None), default=0.0)

    def public(self, explorer: str) -> Ticket:
        return Ticket(self.partition.name, self.number, len(self.slots), explorer)

    def vacate(self, slot: Slot) -> None:
        """Let ``slot`` be handed out: to a running iteration, or to the next claimant of a ticket."""
        slot.explorer = slot.group = None
        slot.touch()
        heapq.heappush(self.vacant, slot.index)
        self.changed.notify()
        self.offer()

    def offer(self) -> None:
        """Offer the ticket to the next claimant if slots are vacant and nobody waits for them."""
        if self.vacant and not self.iterators and self.failure is None:
            self.partition.offer(self.number)

    def hand_out(self, explorer: str) -> GroupSlot | None:
        """The next vacant slot, if there is any."""
        if not self.vacant:
            return None
        slot = self.slots[heapq.heappop(self.vacant)]
        slot.explorer = explorer
        slot.touch()
        return GroupSlot(self.number, slot.index, slot.attempt, self.partition.name, explorer, slot.claim)

    def error(self) -> QueueError:
        return QueueError(
            f"{self.failure}: ticket {self.number} of partition {self.partition.name!r} has failed",
            code="queue.batch-failed",
            where=f"{self.partition.name}/{self.number}",
            fix="correct what failed; where it fails only now and then, raise schedule.max_retries",
        )


@attrs.frozen(eq=False, repr=False)
class Ack:
    """A consumer's statement that it is done with a row."""

    step: int | None  #: None: final at once
    final: bool


@attrs.define(eq=False, repr=False)
class Lease:
    """Rows that a consumer holds."""

    consumer: Consumer
    epoch: int
    expires: float
    whole: bool  #: of whole groups
    rows: dict[Row, None]


@attrs.define(eq=False, repr=False)
class GroupWaiter:
    """Somebody who waits for groups of one ticket; ``groups=None``: for all of them."""

    groups: int | None
    signal: Signal = attrs.field(factory=Signal)


@attrs.define(eq=False, repr=False)
class Consumer:
    """Who takes rows of one partition as soon as its columns are there."""

    name: str
    partition: Partition
    columns: tuple[str, ...]
    mask: int
    bit: int
    lease_seconds: float
    epoch: int = 0
    ready: dict[Row, None] = attrs.field(factory=dict)
    leased: dict[Row, Lease] = attrs.field(factory=dict)
    leases: dict[int, Lease] = attrs.field(factory=dict)
    acked: dict[Row, Ack] = attrs.field(factory=dict)
    provisional: dict[int, dict[Row, None]] = attrs.field(factory=dict)  #: acks by step
    line: Line = attrs.field(factory=Line)
    sampler: Sampler = attrs.field(factory=Sequential)
    reuse: Reuse | None = None  #: None: each group once
    used: dict[Group, Uses] = attrs.field(factory=dict)  #: by consumers with reuse, until the group is consumed
    groups: Line = attrs.field(factory=Line)  #: waiters for groups of any tickets
    row_demand: int = 0  #: waiters for any rows
    sample_demand: int = 0  #: waiters for groups of any tickets
    group_waiters: dict[int, list[GroupWaiter]] = attrs.field(factory=dict)  #: by ticket


@attrs.define(eq=False, repr=False)
class Partition:
    """Rows, tickets and consumers of one name."""

    name: str
    changes: Changes = attrs.field(factory=Changes)
    bits: dict[str, int] = attrs.field(factory=dict)  #: a bit per column
    consumers: list[Consumer] = attrs.field(factory=list)
    tickets: dict[int, TicketState] = attrs.field(factory=dict)  #: until all their rows are consumed
    next_ticket: int = 0
    offered: list[int] = attrs.field(factory=list)  #: heap of tickets to be handed out again
    offers: Signal = attrs.field(factory=Signal)
    feeds: list[list[str]] = attrs.field(factory=list)  #: groups to come, of each ``settled_groups`` iteration
    fed: Signal = attrs.field(factory=Signal)

    def mask(self, columns: tuple[str, ...]) -> int:
        """The bits of ``columns``; new names get new bits."""
        mask = 0
        for name in columns:
            mask |= self.bits.setdefault(name, 1 << len(self.bits))
        return mask

    def names(self, mask: int) -> tuple[str, ...]:
        return tuple(name for name, bit in self.bits.items() if mask & bit)

    def next_offered(self) -> TicketState | None:
        """The first ticket that is to be handed out again. Some need nobody any more: a consumer has them whole."""
        while self.offered:
            ticket = self.tickets.get(self.offered[0])
            if ticket is not None and not ticket.final():
                return ticket
            heapq.heappop(self.offered)
        return None

    def offer(self, number: int) -> None:
        """Let the next claimant have a ticket that was claimed before."""
        if number not in self.offered:
            heapq.heappush(self.offered, number)
            self.offers.notify()
