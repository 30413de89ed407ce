"""The backend: a hash for each row, transactions for each request."""

from __future__ import annotations

import asyncio
import functools
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    TagsRequest,
    TransferQueueBackend,
    TransferQueueContext,
)
from jackfield.errors import QueueError
from jackfield.sdk.archive import BATCH_BYTES, BATCH_ROWS, ArchiveWriter, SavedSample, batches, queue_name, read_archive
from jackfield.sdk.cells import Cell, cell_digest, damaged_samples, join, lacking_column, split_request, unknown_sample
from jackfield_transport_redis.config import Config
from jackfield_transport_redis.scripts import ANNOUNCE, BEGIN, DELETE, END, STAGE, SWAP, TAKE
from jackfield_transport_redis.server import Server

T = TypeVar("T")

FORMAT = b"3"
_CELL_BYTES = 512_000_000  #: Redis ends at 512 MiB
_DIGEST = 16  #: characters, before a cell's header
_SAVING_SECONDS = 60  #: after which a checkpoint whose writer died no longer holds rows


class RedisBackend(TransferQueueBackend):
    """A backend with values on a Redis server. They survive their producer, and a restart as the log allows."""

    durable: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    def __init__(self, config: Config, context: TransferQueueContext) -> None:
        super().__init__(config, context)
        self._settings = config
        self._server: Server | None = None
        self._prefix = ""
        self._entrance = asyncio.Lock()  # held while a checkpoint fixes what belongs to it
        self._thread: ThreadPoolExecutor | None = None  # for files

    async def start(self) -> None:
        """Connect, and refuse a server that could lose or mix up rows."""
        self._prefix = f"jackfield:{self._settings.queue or queue_name(self.context.folder)}:"
        server = Server(self._settings)
        try:
            await server.check()
            await server.run(lambda client: client.set(f"{self._prefix}format", FORMAT, nx=True))
            found = await server.run(lambda client: client.get(f"{self._prefix}format"))
            if found != FORMAT:
                raise QueueError(
                    "the rows on the server are of another format",
                    code="queue.store",
                    where=f"{server.label} {self._prefix}format",
                    expected=FORMAT.decode(),
                    found=found,
                    fix="use another queue, or the version of jackfield-transport-redis that wrote it",
                )
        except BaseException:
            await server.close()
            raise
        self._server = server
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jackfield-redis")

    async def put(self, request: PutRequest) -> PutResult:
        """Write transactions of up to 500 rows or 32 MiB: a reader sees all columns of a row or none."""
        server = self._open()
        columns = list(request.columns)
        rows = [
            (_row_id(request.partition, key), key, cells)
            for key, cells in zip(request.keys, split_request(request), strict=True)
        ]
        async with self._entrance:
            pass
        stored = 0
        for some in batches(rows, lambda row: sum(map(_size, row[2].values()))):
            sizes = [part for row, _, cells in some for part in (row, *map(_size, cells.values()))]

            async def write(client: Any, some: Any = some, sizes: Any = sizes) -> None:
                async with client.pipeline(transaction=True) as pipeline:
                    pipeline.eval(ANNOUNCE, 0, self._prefix, len(columns), *columns, *sizes)
                    for row, key, cells in some:
                        if cells:
                            pipeline.hset(f"{self._prefix}row:{row}", mapping=_fields(request.partition, key, cells))
                    await pipeline.execute()

            await server.run(write)
            stored += sum(_size(cell) for _, _, cells in some for cell in cells.values())
        return PutResult(bytes=stored)

    async def get(self, request: GetRequest) -> GetResult:
        """Return columns in the order of the keys; ``queue.lost`` names altered rows."""
        server = self._open()
        fields = [field for name in request.columns for field in (f"h:{name}", f"v:{name}")]
        found: dict[str, list[bytes | None]] = {}
        keys = list(dict.fromkeys(request.keys))
        for start in range(0, len(keys), BATCH_ROWS):
            some = keys[start : start + BATCH_ROWS]

            async def read(client: Any, some: Any = some) -> list[Any]:
                async with client.pipeline(transaction=True) as pipeline:
                    rows = [_row_id(request.partition, key) for key in some]
                    pipeline.smismember(f"{self._prefix}rows", rows)
                    for row in rows if fields else ():
                        pipeline.hmget(f"{self._prefix}row:{row}", fields)
                    result: list[Any] = await pipeline.execute()
                return result

            there, *rows = await server.run(read)
            unknown = [key for key, known in zip(some, there, strict=True) if not known]
            if unknown:
                raise unknown_sample(request.partition, unknown[0])
            found.update(zip(some, rows, strict=False))
        columns: dict[str, list[Cell]] = {}
        damaged: set[str] = set()
        for place, name in enumerate(request.columns):
            kept = {key: found[key][2 * place : 2 * place + 2] for key in keys}
            lacking = [key for key in request.keys if kept[key][0] is None]
            if lacking:
                raise await self._lacks(server, request.partition, name, lacking)
            cells = {key: _cell(request.partition, key, name, *fields) for key, fields in kept.items()}
            damaged.update(key for key, cell in cells.items() if cell is None)
            columns[name] = [cell for key in request.keys if (cell := cells[key]) is not None]
        if damaged:
            raise damaged_samples(request.partition, damaged, f"{server.label} {self._prefix}")
        return GetResult(columns={name: join(name, cells) for name, cells in columns.items()})

    async def _lacks(self, server: Server, partition: str, name: str, keys: Sequence[str]) -> QueueError:
        row = f"{self._prefix}row:{_row_id(partition, keys[0])}"
        fields = await server.run(lambda client: client.hkeys(row))
        return lacking_column(partition, name, keys, _names(fields))

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Delete rows; unknown keys are ignored."""
        server = self._open()
        async with self._entrance:
            pass
        rows = [_row_id(request.partition, key) for key in dict.fromkeys(request.keys)]
        count = size = 0
        for start in range(0, len(rows), BATCH_ROWS):
            arguments = (self._prefix, *rows[start : start + BATCH_ROWS])
            freed = await server.run(lambda client, given=arguments: client.eval(DELETE, 0, *given))  # type: ignore[misc]
            count, size = count + freed[0], size + freed[1]
        return DeleteResult(samples=count, bytes=size)

    async def keys(self, request: KeysRequest) -> KeysResult:
        """List the rows on the server: a column has a value and a header."""
        server = self._open()
        places = {row: _place(row) for row in await server.run(lambda client: client.smembers(f"{self._prefix}rows"))}
        rows = [row for row, place in places.items() if request.partition in (None, place[0])]
        samples: dict[tuple[str, str], tuple[str, ...]] = {}
        for start in range(0, len(rows), BATCH_ROWS):
            some = rows[start : start + BATCH_ROWS]

            async def look(client: Any, some: Sequence[bytes] = some) -> list[Any]:
                async with client.pipeline(transaction=False) as pipeline:
                    for row in some:
                        pipeline.hkeys(f"{self._prefix}row:".encode() + row)
                    result: list[Any] = await pipeline.execute()
                return result

            found = await server.run(look)
            samples |= {places[row]: tuple(_names(fields)) for row, fields in zip(some, found, strict=True)}
        return KeysResult(samples=samples)

    async def stats(self) -> StatsResult:
        """Return rows and bytes of this queue, and the memory of the server."""
        server = self._open()

        async def count(client: Any) -> list[Any]:
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.scard(f"{self._prefix}rows").get(f"{self._prefix}bytes").info("memory")
                result: list[Any] = await pipeline.execute()
            return result

        rows, size, memory = await server.run(count)
        return StatsResult(samples=rows, bytes=int(size or 0), details={"server_bytes": float(memory["used_memory"])})

    async def put_tags(self, request: TagsRequest) -> None:
        """Store the tags of existing rows, as JSON in the field ``tags``."""
        server = self._open()
        rows = [_row_id(request.partition, key) for key in request.keys]
        if not rows:
            return
        known = await server.run(lambda client: client.smismember(f"{self._prefix}rows", rows))

        async def write(client: Any) -> None:
            async with client.pipeline(transaction=True) as pipeline:
                for row, tags, there in zip(rows, request.tags, known, strict=True):
                    if there:
                        pipeline.hset(f"{self._prefix}row:{row}", "tags", _json(tags))
                await pipeline.execute()

        await server.run(write)

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Write the rows of one moment while others continue to write: see the scripts."""
        server = self._open()
        mark, seconds = uuid.uuid4().hex, _SAVING_SECONDS
        async with self._entrance:
            begun = await server.run(lambda client: client.eval(BEGIN, 0, self._prefix, mark, seconds))
        if not begun:
            raise QueueError(
                "another checkpoint of this queue is being written",
                code="queue.store",
                where=f"{server.label} {self._prefix}saving",
                fix=f"wait for it; one whose writer died is forgotten after {seconds} s",
            )
        try:
            writer = await self._in_thread(lambda: ArchiveWriter(Path(request.folder)))
            try:
                while batch := await self._take(server, mark):
                    await self._in_thread(functools.partial(_write, writer, batch, f"{server.label} {self._prefix}"))
                return await self._in_thread(writer.finish)
            finally:
                await self._in_thread(writer.close)
        finally:
            await server.run(lambda client: client.eval(END, 0, self._prefix, mark))

    async def _take(self, server: Server, mark: str) -> list[Any]:
        # not repeated when the connection is lost: the server has forgotten what it gave
        found = await server.run(
            lambda client: client.eval(TAKE, 0, self._prefix, mark, _SAVING_SECONDS, BATCH_ROWS, BATCH_BYTES),
            repeats=False,
        )
        if found == -1:
            raise QueueError(
                "the checkpoint was overtaken by a restore, or took too long", code="queue.store", where=server.label
            )
        result: list[Any] = found
        return result

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Replace all rows of this queue by a checkpoint, which is staged first and then swapped in."""
        server = self._open()
        parts = batches(read_archive(Path(request.folder)), lambda row: row.bytes)
        batch = await self._in_thread(lambda: next(parts, []))
        await server.run(lambda client: client.eval(STAGE, 0, self._prefix))
        count = size = 0
        while batch:

            async def stage(client: Any, batch: list[SavedSample] = batch) -> None:
                async with client.pipeline(transaction=True) as pipeline:
                    for row in batch:
                        place = _row_id(row.partition, row.key)
                        pipeline.sadd(f"{self._prefix}staged", place)
                        fields = _fields(row.partition, row.key, row.cells) | (
                            {"tags": _json(row.tags)} if row.tags else {}
                        )
                        if fields:
                            pipeline.hset(f"{self._prefix}staged:{place}", mapping=fields)
                    await pipeline.execute()

            await server.run(stage)
            count, size = count + len(batch), size + sum(row.bytes for row in batch)
            batch = await self._in_thread(lambda: next(parts, []))
        await server.run(lambda client: client.eval(SWAP, 0, self._prefix, size))
        return SnapshotResult(samples=count, bytes=size)

    async def close(self) -> None:
        """End the connections; the rows stay on the server."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        if self._thread is not None:
            self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open(self) -> Server:
        if self._server is None:
            raise QueueError("the Redis backend is closed", code="queue.closed")
        return self._server


