"""The backend: a client of the store, and its start in the process that opens the queue."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch

from jackfield.abc.transfer_queue import (
    Column,
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
from jackfield.sdk.buckets import aligned
from jackfield.sdk.cells import Cell, content_of, join, lacking_column, split_request, unknown_sample
from jackfield_transport_nixl.agents import Agent, Place, Regions, place_of, shown
from jackfield_transport_nixl.client import Client
from jackfield_transport_nixl.config import QueueConfig
from jackfield_transport_nixl.serve import agent_of, end, listening, started
from jackfield_transport_nixl.store import CellEntry, Found

FILE = "store.json"
_LANDING_BYTES = 2 * 2**30  #: registered memory for gets, which is reused; more while tensors still show it


class NIXLBackend(TransferQueueBackend):
    """A backend in registered memory of a process beside the one that started the queue, with which it ends. Producers
    and consumers access the memory directly; only small values and metadata are messages."""

    durable: ClassVar[bool] = False
    joins: ClassVar[bool] = True

    def __init__(self, config: QueueConfig, context: TransferQueueContext) -> None:
        super().__init__(config, context)
        self._settings = config
        self._client: Client | None = None
        self._end_store: Callable[[], Awaitable[None]] | None = None  #: of the process that started it
        self._agent: Agent | None = None
        self._landing: Regions | None = None

    async def start(self) -> None:
        """Start the store, or join the process that has it."""
        try:
            folder, joined = Path(str(self.context.folder)), self._settings.join
            if joined is None and self.context.joins:
                joined = str(folder / FILE)
            host = self._settings.host or self.context.host
            with ExitStack() as stack:
                if joined is None and self.context.folder is None:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                file = await self._started(host, folder) if joined is None else Path(joined)
                agent = self._agent = await agent_of(self._settings, host)
                self._client = Client(self._settings, agent)
                self._landing = Regions(agent, "cpu", self._settings.region_bytes, _LANDING_BYTES, waits=False)
                await self._client.connect(file)
        except BaseException:
            await self.close()
            raise

    async def _started(self, host: str, folder: Path) -> Path:
        file = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        order = self._settings, host, file, self.context.heartbeat_seconds
        if self._settings.inline:
            self._end_store = (await listening(*order)).close
        else:
            self._end_store = partial(asyncio.to_thread, end, await started(*order))
        return file

    async def close(self) -> None:
        """Disconnect; the store's end deletes all rows."""
        client, self._client = self._client, None
        end_store, self._end_store = self._end_store, None
        agent, self._agent = self._agent, None
        if client is not None:
            await client.close()
        if end_store is not None:
            await end_store()
            if self.context.folder is not None:
                (Path(self.context.folder) / FILE).unlink(missing_ok=True)
        if agent is not None:
            await asyncio.to_thread(agent.close)
        self._landing = None

    def _open(self) -> Client:
        if self._client is None:
            raise QueueError("the nixl backend is closed", code="queue.closed")
        return self._client

    async def put(self, request: PutRequest) -> PutResult:
        """Send small values in a message; write large ones directly into the store's memory."""
        client = self._open()
        samples = split_request(request)
        size = sum(len(content) for cells in samples for _, content in cells.values())
        rows = request.partition, list(request.keys), list(request.columns)
        contents = [content_of(column) for column in request.columns.values()]
        starts = [0, *accumulate(aligned(len(content)) for content in contents)]
        total, begins = starts[-1], dict(zip(request.columns, starts, strict=False))
        entries = []
        for cells in samples:
            for name, (text, content) in cells.items():
                entries.append(CellEntry(text, begins[name], len(content)))
                begins[name] += len(content)
        if total < client.inline_bytes or not total:
            packed = bytearray(total)
            for content, start in zip(contents, starts, strict=False):
                packed[start : start + len(content)] = content
            await client.within(client.store.put(*rows, entries, bytes(packed)))
        else:
            sources = [
                (torch.frombuffer(content, dtype=torch.uint8), start)
                for content, start in zip(contents, starts, strict=False)
                if len(content)
            ]
            await self._written(client, sources, total, rows, entries)
        return PutResult(bytes=size)

    @staticmethod
    async def _written(
        client: Client,
        sources: Sequence[tuple[torch.Tensor, int]],
        total: int,
        rows: tuple[str, list[str], list[str]],
        entries: list[CellEntry],
    ) -> None:
        """Write columns into memory that the store has provided, and have it keep them."""
        room = await client.room(total)
        kept = False
        try:
            region = await client.region(room.region)
            theirs = [region.part(room.start + start, source.nbytes) for source, start in sources]

            def write() -> None:
                agent, registered = client.agent, [source for source, _ in sources]
                for source in registered:
                    agent.register(source)
                try:
                    agent.move("WRITE", client.name, theirs, [place_of(source) for source in registered])
                finally:
                    for source in registered:
                        agent.release(source)

            await client.done(client.agent.run(write))
            await client.within(client.store.keep(*rows, entries, room.block))
            kept = True
        finally:
            if not kept:
                client.notify_after("let_go", room)

    async def get(self, request: GetRequest) -> GetResult:
        """Return columns in the order of the keys; large values are read from the store's memory, per column."""
        client = self._open()
        found = await client.within(client.store.get(request.partition, list(request.keys), list(request.columns)))
        _name_what_lacks(request, found)
        try:
            content = memoryview(b"".join([found.content, *await client.within(_further(client, found))]))
            width = len(request.columns)
            return GetResult(
                columns={
                    name: await self._column(client, name, found.cells[number::width], content)
                    for number, name in enumerate(request.columns)
                }
            )
        finally:
            if found.lease:
                client.notify_after("done", Found(lease=found.lease))

    async def _column(self, client: Client, name: str, entries: Sequence[CellEntry], inline: memoryview) -> Column:
        if all(entry.region < 0 for entry in entries):
            return join(name, [(entry.type, inline[entry.start : entry.start + entry.size]) for entry in entries])
        assert self._landing is not None
        total = sum(entry.size for entry in entries)
        block = await self._landing.take(total)
        assert block is not None
        regions, landing, content = self._landing, block, block.bytes[:total]
        values = shown(block, total, lambda: regions.give(landing))
        cells, start = list[Cell](), 0
        theirs: list[Place] = []
        ours: list[Place] = []
        view = content.numpy().data
        for entry in entries:
            if entry.region < 0:
                view[start : start + entry.size] = inline[entry.start : entry.start + entry.size]
            elif entry.size:
                there = (await client.region(entry.region)).part(entry.start, entry.size)
                _append(theirs, ours, there, block.place.part(start, entry.size))
            cells.append((entry.type, view[start : start + entry.size]))
            start += entry.size

        def read(_: Any = values) -> None:  # the memory is not reused before this has ended
            client.agent.move("READ", client.name, theirs, ours)

        if theirs:
            await client.done(client.agent.run(read))
        return join(name, cells, lambda _: values)

    async def keys(self, request: KeysRequest) -> KeysResult:
        """List the rows of the store."""
        client, wanted = self._open(), request.partition
        rows = await client.within(client.store.keys())
        return KeysResult(samples={(part, key): tuple(names) for part, key, names in rows if wanted in (None, part)})

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Delete rows; unknown keys are ignored."""
        client = self._open()
        count = await client.within(client.store.delete(request.partition, list(request.keys)))
        return DeleteResult(samples=count.rows, bytes=count.bytes)

    async def stats(self) -> StatsResult:
        """Return rows and bytes; ``details`` has registered memory, clients and refusals."""
        client = self._open()
        state = await client.within(client.store.stats())
        return StatsResult(samples=state.rows, bytes=state.bytes, details=state.details)

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Let the store write the rows of one moment, in its own thread."""
        client = self._open()
        count = await client.within(client.long_store.checkpoint(str(Path(request.folder).absolute())))
        return SnapshotResult(samples=count.rows, bytes=count.bytes)

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Let the store replace everything by a checkpoint, at once."""
        client = self._open()
        count = await client.within(client.long_store.restore(str(Path(request.folder).absolute())))
        return SnapshotResult(samples=count.rows, bytes=count.bytes)


def _append(theirs: list[Place], ours: list[Place], there: Place, here: Place) -> None:
    """Add a stretch of memory, merged with the last one if both continue it."""
    if theirs and (last := theirs[-1]).address + last.size == there.address:
        theirs[-1] = Place(last.address, last.size + there.size, last.device, last.memory)
        ours[-1] = Place(ours[-1].address, ours[-1].size + here.size)
    else:
        theirs.append(there)
        ours.append(here)


async def _further(client: Client, found: Found) -> list[bytes]:
    """Fetch the content that did not fit into the answer."""
    missing = sum(cell.size for cell in found.cells if cell.region < 0) - len(found.content)
    return [piece async for piece in client.store.further_content(found.lease)] if missing else []


def _name_what_lacks(request: GetRequest, found: Found) -> None:
    if found.unknown:
        raise unknown_sample(request.partition, request.keys[found.unknown[0]])
    if found.lacking:
        _, name, there = found.lacking[0]
        keys = [request.keys[number] for number, other, _ in found.lacking if other == name]
        raise lacking_column(request.partition, name, keys, there)
    if not request.keys:
        raise QueueError("no rows are named", expected="one key at least")
