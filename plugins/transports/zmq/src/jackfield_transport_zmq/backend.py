"""The backend: a client of storage units, and, in the process that started the queue, their owner."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from jackfield.abc.transfer_queue import (
    DeleteRequest,
    DeleteResult,
    GetRequest,
    GetResult,
    KeysRequest,
    KeysResult,
    PutRequest,
    PutResult,
    SnapshotRequest,
    SnapshotResult,
    StatsResult,
    TransferQueueBackend,
    TransferQueueContext,
)
from jackfield.errors import QueueError
from jackfield.sdk.cells import layouts
from jackfield.sdk.rpc import Process, is_loopback
from jackfield_transport_zmq.arenas import Block
from jackfield_transport_zmq.client import Client, all_of
from jackfield_transport_zmq.config import QueueConfig
from jackfield_transport_zmq.directory import FILE, Directory, UnitAddress, UnitProcess, started
from jackfield_transport_zmq.line import Lost, Stale
from jackfield_transport_zmq.reading import Reading, lost_rows, restored, written
from jackfield_transport_zmq.values import COPIERS, Outgoing, Reader

T = TypeVar("T")

_LOOKS = 4  #: checks of a unit per deadline
_PAUSE = 0.05  #: seconds between two looks for a unit in the place of the last one


class ZMQBackend(TransferQueueBackend):
    """A backend with values in the memory of storage units, or in shared memory that these hold. Values end with the
    units, and the units with the process that started them."""

    durable: ClassVar[bool] = False
    joins: ClassVar[bool] = True

    def __init__(self, config: QueueConfig, context: TransferQueueContext) -> None:
        super().__init__(config, context)
        self._settings = config
        self._client: Client | None = None
        self._children: list[UnitProcess] = []  #: of the owner
        self._watching: list[asyncio.Task[None]] = []  #: them
        self._growing = asyncio.Lock()
        self._replacing: asyncio.Task[None] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._reader = Reader(config.shared_max_bytes)

    async def start(self) -> None:
        """Start units, or join those of another process."""
        self._threads = ThreadPoolExecutor(COPIERS, thread_name_prefix="jackfield-zmq")
        try:
            joined = self._joined
            directory = await self._started() if joined is None else Directory.read(joined)
            self._client = Client(directory, self._settings, self._noticed)
            self._watch(self._children)
            self._publish()
        except BaseException:
            self._threads.shutdown()
            self._threads = None
            raise

    @property
    def _joined(self) -> Path | None:
        """Return the file in which another process lists its units; None if this process starts them."""
        if self._settings.join is not None:
            return Path(self._settings.join)
        return Path(str(self.context.folder)) / FILE if self.context.joins else None

    @property
    def _host(self) -> str:
        return self._settings.host or self.context.host

    async def _started(self) -> Directory:
        encrypted = self._settings.encrypted
        if encrypted is None:
            encrypted = not is_loopback(self._host)
        directory = Directory.new(self._settings.units, encrypted)
        numbers = range(self._settings.units)
        self._children = await self._in_thread(started, numbers, self._host, directory)
        directory.units = [child.unit for child in self._children if child.unit is not None]
        return directory

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        assert self._threads is not None
        return await asyncio.wrap_future(self._threads.submit(function, *arguments))

    def _publish(self) -> None:
        if self._children and self.context.folder is not None and self._client is not None:
            self._client.directory.write(Path(self.context.folder))

    def _watch(self, children: Sequence[UnitProcess]) -> None:
        self._watching += [asyncio.create_task(self._end_if_silent(child)) for child in children]

    async def _end_if_silent(self, child: UnitProcess) -> None:
        """Kill a unit none of whose threads could run for the deadline; all clients notice its end."""
        process, seconds, silent = Process.of(child.process.pid), self.context.heartbeat_seconds, 0
        while silent <= _LOOKS:
            await asyncio.sleep(seconds / _LOOKS)
            silent = silent + 1 if process.is_near and not process.can_run() else 0
        if child.process.poll() is None and child.unit is not None:
            said = f"({process}) sent no heartbeat for {seconds:g} s and was killed (deadlines.heartbeat)"
            logging.getLogger("jackfield").warning("storage unit %d %s", child.unit.number, said)
            child.process.kill()

    def _noticed(self, unit: UnitAddress) -> None:
        """Handle a unit's death: its owner tells the others."""
        text = "%s has ended, and its rows are lost: those that are needed are made again"
        logging.getLogger("jackfield").warning(text, unit.name)
        if self._children and self._client is not None:
            self._client.tell_all("lose", {"units": [unit.number]})
            self._publish()
            if not self._client.living():
                self._replacing = asyncio.create_task(self._replace())

    async def _replace(self) -> None:
        """Start a unit in the place of the last one, so that lost rows can be made again."""
        try:
            await self.add_unit()
        except (Lost, QueueError) as error:
            logging.getLogger("jackfield").warning("no storage unit could be started in its place: %s", error)

    async def _another(self, client: Client) -> None:
        """Wait for the unit in the place of the last one; ``queue.unreachable`` at the deadline."""
        ends = time.monotonic() + self._settings.seconds
        while not client.living():
            if time.monotonic() > ends:
                raise client.nobody_left()
            await asyncio.sleep(_PAUSE)
            if self._joined is not None:  # there is no unit that could tell of it
                news = Directory.read(self._joined)
                client.directory.lost |= news.lost
                client.added(news.entries())

    async def add_unit(self) -> int:
        """Start another unit, which gets its share of new rows; return its number. Existing rows stay.

        Raises:
            QueueError: ``queue.invalid`` in a process that has joined; ``queue.store`` if the unit does not start.
        """
        client = self._open()
        if not self._children:
            raise QueueError("only the process that started the units can add one", where=str(self._joined))
        async with self._growing:
            directory = client.directory
            number = len(directory.units)
            (child,) = await self._in_thread(started, [number], self._host, directory)
            self._children.append(child)
            self._watch([child])
            entry = (number, child.unit.pid, child.unit.address, child.unit.place)
            # those that are there hear of it before anybody puts anything into the new one
            units = [*directory.entries(), entry]
            await client.ask_all("add", {"units": units})
            client.added([entry])
            await client.ask(number, "add", {"units": units})
            self._publish()
        return number

    async def close(self) -> None:
        """Disconnect; the owner's units end, and with them their rows."""
        if self._replacing is not None:
            await self._replacing
        client, self._client = self._client, None
        children, self._children = self._children, []
        watching, self._watching = self._watching, []
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        if client is not None:
            client.close()
        self._reader.close()
        if self._threads is not None:
            for child in children:
                await self._in_thread(child.end)
            self._threads.shutdown()
            self._threads = None
        if children and self.context.folder is not None:
            (Path(self.context.folder) / FILE).unlink(missing_ok=True)

    def _open(self) -> Client:
        if self._client is None:
            raise QueueError("the zmq backend is closed", code="queue.closed")
        return self._client

    async def put(self, request: PutRequest) -> PutResult:
        """Send each row to its unit, all units at once; large puts within a host use shared memory.

        If a unit dies meanwhile, ``queue.lost`` names the rows.
        """
        client, made = self._open(), Outgoing(layouts(request))
        threshold = self._settings.shared_from_bytes
        block = None
        if threshold is not None and made.bytes >= threshold and client.shares:
            block = await client.room(made.room)
        try:
            if block is not None:
                assert self._threads is not None
                await made.copy(block, self._threads)
            await self._again(lambda known: self._put(client, request, made, block, known))
        finally:
            if block is not None:
                client.sent(block)
        return PutResult(bytes=made.bytes)

    async def _again(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        """Run an attempt that is planned with a number of units; plan it again if there are more."""
        while True:
            client = self._open()
            if not client.living():
                await self._another(client)
            try:
                return await attempt(len(client.directory.units))
            except Stale:
                continue

    @staticmethod
    async def _put(client: Client, request: PutRequest, made: Outgoing, block: Block | None, known: int) -> None:
        columns = list(request.columns)

        async def put(unit: int, rows: Sequence[int]) -> None:
            keys = [request.keys[row] for row in rows]
            values, buffers = made.message(rows)
            fields = {"units": known, "partition": request.partition, "keys": keys, "columns": columns, **values}
            try:
                await client.ask(unit, "put", fields, buffers, block)
            except Lost:
                raise lost_rows(unit, request.partition, keys) from None

        homes = await client.homes(request.partition, request.keys, known)
        await all_of(put(unit, rows) for unit, rows in homes.items())

    async def get(self, request: GetRequest) -> GetResult:
        """Return columns in the order of the keys; ``queue.lost`` names rows lost with a unit.

        Large columns whose rows are contiguous are views of shared memory, and must not be written to.
        """
        reading = Reading(self._open(), self._reader, request)
        try:
            await self._again(reading.run)
            return GetResult(columns=reading.columns())
        finally:
            reading.close()

    async def keys(self, request: KeysRequest) -> KeysResult:
        """List the rows of all units that live."""
        replies = await self._open().ask_all("keys", {})
        return KeysResult(
            samples={
                (partition, key): tuple(names)
                for reply in replies.values()
                for partition, key, names in reply["samples"]
                if request.partition in (None, partition)
            }
        )

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Delete rows; unknown keys, and rows of dead units, are ignored."""
        client = self._open()
        rows = size = 0

        async def delete(unit: int, keys: list[str], known: int) -> None:
            nonlocal rows, size
            with suppress(Lost):
                fields = {"units": known, "partition": request.partition, "keys": keys}
                reply = await client.ask(unit, "delete", fields)
                rows, size = rows + reply["rows"], size + reply["bytes"]

        async def everywhere(known: int) -> None:
            asked: defaultdict[int, list[str]] = defaultdict(list)
            for key, places in client.places(request.partition, request.keys).items():
                for unit in places:
                    asked[unit].append(key)
            await all_of(delete(unit, keys, known) for unit, keys in asked.items())

        await self._again(everywhere)
        return DeleteResult(samples=rows, bytes=size)

    async def stats(self) -> StatsResult:
        """Return rows and bytes of all living units; ``details`` has the refusals of each."""
        client = self._open()
        replies = await client.ask_all("stats", {})
        details = {
            f"unit {unit} {name}": float(count) for unit, reply in replies.items() for name, count in
            reply["details"].items()
        }  # fmt: skip
        own = {"units": float(len(replies)), "lost units": float(len(client.directory.lost))}
        return StatsResult(
            samples=sum(reply["rows"] for reply in replies.values()),
            bytes=sum(reply["bytes"] for reply in replies.values()),
            details={**own, **details},
        )

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Write the rows of one moment, for which all units delay puts and deletions briefly."""
        return await written(self._open(), self._reader, Path(request.folder), self._in_thread)

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Replace everything by a checkpoint, which is staged in the units and then swapped in at once."""
        return await restored(self._open(), Path(request.folder), self._in_thread)
