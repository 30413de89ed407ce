"""The producers' side of the controller: tickets, slots, groups, runs, columns and backpressure.

The controller holds metadata only; no method here sees a tensor.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError, QueueFull
from jackfield.queue.leases import Leases
from jackfield.queue.meta import BatchMeta, GroupSlot, GroupView, Ticket
from jackfield.queue.reuse import Reuse
from jackfield.queue.samplers import Sampler
from jackfield.queue.saving import save_consumer
from jackfield.queue.state import Consumer, Group, Partition, Row, Slot, State, TicketState
from jackfield.queue.waiting import wait

__all__ = ["Controller"]


class Controller:
    """Tickets, groups and rows by state; what consumers have of them is in :attr:`leases`."""

    def __init__(
        self, state: State, *, max_rows: int | None = None, max_bytes: int | None = None, max_refills: int = 8
    ) -> None:
        self.state = state
        self.leases = Leases(state)
        self.leases.consume = self.consume
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.max_refills = max_refills
        self.write_changes: Callable[[], None] = lambda: None  #: to the journal, where there is one

    @property
    def clock(self) -> Clock:
        """The one clock."""
        return self.state.clock

    # -- consumers --------------------------------------------------------------------------------------------------

    def register_consumer(
        self,
        name: str,
        partition: str,
        columns: Sequence[str],
        lease_seconds: float,
        sampler: Sampler | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        """See :meth:`jackfield.queue.TransferQueue.register_consumer`."""
        consumer = self.state.consumers.get(name)
        wanted = (partition, frozenset(columns))
        if consumer is None:
            consumer = self.leases.register(name, self.state.partition(partition), tuple(columns), lease_seconds)
        elif (found := (consumer.partition.name, frozenset(consumer.columns))) != wanted:
            raise QueueError(
                f"consumer {name!r} is registered already, for something else", where=name, expected=wanted, found=found
            )
        consumer.lease_seconds = lease_seconds
        if sampler is not None:
            consumer.sampler = sampler
        if reuse is not None:
            consumer.reuse = reuse
        self.state.changes.note("consumer", name, save_consumer(consumer))

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
            self._refill(group, reason)

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

    def _refill(self, group: Group, reason: str) -> None:
        """Drop a group and let its slot be filled once more, or fail its ticket."""
        slot = group.slot
        ticket = slot.ticket
        self._end_group(group, reason)
        slot.reasons.append(reason)
        slot.attempt += 1
        slot.claim = 0
        self.state.record("drop", group=group.id, task_id=group.task_id, reason=reason)
        if slot.attempt <= self.max_refills:
            ticket.vacate(slot)
            return
        slot.group = None
        slot.touch()
        last = list(enumerate(slot.reasons))[-3:]
        ticket.failure = f"slot {slot.index} was refilled {self.max_refills} times; " + "; ".join(
            f"attempt {attempt}: {why}" for attempt, why in last
        )
        self.state.changes.note("failure", ticket.partition.name, ticket.number, ticket.failure)
        ticket.changed.notify()
        self.leases.ticket_failed(ticket.partition, ticket.number)
        self.state.room.notify()

    def _end_group(self, group: Group, reason: str) -> None:
        """Its rows expire; nobody will see them."""
        if group.state == "published":
            group.slot.ticket.published -= 1
        group.state, group.reason = "dropped", reason
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

    # -- runs -------------------------------------------------------------------------------------------------------

    def run_keys(self, group_id: str, run: int, rows: int) -> tuple[str, ...]:
        """Check that a run may end now; the keys of its rows."""
        self.leases.require_open()
        group = self.state.group(group_id)
        self._require_running(group, run)
        again = f"r{group.broken[run]}" if run in group.broken else ""
        return tuple(f"{group.id}/{run}{again}/{sequence}" for sequence in range(rows))

    def _require_running(self, group: Group, run: int) -> None:
        if group.slot.ticket.failure is not None:
            raise group.slot.ticket.error()
        where = f"{group.id}/{run}"
        if not 0 <= run < group.runs:
            raise QueueError("the group has no such run", where=where, expected=f"0 to {group.runs - 1}", found=run)
        if group.state == "dropped":
            message = f"group {group.id} was dropped: {group.reason}"
            raise QueueError(message, where=where, fix="open a group in another slot")
        if run in group.ended or run in group.writing:
            raise QueueError("the run has ended already", where=where, expected="one put_run or fail_run for each run")

    @contextmanager
    def _writing(self, group: Group, run: int, keys: Sequence[str], size: int) -> Iterator[None]:
        group.writing.add(run)
        partition = group.partition.name
        if keys:
            self.state.in_flight.update(dict.fromkeys(keys, partition))
            self.state.changes.note("forget", partition, list(keys))  # unless the run ends with them
            self.write_changes()
        self.state.row_count += len(keys)
        self.state.byte_count += size
        try:
            yield
        except BaseException:
            self.state.release_room(len(keys), size)
            group.broken[run] = group.broken.get(run, 0) + 1
            for key in keys:
                self.state.discard(partition, key)
            raise
        finally:
            group.writing.discard(run)
            for key in keys:
                self.state.in_flight.pop(key, None)

    def writing(self, group_id: str, run: int, keys: Sequence[str], size: int) -> AbstractContextManager[None]:
        """While the values of a run's rows are on their way to the backend."""
        return self._writing(self.state.group(group_id), run, keys, size)

    def end_run(
        self,
        group_id: str,
        run: int,
        keys: Sequence[str],
        columns: Sequence[str],
        sizes: Sequence[int],
        tags: Sequence[Mapping[str, Any]],
    ) -> None:
        """The values of a run's rows are there: seal them.

        Raises:
            QueueError: when the group was dropped in the meantime.
        """
        state, group = self.state, self.state.group(group_id)
        group.writing.discard(run)
        self._require_running(group, run)
        bits = group.partition.mask(tuple(columns))
        touched: set[Consumer] = set()
        for sequence, key in enumerate(keys):
            row = Row(key, group, run, sequence, state.next_serial, tags[sequence], bits, bytes=sizes[sequence])
            state.next_serial += 1
            state.rows[key] = row
            group.rows.append(row)
            self.leases.row_changed(row, bits, touched)
        group.slot.ticket.rows += len(keys)
        group.ended[run] = None
        self._settle(group)
        self.leases.wake(touched)

    def fail_run(self, group_id: str, run: int, reason: str) -> None:
        """See :meth:`jackfield.queue.TransferQueue.fail_run`."""
        group = self.state.group(group_id)
        self._require_running(group, run)
        group.ended[run] = reason
        self.state.failed(f"{group.id}/{run}", reason)
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """When all siblings have ended: publish or drop."""
        if group.state != "open" or len(group.ended) < group.runs:
            return
        if not group.satisfied():
            self._refill(group, _shortage(group))
            return
        group.sort()
        group.state = "published"
        group.slot.touch()
        ticket = group.slot.ticket
        ticket.published += 1
        self.leases.group_published(group)
        for feed in group.partition.feeds:
            feed.append(group.id)
        group.partition.fed.notify()
        group.settled.notify()
        ticket.changed.notify()

    # -- rows -------------------------------------------------------------------------------------------------------

    def fail_rows(self, keys: Sequence[str], reason: str) -> None:
        """See :meth:`jackfield.queue.TransferQueue.fail_rows`."""
        rows = [row for row in map(self.state.row, dict.fromkeys(keys)) if row is not None]
        groups = {row.group: None for row in rows}
        for group in groups:
            self._require_free(group)
        for row in rows:
            self.state.failed(row.key, reason)
            self._remove(row, "failed")
        for group in groups:
            if group.state == "published":
                if group.satisfied():
                    self.leases.group_published(group)
                else:
                    self._refill(group, f"{_shortage(group)}; rows failed: {reason}")

    def lose_rows(self, keys: Sequence[str], batch: BatchMeta | None, reason: str) -> None:
        """The backend has lost rows: their groups' policy decides again.

        Groups that a consumer has leased as a whole are left alone, but those of ``batch``: it may have read them. Of
        groups that it has acked nothing is made again: nobody waits for them.
        """
        groups: dict[Group, list[Row]] = {}
        mine = {row.group for _, row in self.leases.held_rows(batch)} if batch is not None else set[Group]()
        for row in [row for row in map(self.state.rows.get, dict.fromkeys(keys)) if row is not None]:
            if row.group in mine or not row.group.held_by or row.group.is_acked():
                groups.setdefault(row.group, []).append(row)
        for group, lost in groups.items():
            self.state.record("lose", group=group.id, keys=[row.key for row in lost], reason=reason)
            if group.is_acked():
                self.leases.had(group)
                self.consume(lost)
                continue
            for row in lost:
                self.state.failed(row.key, reason)
                self._remove(row, "failed")
            if group.state == "published" and not group.satisfied():
                self.leases.take(group)
                self._refill(group, f"{_shortage(group)}; {reason}")
            elif group.state == "published":
                self.leases.group_published(group)

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
            ticket.changed.notify()

    # -- columns ----------------------------------------------------------------------------------------------------

    def begin_columns(
        self, keys: Sequence[str], columns: Sequence[str], batch: BatchMeta | None, overwrite: bool
    ) -> list[Row | None]:
        """Check that columns of rows may be written now; the rows, None where one is gone.

        The holder of a lease may write a column again: a worker that took over does what the dead one did.
        """
        self.leases.require_open()
        if len(set(keys)) != len(keys):
            raise QueueError("a row is named twice", expected="distinct keys", found=list(keys)[:4])
        if batch is not None and all(claim.epoch for claim in batch.claims):
            self.leases.held_rows(batch)
            overwrite = True
        rows = [self.state.row(key) for key in keys]
        for row in rows:
            if row is not None:
                bits = row.group.partition.mask(tuple(columns))
                clash = bits & (row.writing if overwrite else row.writing | row.columns)
                if clash:
                    raise QueueError(
                        f"column {', '.join(row.group.partition.names(clash))} of row {row.key} is written already",
                        code="queue.column",
                        where=row.key,
                        fix="write each column once, or pass overwrite=True",
                    )
        for row in rows:
            if row is not None:
                row.writing |= row.group.partition.mask(tuple(columns))
        return rows

    def end_columns(
        self,
        rows: Sequence[Row],
        columns: Sequence[str],
        sizes: Sequence[int],
        tags: Sequence[Mapping[str, Any]] | None,
        *,
        written: bool,
    ) -> tuple[str, ...]:
        """The values are there (or not, after a failure): rows that became complete are offered; the living keys."""
        touched: set[Consumer] = set()
        living = []
        for index, row in enumerate(rows):
            bits = row.group.partition.mask(tuple(columns))
            row.writing &= ~bits
            if row.status != "sealed":  # it went while its values were on their way
                self.state.discard(row.group.partition.name, row.key)
                continue
            living.append(row.key)
            if not written:
                continue
            row.group.slot.touch()
            if tags is not None:
                row.tags = {**row.tags, **tags[index]}
            new, row.columns = bits & ~row.columns, row.columns | bits
            if new:
                row.bytes += sizes[index]
                self.state.byte_count += sizes[index]
                self.leases.row_changed(row, new, touched)
        self.leases.wake(touched)
        return tuple(living)

    # -- backpressure -----------------------------------------------------------------------------------------------

    async def wait_room(self, group_id: str, run: int, rows: int, size: int, deadline_seconds: float) -> None:
        """Hold a producer back while the queue is full; see :class:`jackfield.queue.TransferQueue`."""
        group = self.state.group(group_id)
        until = self.clock.time() + deadline_seconds
        while rows and not self._fits(rows, size) and not self._demanded(group.slot.ticket):
            try:
                await wait(self.clock, self.state.room.next(), until, lambda: "room")
            except DeadlineExceeded as error:
                raise self._full(group, run, rows, size, deadline_seconds) from error
            self.leases.require_open()
            self._require_running(group, run)

    @property
    def limited(self) -> bool:
        """Whether there is any backpressure."""
        return self.max_rows is not None or self.max_bytes is not None

    def _fits(self, rows: int, size: int) -> bool:
        return (self.max_rows is None or self.state.row_count + rows <= self.max_rows) and (
            self.max_bytes is None or self.state.byte_count + size <= self.max_bytes
        )

    def _demanded(self, ticket: TicketState) -> bool:
        """Whether a consumer waits for just this ticket, or in vain for any row while the others have nothing to do."""
        partition = ticket.partition
        if any(ticket.number in consumer.group_waiters for consumer in partition.consumers):
            return True
        busy = [consumer for consumer in partition.consumers if consumer.ready or consumer.leased]
        starving = any(
            (consumer.sample_demand or (consumer.row_demand and not consumer.ready))
            and all(other is consumer for other in busy)
            for consumer in partition.consumers
        )
        return starving and ticket is self._oldest_unfinished(partition)

    @staticmethod
    def _oldest_unfinished(partition: Partition) -> TicketState | None:
        tickets = partition.tickets.values()
        return next((ticket for ticket in tickets if not ticket.complete and not ticket.failure), None)

    def _full(self, group: Group, run: int, rows: int, size: int, seconds: float) -> QueueFull:
        state = self.state
        return QueueFull(
            f"the queue stayed full for {seconds:.6g} s",
            where=f"{group.id}/{run}",
            expected=f"room for {rows} rows and {size} bytes within {self.max_rows} rows and {self.max_bytes} bytes",
            found=f"{state.row_count} rows, {state.byte_count} bytes",
            fix="look at why consumers do not ack and commit, or raise max_rows, max_bytes or the deadline",
        )


def _running(group: Group) -> str:
    return ", ".join(str(run) for run in range(group.runs) if run not in group.ended)


def _shortage(group: Group) -> str:
    failed = [f"run {run}: {why}" for run, why in sorted(group.ended.items()) if why is not None]
    if group.minimum_rows is not None:
        head = f"{len(group.rows)} of at least {group.minimum_rows} rows survive"
    else:
        alive = {row.run for row in group.rows}
        lost = [str(run) for run in range(group.runs) if run not in alive]
        head = f"runs without a surviving row: {', '.join(lost)}"
    return f"{head} ({'; '.join(failed[:3])})" if failed else head


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
