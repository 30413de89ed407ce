"""The backend: a client of the store, and, in the process that started the queue, the store."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Sequence
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
from jackfield.sdk.cells import Cell, content_of, join, lacking_column, split_request, unknown_sample
from jackfield.wire import Message
from jackfield_transport_nixl.agents import Agent, Place, devices_of, place_of
from jackfield_transport_nixl.client import Client
from jackfield_transport_nixl.config import QueueConfig
from jackfield_transport_nixl.regions import Regions, aligned, shown
from jackfield_transport_nixl.store import Store

__all__ = ["FILE", "NIXLBackend"]

FILE = "store.json"
_FORMAT = 1
_LANDING_BYTES = 2 * 2**30  #: registered for what is read, and kept for the next readings; more while readers hold it


class NIXLBackend(TransferQueueBackend):
    """Values lie in registered memory of the process that started the queue, and go with it. Producers write there and
    consumers read from there, directly; only small values and metadata are messages."""

    durable: ClassVar[bool] = False
    joins: ClassVar[bool] = True

    def __init__(self, config: QueueConfig, context: TransferQueueContext) -> None:
        super().__init__(config, context)
        self._settings = config
        self._client: Client | None = None
        self._store: Store | None = None
        self._agents: list[Agent] = []
        self._landing: Regions | None = None

    # -- life

    async def start(self) -> None:
        """Keep values here, or join the process that does."""
        try:
            joined = self._settings.join or (str(Path(str(self.context.folder)) / FILE) if self.context.joins else None)
            entry = await self._started() if joined is None else _read(Path(joined))
            agent = await self._agent(entry["host"])
            client = Client(self._settings, agent, f"{entry['host']}:{entry['port']}")
            self._client = client
            self._landing = Regions(agent, "cpu", self._settings.region_bytes, _LANDING_BYTES, waits=False)
            secret = bytes.fromhex(entry["secret"])
            await client.connect(entry["host"], entry["port"], secret, entry["inline_bytes"])
        except BaseException:
            await self.close()
            raise

    async def _agent(self, host: str) -> Agent:
        agent = Agent(devices_of(self._settings.devices, host))
        self._agents.append(agent)
        try:
            await asyncio.wrap_future(agent.start())
        except OSError as error:
            where = f"UCX on {agent.devices or 'all devices'}"
            raise QueueError(f"NIXL cannot start: {error}", code="queue.store", where=where) from error
        return agent

    async def _started(self) -> dict[str, Any]:
        settings, secret = self._settings, secrets.token_bytes(32)
        host = settings.host or self.context.host
        self._store = Store(settings, await self._agent(host), secret)
        port = await self._store.listen(host, settings.port)
        entry = {
            "format": _FORMAT, "host": host, "port": port, "secret": secret.hex(),
            "inline_bytes": settings.inline_bytes,
        }  # fmt: skip
        if self.context.folder is not None:
            _write(Path(self.context.folder), entry)
        return entry

    async def close(self) -> None:
        """Hang up; with the store all rows go."""
        client, self._client = self._client, None
        store, self._store = self._store, None
        agents, self._agents = self._agents, []
        if client is not None:
            await client.close()
        if store is not None:
            await store.close()
            if self.context.folder is not None:
                (Path(self.context.folder) / FILE).unlink(missing_ok=True)
        for agent in agents:
            await asyncio.to_thread(agent.close)
        self._landing = None

    def _open(self) -> Client:
        if self._client is None:
            raise QueueError("the nixl backend is closed", code="queue.closed")
        return self._client

    # -- rows

    async def put(self, request: PutRequest) -> PutResult:
        """Small values in a message; large ones are written to the store's memory from where they lie.

        Raises:
            QueueError: ``queue.full`` where the store's memory stays full; ``queue.unreachable`` naming the store.
        """
        client = self._open()
        samples = split_request(request)
        size = sum(len(content) for cells in samples for _, content in cells.values())
        rows = {"partition": request.partition, "keys": list(request.keys), "columns": list(request.columns)}
        contents = [content_of(column) for column in request.columns.values()]
        starts = [0, *accumulate(aligned(len(content)) for content in contents)]
        total, begins = starts[-1], dict(zip(request.columns, starts, strict=False))
        entries = []
        for cells in samples:
            for name, (text, content) in cells.items():
                entries.append((text, begins[name], len(content)))
                begins[name] += len(content)
        if total < client.inline_bytes or not total:
            packed = bytearray(total)
            for content, start in zip(contents, starts, strict=False):
                packed[start : start + len(content)] = content
            await client.ask("put", {**rows, "cells": entries}, [packed] if total else ())
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
        client: Client, sources: Sequence[tuple[torch.Tensor, int]], total: int, rows: Any, entries: Any
    ) -> None:
        """Write columns into memory of the store that was asked for, and have it kept."""
        room = await client.ask("room", {"size": total})
        kept = False
        try:
            region = await client.region(room["region"])
            theirs = [region.part(room["start"] + start, source.nbytes) for source, start in sources]

            def write() -> None:
                agent, registered = client.agent, [source for source, _ in sources]
                for source in registered:
                    agent.register_now(source)
                try:
                    agent.move_now("WRITE", client.name, theirs, [place_of(source) for source in registered])
                finally:
                    for source in registered:
                        agent.release_now(source)

            await client.done(client.agent.run(write))
            await client.ask("keep", {**rows, "cells": entries, "block": room["block"]})
            kept = True
        finally:
            if not kept:
                client.tell_after("let_go", {"block": room["block"]})

    async def get(self, request: GetRequest) -> GetResult:
        """Columns in the order of the keys; large values are read out of the store's memory, each column into memory of
        its own.

        Raises:
            QueueError: ``queue.unknown-sample``, ``queue.column``; ``queue.unreachable`` naming the store.
        """
        client = self._open()
        fields = {"partition": request.partition, "keys": list(request.keys), "columns": list(request.columns)}
        reply = await client.ask("get", fields)
        _name_what_lacks(request, reply)
        try:
            width = len(request.columns)
            return GetResult(
                columns={
                    name: await self._column(client, name, reply["cells"][number::width], reply)
                    for number, name in enumerate(request.columns)
                }
            )
        finally:
            if reply["lease"]:
                client.tell_after("done", {"lease": reply["lease"]})

    async def _column(self, client: Client, name: str, entries: Sequence[Any], reply: Message) -> Column:
        if all(entry[1] < 0 for entry in entries):
            return join(name, [_inline(entry, reply) for entry in entries])
        assert self._landing is not None
        total = sum(entry[3] for entry in entries)
        block = await self._landing.take(total)
        assert block is not None
        regions, landing, content = self._landing, block, block.bytes[:total]
        values = shown(block, total, lambda: regions.give(landing))
        cells, start = list[Cell](), 0
        theirs: list[Place] = []
        ours: list[Place] = []
        view = content.numpy().data
        for entry in entries:
            text, number, offset, size = entry
            here = block.place.part(start, size)
            if number < 0:
                view[start : start + size] = _inline(entry, reply)[1]
            elif size:
                _append(theirs, ours, (await client.region(number)).part(offset, size), here)
            cells.append((text, view[start : start + size]))
            start += size

        def read(_: Any = values) -> None:  # the memory is not used again before this has ended
            client.agent.move_now("READ", client.name, theirs, ours)

        if theirs:
            await client.done(client.agent.run(read))
        return join(name, cells, lambda _: values)

    async def keys(self, request: KeysRequest) -> KeysResult:
        """List what the store has."""
        reply = await self._open().ask("keys", {})
        wanted = request.partition
        return KeysResult(
            samples={(part, key): tuple(names) for part, key, names in reply["samples"] if wanted in (None, part)}
        )

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Forget rows; unknown keys are ignored."""
        fields = {"partition": request.partition, "keys": list(request.keys)}
        reply = await self._open().ask("delete", fields)
        return DeleteResult(samples=reply["rows"], bytes=reply["bytes"])

    async def stats(self) -> StatsResult:
        """Rows and bytes; in ``details`` what is registered, who is there and what was refused."""
        reply = await self._open().ask("stats", {})
        return StatsResult(samples=reply["rows"], bytes=reply["bytes"], details=reply["details"])

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Have the store write the rows of one moment, in a thread of its own."""
        return await self._snapshot("checkpoint", request)

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Have the store replace everything by a checkpoint, at once."""
        return await self._snapshot("restore", request)

    async def _snapshot(self, what: str, request: SnapshotRequest) -> SnapshotResult:
        fields = {"folder": str(Path(request.folder).absolute())}
        reply = await self._open().ask(what, fields, seconds=self._settings.checkpoint_seconds)
        return SnapshotResult(samples=reply["rows"], bytes=reply["bytes"])


