"""Which rows and groups a consumer could have: the part of the controller that every change of a row goes through.

A change touches the few consumers of the row's partition and nothing else, so that n rows cost O(n), however many rows
and waiters there are.
"""

from __future__ import annotations

from collections.abc import Iterable

from jackfield.queue.records import Consumer, Group, Lease, Partition, Row
from jackfield.queue.state import State

__all__ = ["Readiness"]


class Readiness:
    """What consumers may have."""

    def __init__(self, state: State) -> None:
        self._state = state

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
            if len(group.rows) == 1:
                consumer.used.pop(group, None)
        group.rows.remove(row)

    def take(self, group: Group) -> None:
        """Whoever has leased a group as a whole does not have it any more: it is about to be dropped."""
        for consumer in group.held_by:
            group.slot.ticket.held[consumer] -= 1
        group.held_by.clear()

    def had(self, group: Group) -> None:
        """Nobody waits for a group any more."""
        for consumer in group.partition.consumers:
            if consumer not in group.held_by:
                self._hold(consumer, group)
                self._wake_group_waiters(consumer, group.slot.ticket.number)

    @staticmethod
    def _hold(consumer: Consumer, group: Group) -> None:
        group.held_by.add(consumer)
        held = group.slot.ticket.held
        held[consumer] = held.get(consumer, 0) + 1

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
            consumer.groups.news()

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
            consumer.groups.wake_all()
            for waiters in consumer.group_waiters.values():
                for waiter in waiters:
                    waiter.signal.notify()

    def _enough(self, consumer: Consumer, number: int, groups: int | None) -> bool:
        ticket = consumer.partition.tickets.get(number)
        if ticket is None:
            return False
        ready = len(ticket.ready.get(consumer, ()))
        remaining = len(ticket.slots) - ticket.held.get(consumer, 0)
        return ready >= (remaining if groups is None else min(groups, remaining))

    def _forget_if_empty(self, lease: Lease) -> None:
        if not lease.rows:
            lease.consumer.leases.pop(lease.epoch, None)
