"""The store: rows, and the registered memory in which their values lie, for others to write to and read from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from jackfield.errors import JackfieldError, QueueError, RpcError
from jackfield.sdk.archive import batches, read_archive, write_archive
from jackfield.sdk.arrow import SavedSample
from jackfield.sdk.cells import Cell, ColumnType
from jackfield.wire import Buffer, Message, Wire
from jackfield_transport_nixl.agents import Agent, place_of
from jackfield_transport_nixl.config import QueueConfig
from jackfield_transport_nixl.regions import Block, Regions, aligned
from jackfield_transport_nixl.wiring import REQUESTS, Stream, limits

__all__ = ["Store"]


@attrs.frozen(eq=False)
class _Kept:
    """One cell."""

    type: str
    size: int  #: bytes
    content: Buffer = b""  #: where it is in no block
    block: Block | None = None
    start: int = 0  #: in the region

    def cell(self) -> Cell:
        """With its bytes; they are copied from a GPU only."""
        content = self.content
        if self.block is not None:
            memory = self.block.region.memory[self.start : self.start + self.size]
            content = memory.cpu().numpy().data
        return self.type, content


@attrs.define(eq=False)
class _Client:
    """Somebody who puts and gets, and what they may write to or read now."""

    stream: Stream
    rooms: dict[int, Block] = attrs.field(factory=dict)
    leases: dict[int, list[Block]] = attrs.field(factory=dict)
    tasks: set[asyncio.Task[Any]] = attrs.field(factory=set)


class Store:
    """Answers everybody who knows the secret. Values above ``inline_bytes`` do not pass here."""

    def __init__(self, settings: QueueConfig, agent: Agent, secret: bytes) -> None:
        self._settings = settings
        self._agent = agent
        self._regions = Regions(agent, settings.device, settings.region_bytes, settings.max_bytes)
        self._allowed = limits(settings.inline_bytes)
        self._wire = Wire(REQUESTS, secret)
        self._rows: dict[tuple[str, str], dict[str, _Kept]] = {}
        self._bytes = 0
        self._numbers = iter(range(1, 1 << 62))
        self._clients: set[_Client] = set()
        self._freed: set[asyncio.Future[None]] = set()  #: who waits for room
        self._server: asyncio.Server | None = None
        self._listening: set[asyncio.Task[Any]] = set()

    async def listen(self, host: str, port: int) -> int:
        """Take requests; the port.

        Raises:
            QueueError: ``queue.store`` where nobody can listen there.
        """
        try:
            self._server = await asyncio.start_server(self._accepted, host, port)
        except OSError as error:
            raise QueueError(
                f"the store cannot listen: {error.strerror or error}",
                code="queue.store",
                where=f"{host}:{port}",
                fix="name an address of this host, and a port that is free",
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(Stream(reader, writer, self._wire, self._allowed))
        self._clients.add(client)
        try:
            while True:
                message = await client.stream.receive()
                answer = asyncio.ensure_future(self._answer(client, message))
                client.tasks.add(answer)
                answer.add_done_callback(client.tasks.discard)
        except (EOFError, OSError, RpcError):
            pass  # gone, or no client of ours: the wire has counted it
        finally:
            self._clients.discard(client)
            for task in client.tasks:
                task.cancel()
            for block in client.rooms.values():
                self._free(block)
            for lease in client.leases.values():
                self._let_go(lease)
            self._rest()
            writer.close()

    async def _answer(self, client: _Client, message: Message) -> None:
        try:
            answer = await getattr(self, f"_do_{message.kind}")(client, message)
        except JackfieldError as error:
            fields = {"code": error.code, "message": error.message, "where": str(error.where or "")}
            answer = "error", fields, ()
        except (OSError, RuntimeError) as error:
            answer = "error", {"code": "queue.store", "message": f"the store failed: {error}", "where": ""}, ()
        if answer is not None:
            kind, fields, buffers = answer
            client.stream.send(kind, {"id": message["id"], **fields}, buffers)
            self._rest()

    def _rest(self) -> None:
        """Answer NIXL's peers while somebody may write or read."""
        self._agent.progress(any(client.rooms or client.leases for client in self._clients))

    # -- memory

    def _free(self, block: Block) -> None:
        self._regions.give(block)
        waiting, self._freed = self._freed, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _let_go(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.uses -= 1
            if not block.uses:
                self._free(block)

    def _drop(self, kept: Iterable[_Kept]) -> int:
        """Cells that are not needed any more; their bytes."""
        size = 0
        for cell in kept:
            size += cell.size
            if cell.block is not None:
                self._let_go([cell.block])
        return size

    # -- requests: each returns kind, fields and buffers of the reply

    async def _do_agent(self, client: _Client, message: Message) -> Any:
        metadata = await asyncio.wrap_future(self._agent.metadata())
        regions = [(number, attrs.astuple(place_of(region.memory))) for number, region in self._regions.regions.items()]
        return "agent", {"metadata": metadata, "regions": regions}, ()

    async def _do_room(self, client: _Client, message: Message) -> Any:
        while (block := await self._regions.take(message["size"])) is None:
            future = asyncio.get_running_loop().create_future()
            self._freed.add(future)
            await future
        number = next(self._numbers)
        client.rooms[number] = block
        return "room", {"block": number, "region": block.region.number, "start": block.start}, ()

    async def _do_let_go(self, client: _Client, message: Message) -> Any:
        block = client.rooms.pop(message["block"], None)
        if block is not None:
            self._free(block)
            self._rest()

    async def _do_put(self, client: _Client, message: Message) -> Any:
        (content,) = message.buffers or (b"",)
        view = memoryview(content)
        made = []
        for text, start, size in message["cells"]:
            value = bytes(view[start : start + size])
            ColumnType.parse(text).length(value)
            made.append(_Kept(text, size, value))
        return self._stored(message, made)

    async def _do_keep(self, client: _Client, message: Message) -> Any:
        block = client.rooms.pop(message["block"], None)
        if block is None:
            raise QueueError("a put is about memory that it was not given", code="queue.store")
        made = []
        try:
            for text, start, size in message["cells"]:
                if start < 0 or start + size > block.size:
                    raise QueueError("a cell lies outside of its memory", code="queue.store")
                made.append(_Kept(text, size, block=block, start=block.start + start))
            reply = self._stored(message, made)
        except BaseException:
            self._free(block)
            raise
        block.uses += len(made)
        if not made:
            self._free(block)
        return reply

    def _stored(self, message: Message, made: Sequence[_Kept]) -> Any:
        """All or nothing: cells were looked at before any is stored."""
        keys, columns = message["keys"], message["columns"]
        if len(made) != len(keys) * len(columns):
            raise QueueError(f"{len(made)} cells for {len(keys)} rows of {len(columns)} columns", code="queue.store")
        cells = iter(made)
        for key in keys:
            row = self._rows.setdefault((message["partition"], key), {})
            for column in columns:
                if column in row:
                    self._bytes -= self._drop([row[column]])
                row[column] = next(cells)
        size = sum(cell.size for cell in made)
        self._bytes += size
        return "counted", {"rows": len(keys), "bytes": size}, ()

    async def _do_get(self, client: _Client, message: Message) -> Any:
        unknown: list[int] = []
        lacking: list[tuple[int, str, list[str]]] = []
        found: list[_Kept] = []
        for number, key in enumerate(message["keys"]):
            row = self._rows.get((message["partition"], key))
            if row is None:
                unknown.append(number)
                continue
            for column in message["columns"]:
                if column in row:
                    found.append(row[column])
                else:
                    lacking.append((number, column, sorted(row)))
        if unknown or lacking:
            return "cells", {"unknown": unknown, "lacking": lacking, "lease": 0, "cells": []}, ()
        inline = sum(cell.size for cell in found) < self._settings.inline_bytes
        parts: list[Buffer] = []
        entries, start = [], 0
        for cell in found:
            if inline or cell.block is None:
                parts.append(cell.cell()[1])
                entries.append((cell.type, -1, start, cell.size))
                start += cell.size
            else:
                entries.append((cell.type, cell.block.region.number, cell.start, cell.size))
        blocks = [] if inline else list({id(cell.block): cell.block for cell in found if cell.block}.values())
        lease = next(self._numbers) if blocks else 0
        for block in blocks:
            block.uses += 1
        if lease:
            client.leases[lease] = blocks
        fields = {"unknown": [], "lacking": [], "lease": lease, "cells": entries}
        return "cells", fields, [b"".join(parts)] if parts else ()

    async def _do_done(self, client: _Client, message: Message) -> Any:
        self._let_go(client.leases.pop(message["lease"], []))
        self._rest()

    async def _do_delete(self, client: _Client, message: Message) -> Any:
        rows = size = 0
        for key in message["keys"]:
            row = self._rows.pop((message["partition"], key), None)
            if row is not None:
                rows += 1
                size += self._drop(row.values())
        self._bytes -= size
        return "counted", {"rows": rows, "bytes": size}, ()

    async def _do_keys(self, client: _Client, message: Message) -> Any:
        return "samples", {"samples": [(*place, list(row)) for place, row in self._rows.items()]}, ()

    async def _do_stats(self, client: _Client, message: Message) -> Any:
        refused = {f"refused {code}": float(count) for code, count in self._wire.refused.items()}
        details = {"clients": float(len(self._clients)), "registered bytes": float(self._regions.bytes), **refused}
        return "state", {"rows": len(self._rows), "bytes": self._bytes, "details": details}, ()

    # -- checkpoints

    async def _do_checkpoint(self, client: _Client, message: Message) -> Any:
        rows = {place: dict(row) for place, row in self._rows.items()}
        blocks = [cell.block for row in rows.values() for cell in row.values() if cell.block is not None]
        for block in blocks:
            block.uses += 1

        def archived() -> Iterator[SavedSample]:
            for (partition, key), row in rows.items():
                cells = {name: kept.cell() for name, kept in row.items()}
                yield SavedSample(partition=partition, key=key, cells=cells)

        try:
            written = await asyncio.to_thread(write_archive, Path(message["folder"]), archived())
        finally:
            self._let_go(blocks)
        return "counted", {"rows": written.samples, "bytes": written.bytes}, ()

    async def _do_restore(self, client: _Client, message: Message) -> Any:
        staged: dict[tuple[str, str], dict[str, _Kept]] = {}
        archive = batches(read_archive(Path(message["folder"])), lambda row: row.bytes)
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
        return "counted", {"rows": len(staged), "bytes": self._bytes}, ()

    async def _stage(self, staged: dict[tuple[str, str], dict[str, _Kept]], batch: Sequence[SavedSample]) -> None:
        """Rows of a checkpoint into memory, in one block."""
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
        self._let_go([block])

    async def close(self) -> None:
        """Hang up, and forget everything."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        tasks = list(self._listening)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._rows.clear()