def _append(theirs: list[Place], ours: list[Place], there: Place, here: Place) -> None:
    """One more stretch; together with the last one, where both go on."""
    if theirs and (last := theirs[-1]).address + last.size == there.address:
        theirs[-1] = Place(last.address, last.size + there.size, last.device, last.memory)
        ours[-1] = Place(ours[-1].address, ours[-1].size + here.size)
    else:
        theirs.append(there)
        ours.append(here)


def _inline(entry: Sequence[Any], reply: Message) -> Cell:
    text, _, start, size = entry
    return text, memoryview(reply.buffers[0])[start : start + size] if size else b""


def _name_what_lacks(request: GetRequest, reply: Message) -> None:
    if reply["unknown"]:
        raise unknown_sample(request.partition, request.keys[reply["unknown"][0]])
    if reply["lacking"]:
        _, name, there = reply["lacking"][0]
        keys = [request.keys[number] for number, other, _ in reply["lacking"] if other == name]
        raise lacking_column(request.partition, name, keys, there)
    if not request.keys:
        raise QueueError("no rows are named", expected="one key at least")


# -- the file by which others join -------------------------------------------------------------------------------------


def _write(folder: Path, entry: dict[str, Any]) -> None:
    """For this user's eyes only: who can read it may read and write samples."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{FILE}.{os.getpid()}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(entry, file)
    partial.replace(folder / FILE)


def _read(path: Path) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise QueueError(
            f"no queue can be joined: {error}",
            code="queue.unreachable",
            where=str(path),
            fix=f"name the {FILE} in the queue folder of a run that is running",
        ) from error
    if not isinstance(entry, dict) or entry.get("format") != _FORMAT:
        raise QueueError("the store's file is of another format", code="queue.store", where=str(path))
    return entry
