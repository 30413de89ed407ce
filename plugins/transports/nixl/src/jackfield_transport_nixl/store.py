"""The store: rows, and registered memory with their values, which other processes write and read."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import torch

from jackfield.clock import Clock
from jackfield.errors import QueueError, RpcError
from jackfield.sdk.archive import SavedSample, batches, read_archive, write_archive
from jackfield.sdk.buckets import aligned
from jackfield.sdk.cells import Buffer, Cell, ColumnType
from jackfield.sdk.rpc import Address, Connection, Contract, Server, Service, caller
from jackfield_transport_nixl.agents import Agent, Block, Place, Regions, place_of
from jackfield_transport_nixl.config import QueueConfig

_PIECE_BYTES = 16 * 2**20  #: of the values in one message


@attrs.frozen(eq=False)
class _Kept:
    """One stored cell."""

    type: str
    size: int  #: bytes
    content: Buffer = b""  #: where it is in no block
    block: Block | None = None
    start: int = 0  #: in the region

    def cell(self) -> Cell:
        """Return the cell with its bytes, which are copied only from a GPU."""
        content = self.content
        if self.block is not None:
            memory = self.block.region.memory[self.start : self.start + self.size]
            content = memory.cpu().numpy().data
        return self.type, content


@attrs.frozen
class Description:
    """The data that a process needs to reach the store's memory."""

    metadata: bytes  #: of the store's agent
    regions: dict[int, Place]


@attrs.frozen
class Room:
    """Memory that a client may write to."""

    block: int
    region: int
    start: int


@attrs.frozen
class CellEntry:
    """The place of a cell's bytes."""

    type: str
    start: int  #: in the region, in the block that is kept, or in the content that is sent along
    size: int
    region: int = -1  #: -1: in the content


@attrs.frozen(kw_only=True)
class Found:
    """The result of a get: cells row after row, or what is missing."""

    unknown: list[int] = attrs.field(factory=list)  #: indexes of keys
    lacking: list[tuple[int, str, list[str]]] = attrs.field(factory=list)  #: index, column, columns that are there
    lease: int = 0  #: under which the memory stays what it is; 0: none is needed
    cells: list[CellEntry] = attrs.field(factory=list)
    content: bytes = b""  #: the first piece; the store yields the others under the lease


@attrs.frozen
class Count:
    """The numbers of rows and bytes of a call."""

    rows: int
    bytes: int


@attrs.frozen
class State(Count):
    """The state of the store."""

    details: dict[str, float]


@attrs.define(eq=False)
class _Lease:
    """Memory that a client may read."""

    blocks: list[Block]
    rest: bytes  #: content that has not been sent along


@attrs.define(eq=False)
class _Client:
    """Memory that a client may write and read now."""

    rooms: dict[int, Block] = attrs.field(factory=dict)
    leases: dict[int, _Lease] = attrs.field(factory=dict)


