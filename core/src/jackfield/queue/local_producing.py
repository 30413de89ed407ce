"""The producers' side, where the controller lives in this process."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from jackfield.abc.transfer_queue import GetRequest, TagsRequest, TransferQueueBackend
from jackfield.errors import QueueError
from jackfield.queue.changes import journaled
from jackfield.queue.lifetime import Lifetime
from jackfield.queue.lineage import Lineage, with_lineage
from jackfield.queue.meta import BatchMeta, GroupSlot, GroupView, Ticket, partition_of
from jackfield.queue.missing import some
from jackfield.queue.producing import Producing
from jackfield.queue.records import Row
from jackfield.queue.rows import Written

__all__ = ["LocalProducing"]


class LocalProducing(Lifetime, Producing):
    """Asks the controller."""

    @journaled
    async def claim_ticket(self, partition: str, explorer: str, groups: int) -> Ticket:
        """See :meth:`~jackfield.queue.TransferQueue.claim_ticket`."""
        return self._controller.claim_ticket(partition, explorer, groups)

    @journaled
    async def wait_ticket(
        self, partition: str, explorer: str, groups: int, below: int, deadline_seconds: float
    ) -> Ticket | None:
        """See :meth:`~jackfield.queue.TransferQueue.wait_ticket`."""
        return await self._controller.wait_ticket(partition, explorer, groups, below, deadline_seconds)

    async def vacancies(self, ticket: Ticket) -> int:
        """See :meth:`~jackfield.queue.TransferQueue.vacancies`."""
        return self._controller.vacancies(ticket)

    @journaled
    async def release_tickets(self, explorer: str) -> tuple[Ticket, ...]:
        """See :meth:`~jackfield.queue.TransferQueue.release_tickets`."""
        return self._controller.release_tickets(explorer)

    async def wait_offer(self, partition: str, deadline_seconds: float) -> int:
        """See :meth:`~jackfield.queue.TransferQueue.wait_offer`."""
        return await self._controller.wait_offer(partition, deadline_seconds)

    def slots(
        self, ticket: Ticket, deadline_seconds: float, *, until: Literal["acked", "published"] = "acked"
    ) -> AsyncIterator[GroupSlot]:
        """See :meth:`~jackfield.queue.TransferQueue.slots`."""
        return self._controller.slots(ticket, deadline_seconds, until)

    @journaled
    async def open_group(
        self,
        slot: GroupSlot,
        task_id: str,
        runs: int,
        minimum_rows: int | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> str:
        """See :meth:`~jackfield.queue.TransferQueue.open_group`."""
        return self._controller.open_group(slot, task_id, runs, minimum_rows, tags or {})

    @journaled
    async def drop_group(self, group: str, reason: str) -> None:
        """See :meth:`~jackfield.queue.TransferQueue.drop_group`."""
        self._controller.drop_group(group, reason)

    async def group(self, group: str) -> GroupView:
        """See :meth:`~jackfield.queue.TransferQueue.group`."""
        return self._state.group(group).view()

    async def wait_group_settled(self, group: str, deadline_seconds: float) -> GroupView:
        """See :meth:`~jackfield.queue.TransferQueue.wait_group_settled`."""
        return await self._controller.wait_group_settled(group, deadline_seconds)

    def settled_groups(self, partition: str, deadline_seconds: float | None = None) -> AsyncIterator[GroupView]:
        """See :meth:`~jackfield.queue.TransferQueue.settled_groups`."""
        return self._controller.settled_groups(partition, deadline_seconds)

    @asynccontextmanager
    async def ending_run(
        self,
        group: str,
        run: int,
        written: Written,
        tags: Sequence[Mapping[str, Any]],
        *,
        lineage: Sequence[Lineage | None] | None = None,
        deadline_seconds: float | None = None,
    ) -> AsyncIterator[tuple[str, ...]]:
        """See :meth:`~jackfield.queue.TransferQueue.ending_run`."""
        self._check()
        sizes, rows = written.sizes, len(written.sizes)
        if len(tags) != rows or (lineage is not None and len(lineage) != rows):
            found = f"{len(tags)} tags, {'no' if lineage is None else len(lineage)} lineages"
            raise QueueError("there is one mapping of tags, and one lineage, for each row", expected=rows, found=found)
        tags = with_lineage(tags, lineage)
        if rows and self._controller.limited:
            self._controller.run_keys(group, run, rows)
            seconds = self._put_deadline_seconds if deadline_seconds is None else deadline_seconds
            await self._controller.wait_room(group, run, rows, sum(sizes), seconds)
        keys = self._controller.run_keys(group, run, rows)
        try:
            with self._controller.writing(group, run, keys, sum(sizes)):
                yield keys
                if rows and self._shows_tags:
                    partition = self._state.group(group).partition.name
                    await self.backend.put_tags(TagsRequest(partition=partition, keys=keys, tags=tuple(tags)))
                self._controller.end_run(group, run, keys, written.columns, sizes, tags)
                for key, made in zip(keys, lineage or (), strict=False):
                    if made is not None:
                        self._state.derive(key, made)
        finally:
            self._write_changes()

    @journaled
    async def remember_lineage(self, name: str, lineage: Lineage) -> None:
        """See :meth:`~jackfield.queue.TransferQueue.remember_lineage`."""
        self._state.derive(name, lineage)

    @journaled
    async def fail_run(self, group: str, run: int, reason: str) -> None:
        """See :meth:`~jackfield.queue.TransferQueue.fail_run`."""
        self._controller.fail_run(group, run, reason)

    @asynccontextmanager
    async def adding(
        self,
        target: BatchMeta | Sequence[str],
        written: Written,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        overwrite: bool = False,
    ) -> AsyncIterator[set[str]]:
        """See :meth:`~jackfield.queue.TransferQueue.adding`."""
        self._check()
        keys = target.keys if isinstance(target, BatchMeta) else tuple(target)
        for what, found in (("one mapping of tags", tags), ("something written", written.sizes)):
            if found is not None and len(found) != len(keys):
                raise QueueError(f"there is {what} for each row", expected=len(keys), found=len(found))
        batch = target if isinstance(target, BatchMeta) else None
        rows = self._controller.begin_columns(keys, written.columns, batch, overwrite)
        living = [index for index, row in enumerate(rows) if row is not None]
        some = None if tags is None else [tags[index] for index in living]
        sizes, done = [written.sizes[index] for index in living], False
        named = {keys[index] for index in living}
        try:
            yield named
            await self._show_tags([row for row in rows if row is not None], some)
            done = True
        finally:
            there = [row for row in rows if row is not None]
            kept = self._controller.end_columns(there, written.columns, sizes, some, written=done)
            named.intersection_update(kept)
            self._write_changes()

    async def announce(
        self, target: BatchMeta | Sequence[str], written: Written, tags: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, ...]:
        """See :meth:`~jackfield.queue.TransferQueue.announce`."""
        keys = target.keys if isinstance(target, BatchMeta) else tuple(target)
        async with self.adding(target, written, tags) as living:
            for key in keys:
                if key not in living:
                    self._state.discard(partition_of(key), key)
        return tuple(key for key in keys if key in living)

    async def _show_tags(self, rows: Sequence[Row], tags: Sequence[Mapping[str, Any]] | None) -> None:
        """Let the backend show tags that are added to rows, beside those that they have."""
        if tags is None or not self._shows_tags:
            return
        places: dict[str, dict[str, Mapping[str, Any]]] = {}
        for row, more in zip(rows, tags, strict=True):
            places.setdefault(row.group.partition.name, {})[row.key] = {**row.tags, **more}
        for partition, shown in places.items():
            request = TagsRequest(partition=partition, keys=tuple(shown), tags=tuple(shown.values()))
            await self.backend.put_tags(request)

    @journaled
    async def fail_lost(self, batch: BatchMeta | None = None, named: Sequence[str] = ()) -> tuple[str, ...]:
        """See :meth:`~jackfield.queue.TransferQueue.fail_lost`."""
        self._check()
        lost = [*named, *sorted(await self._lost())]
        if not lost:
            return ()
        there = [key for key in dict.fromkeys(lost) if key in self._state.rows]
        self._controller.lose_rows(lost, batch, "its values are gone from the store, or damaged in it")
        failed = [key for key in there if key not in self._state.rows]
        if failed:
            logging.getLogger("jackfield").warning(
                "values of %d rows are gone from the queue's store, or damaged in it; what is needed of them is made "
                "again: %s",
                *(len(failed), some(failed)),
            )
        return tuple(key for key in dict.fromkeys(lost) if key not in self._state.rows)

    async def _lost(self) -> set[str]:
        """The rows that the backend does not have any more."""
        if type(self.backend).lost is TransferQueueBackend.lost:
            return set()
        places: dict[tuple[str, int], list[str]] = {}
        for row in self._state.rows.values():
            places.setdefault((row.group.partition.name, row.columns), []).append(row.key)
        lost: set[str] = set()
        for (partition, columns), keys in places.items():
            names = self._state.partition(partition).names(columns)
            request = GetRequest(partition=partition, keys=tuple(keys), columns=names)
            lost |= set((await self.backend.lost(request)).keys)
        return lost

    @journaled
    async def fail_rows(self, keys: Sequence[str], reason: str) -> None:
        """See :meth:`~jackfield.queue.TransferQueue.fail_rows`."""
        self._controller.fail_rows(keys, reason)
