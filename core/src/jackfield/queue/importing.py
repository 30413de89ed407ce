"""Rows of files into a partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from jackfield.abc.transfer_queue import Column, TransferQueueContext
from jackfield.clock import Clock
from jackfield.errors import QueueError
from jackfield.queue.cells import column_of
from jackfield.queue.lineage import Lineage
from jackfield.queue.local import STATE_FILE, LocalQueue
from jackfield.queue.memory import MemoryBackend, MemoryConfig
from jackfield.queue.row_files import StoredRow, read_rows
from jackfield.queue.transfer_queue import TransferQueue

__all__ = ["import_file", "put_rows"]

_WHO = "import"
_SECONDS = 600.0  #: for room in the queue, and for nothing else: nobody works on these rows


async def put_rows(
    queue: TransferQueue,
    partition: str,
    rows: Iterable[StoredRow],
    origin: str,
    complete: Callable[[StoredRow], StoredRow] = lambda row: row,
) -> int:
    """Put rows as one ticket of published groups; returns their number.

    Rows of one group become one group again, each as a run of its own. Its parent is ``ORIGIN:KEY``, or
    ``ORIGIN`` where it had no key, and what that was made of is remembered.

    Args:
        queue: started.
        partition: where they go.
        rows: in order.
        origin: where they are from, a file or a folder.
        complete: adds to each row what is missing.

    Raises:
        QueueError: where a row cannot be put.
    """
    groups: dict[object, list[StoredRow]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(number if row.group is None else (row.partition, row.group), []).append(row)
    if not groups:
        return 0
    ticket = await queue.claim_ticket(partition, _WHO, len(groups))
    while not await queue.vacancies(ticket):  # of an earlier import: a restored queue offers it again
        ticket = await queue.claim_ticket(partition, _WHO, len(groups))
    left = iter(groups.values())
    async for slot in queue.slots(ticket, _SECONDS, until="published"):
        members = next(left)
        task = members[0].task
        group = await queue.open_group(
            slot, task_id=task if task is not None else f"row-{slot.index}", runs=len(members)
        )
        for run, row in enumerate(map(complete, members)):
            parent = origin if row.key is None else f"{origin}:{row.key}"
            columns, lineage = _columns(row), Lineage(_WHO, (parent,))
            await queue.put_run(group, run, columns, [row.tags], lineage=[lineage], deadline_seconds=_SECONDS)
            if "operation" in row.tags and "parents" in row.tags:
                await queue.remember_lineage(parent, Lineage(row.tags["operation"], tuple(row.tags["parents"])))
    return sum(map(len, groups.values()))


def _columns(row: StoredRow) -> Mapping[str, Column]:
    return {name: column_of(name, [cell]) for name, cell in row.cells.items()}


async def import_file(file: Path, folder: Path, partition: str) -> int:
    """Put the rows of a JSONL or Parquet file into the checkpointed queue of ``folder``; returns their number.

    Raises:
        QueueError: where the file is no file of rows, or the folder holds something else than a queue.
    """
    context = TransferQueueContext()
    queue = LocalQueue(MemoryBackend(MemoryConfig(), context), Clock())
    await queue.start()
    try:
        if (folder / STATE_FILE).is_file():
            await queue.restore(folder)
        elif folder.is_dir() and any(folder.iterdir()):
            raise QueueError("the folder holds something else than a queue", where=str(folder), expected=STATE_FILE)
        count = await put_rows(queue, partition, read_rows(file), str(file))
        await queue.checkpoint(folder)
    finally:
        await queue.close()
    return count
