"""Rows of files into a partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast

from jackfield.abc.transfer_queue import Column
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.appending import AppendingBackend
from jackfield.queue.cells import column_of
from jackfield.queue.lineage import Lineage
from jackfield.queue.local import STATE_FILE, VALUES_FOLDER, LocalQueue
from jackfield.queue.meta import GroupSlot, Ticket
from jackfield.queue.row_files import StoredRow, read_rows
from jackfield.queue.transfer_queue import TransferQueue

__all__ = ["ImportedRows", "import_file"]

_WHO = "import"
_SECONDS = 600.0  #: for room in the queue, and for nothing else: nobody works on these rows


class ImportedRows:
    """Rows of a file, or of a queue's folder, as one ticket of published groups: put there, and put again where lost.

    Rows of one group become one group again, each as a run of its own. Its parent is ``ORIGIN:KEY``, or ``ORIGIN``
    where it had no key, and what that was made of is remembered. Rows are read one by one: of those that were read,
    only the names of their groups are kept.
    """

    def __init__(
        self,
        queue: TransferQueue,
        partition: str,
        read: Callable[[], Iterable[StoredRow]],
        origin: str,
        complete: Callable[[StoredRow], StoredRow] = lambda row: row,
    ) -> None:
        """
        Args:
            queue: started.
            partition: where they go.
            read: the rows from the first one on, in an order that stays.
            origin: where they are from, a file or a folder.
            complete: adds to each row what is missing.
        """
        self._queue = queue
        self._partition = partition
        self._read = read
        self._origin = origin
        self._complete = complete
        self._sizes: list[int] = []  #: of groups, in the order of their first rows
        self._places: dict[object, int] = {}  #: of groups, by what they were called

    def _look(self) -> None:
        """Count groups and their rows."""
        if not self._sizes:
            for number, row in enumerate(self._read()):
                place = self._places.setdefault(_group_of(row, number), len(self._sizes))
                self._sizes += [0] * (place == len(self._sizes))
                self._sizes[place] += 1

    async def put(self) -> int:
        """Put all rows; their number.

        Raises:
            QueueError: where a row cannot be put.
        """
        self._look()
        if not self._sizes:
            return 0
        ticket = await self._queue.claim_ticket(self._partition, _WHO, len(self._sizes))
        while not await self._queue.vacancies(ticket):  # of an earlier import: a restored queue offers it again
            ticket = await self._queue.claim_ticket(self._partition, _WHO, len(self._sizes))
        await self._fill(ticket)
        return sum(self._sizes)

    async def keep(self) -> None:
        """Put groups again whose rows were lost with a part of the store; until cancelled.

        Raises:
            QueueError: a group was lost too often.
        """
        while True:
            with suppress(DeadlineExceeded):
                await self._queue.wait_offer(self._partition, _SECONDS)
                self._look()
                await self._fill(await self._queue.claim_ticket(self._partition, _WHO, len(self._sizes)))

    async def _fill(self, ticket: Ticket) -> None:
        """Fill the places of a ticket that have no group."""
        while vacancies := await self._queue.vacancies(ticket):
            slots = cast("AsyncGenerator[GroupSlot, None]", self._queue.slots(ticket, _SECONDS, until="published"))
            try:
                given = [await anext(slots) for _ in range(vacancies)]
                await self._put({slot.index: slot for slot in given})
            finally:
                await slots.aclose()

    async def _put(self, slots: Mapping[int, GroupSlot]) -> None:
        """Put the groups of these places, row by row."""
        groups: dict[int, str] = {}
        runs: Counter[int] = Counter()
        for number, row in enumerate(self._read()):
            place = self._places[_group_of(row, number)]
            if place not in slots:
                continue
            if place not in groups:
                task = row.task if row.task is not None else f"row-{place}"
                groups[place] = await self._queue.open_group(slots[place], task_id=task, runs=self._sizes[place])
            await self._put_row(groups[place], runs[place], self._complete(row))
            runs[place] += 1

    async def _put_row(self, group: str, run: int, row: StoredRow) -> None:
        parent = self._origin if row.key is None else f"{self._origin}:{row.key}"
        lineage = [Lineage(_WHO, (parent,))]
        await self._queue.put_run(group, run, _columns(row), [row.tags], lineage=lineage, deadline_seconds=_SECONDS)
        if "operation" in row.tags and "parents" in row.tags:
            made = Lineage(row.tags["operation"], tuple(row.tags["parents"]))
            await self._queue.remember_lineage(parent, made)


def _group_of(row: StoredRow, number: int) -> object:
    return number if row.group is None else (row.partition, row.group)


def _columns(row: StoredRow) -> Mapping[str, Column]:
    return {name: column_of(name, [cell]) for name, cell in row.cells.items()}


async def import_file(file: Path, folder: Path, partition: str) -> int:
    """Put the rows of a JSONL or Parquet file into the checkpointed queue of ``folder``; returns their number.

    The file may be larger than memory: values go from it to the folder batch by batch; tags and keys stay in memory.

    Raises:
        QueueError: where the file is no file of rows, or the folder holds something else than a queue.
    """
    queue = LocalQueue(AppendingBackend(folder / VALUES_FOLDER), Clock())
    await queue.start()
    try:
        if (folder / STATE_FILE).is_file():
            await queue.restore(folder)
        elif folder.is_dir() and any(folder.iterdir()):
            raise QueueError("the folder holds something else than a queue", where=str(folder), expected=STATE_FILE)
        count = await ImportedRows(queue, partition, lambda: read_rows(file), str(file)).put()
        await queue.checkpoint(folder)
    finally:
        await queue.close()
    return count
