"""What explorers, reward agents and other producers call: tickets, groups, runs and columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

from jackfield.abc.transfer_queue import Column, PutRequest, TransferQueueBackend
from jackfield.queue.columns import take
from jackfield.queue.lineage import Lineage
from jackfield.queue.meta import BatchMeta, GroupSlot, GroupView, Ticket, partition_of
from jackfield.queue.rows import Written, check_columns

__all__ = ["Producing"]


class Producing(ABC):
    """The producers' side of a :class:`~jackfield.queue.TransferQueue`."""

    backend: TransferQueueBackend  #: where this process writes and reads values

    # -- tickets and groups -------------------------------------------------------------------------------------------

    @abstractmethod
    async def claim_ticket(self, partition: str, explorer: str, groups: int) -> Ticket:
        """Take the next batch to make.

        Tickets that were given back, with the groups that they had published, come first; they keep their own number
        of groups. New ones are numbered from 0.
        """

    @abstractmethod
    async def wait_ticket(
        self, partition: str, explorer: str, groups: int, below: int, deadline_seconds: float
    ) -> Ticket | None:
        """The next batch to make before ticket ``below``; None when all of these are finished (:meth:`slots`).

        Where all of them are claimed it waits: another explorer's may be given back.

        Args:
            partition: of the tickets.
            explorer: that makes the batch.
            groups: of a new ticket.
            below: the first number that is not to be made.
            deadline_seconds: how long nothing may happen, beyond the time for which unfinished tickets are leased.

        Raises:
            DeadlineExceeded: naming the unfinished tickets.
            QueueError: when one of them has failed.
        """

    @abstractmethod
    async def vacancies(self, ticket: Ticket) -> int:
        """How many slots of a ticket nobody fills now. A ticket that is handed out again may have none."""

    @abstractmethod
    async def release_tickets(self, explorer: str) -> tuple[Ticket, ...]:
        """Take the unfinished tickets of a dead explorer back; they are handed out again.

        Their open groups are dropped (without counting as refills) and the same attempts are made again; published
        groups stay.
        """

    @abstractmethod
    async def wait_offer(self, partition: str, deadline_seconds: float) -> int:
        """Wait until a ticket is to be handed out again; its number. :meth:`claim_ticket` then gets it.

        Raises:
            DeadlineExceeded: when none was.
        """

    @abstractmethod
    def slots(
        self, ticket: Ticket, deadline_seconds: float, *, until: Literal["acked", "published"] = "acked"
    ) -> AsyncIterator[GroupSlot]:
        """The slots to fill: at once those that have no group, later one for each group that was dropped.

        Ends when the ticket is finished. ``until="acked"``: when a consumer has leased all its groups as a whole and
        acked them, or all its rows are consumed; only then can no group be dropped any more, for want of a reward, or
        because its values were lost. An explorer that works ahead iterates over several tickets concurrently.
        ``until="published"``: when all groups are published; if one is dropped afterwards, the ticket is offered to the
        next claimant (:meth:`wait_offer`).

        Args:
            ticket: that the explorer has claimed.
            deadline_seconds: how long nothing may happen to the ticket, beyond the time for which it is leased.
            until: see above.

        Raises:
            DeadlineExceeded: naming the runs, slots or consumers that are waited for.
            QueueError: when a slot was refilled too often, naming the reasons; or the ticket was taken back.
        """

    @abstractmethod
    async def open_group(
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

    @abstractmethod
    async def drop_group(self, group: str, reason: str) -> None:
        """Drop a group that no consumer has leased as a whole, and refill its slot. Dropped already: no effect.

        Raises:
            QueueError: when it is leased, or unknown.
        """

    @abstractmethod
    async def group(self, group: str) -> GroupView:
        """A group as it is now.

        Raises:
            QueueError: ``queue.unknown-sample`` when it is unknown or its ticket has been consumed.
        """

    @abstractmethod
    async def wait_group_settled(self, group: str, deadline_seconds: float) -> GroupView:
        """Wait until a group is published or dropped.

        Raises:
            DeadlineExceeded: naming the runs that go on.
        """

    @abstractmethod
    def settled_groups(self, partition: str, deadline_seconds: float | None = None) -> AsyncIterator[GroupView]:
        """Every group that is published, once: first those that are there, then each as it comes.

        A service iterates without deadline: the iteration ends when the queue closes.

        Raises:
            DeadlineExceeded: when ``deadline_seconds`` pass between two groups.
        """

    # -- runs --------------------------------------------------------------------------------------------------------

    async def put_run(
        self,
        group: str,
        run: int,
        columns: Mapping[str, Column],
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        lineage: Sequence[Lineage | None] | None = None,
        deadline_seconds: float | None = None,
    ) -> tuple[str, ...]:
        """End a run with its rows; they are sealed and visible. Returns their keys.

        Args:
            group: that the run belongs to.
            run: 0 to ``runs - 1``.
            columns: of one length; empty, or of no rows, for a run without rows.
            tags: one mapping of plain values for each row.
            lineage: for each row what it was made of, None where of no other; None: all of no other.
            deadline_seconds: how long to wait for room; None: the queue's default.

        Raises:
            QueueFull: when there was no room in time.
            QueueError: when the run has ended, or its group was dropped.
        """
        rows = len(next(iter(columns.values()))) if columns else 0
        tags = [{} for _ in range(rows)] if tags is None else tags
        written = Written(columns=tuple(columns), sizes=check_columns(columns, rows))
        async with self.ending_run(
            group, run, written, tags, lineage=lineage, deadline_seconds=deadline_seconds
        ) as keys:
            if keys:
                await self.backend.put(PutRequest(partition=partition_of(keys[0]), keys=keys, columns=columns))
        return keys

    @abstractmethod
    def ending_run(
        self,
        group: str,
        run: int,
        written: Written,
        tags: Sequence[Mapping[str, Any]],
        *,
        lineage: Sequence[Lineage | None] | None = None,
        deadline_seconds: float | None = None,
    ) -> AbstractAsyncContextManager[tuple[str, ...]]:
        """End a run with rows whose values somebody else writes: yields their keys, and seals them when left.

        Inside, the values have to get to the backend under these keys. What raises inside leaves the run as it was.

        Args:
            group: that the run belongs to.
            run: 0 to ``runs - 1``.
            written: what will be there.
            tags: one mapping of plain values for each row.
            lineage: for each row what it was made of, None where of no other; None: all of no other.
            deadline_seconds: how long to wait for room; None: the queue's default.

        Raises:
            QueueFull: when there was no room in time.
            QueueError: when the run has ended, or its group was dropped.
        """

    @abstractmethod
    async def remember_lineage(self, name: str, lineage: Lineage) -> None:
        """Say what a row of another queue was made of, which is a parent of rows here."""

    @abstractmethod
    async def fail_run(self, group: str, run: int, reason: str) -> None:
        """End a run without rows, because it failed.

        Raises:
            QueueError: when the run has ended, or its group was dropped.
        """

    # -- columns ----------------------------------------------------------------------------------------------------

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
            target: keys; or a leased batch, whose lease must still hold.
            columns: one row for each key.
            tags: to be added to the rows' tags.
            overwrite: let columns be replaced that are there; the holder of a lease always may.

        Raises:
            LeaseError: when the batch's lease does not hold any more.
            QueueError: ``queue.unknown-sample``, or ``queue.column`` for a column that is there.
        """
        keys = target.keys if isinstance(target, BatchMeta) else tuple(target)
        written = Written(columns=tuple(columns), sizes=check_columns(columns, len(keys)))
        async with self.adding(target, written, tags, overwrite=overwrite) as living:
            places: dict[str, list[int]] = {}
            for index, key in enumerate(keys):
                if columns and key in living:
                    places.setdefault(partition_of(key), []).append(index)
            for partition, chosen in places.items():
                some = columns
                if len(chosen) < len(keys):
                    some = {name: take(column, chosen) for name, column in columns.items()}
                names = tuple(keys[index] for index in chosen)
                await self.backend.put(PutRequest(partition=partition, keys=names, columns=some))
        return tuple(key for key in keys if key in living)

    @abstractmethod
    def adding(
        self,
        target: BatchMeta | Sequence[str],
        written: Written,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        overwrite: bool = False,
    ) -> AbstractAsyncContextManager[set[str]]:
        """Columns of rows that are there, whose values somebody else writes: yields the keys that are to be written.

        Inside, the values have to get to the backend; when it is left, consumers whose columns are complete wake, and
        rows that went meanwhile are not in the set any more. What raises inside leaves the rows as they were. See
        :meth:`put`.
        """

    @abstractmethod
    async def announce(
        self, target: BatchMeta | Sequence[str], written: Written, tags: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, ...]:
        """A worker has written columns of rows that are there; consumers whose columns are complete wake.

        Rows that failed, expired or were consumed meanwhile are skipped, and the backend forgets what was written.
        Returns the keys of the others.

        Args:
            target: keys of one partition, whose columns are new; or a leased batch, whose lease must still hold.
            written: what is there now.
            tags: to be added to the rows' tags.

        Raises:
            LeaseError: when the batch's lease does not hold any more.
            QueueError: ``queue.unknown-sample``, or ``queue.column`` for a column that was there.
        """

    @abstractmethod
    async def fail_lost(self, batch: BatchMeta | None = None, named: Sequence[str] = ()) -> tuple[str, ...]:
        """Fail the rows whose values the backend has lost; groups with too few rows left are refilled.

        A group that a consumer has leased as a whole is its own concern: it may have read everything. Where it has not,
        it names its batch here, gives it back and leases its ticket anew. What it has acked nobody needs any more.

        Args:
            batch: that the caller holds.
            named: rows that the backend has named already (``found`` of ``queue.lost``).

        Returns:
            keys of lost rows that are not in the queue any more.

        Raises:
            LeaseError: when the batch's lease does not hold any more.
        """

    @abstractmethod
    async def fail_rows(self, keys: Sequence[str], reason: str) -> None:
        """Fail rows; the policy of their groups decides again. Rows that are gone already are skipped.

        Raises:
            QueueError: when a consumer has leased such a group as a whole; then no row is failed.
        """
