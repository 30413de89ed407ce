"""Tickets, slots and groups: what is to be made, by whom, and what becomes of it.

The controller holds metadata only; no method here sees a tensor.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from jackfield.errors import QueueError
from jackfield.queue.backpressure import Backpressure
from jackfield.queue.meta import GroupSlot, GroupView, Ticket
from jackfield.queue.records import Group, Row, Slot, TicketState
from jackfield.queue.waiting import wait

__all__ = ["Tickets"]


class Tickets(Backpressure):
    """Hands out slots, and publishes, drops and refills groups."""

    # -- tickets ----------------------------------------------------------------------------------------------------

    def claim_ticket(self, partition: str, explorer: str, groups: int) -> Ticket:
        """See :meth:`jackfield.queue.TransferQueue.claim_ticket`."""
        self.leases.require_open()
        if groups < 1 or not explorer:
            raise QueueError("a ticket is for a named explorer and one group or more", found=(explorer, groups))
        found = self.state.partition(partition)
        ticket = found.next_offered()
        if ticket is not None:
            heapq.heappop(found.offered)
        else:
            ticket = TicketState(found, found.next_ticket)
            ticket.slots = [Slot(ticket, index) for index in range(groups)]
            ticket.vacant = list(range(groups))
            found.tickets[ticket.number] = ticket
            found.next_ticket += 1
            self.state.changes.note("ticket", partition, ticket.number, groups)
        ticket.explorers.add(explorer)
        return ticket.public(explorer)

    async def wait_ticket(
        self, partition: str, explorer: str, groups: int, below: int, deadline_seconds: float
    ) -> Ticket | None:
        """See :meth:`jackfield.queue.TransferQueue.wait_ticket`."""
        found = self.state.partition(partition)
        while True:
            self.leases.require_open()
            offered = found.next_offered()
            if (found.next_ticket if offered is None else offered.number) < below:
                return self.claim_ticket(partition, explorer, groups)
            left = [ticket for number, ticket in found.tickets.items() if number < below and not ticket.final()]
            for ticket in left:
                if ticket.failure is not None:
                    raise ticket.error()
            if not left:
                return None
            leased = max(ticket.leased_until() for ticket in left)
            until = max(self.clock.time(), leased) + deadline_seconds
            name = f"a ticket to be given back, or the last ones to be finished; {_unfinished(left[0])}"
            await wait(self.clock, found.offers.next(), until, lambda name=name: name)  # type: ignore[misc]

    def offer_unfinished(self) -> None:
        """Let the next claimants have every ticket that could still lose a group: whoever had it is gone."""
        for partition in self.state.partitions.values():
            for ticket in partition.tickets.values():
                if ticket.failure is None and not ticket.final():
                    partition.offer(ticket.number)

    def vacancies(self, ticket: Ticket) -> int:
        """See :meth:`jackfield.queue.TransferQueue.vacancies`."""
        state = self._ticket(ticket.partition, ticket.number)
        return 0 if state is None else len(state.vacant)

    async def wait_offer(self, partition: str, deadline_seconds: float) -> int:
        """See :meth:`jackfield.queue.TransferQueue.wait_offer`."""
        found = self.state.partition(partition)
        until = self.clock.time() + deadline_seconds
        name = f"a ticket of partition {partition!r} that is to be handed out again"
        while (ticket := found.next_offered()) is None:
            self.leases.require_open()
            await wait(self.clock, found.offers.next(), until, lambda: name)
        return ticket.number

    def release_tickets(self, explorer: str) -> tuple[Ticket, ...]:
        """See :meth:`jackfield.queue.TransferQueue.release_tickets`."""
        released = []
        for partition in self.state.partitions.values():
            for ticket in list(partition.tickets.values()):
                if explorer not in ticket.explorers:
                    continue
                ticket.explorers.discard(explorer)
                if not ticket.complete and ticket.failure is None:
                    released.append(ticket.public(explorer))
                    self._release(ticket, explorer)
        return tuple(released)

    def _release(self, ticket: TicketState, explorer: str) -> None:
        again, reason = [], f"explorer {explorer!r} was released"
        for slot in ticket.slots:
            if slot.explorer != explorer or (slot.group is not None and slot.group.state == "published"):
                continue
            if slot.group is not None:
                self._end_group(slot.group, reason)
            slot.claim += 1
            again.append(slot.index)
            ticket.vacate(slot)
        if not ticket.explorers and ticket.vacant:
            ticket.partition.offer(ticket.number)
        ticket.changed.notify()
        self.state.record("release", partition=ticket.partition.name, ticket=ticket.number, slots=again, reason=reason)

    async def slots(
        self, ticket: Ticket, deadline_seconds: float, until: Literal["acked", "published"]
    ) -> AsyncIterator[GroupSlot]:
        """See :meth:`jackfield.queue.TransferQueue.slots`."""
        state = self._ticket(ticket.partition, ticket.number)
        if state is None:
            return  # consumed
        state.iterators += 1
        if state.number in state.partition.offered:
            state.partition.offered.remove(state.number)
            heapq.heapify(state.partition.offered)
        try:
            while not self._ended(state, until):
                self.leases.require_open()
                self._check_explorer(state, ticket.explorer)
                slot = state.hand_out(ticket.explorer)
                if slot is not None:
                    self.write_changes()
                    yield slot
                    continue
                changed = state.changed.next()
                limit = max(self.clock.time(), state.leased_until()) + deadline_seconds
                await wait(self.clock, changed, limit, lambda: _unfinished(state))
        finally:
            state.iterators -= 1
            state.offer()

    @staticmethod
    def _ended(ticket: TicketState, until: Literal["acked", "published"]) -> bool:
        if ticket.failure is not None:
            raise ticket.error()
        return ticket.final() if until == "acked" else ticket.complete

    def _ticket(self, partition: str, number: int) -> TicketState | None:
        found = self.state.partition(partition)
        ticket = found.tickets.get(number)
        if ticket is None and not 0 <= number < found.next_ticket:
            raise QueueError(f"ticket {number} of partition {partition!r} has not been claimed", where=partition)
        return ticket

    @staticmethod
    def _check_explorer(ticket: TicketState, explorer: str) -> None:
        if explorer not in ticket.explorers:
            raise QueueError(
                f"ticket {ticket.number} of partition {ticket.partition.name!r} was taken from explorer {explorer!r}",
                where=f"{ticket.partition.name}/{ticket.number}",
                expected=f"one of {sorted(ticket.explorers)}",
                found=explorer,
                fix="claim a ticket",
            )

    # -- groups -----------------------------------------------------------------------------------------------------

    def open_group(
        self, place: GroupSlot, task_id: str, runs: int, minimum_rows: int | None, tags: Mapping[str, Any]
    ) -> str:
        """See :meth:`jackfield.queue.TransferQueue.open_group`."""
        self.leases.require_open()
        if runs < 1 or (minimum_rows is not None and minimum_rows < 1):
            found = f"runs={runs}, minimum_rows={minimum_rows}"
            raise QueueError("a group has one run and one row at least", found=found)
        ticket = self._ticket(place.partition, place.ticket)
        where = f"{place.partition}/{place.ticket}/{place.index}"
        if ticket is None:
            raise QueueError("the ticket has been consumed", where=where)
        if ticket.failure is not None:
            raise ticket.error()
        self._check_explorer(ticket, place.explorer)
        slot = ticket.slots[place.index]
        current, given = [(each.explorer, each.attempt, each.claim) for each in (slot, place)]
        if slot.group is not None or current != given:
            raise QueueError(
                "the slot is not this explorer's to fill any more",
                where=where,
                expected="explorer {}, attempt {}, claim {}".format(*current),
                found="explorer {}, attempt {}, claim {}".format(*given) + (", a group" if slot.group else ""),
            )
        group = Group(slot.group_id(), slot, slot.attempt, task_id, runs, minimum_rows, dict(tags))
        slot.group = group
        ticket.groups.append(group.id)
        self.state.groups[group.id] = group
        return group.id

    def drop_group(self, group_id: str, reason: str) -> None:
        """See :meth:`jackfield.queue.TransferQueue.drop_group`."""
        group = self.state.group(group_id)
        if group.state != "dropped":
            self._require_free(group)
            self._refill(group, reason, failed=False)

    @staticmethod
    def _require_free(group: Group) -> None:
        if group.held_by or group.consumed:
            names = ", ".join(sorted(consumer.name for consumer in group.held_by))
            raise QueueError(
                f"group {group.id} cannot be changed any more",
                where=group.id,
                expected="a group that no consumer has leased as a whole, and none of whose rows are consumed",
                found=f"leased by {names}" if names else f"{group.consumed} rows consumed",
            )

    def _refill(self, group: Group, reason: str, *, failed: bool = True) -> None:
        """Drop a group and let its slot be filled once more, or fail its ticket. A filtered group is no failure."""
        slot = group.slot
        ticket = slot.ticket
        self._end_group(group, reason, failed=failed)
        slot.reasons.append(reason)
        slot.attempt += 1
        slot.claim = 0
        self.state.record("drop", group=group.id, task_id=group.task_id, reason=reason)
        if slot.attempt <= self.max_retries:
            ticket.vacate(slot)
            return
        slot.group = None
        slot.touch()
        ticket.failure = f"{_grouped(slot.reasons)}; slot {slot.index} was refilled {self.max_retries} times"
        self.state.changes.note("failure", ticket.partition.name, ticket.number, ticket.failure)
        ticket.note_change()
        self.leases.ticket_failed(ticket.partition, ticket.number)
        self.state.room.notify()

    def _end_group(self, group: Group, reason: str, *, failed: bool = True) -> None:
        """Its rows expire; nobody will see them."""
        if group.state == "published":
            group.slot.ticket.published -= 1
        group.state, group.reason = "dropped", reason
        if failed:
            self.state.failed(group.id, reason)
        for row in list(group.rows):
            self._remove(row, "expired")
        group.settled.notify()

    async def wait_group_settled(self, group_id: str, deadline_seconds: float) -> GroupView:
        """See :meth:`jackfield.queue.TransferQueue.wait_group_settled`."""
        group = self.state.group(group_id)
        until = self.clock.time() + deadline_seconds

        def name() -> str:
            return f"group {group.id} to settle; still running: runs {_running(group)}"

        while group.state == "open":
            self.leases.require_open()
            await wait(self.clock, group.settled.next(), until, name)
        return group.view()

    async def settled_groups(self, partition: str, deadline_seconds: float | None) -> AsyncIterator[GroupView]:
        """See :meth:`jackfield.queue.TransferQueue.settled_groups`."""
        state, found = self.state, self.state.partition(partition)
        feed = [group.id for group in state.groups.values() if group.partition is found and group.state == "published"]
        found.feeds.append(feed)
        name = f"a group of partition {partition!r} to settle"
        try:
            while not state.closed:
                coming, feed[:] = list(feed), []
                for group_id in coming:
                    group = state.groups.get(group_id)
                    if group is not None and group.state == "published" and group.rows:
                        yield group.view()
                if feed:
                    continue
                future = found.fed.next()
                if deadline_seconds is None:
                    await future
                else:
                    await wait(self.clock, future, self.clock.time() + deadline_seconds, lambda: name)
        finally:
            found.feeds.remove(feed)

    # -- the end of rows -------------------------------------------------------------------------------------------

    def _remove(self, row: Row, status: Literal["failed", "expired", "consumed"]) -> None:
        """Forget a row, and let the backend forget it."""
        row.status = status
        row.group.slot.touch()
        self.leases.row_removed(row)
        del self.state.rows[row.key]
        row.group.slot.ticket.rows -= 1
        self.state.release_room(1, row.bytes)
        self.state.discard(row.group.partition.name, row.key)

    def consume(self, rows: Sequence[Row]) -> None:
        """Forget rows that nobody needs any more, and tickets without any."""
        for row in rows:
            row.group.consumed += 1
            self._remove(row, "consumed")
        for ticket in {row.group.slot.ticket: None for row in rows}:
            if ticket.complete and not ticket.rows:
                del ticket.partition.tickets[ticket.number]
                self.state.changes.note("gone", ticket.partition.name, ticket.number)
                for group_id in ticket.groups:
                    del self.state.groups[group_id]
            ticket.note_change()


def _running(group: Group) -> str:
    return ", ".join(str(run) for run in range(group.runs) if run not in group.ended)


def _unfinished(ticket: TicketState) -> str:
    head = f"ticket {ticket.number} of partition {ticket.partition.name!r}"
    waiting = [slot.index for slot in ticket.slots if slot.group is None]
    groups = [slot.group for slot in ticket.slots if slot.group is not None]
    running = [f"{group.id} (runs {_running(group)})" for group in groups if group.state == "open"]
    if waiting:
        return f"{head}: no group was opened in slots {', '.join(map(str, waiting[:4]))}"
    if running:
        return f"{head}: groups that have not ended: {', '.join(running[:4])}"
    free = [group.id for group in groups if not group.held_by and group.rows]
    if free:
        return f"{head}: published groups that no consumer has leased: {', '.join(free[:4])}"
    names = {consumer.name for group in groups for consumer in group.held_by if not group.is_acked()}
    return f"{head}: consumers that have leased groups and not acked them: {', '.join(sorted(names))}"


def _grouped(reasons: Sequence[str]) -> str:
    """Distinct reasons of a slot's attempts, the most frequent first, at most three."""
    counted = Counter(reasons).most_common(3)
    return "; ".join(why if count == 1 else f"{why} (in {count} attempts)" for why, count in counted)
