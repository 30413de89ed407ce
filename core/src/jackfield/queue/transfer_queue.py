"""The TransferQueue: what producers and consumers talk to.

Here, client and controller live in one process; values go to a backend and never through the controller.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from jackfield.abc.transfer_queue import (
    Column,
    DeleteRequest,
    GetRequest,
    PutRequest,
    SnapshotRequest,
    TagsRequest,
    TransferQueueBackend,
)
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.columns import take
from jackfield.queue.controller import Controller
from jackfield.queue.meta import BatchMeta, GroupSlot, GroupView, Ticket
from jackfield.queue.rows import Written, check_columns
from jackfield.queue.samplers import Sampler
from jackfield.queue.snapshot import load_state, state_dict
from jackfield.queue.state import State

__all__ = ["STATE_FILE", "VALUES_FOLDER", "TransferQueue"]

STATE_FILE = "controller.json"
VALUES_FOLDER = "values"


class TransferQueue:
    """Samples × columns, with leases and acks.

    **Rows.** A run of a group ends with no, one or several rows (:meth:`put_run`) or fails (:meth:`fail_run`). Rows are
    visible to a consumer from the moment that its columns are there. A row that fails or whose group is dropped is
    gone: whoever still works on it is not punished; columns put into it and acks of it are ignored.

    **Groups** settle when all their runs have ended: enough surviving rows, and the group is published; too few, and
    it is dropped and its slot refilled. When a row of a published group fails, the same rule decides again. Once a
    consumer has leased a group as a whole, it does not change any more.

    **Backpressure.** :meth:`put_run` waits while ``max_rows`` or ``max_bytes`` would be exceeded (rows count until they
    are deleted, so acked rows count until their commit). Rows of a ticket that a consumer waits for *now*, and of the
    oldest unfinished ticket while a consumer waits for any row in vain, are let in whatever the limits say; further
    columns of rows that are there are never held back. So what a trainer waits for can always be finished: the limits
    bound how far producers run ahead, not the batch itself.

    **Threads.** All methods are called on one event loop.
    """

    def __init__(
        self,
        backend: TransferQueueBackend,
        clock: Clock,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        *,
        max_refills: int = 8,
        lease_seconds: float = 3600.0,
        put_deadline_seconds: float = 3600.0,
        on_ledger: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """
        Args:
            backend: keeps the values.
            clock: through which every wait goes.
            max_rows: backpressure: rows in the queue.
            max_bytes: backpressure: bytes of values in the queue.
            max_refills: how often one slot of a ticket may be refilled before the ticket fails.
            lease_seconds: how long a lease holds without :meth:`renew`; a consumer may have its own.
            put_deadline_seconds: how long :meth:`put_run` waits for room, if it is not told otherwise.
            on_ledger: called with each entry of the ledger, as a plain dict, when it is made.
        """
        self.backend = backend
        self.clock = clock
        self._state = State(clock, on_ledger, closed=True)
        self._controller = Controller(self._state, max_rows=max_rows, max_bytes=max_bytes, max_refills=max_refills)
        self._leases = self._controller.leases
        self._lease_seconds = lease_seconds
        self._put_deadline_seconds = put_deadline_seconds
        self._tasks: list[asyncio.Task[None]] = []
        self._deleting = asyncio.Lock()
        self._failure: Exception | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the backend and the housekeeping (deletion, expiry of leases)."""
        await self.backend.start()
        self._state.closed = False
        self._tasks = [asyncio.create_task(self._delete_discarded()), asyncio.create_task(self._expire_leases())]

    async def close(self) -> None:
        """End every wait with ``queue.closed``, and close the backend. Idempotent."""
        self._state.closed = True
        self._leases.wake_all()
        self._state.room.notify()
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
        await self.backend.close()

    # -- tickets and groups -------------------------------------------------------------------------------------------

    def claim_ticket(self, partition: str, explorer: str, groups: int) -> Ticket:
        """Take the next batch to make.

        Tickets that were given back, with the groups that they had published, come first; they keep their own number
        of groups. New ones are numbered from 0.
        """
        return self._controller.claim_ticket(partition, explorer, groups)

    def vacancies(self, ticket: Ticket) -> int:
        """How many slots of a ticket nobody fills now. A ticket that is handed out again may have none."""
        return self._controller.vacancies(ticket)

    def release_tickets(self, explorer: str) -> tuple[Ticket, ...]:
        """Take the unfinished tickets of a dead explorer back; they are handed out again.

        Their open groups are dropped (without counting as refills) and the same attempts are made again; published
        groups stay.
        """
        return self._controller.release_tickets(explorer)

    async def wait_offer(self, partition: str, deadline_seconds: float) -> int:
        """Wait until a ticket is to be handed out again; its number. :meth:`claim_ticket` then gets it.

        Raises:
            DeadlineExceeded: when none was.
        """
        return await self._controller.wait_offer(partition, deadline_seconds)

    def slots(
        self, ticket: Ticket, deadline_seconds: float, *, until: Literal["leased", "published"] = "leased"
    ) -> AsyncIterator[GroupSlot]:
        """The slots to fill: at once those that have no group, later one for each group that was dropped.

        Ends when the ticket is finished. ``until="leased"``: when a consumer has leased all its groups as a whole, or
        all its rows are consumed; only then can no group be dropped any more, for want of a reward, say. An explorer
        that works ahead iterates over several tickets concurrently. ``until="published"``: when all groups are
        published; if one is dropped afterwards, the ticket is offered to the next claimant (:meth:`wait_offer`).

        Args:
            ticket: that the explorer has claimed.
            deadline_seconds: how long nothing may happen to the ticket.
            until: see above.

        Raises:
            DeadlineExceeded: naming the runs, slots or consumers that are waited for.
            QueueError: when a slot was refilled too often, naming the reasons; or the ticket was taken back.
        """
        return self._controller.slots(ticket, deadline_seconds, until)

    def open_group(
        self,
        slot: GroupSlot,
        task_id: str,
        runs: int,
        minimum_rows: int | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> str:
        """Announce the sibling runs of one task; returns the group's id.

        Args:
            slot: to be filled.
            task_id: of the task.
            runs: how many runs will end.
            minimum_rows: rows that have to survive for the group to be published; None: one of each run.
            tags: of all its rows.

        Raises:
            QueueError: when the slot is filled or taken back, or the ticket has failed.
        """
        return self._controller.open_group(slot, task_id, runs, minimum_rows, tags or {})

    def drop_group(self, group: str, reason: str) -> None:
        """Drop a group that no consumer has leased as a whole, and refill its slot. Dropped already: no effect.

        Raises:
            QueueError: when it is leased, or unknown.
        """
        self._controller.drop_group(group, reason)

    def group(self, group: str) -> GroupView:
        """A group as it is now.

        Raises:
            QueueError: ``queue.unknown-row`` when it is unknown or its ticket has been consumed.
        """
        return self._state.group(group).view()

    async def wait_group_settled(self, group: str, deadline_seconds: float) -> GroupView:
        """Wait until a group is published or dropped.

        Raises:
            DeadlineExceeded: naming the runs that go on.
        """
        return await self._controller.wait_group_settled(group, deadline_seconds)

    def settled_groups(self, partition: str, deadline_seconds: float | None = None) -> AsyncIterator[GroupView]:
        """Every group that is published, once: first those that are there, then each as it comes.

        A service iterates without deadline: the iteration ends when the queue closes.

        Raises:
            DeadlineExceeded: when ``deadline_seconds`` pass between two groups.
        """
        return self._controller.settled_groups(partition, deadline_seconds)

    # -- producers ------------------------------------------------------------------------------------------------

    async def put_run(
        self,
        group: str,
        run: int,
        columns: Mapping[str, Column],
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        deadline_seconds: float | None = None,
    ) -> tuple[str, ...]:
        """End a run with its rows; they are sealed and visible. Returns their keys.

        Args:
            group: that the run belongs to.
            run: 0 to ``runs - 1``.
            columns: of one length; empty, or of no rows, for a run without rows.
            tags: one mapping of plain values for each row.
            deadline_seconds: how long to wait for room; None: the queue's default.

        Raises:
            QueueFull: when there was no room in time.
            QueueError: when the run has ended, or its group was dropped.
        """
        rows = len(next(iter(columns.values()))) if columns else 0
        tags = [{} for _ in range(rows)] if tags is None else tags
        written = Written(columns=tuple(columns), sizes=check_columns(columns, rows))
        async with self.ending_run(group, run, written, tags, deadline_seconds=deadline_seconds) as keys:
            if keys:
                partition = self._state.group(group).partition.name
                await self.backend.put(PutRequest(partition=partition, keys=keys, columns=columns))
        return keys

    @asynccontextmanager
    async def ending_run(
        self,
        group: str,
        run: int,
        written: Written,
        tags: Sequence[Mapping[str, Any]],
        *,
        deadline_seconds: float | None = None,
    ) -> AsyncIterator[tuple[str, ...]]:
        """End a run with rows whose values somebody else writes: yields their keys, and seals them when left.

        Inside, the values have to get to the backend under these keys. What raises inside leaves the run as it was.

        Args:
            group: that the run belongs to.
            run: 0 to ``runs - 1``.
            written: what will be there.
            tags: one mapping of plain values for each row.
            deadline_seconds: how long to wait for room; None: the queue's default.

        Raises:
            QueueFull: when there was no room in time.
            QueueError: when the run has ended, or its group was dropped.
        """
        self._check()
        sizes, rows = written.sizes, len(written.sizes)
        if len(tags) != rows:
            raise QueueError("there is one mapping of tags for each row", expected=rows, found=len(tags))
        if rows and self._controller.limited:
            self._controller.run_keys(group, run, rows)
            seconds = self._put_deadline_seconds if deadline_seconds is None else deadline_seconds
            await self._controller.wait_room(group, run, rows, sum(sizes), seconds)
        keys = self._controller.run_keys(group, run, rows)
        with self._controller.writing(group, run, keys, sum(sizes)):
            yield keys
            if rows and self._shows_tags:
                partition = self._state.group(group).partition.name
                await self.backend.put_tags(TagsRequest(partition=partition, keys=keys, tags=tuple(tags)))
            self._controller.end_run(group, run, keys, written.columns, sizes, tags)

    def fail_run(self, group: str, run: int, reason: str) -> None:
        """End a run without rows, because it failed.

        Raises:
            QueueError: when the run has ended, or its group was dropped.
        """
        self._controller.fail_run(group, run, reason)

    async def put(
        self,
        target: BatchMeta | Sequence[str],
        columns: Mapping[str, Column],
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        overwrite: bool = False,
    ) -> tuple[str, ...]:
        """Write further columns of rows that are there, by any producer; consumers whose columns are complete wake.

        Rows that failed, expired or were consumed are skipped. Returns the keys of the others.

        Args:
            target: keys of one partition; or a leased batch, whose lease must still hold.
            columns: one row for each key.
            tags: to be added to the rows' tags.
            overwrite: let columns be replaced that are there; the holder of a lease always may.

        Raises:
            LeaseError: when the batch's lease does not hold any more.
            QueueError: ``queue.unknown-row``, or ``queue.column`` for a column that is there.
        """
        self._check()
        keys = target.keys if isinstance(target, BatchMeta) else tuple(target)
        sizes = check_columns(columns, len(keys))
        if tags is not None and len(tags) != len(keys):
            raise QueueError("there is one mapping of tags for each row", expected=len(keys), found=len(tags))
        batch = target if isinstance(target, BatchMeta) else None
        found = self._controller.begin_columns(keys, tuple(columns), batch, overwrite)
        living = [index for index, row in enumerate(found) if row is not None]
        rows = [row for row in found if row is not None]
        if len(living) < len(keys):
            columns = {name: take(column, living) for name, column in columns.items()}
            tags = None if tags is None else [tags[index] for index in living]
            sizes = tuple(sizes[index] for index in living)
        written = False
        try:
            if rows and columns:
                partition = rows[0].group.partition.name
                request = PutRequest(partition=partition, keys=tuple(row.key for row in rows), columns=columns)
                await self.backend.put(request)
            written = True
        finally:
            kept = self._controller.end_columns(rows, tuple(columns), sizes, tags, written=written)
        return kept

    def announce(self, target: BatchMeta | Sequence[str], written: Written) -> tuple[str, ...]:
        """A worker has written columns of rows that are there; consumers whose columns are complete wake.

        Rows that failed, expired or were consumed meanwhile are skipped, and the backend forgets what was written.
        Returns the keys of the others.

        Args:
            target: keys of one partition, whose columns are new; or a leased batch, whose lease must still hold.
            written: what is there now.

        Raises:
            LeaseError: when the batch's lease does not hold any more.
            QueueError: ``queue.unknown-row``, or ``queue.column`` for a column that was there.
        """
        self._check()
        keys = target.keys if isinstance(target, BatchMeta) else tuple(target)
        if len(written.sizes) != len(keys):
            raise QueueError("something is written for each row", expected=len(keys), found=len(written.sizes))
        batch = target if isinstance(target, BatchMeta) else None
        found = self._controller.begin_columns(keys, written.columns, batch, overwrite=False)
        for key, row in zip(keys, found, strict=True):
            if row is None:
                self._state.discard(_partition(key), key)
        rows = [row for row in found if row is not None]
        sizes = [size for size, row in zip(written.sizes, found, strict=True) if row is not None]
        return self._controller.end_columns(rows, written.columns, sizes, None, written=True)

    def fail_rows(self, keys: Sequence[str], reason: str) -> None:
        """Fail rows; the policy of their groups decides again. Rows that are gone already are skipped.

        Raises:
            QueueError: when a consumer has leased such a group as a whole; then no row is failed.
        """
        self._controller.fail_rows(keys, reason)

    # -- consumers ------------------------------------------------------------------------------------------------

    def register_consumer(
        self, name: str, partition: str, columns: Sequence[str], *, lease_seconds: float | None = None
    ) -> None:
        """Announce a consumer: rows of ``partition`` that have ``columns`` are ready for it, each of them once.

        Rows are deleted when every registered consumer of their partition has acked them finally. Again with the same
        arguments: no effect.

        Raises:
            QueueError: when the name is registered for something else.
        """
        seconds = self._lease_seconds if lease_seconds is None else lease_seconds
        self._controller.register_consumer(name, partition, columns, seconds)

    async def lease(
        self,
        consumer: str,
        max_rows: int | None = None,
        deadline_seconds: float = 600.0,
        sampler: Sampler | None = None,
    ) -> BatchMeta:
        """Ready rows, whether or not their groups have settled; returns as soon as there is one.

        Args:
            consumer: registered.
            max_rows: at most; None: all that are ready.
            deadline_seconds: how long to wait for the first.
            sampler: chooses; None: :class:`~jackfield.queue.samplers.Sequential`.

        Raises:
            DeadlineExceeded: naming the columns that rows lack and the runs that have not ended.
        """
        self._check()
        return await self._leases.lease(consumer, max_rows, deadline_seconds, sampler)

    async def lease_groups(
        self, consumer: str, ticket: int | Ticket, groups: int | None = None, deadline_seconds: float = 600.0
    ) -> BatchMeta:
        """Whole published groups of one ticket, ordered by slot, run and sequence.

        Args:
            consumer: registered.
            ticket: number of a ticket, claimed or not yet.
            groups: None: all that the consumer has not had, as soon as the ticket is complete and all of them are
                ready; a number: so many (fewer at the end of the ticket, none after it), as soon as they are ready.
            deadline_seconds: how long to wait.

        Raises:
            DeadlineExceeded: naming slots without a group, runs that have not ended, columns that rows lack.
            QueueError: when the ticket has failed, naming the reasons, or has been consumed.
        """
        self._check()
        number = ticket.number if isinstance(ticket, Ticket) else ticket
        return await self._leases.lease_groups(consumer, number, groups, deadline_seconds)

    async def get(self, target: BatchMeta | Sequence[str], columns: Sequence[str]) -> dict[str, Column]:
        """Read columns of rows, in order, without leasing.

        Raises:
            QueueError: ``queue.unknown-row``, ``queue.column``.
        """
        self._check()
        keys = target.keys if isinstance(target, BatchMeta) else tuple(target)
        if not keys:
            raise QueueError("no rows are named", expected="one key at least")
        partition = target.partition if isinstance(target, BatchMeta) else _partition(keys[0])
        result = await self.backend.get(GetRequest(partition=partition, keys=keys, columns=tuple(columns)))
        return dict(result.columns)

    def renew(self, batch: BatchMeta) -> None:
        """Begin the lease's time anew, for all rows that were leased together.

        Raises:
            LeaseError: when it does not hold any more.
        """
        self._leases.renew(batch)

    def release(self, batch: BatchMeta) -> None:
        """Give leased rows back; they are ready again for the same consumer.

        Raises:
            LeaseError: when the lease does not hold any more.
        """
        self._leases.release(batch)

    async def ack(self, batch: BatchMeta, step: int | None = None) -> tuple[str, ...]:
        """Be done with rows, provisionally: final with the commit of ``step``. Returns the keys that were acked.

        Args:
            batch: leased rows; groups that were leased as a whole are acked as a whole.
            step: the trainer's step that used the rows; None: final at once.

        Raises:
            LeaseError: when the lease does not hold any more; then nothing is acked.
        """
        self._check()
        keys, consumed = self._leases.ack(batch, step)
        self._controller.consume(consumed)
        return tuple(keys)

    async def commit(self, step: int) -> None:
        """The trainer's checkpoint that contains all steps up to ``step`` is durable: their acks are final.

        Rows that every consumer has acked finally are deleted; the backend forgets them in the background
        (:meth:`flush`).
        """
        self._check()
        self._controller.consume(self._leases.commit(step))

    async def rollback(self, step: int) -> tuple[str, ...]:
        """Take back the acks of all steps after ``step``; returns the keys of the rows that are ready again.

        Raises:
            QueueError: when later steps are committed already.
        """
        self._check()
        return tuple(self._leases.rollback(step))

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """Every ack, commit, rollback, expiry, drop and release, as plain dicts, in order.

        Whoever keeps them in a file through ``on_ledger`` may clear the list.
        """
        return self._state.ledger

    def drain_failures(self) -> dict[str, str]:
        """What did not become training data since the last call: rows, runs and groups, by id, and why."""
        failures, self._state.failures = self._state.failures, {}
        return failures

    def stats(self) -> dict[str, int]:
        """Rows, bytes, and open tickets and groups."""
        state = self._state
        return {
            "rows": state.row_count,
            "bytes": state.byte_count,
            "tickets": sum(len(partition.tickets) for partition in state.partitions.values()),
            "groups_open": sum(group.state == "open" for group in state.groups.values()),
            "rows_leased": sum(len(consumer.leased) for consumer in state.consumers.values()),
        }

    def state_dict(self) -> dict[str, Any]:
        """The controller's state as plain JSON values: published groups, acks, tickets. Values are the backend's.

        Leased rows are saved as ready, open groups as slots to fill again.
        """
        return state_dict(self._controller)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Replace everything by what :meth:`state_dict` returned. Consumers that are registered keep their columns."""
        load_state(self._controller, saved)

    async def checkpoint(self, folder: str | Path, *, at_cut: Callable[[], None] | None = None) -> None:
        """Write controller and values, as they are at one moment, to ``folder``. Producers go on; deletions wait.

        Args:
            folder: made when it is not there.
            at_cut: called at that moment, so that others can note where they are.
        """
        self._check()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        async with self._deleting:
            text = json.dumps(self.state_dict(), ensure_ascii=False, separators=(",", ":"))
            if at_cut is not None:
                at_cut()
            await self.backend.checkpoint(SnapshotRequest(folder=str(folder / VALUES_FOLDER)))
        partial = folder / f"{STATE_FILE}.partial"
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / STATE_FILE)

    async def restore(self, folder: str | Path) -> None:
        """Replace everything by what :meth:`checkpoint` wrote.

        Raises:
            QueueError: ``queue.invalid`` when the folder holds no complete checkpoint.
        """
        self._check()
        file = Path(folder) / STATE_FILE
        if not file.is_file():
            raise QueueError("the folder holds no checkpoint of a queue", where=str(folder), expected=STATE_FILE)
        async with self._deleting:
            self._state.discarded.clear()
            await self.backend.restore(SnapshotRequest(folder=str(Path(folder) / VALUES_FOLDER)))
            self.load_state_dict(json.loads(file.read_text(encoding="utf-8")))

    async def flush(self) -> None:
        """Return when the backend has forgotten every row that nobody needs."""
        self._check()
        await self._delete_now()

    # -- housekeeping ---------------------------------------------------------------------------------------------

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
            discarded, self._state.discarded = self._state.discarded, {}
            for partition, keys in discarded.items():
                await self.backend.delete(DeleteRequest(partition=partition, keys=tuple(dict.fromkeys(keys))))

    async def _expire_leases(self) -> None:
        while True:
            changed, expires = self._leases.expiry_changed.next(), self._leases.next_expiry()
            if expires is None:
                await changed
            else:
                with suppress(DeadlineExceeded):
                    await self.clock.wait_for(changed, max(expires - self.clock.time(), 0.0), "a lease to expire")
            self._leases.expire()


def _partition(key: str) -> str:
    """Keys are ``partition/ticket/slot/attempt/run/sequence``."""
    return key.rsplit("/", 5)[0]
