"""The backend: one transaction for each request."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import sqlalchemy as sql

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
from jackfield.sdk.archive import SavedSample, batches, queue_name, read_archive, write_archive
from jackfield.sdk.cells import Cell, join, lacking_column, split_request, unknown_sample
from jackfield_transport_sql.config import Config
from jackfield_transport_sql.database import Database
from jackfield_transport_sql.rows import Reader, Rows
from jackfield_transport_sql.schema import prepare

_FILE = "samples.sqlite"
_BOOT = Path("/proc/sys/kernel/random/boot_id")  #: different on every host and after every start


class SQLBackend(TransferQueueBackend):
    """A backend with values in a database. They survive crashes of their producer and of the server."""

    durable: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    def __init__(self, config: Config, context: TransferQueueContext) -> None:
        super().__init__(config, context)
        self._settings = config
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._opened: tuple[Database, Rows] | None = None
        self._entrance = asyncio.Lock()  # held while a checkpoint fixes what belongs to it

    async def start(self) -> None:
        """Connect, create missing tables, and refuse tables of another format."""
        settings = self._settings
        name = settings.queue or queue_name(self.context.folder)
        rows = Rows(name, Reader(settings.tokenizer), settings.history)
        database = Database(settings.url or self._file(), settings)
        try:
            await database.first(lambda connection: prepare(connection, settings.tag_columns))
        except BaseException:
            database.close()
            raise
        self._opened = database, rows

    def _file(self) -> str:
        """Return SQLite's file in the queue's folder, or a temporary one that ends with the backend."""
        if self.context.folder is not None:
            self._check_host(Path(self.context.folder, f"{_FILE}.host"))
            return f"sqlite:///{Path(self.context.folder).absolute() / _FILE}"
        self._temporary = tempfile.TemporaryDirectory(prefix="jackfield-sql-")
        return f"sqlite:///{Path(self._temporary.name) / _FILE}"

    def _check_host(self, mark: Path) -> None:
        """Refuse to join SQLite's file from another host: its processes share memory beside it."""
        host = _BOOT.read_text(encoding="ascii") if _BOOT.is_file() else socket.gethostname()
        if not self.context.joins:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(host, encoding="ascii")
        elif mark.is_file() and mark.read_text(encoding="ascii") != host:
            raise QueueError(
                "SQLite's file is open on another host, and its processes have to share memory",
                code="queue.unreachable",
                where=str(mark.parent / _FILE),
                fix="use a PostgreSQL server (transfer_queue.url), or another backend",
            )

    async def put(self, request: PutRequest) -> PutResult:
        """Write all columns of all rows in one transaction: a reader sees all of them or none."""
        database, rows = self._open()
        samples = [
            SavedSample(partition=request.partition, key=key, cells=cells)
            for key, cells in zip(request.keys, split_request(request), strict=True)
        ]
        async with self._entrance:
            pass
        return PutResult(bytes=await database.run(lambda connection: rows.write(connection, samples), "write"))

    async def get(self, request: GetRequest) -> GetResult:
        """Return columns in the order of the keys, all of one moment; ``queue.lost`` names altered rows."""
        database, rows = self._open()

        def read(connection: sql.Connection) -> dict[tuple[str, str], Cell]:
            found = rows.cells(connection, request.partition, request.keys, request.columns)
            if not request.columns or len(found) < len(set(request.keys)) * len(set(request.columns)):
                _name_what_lacks(connection, rows, request, found)
            return found

        found = await database.run(read, "read")
        return GetResult(
            columns={name: join(name, [found[key, name] for key in request.keys]) for name in request.columns}
        )

    async def keys(self, request: KeysRequest) -> KeysResult:
        """List the rows in the tables."""
        database, rows = self._open()
        return KeysResult(
            samples=await database.run(lambda connection: rows.names(connection, request.partition), "read")
        )

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Delete rows; unknown keys are ignored."""
        database, rows = self._open()
        async with self._entrance:
            pass
        return await database.run(lambda connection: rows.delete(connection, request.partition, request.keys), "write")

    async def stats(self) -> StatsResult:
        """Return rows and bytes of this queue."""
        database, rows = self._open()
        return await database.run(rows.count, "read")

    async def put_tags(self, request: TagsRequest) -> None:
        """Store the tags of existing rows, as JSON and as columns of the view."""
        database, rows = self._open()
        tags = dict(zip(request.keys, request.tags, strict=True))
        await database.run(lambda connection: rows.show_tags(connection, request.partition, tags), "write")

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Write the rows of one moment while others continue to write."""
        database, rows = self._open()
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def write(connection: sql.Connection) -> SnapshotResult:
            places = rows.places(connection)
            loop.call_soon_threadsafe(begun.set)  # from its first query on, the transaction sees one state
            return write_archive(Path(request.folder), rows.archived(connection, places))

        async with self._entrance:
            writing = asyncio.ensure_future(database.run(write, "read", self._settings.checkpoint_seconds))
            writing.add_done_callback(lambda _: begun.set())
            await begun.wait()  # not longer than `writing`, which has a deadline
        return await writing

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Replace all rows of this queue by a checkpoint, in one transaction."""
        database, rows = self._open()

        def replace(connection: sql.Connection) -> SnapshotResult:
            rows.delete_all(connection)
            count = size = 0
            for batch in batches(read_archive(Path(request.folder)), lambda row: row.bytes):
                count, size = count + len(batch), size + rows.write(connection, batch)
                rows.queued_again(connection, batch)
            return SnapshotResult(samples=count, bytes=size)

        return await database.run(replace, "write", self._settings.checkpoint_seconds)

    async def close(self) -> None:
        """End connections and threads."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[0].close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _open(self) -> tuple[Database, Rows]:
        if self._opened is None:
            raise QueueError("the SQL backend is closed", code="queue.closed")
        return self._opened


def _name_what_lacks(
    connection: sql.Connection, rows: Rows, request: GetRequest, found: Mapping[tuple[str, str], Cell]
) -> None:
    there = rows.names(connection, request.partition)
    for key in request.keys:
        if (request.partition, key) not in there:
            raise unknown_sample(request.partition, key)
    for name in request.columns:
        lacking = [key for key in request.keys if (key, name) not in found]
        if lacking:
            raise lacking_column(request.partition, name, lacking, there[request.partition, lacking[0]])