def _row_id(partition: str, key: str) -> str:
    """Return a row's id, which begins with the partition's length, so that no two are equal."""
    return f"{len(partition)}:{partition}:{key}"


def _place(row: bytes) -> tuple[str, str]:
    length, _, rest = row.decode().partition(":")
    return rest[: int(length)], rest[int(length) + 1 :]


def _names(fields: Sequence[bytes]) -> list[str]:
    """Return the columns of a row's hash that have a header and a value."""
    values = {field[2:] for field in fields if field.startswith(b"v:")}
    return sorted(field[2:].decode() for field in fields if field.startswith(b"h:") and field[2:] in values)


def _write(writer: ArchiveWriter, batch: Sequence[Any], where: str) -> None:
    writer.add(_archived(row, fields, where) for row, fields in batch)


def _archived(row: bytes, fields: Sequence[bytes], where: str) -> SavedSample:
    partition, key = _place(row)
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    cells: dict[str, Cell] = {}
    for name in sorted(field[2:].decode() for field in values if field.startswith(b"h:")):
        cell = _cell(partition, key, name, *(values.get(f"{at}:{name}".encode()) for at in "hv"))
        if cell is None:
            raise damaged_samples(partition, [key], where)
        cells[name] = cell
    return SavedSample(partition=partition, key=key, cells=cells, tags=json.loads(values.get(b"tags", b"{}")))


def _fields(partition: str, key: str, cells: Mapping[str, Cell]) -> dict[str, Any]:
    """Return a row's hash: of each cell the digest and the type, and the bytes."""
    fields: dict[str, Any] = {}
    for name, (kind, content) in cells.items():
        fields |= {f"h:{name}": cell_digest(partition, key, name, kind, content) + kind, f"v:{name}": content}
    return fields


def _cell(partition: str, key: str, name: str, header: bytes | None, content: bytes | None) -> Cell | None:
    """Return the stored cell; None if it differs from what was put."""
    text, value = (header or b"").decode(errors="replace"), content or b""
    digest, kind = text[:_DIGEST], text[_DIGEST:]
    return (kind, value) if cell_digest(partition, key, name, kind, value) == digest else None


def _size(cell: Cell) -> int:
    size = len(cell[1])
    if size > _CELL_BYTES:
        raise QueueError("a value is too large for Redis", expected=f"{_CELL_BYTES} bytes at most", found=size)
    return size


def _json(tags: Mapping[str, Any]) -> str:
    return json.dumps(dict(tags), ensure_ascii=False, default=str)
