"""What every part of the queue has: backend, controller, and the housekeeping from start to close."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from jackfield.abc.transfer_queue import DeleteRequest, TransferQueueBackend
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.controller import Controller
from jackfield.queue.journal import Journal
from jackfield.queue.ledger import Ledger
from jackfield.queue.saving import save_slot
from jackfield.queue.state import State

__all__ = ["Lifetime"]


class Lifetime:
    """Starts and closes the queue, deletes what nobody needs and expires leases."""

    def __init__(
        self,
        backend: TransferQueueBackend,
        clock: Clock,
        max_samples: int | None = None,
        max_bytes: int | None = None,
        *,
        max_retries: int = 8,
        lease_seconds: float = math.inf,
        put_deadline_seconds: float = 3600.0,
        ledger: Path | None = None,
        journal: Path | None = None,
    ) -> None:
        """
        Args:
            backend: keeps the values.
            clock: through which every wait goes.
            max_samples: backpressure: rows in the queue.
            max_bytes: backpressure: bytes of values in the queue.
            max_retries: how often one slot of a ticket may be refilled before the ticket fails.
            lease_seconds: how long a lease holds without :meth:`renew`; infinite: as long as the process of its holder
                lives. A consumer may have its own.
            put_deadline_seconds: how long :meth:`put_run` waits for room, if it is not told otherwise.
            ledger: file that gets each entry of the ledger when it is made; None: they are in :attr:`ledger`.
            journal: file in which what the controller knows survives its process, beside a durable backend. It begins
                with :meth:`clear`, :meth:`restore` or :meth:`recover`.
        """
        self.backend = backend
        self.clock = clock
        self._state = State(clock, closed=True)
        self._ledger_path = ledger
        self._ledger: Ledger | None = None
        self._controller = Controller(
            self._state, max_samples=max_samples, max_bytes=max_bytes, max_retries=max_retries
        )
        self._controller.write_changes = self._write_changes
        self._journal = None if journal is None else Journal(journal)
        self._state.changes.kept = journal is not None
        self._marks: list[str] = []
        self.went_on = False  #: whether the last :meth:`recover` found this controller living
        self._leases = self._controller.leases
        self._lease_seconds = lease_seconds
        self._put_deadline_seconds = put_deadline_seconds
        self._tasks: list[asyncio.Task[None]] = []
        self._deleting = asyncio.Lock()
        self._failure: Exception | None = None

    async def start(self) -> None:
        """Start the backend and the housekeeping (deletion, expiry of leases)."""
        await self.backend.start()
        if self._ledger_path is not None:
            self._ledger = Ledger(self._ledger_path)
            self._state.on_ledger = self._ledger.write
        self._state.closed = False
        self._tasks = [asyncio.create_task(self._delete_discarded()), asyncio.create_task(self._expire_leases())]

    async def close(self) -> None:
        """End every wait with ``queue.closed``, and close the backend. Idempotent."""
        self._state.closed = True
        self._leases.wake_all()
        self._state.room.notify()
        self._state.noticed.notify()
        for partition in self._state.partitions.values():
            partition.fed.notify()
            partition.offers.notify()
            for ticket in partition.tickets.values():
                ticket.changed.notify()
        for group in self._state.groups.values():
            group.settled.notify()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        if self._journal is not None:
            self._journal.close()
        if self._ledger is not None:
            self._ledger.close()
        await self.backend.close()

    def _write_changes(self) -> None:
        """Let the journal have what has changed since the last time; without a journal there is nothing."""
        changes = self._state.changes
        if not changes.entries and not changes.slots:
            return
        entries, changes.entries = changes.entries, []
        slots, changes.slots = changes.slots, {}
        if self._journal is None or not self._journal.is_open:
            return  # a base will have it
        for slot in slots:
            ticket = slot.ticket
            if ticket.partition.tickets.get(ticket.number) is ticket:
                entries.append(["slot", ticket.partition.name, ticket.number, slot.index, save_slot(slot)])
        if entries:
            self._journal.append(entries)

    def _check(self) -> None:
        self._leases.require_open()
        if self._failure is not None:
            raise QueueError(f"the backend failed to delete rows: {self._failure}") from self._failure

    @property
    def _shows_tags(self) -> bool:
        return type(self.backend).put_tags is not TransferQueueBackend.put_tags

    async def _delete_discarded(self) -> None:
        while True:
            if not self._state.discarded:
                await self._state.discards.next()
            try:
                await self._delete_now()
            except Exception as error:
                self._failure = error  # raised by the next call; nothing is lost but room
                return

    async def _delete_now(self) -> None:
        async with self._deleting:
            await self._forget()

    async def _forget(self) -> None:
        """Let the backend forget what nobody needs; the caller holds the lock."""
        self._write_changes()  # that nobody needs them
        discarded, self._state.discarded = self._state.discarded, {}
        for partition, keys in discarded.items():
            await self.backend.delete(DeleteRequest(partition=partition, keys=tuple(dict.fromkeys(keys))))
            self._state.changes.note("forgotten", partition, keys)
        self._write_changes()

    def end_leases(self, leases: Iterable[tuple[str, int]]) -> None:
        """End leases whose holder has ended: those that last as long as it.

        Args:
            leases: consumer and epoch of each.
        """
        self._leases.end_held(leases)

    async def _expire_leases(self) -> None:
        while True:
            changed, expires = self._leases.expiry_changed.next(), self._leases.next_expiry()
            if expires is None:
                await changed
            else:
                with suppress(DeadlineExceeded):
                    await self.clock.wait_for(changed, max(expires - self.clock.time(), 0.0), "a lease to expire")
            self._leases.expire()