class Store:
    """The store, which answers its clients. Values above ``inline_bytes`` are moved by NIXL instead."""

    def __init__(self, settings: QueueConfig, agent: Agent, heartbeat_seconds: float) -> None:
        self._settings = settings
        self._agent = agent
        self._regions = Regions(agent, settings.device, settings.region_bytes, settings.max_bytes)
        self._rows: dict[tuple[str, str], dict[str, _Kept]] = {}
        self._bytes = 0
        self._numbers = itertools.count(1)
        self._clients = defaultdict[str, _Client](_Client)  #: by session
        self._freed: set[asyncio.Future[None]] = set()  #: of the calls that wait for room
        self._server = Server(
            "the store", {"store": Service(target=self, contract=STORE)}, Clock(), heartbeat_seconds, self._client_ended
        )

    async def listen(self, host: str, port: int) -> Address:
        """Listen for clients; raise ``queue.store`` if the address is taken or not of this machine."""
        try:
            return await self._server.listen(host, port)
        except RpcError as error:
            raise QueueError(error.message, code="queue.store", where=error.where, fix=error.fix) from error

    async def _client_ended(self, connection: Connection, _: str) -> None:
        client = self._clients.pop(connection.session, _Client())
        for block in client.rooms.values():
            self._free(block)
        for lease in client.leases.values():
            self._release(lease.blocks)
        self._show_progress()

    def _client(self) -> _Client:
        return self._clients[caller().session]

    def _show_progress(self) -> None:
        """Answer NIXL's peers while a client may write or read."""
        self._agent.progress(any(client.rooms or client.leases for client in self._clients.values()))

    def _free(self, block: Block) -> None:
        self._regions.give(block)
        waiting, self._freed = self._freed, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.uses -= 1
            if not block.uses:
                self._free(block)

    def _drop(self, kept: Iterable[_Kept]) -> int:
        size = 0
        for cell in kept:
            size += cell.size
            if cell.block is not None:
                self._release([cell.block])
        return size

    async def inline_bytes(self) -> int:
        """Return the bytes from which on values are moved by NIXL."""
        return self._settings.inline_bytes

    async def describe(self) -> Description:
        """Describe the store's memory."""
        metadata = await asyncio.wrap_future(self._agent.run(self._agent.metadata))
        regions = self._regions.regions.items()
        return Description(metadata, {number: place_of(region.memory) for number, region in regions})

    async def room(self, size: int) -> Room:
        """Wait for memory that the caller may write to until it keeps or releases it."""
        client = self._client()
        while (block := await self._regions.take(size)) is None:
            future = asyncio.get_running_loop().create_future()
            self._freed.add(future)
            await future
        number = next(self._numbers)
        client.rooms[number] = block
        self._show_progress()
        return Room(number, block.region.number, block.start)

    async def let_go(self, room: Room) -> None:
        """Take back memory that is not needed."""
        taken = self._client().rooms.pop(room.block, None)
        if taken is not None:
            self._free(taken)
            self._show_progress()

    async def put(
        self, partition: str, keys: list[str], columns: list[str], cells: list[CellEntry], content: bytes
    ) -> Count:
        """Store cells whose bytes come with the call, row after row."""
        made = []
        for cell in cells:
            value = content[cell.start : cell.start + cell.size]
            ColumnType.parse(cell.type).length(value)
            made.append(_Kept(cell.type, cell.size, value))
        return self._stored(partition, keys, columns, made)

    async def keep(
        self, partition: str, keys: list[str], columns: list[str], cells: list[CellEntry], block: int
    ) -> Count:
        """Store cells whose bytes the caller has written to a block."""
        room = self._client().rooms.pop(block, None)
        if room is None:
            raise QueueError("a put is about memory that it was not given", code="queue.store")
        made = []
        try:
            for cell in cells:
                if cell.start < 0 or cell.start + cell.size > room.size:
                    raise QueueError("a cell lies outside of its memory", code="queue.store")
                made.append(_Kept(cell.type, cell.size, block=room, start=room.start + cell.start))
            count = self._stored(partition, keys, columns, made)
        except BaseException:
            self._free(room)
            raise
        room.uses += len(made)
        if not made:
            self._free(room)
        self._show_progress()
        return count

    def _stored(self, partition: str, keys: list[str], columns: list[str], made: Sequence[_Kept]) -> Count:
        """Store all cells or none; they were checked before."""
        if len(made) != len(keys) * len(columns):
            raise QueueError(f"{len(made)} cells for {len(keys)} rows of {len(columns)} columns", code="queue.store")
        cells = iter(made)
        for key in keys:
            row = self._rows.setdefault((partition, key), {})
            for column in columns:
                if column in row:
                    self._bytes -= self._drop([row[column]])
                row[column] = next(cells)
        size = sum(cell.size for cell in made)
        self._bytes += size
        return Count(len(keys), size)

    async def get(self, partition: str, keys: list[str], columns: list[str]) -> Found:
        """Find the cells of rows. The caller ends the lease once it has read them."""
        found: list[_Kept] = []
        missing = Found()
        for number, key in enumerate(keys):
            row = self._rows.get((partition, key))
            if row is None:
                missing.unknown.append(number)
                continue
            for column in columns:
                if column in row:
                    found.append(row[column])
                else:
                    missing.lacking.append((number, column, sorted(row)))
        return missing if missing.unknown or missing.lacking else self._leased(found)

    def _leased(self, found: Sequence[_Kept]) -> Found:
        inline = sum(cell.size for cell in found) < self._settings.inline_bytes
        content, entries = bytearray(), []
        for cell in found:
            if inline or cell.block is None:
                entries.append(CellEntry(cell.type, len(content), cell.size))
                content += cell.cell()[1]
            else:
                entries.append(CellEntry(cell.type, cell.start, cell.size, cell.block.region.number))
        blocks = [] if inline else list({id(cell.block): cell.block for cell in found if cell.block}.values())
        for block in blocks:
            block.uses += 1
        lease = 0
        if blocks or len(content) > _PIECE_BYTES:
            lease = next(self._numbers)
            self._client().leases[lease] = _Lease(blocks, bytes(content[_PIECE_BYTES:]))
            self._show_progress()
        return Found(lease=lease, cells=entries, content=bytes(content[:_PIECE_BYTES]))

    async def further_content(self, lease: int) -> AsyncIterator[bytes]:
        """Yield the content that did not come with the result of a get."""
        rest = self._client().leases[lease].rest
        for start in range(0, len(rest), _PIECE_BYTES):
            yield rest[start : start + _PIECE_BYTES]

    async def done(self, found: Found) -> None:
        """End the lease of a get's result."""
        ended = self._client().leases.pop(found.lease, None)
        if ended is not None:
            self._release(ended.blocks)
            self._show_progress()

    async def delete(self, partition: str, keys: list[str]) -> Count:
        """Forget rows; unknown keys are ignored."""
        rows = [row for key in keys if (row := self._rows.pop((partition, key), None)) is not None]
        size = sum(self._drop(row.values()) for row in rows)
        self._bytes -= size
        return Count(len(rows), size)

    async def keys(self) -> list[tuple[str, str, list[str]]]:
        """List partition, key and columns of every row."""
        return [(*place, list(row)) for place, row in self._rows.items()]

    async def stats(self) -> State:
        """Return counts of the store, and of refused connections."""
        clients, refused = len(self._server.clients), self._server.refused
        details = {"clients": clients, "registered bytes": self._regions.bytes, "refused": refused}
        return State(len(self._rows), self._bytes, {name: float(value) for name, value in details.items()})

    async def checkpoint(self, folder: str) -> Count:
        """Write the current rows, in a thread."""
        rows = {place: dict(row) for place, row in self._rows.items()}
        blocks = [cell.block for row in rows.values() for cell in row.values() if cell.block is not None]
        for block in blocks:
            block.uses += 1

        def archived() -> Iterator[SavedSample]:
            for (partition, key), row in rows.items():
                cells = {name: kept.cell() for name, kept in row.items()}
                yield SavedSample(partition=partition, key=key, cells=cells)

        try:
            written = await asyncio.to_thread(write_archive, Path(folder), archived())
        finally:
            self._release(blocks)
        return Count(written.samples, written.bytes)

    async def restore(self, folder: str) -> Count:
        """Replace all rows by a checkpoint, atomically."""
        staged: dict[tuple[str, str], dict[str, _Kept]] = {}
        archive = batches(read_archive(Path(folder)), lambda row: row.bytes)
        try:
            while batch := await asyncio.to_thread(next, archive, None):
                await self._stage(staged, batch)
        except BaseException:
            for row in staged.values():
                self._drop(row.values())
            raise
        for row in self._rows.values():
            self._drop(row.values())
        self._rows = staged
        self._bytes = sum(cell.size for row in staged.values() for cell in row.values())
        return Count(len(staged), self._bytes)

    async def _stage(self, staged: dict[tuple[str, str], dict[str, _Kept]], batch: Sequence[SavedSample]) -> None:
        block = await self._regions.take(
            sum(aligned(len(content)) for row in batch for _, content in row.cells.values())
        )
        if block is None:
            raise QueueError("registered memory is full", code="queue.full", fix="raise max_bytes")
        start = 0
        block.uses += 1
        for row in batch:
            kept = staged.setdefault((row.partition, row.key), {})
            for name, (text, content) in row.cells.items():
                size = len(content)
                if size:
                    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                    block.bytes[start : start + size].copy_(values)
                kept[name] = _Kept(text, size, block=block, start=block.start + start)
                block.uses += 1
                start += aligned(size)
        self._release([block])

    async def close(self) -> None:
        """End all connections and the agent, and forget everything."""
        await self._server.close()
        self._rows.clear()
        await asyncio.to_thread(self._agent.close)


STORE = Contract(Store, without=("listen", "close"), undo={"room": "let_go", "get": "done"})
