"""Checkpoints of all units: the rows of one moment."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jackfield.abc.transfer_queue import SnapshotResult
from jackfield.errors import QueueError
from jackfield.sdk.archive import ArchiveWriter, batches, read_archive
from jackfield.sdk.arrow import SavedSample
from jackfield_transport_zmq.client import Client
from jackfield_transport_zmq.line import Lost
from jackfield_transport_zmq.values import Lease, Reader, packed_cells
from jackfield_transport_zmq.wire import Message

InThread = Callable[..., Awaitable[Any]]


async def written(client: Client, reader: Reader, folder: Path, in_thread: InThread) -> SnapshotResult:
    """Have all units hold writers back, remember what is there, and go on; then write it, unit after unit.

    Raises:
        QueueError: ``queue.lost`` where a unit dies meanwhile; there is no checkpoint then.
    """
    mark = uuid.uuid4().hex
    units = client.living()
    try:
        await _at_once(client, units, mark, "begin")
        writer = await in_thread(ArchiveWriter, folder)
        try:
            for unit in units:
                while (reply := await _asked(client, unit, "take", {"mark": mark}))["rows"]:
                    lease = client.lease(unit, reply["lease"]) if reply["lease"] else None
                    try:
                        await in_thread(writer.add, _rows(reader, reply, lease))
                    finally:
                        if lease is not None:
                            lease.done()
            result: SnapshotResult = await in_thread(writer.finish)
            return result
        finally:
            await in_thread(writer.close)
    finally:
        await _end(client, units, mark)


async def restored(client: Client, folder: Path, in_thread: InThread) -> SnapshotResult:
    """Bring the rows of a checkpoint to the units, and put them in the place of all others at once.

    Raises:
        QueueError: ``queue.invalid`` without a checkpoint; ``queue.lost`` where a unit dies meanwhile.
    """
    mark = uuid.uuid4().hex
    units = client.living()
    archive = batches(read_archive(folder), lambda row: row.bytes)
    try:
        while batch := await in_thread(next, archive, None):
            for (unit, partition, columns), rows in _by_unit(client, batch).items():
                values, buffers = packed_cells([row.cells[name] for row in rows for name in columns])
                keys = [row.key for row in rows]
                fields = {"mark": mark, "partition": partition, "keys": keys, "columns": list(columns), **values}
                await _asked(client, unit, "stage", fields, buffers)
        return await _at_once(client, units, mark, "swap")
    finally:
        await _end(client, units, mark)


async def _at_once(client: Client, units: Sequence[int], mark: str, what: str) -> SnapshotResult:
    """Do something in all units while none of them takes puts or deletions. Held in order, so that two who do this
    wait for each other one way only."""
    for unit in units:
        await _asked(client, unit, "hold", {"mark": mark})
    rows = size = 0
    for unit in units:
        reply = await _asked(client, unit, what, {"mark": mark})
        rows, size = rows + reply["rows"], size + reply["bytes"]
    return SnapshotResult(samples=rows, bytes=size)


async def _end(client: Client, units: Sequence[int], mark: str) -> None:
    for unit in units:
        with suppress(Lost, QueueError):  # what is raised already is the cause
            await client.ask(unit, "end", {"mark": mark})


async def _asked(client: Client, unit: int, kind: str, fields: dict[str, Any], buffers: Sequence[Any] = ()) -> Message:
    try:
        return await client.ask(unit, kind, fields, buffers)
    except Lost:
        raise QueueError(
            f"storage unit {unit} died while a checkpoint was written or read", code="queue.lost", where=f"unit {unit}"
        ) from None


def _rows(reader: Reader, reply: Message, lease: Lease | None) -> list[SavedSample]:
    slots = iter(reader.slots(reply["cells"], reply["blocks"], reply.buffers, lease))
    return [
        SavedSample(partition=partition, key=key, cells={name: next(slots).cell for name in columns})
        for partition, key, columns in reply["rows"]
    ]


def _by_unit(client: Client, rows: Sequence[SavedSample]) -> dict[tuple[int, str, tuple[str, ...]], list[SavedSample]]:
    """Rows of one unit, partition and set of columns together."""
    found: defaultdict[tuple[int, str, tuple[str, ...]], list[SavedSample]] = defaultdict(list)
    for row in rows:
        (places,) = client.places(row.partition, [row.key]).values()
        if not places:
            raise client.nobody_left()
        found[places[0], row.partition, tuple(row.cells)].append(row)
    return found
