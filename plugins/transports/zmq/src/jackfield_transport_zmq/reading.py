"""Requests that concern rows of several units: a get, and the checkpoint of one moment."""

from __future__ import annotations

import itertools
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jackfield.abc.transfer_queue import Column, GetRequest, SnapshotResult
from jackfield.errors import QueueError
from jackfield.sdk.archive import ArchiveWriter, SavedSample, batches, read_archive
from jackfield.sdk.cells import lacking_column, unknown_sample
from jackfield_transport_zmq.client import Client, all_of
from jackfield_transport_zmq.line import Lost
from jackfield_transport_zmq.values import Found, Lease, Reader
from jackfield_transport_zmq.wire import Message, Packer


class Reading:
    """What has been found so far."""

    def __init__(self, client: Client, reader: Reader, request: GetRequest) -> None:
        self._client = client
        self._reader = reader
        self._request = request
        self._keys = list(dict.fromkeys(request.keys))
        self._found: dict[str, int] = {}  #: by key: the row's number in the columns; -1 where it lacks one
        self._columns, self._count = [Found() for _ in request.columns], 0
        self._lacking: dict[str, tuple[str, list[str]]] = {}  #: by key: a column, and those that are there
        self._leases: list[Lease] = []

    async def run(self, known: int) -> None:
        """Ask the units, planned with ``known`` of them; may be done again.

        Raises:
            Stale: there are more units.
            QueueError: ``queue.unknown-sample``, ``queue.lost``, ``queue.column``.
        """
        places = self._client.places(self._request.partition, self._keys)
        for attempt in range(max(map(len, places.values()), default=0)):
            asked: defaultdict[int, list[str]] = defaultdict(list)
            for key in self._keys:
                if key not in self._found and len(places[key]) > attempt:
                    asked[places[key][attempt]].append(key)
            await all_of(self._read(unit, keys, known) for unit, keys in asked.items())
        unknown = [key for key in self._keys if key not in self._found]
        if unknown:
            raise self._unknown(unknown)
        if self._lacking:
            raise self._lacks()

    async def _read(self, unit: int, keys: list[str], known: int) -> None:
        request, columns = self._request, list(self._request.columns)
        fields = {"units": known, "partition": request.partition, "keys": keys, "columns": columns}
        try:
            reply = await self._client.ask(unit, "get", fields)
        except Lost:
            return  # its rows will turn out to be lost
        lease = None
        if reply["lease"]:
            lease = self._client.lease(unit, reply["lease"])
            self._leases.append(lease)
        unknown = set(reply["unknown"])
        there = [key for number, key in enumerate(keys) if number not in unknown]
        for number, name, others in reply["lacking"]:
            self._lacking.setdefault(keys[number], (name, others))
        if reply["lacking"]:
            self._found.update(dict.fromkeys(there, -1))
            return
        try:
            found = self._reader.found(reply, len(there), lease)
        except QueueError:
            if not self._client.notice_death(unit):
                raise
            return  # with its memory, after it had answered
        self._found.update(zip(there, itertools.count(self._count)))
        self._count += len(there)
        for column, more in zip(self._columns, found, strict=True):
            column.add(more)

    def _unknown(self, keys: Sequence[str]) -> QueueError:
        partition, directory = self._request.partition, self._client.directory
        lost = [key for key in keys if directory.was_at_a_lost_unit(partition, key)]
        if lost:
            return lost_rows(max(directory.lost), partition, lost)
        return unknown_sample(partition, keys[0])

    def _lacks(self) -> QueueError:
        partition, directory = self._request.partition, self._client.directory
        lost = [key for key in self._lacking if directory.was_at_a_lost_unit(partition, key)]
        if lost:  # what was written since is there, and what was there before is not
            return lost_rows(max(directory.lost), partition, lost)
        keys = [key for key in self._keys if key in self._lacking]
        name, there = self._lacking[keys[0]]
        return lacking_column(partition, name, [key for key in keys if self._lacking[key][0] == name], there)

    def columns(self) -> dict[str, Column]:
        """The columns, in the order of the keys; ``queue.column`` for rows that do not fit together."""
        rows = [self._found[key] for key in self._request.keys]
        columns = self._columns if rows == [*range(self._count)] else [each.chosen(rows) for each in self._columns]
        return {
            name: self._reader.column(name, found) for name, found in zip(self._request.columns, columns, strict=True)
        }

    def close(self) -> None:
        """Give back what no column shows."""
        for lease in self._leases:
            lease.done()


def lost_rows(unit: int, partition: str, keys: Sequence[str]) -> QueueError:
    """Return the error of rows that went with a unit."""
    return QueueError(
        f"storage unit {unit} died, and with it {len(keys)} rows: {', '.join(keys[:8])}{', …' * (len(keys) > 8)}",
        code="queue.lost",
        where=f"{partition}: {keys[0]}",
        found=list(keys),
        fix="make these rows again; all others are there",
    )


InThread = Callable[..., Awaitable[Any]]


async def written(client: Client, reader: Reader, folder: Path, in_thread: InThread) -> SnapshotResult:
    """Have all units hold writers back, remember what is there, and go on; then write it, unit after unit.

    Where a unit dies meanwhile (``queue.lost``), there is no checkpoint.
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
    """Replace all rows by a checkpoint's, at once; ``queue.invalid`` without one, ``queue.lost`` if a unit dies."""
    mark = uuid.uuid4().hex
    units = client.living()
    archive = batches(read_archive(folder), lambda row: row.bytes)
    try:
        while batch := await in_thread(next, archive, None):
            for (unit, partition, columns), rows in _by_unit(client, batch).items():
                packer = Packer()
                parts = [[row.cells[name] for row in rows] for name in columns]
                cells = [packer.cells([text for text, _ in part], [content for _, content in part]) for part in parts]
                keys = [row.key for row in rows]
                place: dict[str, Any] = {"mark": mark, "partition": partition, "keys": keys, "columns": list(columns)}
                fields = {**place, "cells": cells, "blocks": []}
                await _asked(client, unit, "stage", fields, packer.buffers())
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
    rows = reply["rows"]
    (found,) = reader.found(reply, sum(len(columns) for _, _, columns in rows), lease)
    cells = iter(found.cells())
    return [
        SavedSample(partition=partition, key=key, cells={name: next(cells) for name in columns})
        for partition, key, columns in rows
    ]


def _by_unit(client: Client, rows: Sequence[SavedSample]) -> dict[tuple[int, str, tuple[str, ...]], list[SavedSample]]:
    found: defaultdict[tuple[int, str, tuple[str, ...]], list[SavedSample]] = defaultdict(list)
    for row in rows:
        (places,) = client.places(row.partition, [row.key]).values()
        if not places:
            raise client.nobody_left()
        found[places[0], row.partition, tuple(row.cells)].append(row)
    return found
