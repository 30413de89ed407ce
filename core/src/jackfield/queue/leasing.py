"""The consumers' side of the controller: leases of rows and of the groups of a ticket."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jackfield.errors import LeaseError, QueueError
from jackfield.queue.meta import BatchMeta, Claim
from jackfield.queue.missing import missing_groups, missing_rows, some
from jackfield.queue.readiness import Readiness
from jackfield.queue.records import Consumer, Group, GroupWaiter, Lease, Row
from jackfield.queue.samplers import Sampler
from jackfield.queue.state import State
from jackfield.queue.waiting import Signal, wait

__all__ = ["Leasing"]

_ROUNDING = 1e-6  #: seconds by which a clock may wake too early


class Leasing(Readiness):
    """What consumers have."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._expiries: list[tuple[float, int, Lease]] = []
        self._next_lease = 0
        self.expiry_changed = Signal()

    # -- leases of any rows ---------------------------------------------------------------------------------------

    async def lease(
        self, name: str, max_samples: int | None, deadline_seconds: float, sampler: Sampler | None
    ) -> BatchMeta:
        """See :meth:`jackfield.queue.TransferQueue.lease`."""
        state, consumer = self._state, self._state.consumer(name)
        sampler = sampler or consumer.sampler
        until = state.clock.time() + deadline_seconds
        while True:
            self.require_open()
            keys = sampler.sample(_ReadyRows(consumer, state), max_samples) if consumer.ready else ()
            if keys:
                batch = self._grant(consumer, self._sampled(consumer, keys, max_samples), whole=False)
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
            await wait(state.clock, future, until, lambda: missing_rows(state, consumer))
        except BaseException:
            consumer.line.leave(future)
            raise
        finally:
            consumer.row_demand -= 1

    def _sampled(self, consumer: Consumer, keys: Sequence[str], max_samples: int | None) -> list[Row]:
        rows = [row for row in map(self._state.rows.get, keys) if row is not None and row in consumer.ready]
        distinct = len(rows) == len(keys) == len(set(keys))
        self._check_sample(consumer, keys, distinct and (max_samples is None or len(rows) <= max_samples))
        return rows

    @staticmethod
    def _check_sample(consumer: Consumer, names: Sequence[str], fine: bool) -> None:
        if not fine:
            raise QueueError(
                f"a sampler of consumer {consumer.name!r} chose rows that it was not offered, twice, or too many",
                expected="as many distinct ready ones as were asked for, at most",
                found=some(list(names)),
            )

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
            await wait(self._state.clock, waiter.signal.next(), until, lambda: missing_groups(consumer, number))
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
        batch = self._grant_whole(consumer, [ready[index] for index in sorted(ready)[:groups]])
        ticket.changed.notify()
        return batch

    def _grant_whole(self, consumer: Consumer, groups: Sequence[Group]) -> BatchMeta:
        for group in groups:
            if consumer not in group.held_by:
                self._hold(consumer, group)
        return self._grant(consumer, [row for group in groups for row in group.rows], whole=True)

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

    # -- granting and giving back ---------------------------------------------------------------------------------

    def _grant(self, consumer: Consumer, rows: Sequence[Row], *, whole: bool) -> BatchMeta:
        consumer.epoch += 1
        self._next_lease += 1
        expires = self._state.clock.time() + consumer.lease_seconds
        lease = Lease(consumer, consumer.epoch, expires, whole, dict.fromkeys(rows))
        for row in rows:
            if row in consumer.ready:
                self._withdraw(consumer, row)
            consumer.leased[row] = lease
        if rows:
            consumer.leases[lease.epoch] = lease
            self._schedule(lease)
        claim = Claim(consumer.partition.name, consumer.name, lease.epoch)
        return BatchMeta(
            keys=tuple(row.key for row in rows),
            tags=tuple(row.all_tags() for row in rows),
            group_ids=tuple(row.group.id for row in rows),
            claims=(claim,) * len(rows),
        )

    def _schedule(self, lease: Lease) -> None:
        if lease.expires == math.inf:
            return
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
            self._end(heapq.heappop(self._expiries)[2])

    def end_all(self) -> None:
        """Take all leases back: nobody is there any more who holds one."""
        for consumer in self._state.consumers.values():
            for lease in list(consumer.leases.values()):
                self._end(lease)

    def end_held(self, leases: Iterable[tuple[str, int]]) -> None:
        """Take back those leases, by consumer and epoch, that last as long as their holder, who has ended."""
        for name, epoch in sorted(leases):
            consumer = self._state.consumers.get(name)
            lease = None if consumer is None else consumer.leases.get(epoch)
            if lease is not None and lease.expires == math.inf:
                self._end(lease)

    def _end(self, lease: Lease) -> None:
        keys = [row.key for row in lease.rows]
        self._state.record("expire", consumer=lease.consumer.name, epoch=lease.epoch, keys=keys)
        self._give_back(lease, list(lease.rows))

    def renew(self, batch: BatchMeta) -> None:
        """See :meth:`jackfield.queue.TransferQueue.renew`."""
        for lease, rows in self._leases_of(batch).items():
            lease.expires = self._state.clock.time() + lease.consumer.lease_seconds
            self._schedule(lease)
            for ticket in {row.group.slot.ticket: None for row in rows}:
                ticket.changed.notify()

    def release(self, batch: BatchMeta) -> None:
        """See :meth:`jackfield.queue.TransferQueue.release`."""
        leases = self._leases_of(batch)
        self._require_whole_groups(leases)
        for lease, rows in leases.items():
            self._give_back(lease, rows)

    def take_over(self, consumer: str) -> list[str]:
        """See :meth:`jackfield.queue.TransferQueue.take_over`."""
        keys: list[str] = []
        for lease in list(self._state.consumer(consumer).leases.values()):
            keys += [row.key for row in lease.rows]
            self._give_back(lease, list(lease.rows))
        return keys

    def _leases_of(self, batch: BatchMeta) -> dict[Lease, list[Row]]:
        """The living rows of a batch by lease."""
        leases: dict[Lease, list[Row]] = {}
        for consumer, row in self.held_rows(batch):
            leases.setdefault(consumer.leased[row], []).append(row)
        return leases

    def _give_back(self, lease: Lease, rows: Sequence[Row]) -> None:
        consumer = lease.consumer
        for row in rows:
            lease.rows.pop(row)
            del consumer.leased[row]
        self._forget_if_empty(lease)
        self._return(consumer, rows, whole=lease.whole)

    def _return(self, consumer: Consumer, rows: Sequence[Row], *, whole: bool) -> None:
        """Make rows available again to a consumer that had them; a group that it has used waits for its next use."""
        for group in {row.group: None for row in rows} if whole else ():
            if consumer in group.held_by and group not in consumer.used and not group.consumed:
                group.held_by.discard(consumer)
                group.slot.ticket.held[consumer] -= 1
        for row in rows:
            self._offer(consumer, row)
        consumer.line.news()
        consumer.groups.news()

    def held_rows(self, batch: BatchMeta) -> list[tuple[Consumer, Row]]:
        """The rows of a batch that still live, all of which the batch's leases must hold, with who holds them.

        Raises:
            LeaseError: naming rows that they do not hold.
        """
        held: list[tuple[Consumer, Row]] = []
        lost: list[tuple[Consumer, Row]] = []
        for key, claim in zip(batch.keys, batch.claims, strict=True):
            row, consumer = self._state.row(key), self._state.consumer(claim.consumer)
            if row is not None:
                lease = consumer.leased.get(row)
                (held if lease is not None and lease.epoch == claim.epoch else lost).append((consumer, row))
        if lost:
            consumer = lost[0][0]
            raise LeaseError(
                f"consumer {consumer.name!r} does not hold {some([row.key for _, row in lost])} under this lease any "
                "more",
                where=consumer.name,
                expected=f"a lease of epoch {next(c.epoch for c in batch.claims if c.consumer == consumer.name)}",
                found="a lease that expired, was given back or acked",
                fix="lease the rows again; renew leases of long steps, or raise lease_seconds",
            )
        return held

    @staticmethod
    def _require_whole_groups(leases: Mapping[Lease, Sequence[Row]]) -> None:
        for lease, rows in leases.items():
            given = set(rows)
            for group in {row.group: None for row in rows} if lease.whole else ():
                if any(row not in given for row in group.rows):
                    raise QueueError(
                        f"group {group.id} was leased as a whole and cannot be acked or given back in part",
                        where=group.id,
                        expected=f"all of its {len(group.rows)} rows",
                    )

    def require_open(self) -> None:
        """Refuse to go on with a closed queue."""
        if self._state.closed:
            raise QueueError("the TransferQueue is closed", code="queue.closed", fix="start() it, and close it last")


class _ReadyRows:
    """The rows that a consumer could have, as a sampler sees them."""

    step = None

    def __init__(self, consumer: Consumer, state: State) -> None:
        self._consumer = consumer
        self._state = state

    def __len__(self) -> int:
        return len(self._consumer.ready)

    def __iter__(self) -> Iterator[str]:
        return (row.key for row in self._consumer.ready)

    def tags(self, name: str) -> Mapping[str, Any]:
        return self._state.rows[name].all_tags()

    def uses(self, name: str) -> int:
        return 0
