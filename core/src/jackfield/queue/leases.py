"""The consumers' side of the controller: readiness, leases, acks, commit and rollback.

Every change of a row touches the few consumers of its partition and nothing else, so that n rows cost O(n), however
many rows and waiters there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jackfield.errors import LeaseError, QueueError
from jackfield.queue.meta import BatchMeta
from jackfield.queue.samplers import Sampler, Sequential
from jackfield.queue.state import Ack, Consumer, Group, GroupWaiter, Lease, Partition, Row, State
from jackfield.queue.waiting import Signal, wait

__all__ = ["Leases"]

_SHOWN = 4  #: rows or groups that a message names
_ROUNDING = 1e-6  #: seconds by which a clock may wake too early


class Leases:
    """What consumers have, may have and are done with."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._expiries: list[tuple[float, int, Lease]] = []
        self._next_lease = 0
        self.expiry_changed = Signal()

    # -- consumers ----------------------------------------------------------------------------------------------

    def register(self, name: str, partition: Partition, columns: tuple[str, ...], lease_seconds: float) -> Consumer:
        """Make a consumer and show it every row that is there."""
        mask = partition.mask(columns)
        consumer = Consumer(name, partition, columns, mask, 1 << len(partition.consumers), lease_seconds)
        partition.consumers.append(consumer)
        self._state.consumers[name] = consumer
        for row in [row for row in self._state.rows.values() if row.group.partition is partition]:
            self._offer(consumer, row)
        consumer.line.news()
        return consumer

    # -- readiness ----------------------------------------------------------------------------------------------

    def row_changed(self, row: Row, new_columns: int, touched: set[Consumer]) -> None:
        """Offer a row to the consumers that ``new_columns`` complete; collect them in ``touched``."""
        for consumer in row.group.partition.consumers:
            if consumer.mask & new_columns or not consumer.mask:
                before = len(consumer.ready)
                self._offer(consumer, row)
                if len(consumer.ready) > before:
                    touched.add(consumer)

    def wake(self, consumers: Iterable[Consumer]) -> None:
        """Tell those who wait for any rows that there are new ones."""
        for consumer in consumers:
            consumer.line.news()

    def group_published(self, group: Group) -> None:
        """A group has been published, or its rows have become fewer."""
        for consumer in group.partition.consumers:
            self._check_group(consumer, group)
            self._wake_group_waiters(consumer, group.slot.ticket.number)

    def row_removed(self, row: Row) -> None:
        """A row has failed, expired or been consumed: no consumer has it any more. Takes it out of its group, too."""
        group = row.group
        for consumer in group.partition.consumers:
            if row in consumer.ready:
                self._withdraw(consumer, row)
            lease = consumer.leased.pop(row, None)
            if lease is not None:
                lease.rows.pop(row, None)
                self._forget_if_empty(lease)
            ack = consumer.acked.pop(row, None)
            if ack is not None and ack.step is not None:
                consumer.provisional.get(ack.step, {}).pop(row, None)
        group.rows.remove(row)

    def _offer(self, consumer: Consumer, row: Row) -> None:
        """Make a row available to a consumer, if its columns are there and it has not had it."""
        if row.columns & consumer.mask != consumer.mask:
            return
        if row in consumer.ready or row in consumer.leased or row in consumer.acked:
            return
        consumer.ready[row] = None
        group = row.group
        group.available[consumer] = group.available.get(consumer, 0) + 1
        self._check_group(consumer, group)

    def _withdraw(self, consumer: Consumer, row: Row) -> None:
        del consumer.ready[row]
        group = row.group
        group.available[consumer] -= 1
        group.slot.ticket.ready.get(consumer, {}).pop(group.slot.index, None)

    def _check_group(self, consumer: Consumer, group: Group) -> None:
        """A published group, all of whose rows are available, is ready as a whole; what is left of one is not."""
        whole = group.state == "published" and group.rows and not group.consumed
        if whole and group.available.get(consumer, 0) == len(group.rows):
            group.slot.ticket.ready.setdefault(consumer, {})[group.slot.index] = group
            self._wake_group_waiters(consumer, group.slot.ticket.number)

    def _wake_group_waiters(self, consumer: Consumer, number: int) -> None:
        for waiter in consumer.group_waiters.get(number, ()):
            if self._enough(consumer, number, waiter.groups):
                waiter.signal.notify()

    def ticket_failed(self, partition: Partition, number: int) -> None:
        """Let everybody who waits for the ticket hear of it."""
        for consumer in partition.consumers:
            for waiter in consumer.group_waiters.get(number, ()):
                waiter.signal.notify()

    def wake_all(self) -> None:
        """Let everybody look again (the queue closes)."""
        for consumer in self._state.consumers.values():
            consumer.line.wake_all()
            for waiters in consumer.group_waiters.values():
                for waiter in waiters:
                    waiter.signal.notify()

    # -- leases of any rows ---------------------------------------------------------------------------------------

    async def lease(
        self, name: str, max_rows: int | None, deadline_seconds: float, sampler: Sampler | None
    ) -> BatchMeta:
        """See :meth:`jackfield.queue.TransferQueue.lease`."""
        state, consumer = self._state, self._state.consumer(name)
        sampler = sampler or Sequential()
        until = state.clock.time() + deadline_seconds
        while True:
            self.require_open()
            keys = sampler.sample(_Ready(consumer, state), max_rows) if consumer.ready else ()
            if keys:
                batch = self._grant(consumer, self._sampled(consumer, keys, max_rows), whole=False)
                if consumer.ready:
                    consumer.line.pass_on()
                return batch
            if consumer.ready:
                consumer.line.pass_on()  # another sampler may choose some of them
            await self._wait_for_rows(consumer, until)

    async def _wait_for_rows(self, consumer: Consumer, until: float) -> None:
        state, future = self._state, consumer.line.join()
        consumer.row_demand += 1
        state.room.notify()  # a producer that is held back may be the one that is waited for
        try:
            await wait(state.clock, future, until, lambda: self._missing_rows(consumer))
        except BaseException:
            consumer.line.leave(future)
            raise
        finally:
            consumer.row_demand -= 1

    def _sampled(self, consumer: Consumer, keys: Sequence[str], max_rows: int | None) -> list[Row]:
        rows = [row for row in map(self._state.rows.get, keys) if row is not None and row in consumer.ready]
        if len(rows) != len(keys) or len(set(keys)) != len(keys) or (max_rows is not None and len(rows) > max_rows):
            raise QueueError(
                f"a sampler of consumer {consumer.name!r} chose rows that it was not offered, twice, or too many",
                expected=f"{max_rows if max_rows is not None else 'any number of'} distinct ready keys at most",
                found=list(keys)[:_SHOWN],
            )
        return rows

    # -- leases of whole groups -----------------------------------------------------------------------------------

    async def lease_groups(self, name: str, number: int, groups: int | None, deadline_seconds: float) -> BatchMeta:
        """See :meth:`jackfield.queue.TransferQueue.lease_groups`."""
        state, consumer = self._state, self._state.consumer(name)
        if groups is not None and groups < 1:
            raise QueueError("at least one group is leased", expected="1 or more", found=groups)
        until = state.clock.time() + deadline_seconds
        while True:
            self.require_open()
            self._check_ticket(consumer, number)
            if self._enough(consumer, number, groups):
                return self._grant_groups(consumer, number, groups)
            await self._wait_for_groups(consumer, number, groups, until)

    async def _wait_for_groups(self, consumer: Consumer, number: int, groups: int | None, until: float) -> None:
        waiter = GroupWaiter(groups)
        consumer.group_waiters.setdefault(number, []).append(waiter)
        self._state.room.notify()
        try:
            await wait(self._state.clock, waiter.signal.next(), until, lambda: self._missing_groups(consumer, number))
        finally:
            consumer.group_waiters[number].remove(waiter)
            if not consumer.group_waiters[number]:
                del consumer.group_waiters[number]

    def _grant_groups(self, consumer: Consumer, number: int, groups: int | None) -> BatchMeta:
        ticket = consumer.partition.tickets[number]
        ready = ticket.ready.get(consumer, {})
        if groups is None and not ready:
            raise QueueError(
                f"consumer {consumer.name!r} has had all groups of ticket {number} already",
                where=f"{consumer.partition.name}/{number}",
                fix="lease each ticket once; rollback gives acked rows back",
            )
        chosen = [ready[index] for index in sorted(ready)[:groups]]
        rows = [row for group in chosen for row in group.rows]
        ticket.held[consumer] = ticket.held.get(consumer, 0) + len(chosen)
        for group in chosen:
            group.held_by.add(consumer)
        batch = self._grant(consumer, rows, whole=True)
        ticket.changed.notify()
        return batch

    def _check_ticket(self, consumer: Consumer, number: int) -> None:
        partition = consumer.partition
        ticket = partition.tickets.get(number)
        if ticket is not None and ticket.failure is not None:
            raise ticket.error()
        if number < 0 or (ticket is None and number < partition.next_ticket):
            raise QueueError(
                f"ticket {number} of partition {partition.name!r} has been consumed",
                where=f"{partition.name}/{number}",
                expected=f"one of {sorted(partition.tickets)} or a later one",
                found=number,
            )

    def _enough(self, consumer: Consumer, number: int, groups: int | None) -> bool:
        ticket = consumer.partition.tickets.get(number)
        if ticket is None:
            return False
        ready = len(ticket.ready.get(consumer, ()))
        remaining = len(ticket.slots) - ticket.held.get(consumer, 0)
        return ready >= (remaining if groups is None else min(groups, remaining))

    # -- granting and giving back ---------------------------------------------------------------------------------

    def _grant(self, consumer: Consumer, rows: Sequence[Row], *, whole: bool) -> BatchMeta:
        consumer.epoch += 1
        self._next_lease += 1
        expires = self._state.clock.time() + consumer.lease_seconds
        lease = Lease(consumer, consumer.epoch, expires, whole, dict.fromkeys(rows))
        for row in rows:
            self._withdraw(consumer, row)
            consumer.leased[row] = lease
        if rows:
            consumer.leases[lease.epoch] = lease
            self._schedule(lease)
        return BatchMeta(
            partition=consumer.partition.name,
            consumer=consumer.name,
            keys=tuple(row.key for row in rows),
            tags=tuple(row.all_tags() for row in rows),
            group_ids=tuple(row.group.id for row in rows),
            epoch=lease.epoch,
        )

    def _schedule(self, lease: Lease) -> None:
        self._next_lease += 1
        heapq.heappush(self._expiries, (lease.expires, self._next_lease, lease))
        if self._expiries[0][2] is lease:
            self.expiry_changed.notify()

    def next_expiry(self) -> float | None:
        """When the next lease expires, on the clock."""
        while self._expiries:
            expires, _, lease = self._expiries[0]
            if lease.rows and lease.expires == expires:
                return expires
            heapq.heappop(self._expiries)  # acked, given back or renewed
        return None

    def expire(self) -> None:
        """Take back the leases whose time is over."""
        now = self._state.clock.time() + _ROUNDING
        while (expires := self.next_expiry()) is not None and expires <= now:
            lease = heapq.heappop(self._expiries)[2]
            consumer = lease.consumer
            keys = [row.key for row in lease.rows]
            self._state.record("expire", consumer=consumer.name, epoch=lease.epoch, keys=keys)
            self._give_back(lease, list(lease.rows))

    def renew(self, batch: BatchMeta) -> None:
        """See :meth:`jackfield.queue.TransferQueue.renew`."""
        consumer = self._state.consumer(batch.consumer)
        self.held_rows(batch)
        lease = consumer.leases.get(batch.epoch)
        if lease is not None:
            lease.expires = self._state.clock.time() + consumer.lease_seconds
            self._schedule(lease)

    def release(self, batch: BatchMeta) -> None:
        """See :meth:`jackfield.queue.TransferQueue.release`."""
        rows = self.held_rows(batch)
        if rows:
            lease = self._state.consumer(batch.consumer).leased[rows[0]]
            self._require_whole_groups(lease, rows)
            self._give_back(lease, rows)

    def _give_back(self, lease: Lease, rows: Sequence[Row]) -> None:
        consumer = lease.consumer
        for row in rows:
            lease.rows.pop(row)
            del consumer.leased[row]
        self._forget_if_empty(lease)
        self._return(consumer, rows, whole=lease.whole)

    def _return(self, consumer: Consumer, rows: Sequence[Row], *, whole: bool) -> None:
        """Make rows available again to a consumer that had them."""
        for group in {row.group: None for row in rows} if whole else ():
            if consumer in group.held_by:
                group.held_by.discard(consumer)
                group.slot.ticket.held[consumer] -= 1
        for row in rows:
            self._offer(consumer, row)
        consumer.line.news()

    def _forget_if_empty(self, lease: Lease) -> None:
        if not lease.rows:
            lease.consumer.leases.pop(lease.epoch, None)

    def held_rows(self, batch: BatchMeta) -> list[Row]:
        """The rows of a batch that still live, all of which the batch's lease must hold.

        Raises:
            LeaseError: naming rows that it does not hold.
        """
        consumer = self._state.consumer(batch.consumer)
        rows = [row for row in map(self._state.row, batch.keys) if row is not None]
        lost = [row.key for row in rows if (lease := consumer.leased.get(row)) is None or lease.epoch != batch.epoch]
        if lost:
            raise LeaseError(
                f"consumer {consumer.name!r} does not hold {_some(lost)} under this lease any more",
                where=consumer.name,
                expected=f"a lease of epoch {batch.epoch}",
                found="a lease that expired, was given back or acked",
                fix="lease the rows again; renew leases of long steps, or raise lease_seconds",
            )
        return rows

    def _require_whole_groups(self, lease: Lease, rows: Sequence[Row]) -> None:
        if not lease.whole:
            return
        given = set(rows)
        for group in {row.group: None for row in rows}:
            if any(row not in given for row in group.rows):
                raise QueueError(
                    f"group {group.id} was leased as a whole and cannot be acked or given back in part",
                    where=group.id,
                    expected=f"all of its {len(group.rows)} rows",
                )

    # -- acks -------------------------------------------------------------------------------------------------------

    def ack(self, batch: BatchMeta, step: int | None) -> tuple[list[str], list[Row]]:
        """Mark rows as done; returns the acked keys and the rows that nobody needs any more."""
        state, consumer = self._state, self._state.consumer(batch.consumer)
        rows = self.held_rows(batch)
        if rows:
            self._require_whole_groups(consumer.leased[rows[0]], rows)
        final = step is None or (state.committed is not None and step <= state.committed)
        record = Ack(step, final)
        for row in rows:
            lease = consumer.leased.pop(row)
            lease.rows.pop(row, None)
            self._forget_if_empty(lease)
            consumer.acked[row] = record
            if final:
                row.done |= consumer.bit
            else:
                assert step is not None
                consumer.provisional.setdefault(step, {})[row] = None
        keys = [row.key for row in rows]
        state.record("ack", consumer=consumer.name, step=step, epoch=batch.epoch, keys=keys)
        return keys, [row for row in rows if final and self._consumed(row)]

    def commit(self, step: int) -> list[Row]:
        """Make the acks of all steps up to ``step`` final; returns the rows that nobody needs any more."""
        state = self._state
        consumed = []
        for consumer in state.consumers.values():
            for earlier in sorted(other for other in consumer.provisional if other <= step):
                final = Ack(earlier, True)
                for row in consumer.provisional.pop(earlier):
                    consumer.acked[row] = final
                    row.done |= consumer.bit
                    if self._consumed(row):
                        consumed.append(row)
        state.committed = step if state.committed is None else max(step, state.committed)
        state.record("commit", step=step, keys=[row.key for row in consumed])
        return consumed

    def rollback(self, step: int) -> list[str]:
        """Take back the acks of all steps after ``step``; returns the keys."""
        state = self._state
        if state.committed is not None and step < state.committed:
            raise QueueError(
                "acks that are final cannot be taken back",
                expected=f"step {state.committed} or later",
                found=step,
                fix="load the queue's own checkpoint of that step",
            )
        returned: list[str] = []
        for consumer in state.consumers.values():
            later = sorted(other for other in consumer.provisional if other > step)
            rows = [row for other in later for row in consumer.provisional.pop(other)]
            for row in rows:
                del consumer.acked[row]
            if rows:
                self._return(consumer, rows, whole=True)
                consumer.ready = dict.fromkeys(sorted(consumer.ready, key=lambda row: row.serial))
                keys = [row.key for row in rows]
                state.record("rollback", consumer=consumer.name, step=step, keys=keys)
                returned += keys
        if not returned:
            state.record("rollback", consumer=None, step=step, keys=[])
        return returned

    @staticmethod
    def _consumed(row: Row) -> bool:
        return all(row.done & consumer.bit for consumer in row.group.partition.consumers)

    # -- messages -------------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Refuse to go on with a closed queue."""
        if self._state.closed:
            raise QueueError("the TransferQueue is closed", code="queue.closed", fix="start() it, and close it last")

    def _missing_rows(self, consumer: Consumer) -> str:
        partition = consumer.partition
        rows = [row for row in self._state.rows.values() if row.group.partition is partition]
        lacking = [_lacks(row, consumer) for row in rows if consumer.mask & ~row.columns]
        ends = [_unended(group) for group in self._state.groups.values() if group.partition is partition]
        parts = [f"any row of partition {partition.name!r} for consumer {consumer.name!r}"]
        if lacking:
            parts.append(f"{len(lacking)} rows lack columns: {_some(lacking)}")
        if any(ends):
            parts.append(f"runs have not ended: {_some([end for end in ends if end])}")
        if consumer.leased:
            parts.append(f"{len(consumer.leased)} rows are leased")
        if consumer.ready:
            parts.append(f"{len(consumer.ready)} rows are ready, and the sampler chose none")
        return "; ".join(parts)

    def _missing_groups(self, consumer: Consumer, number: int) -> str:
        partition = consumer.partition
        head = f"ticket {number} of partition {partition.name!r} for consumer {consumer.name!r}"
        ticket = partition.tickets.get(number)
        if ticket is None:
            return f"{head}; no explorer has claimed it"
        ready = ticket.ready.get(consumer, {})
        parts = [f"{head}, {ticket.published} of whose {len(ticket.slots)} groups are published and {len(ready)} ready"]
        if number in partition.offered:
            parts.append("it waits to be claimed again")
        empty = [str(slot.index) for slot in ticket.slots if slot.group is None]
        if empty:
            parts.append(f"slots without a group: {_some(empty)}")
        groups = [slot.group for slot in ticket.slots if slot.group is not None]
        ends = [end for group in groups if (end := _unended(group))]
        if ends:
            parts.append(f"runs have not ended: {_some(ends)}")
        rows = [row for group in groups if group.state == "published" for row in group.rows]
        lacking = [_lacks(row, consumer) for row in rows if consumer.mask & ~row.columns]
        if lacking:
            parts.append(f"{len(lacking)} rows lack columns: {_some(lacking)}")
        alone = [row.key for row in rows if row in consumer.leased and not consumer.leased[row].whole]
        alone += [f"{group.consumed} of {group.id}" for group in groups if group.consumed and not group.held_by]
        if alone:
            parts.append(f"rows leased one by one: {_some(alone)}")
        return "; ".join(parts)


class _Ready:
    """What a sampler sees of a consumer."""

    def __init__(self, consumer: Consumer, state: State) -> None:
        self._consumer = consumer
        self._state = state

    def __len__(self) -> int:
        return len(self._consumer.ready)

    def __iter__(self) -> Iterator[str]:
        return (row.key for row in self._consumer.ready)

    def tags(self, key: str) -> Mapping[str, Any]:
        return self._state.rows[key].all_tags()


def _lacks(row: Row, consumer: Consumer) -> str:
    return f"{row.key} ({', '.join(consumer.partition.names(consumer.mask & ~row.columns))})"


def _unended(group: Group) -> str:
    if group.state != "open":
        return ""
    runs = [str(run) for run in range(group.runs) if run not in group.ended]
    return f"{group.id} (task {group.task_id!r}, runs {', '.join(runs)})"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
