"""A durable store of values: one SQLite file, one thread that talks to it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

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
from jackfield.sdk.cells import Cell, join, lacking_column, split_request, unknown_sample
from jackfield_transport_sqlite.config import Config

T = TypeVar("T")

_TABLE = """
CREATE TABLE IF NOT EXISTS cells (
    partition TEXT, key TEXT, name TEXT, type TEXT, content BLOB,
    PRIMARY KEY (partition, key, name)
) WITHOUT ROWID
"""
_SNAPSHOT = "samples.sqlite"


class SQLiteBackend(TransferQueueBackend):
    """Values survive the death of the process that put them."""

    durable: ClassVar[bool] = True

    def __init__(self, config: Config, context: TransferQueueContext) -> None:
        super().__init__(config, context)
        self._folder = None if context.folder is None else Path(context.folder)
        self._file = config.file
        # a thread of its own: asyncio.to_thread would queue behind the run's training passes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite")
        self._database: sqlite3.Connection | None = None

    async def start(self) -> None:
        """Open the file; without a folder, a database in memory."""
        await self._run(self._open)

    def _open(self) -> None:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        place = ":memory:" if self._folder is None else str(self._folder / self._file)
        self._database = sqlite3.connect(place)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute(_TABLE)

    async def put(self, request: PutRequest) -> PutResult:
        """All columns of all rows in one transaction: a reader sees all of them or none."""
        rows = [
            (request.partition, key, name, *cell)
            for key, cells in zip(request.keys, split_request(request), strict=True)
            for name, cell in cells.items()
        ]

        def write(database: sqlite3.Connection) -> None:
            with database:
                database.executemany("INSERT OR REPLACE INTO cells VALUES (?, ?, ?, ?, ?)", rows)

        await self._with(write)
        return PutResult(bytes=sum(len(row[-1]) for row in rows))

    async def get(self, request: GetRequest) -> GetResult:
        """Columns in the order of the keys."""
        found = await self._with(lambda database: self._cells(database, request.partition, request.keys))
        columns = {}
        for name in request.columns:
            lacking = [key for key in request.keys if name not in found[key]]
            if lacking:
                raise lacking_column(request.partition, name, lacking, found[lacking[0]])
            columns[name] = join(name, [found[key][name] for key in request.keys])
        return GetResult(columns=columns)

    def _cells(self, database: sqlite3.Connection, partition: str, keys: Sequence[str]) -> dict[str, dict[str, Cell]]:
        query = "SELECT name, type, content FROM cells WHERE partition = ? AND key = ?"
        found = {}
        for key in keys:
            found[key] = {name: (kind, content) for name, kind, content in database.execute(query, (partition, key))}
            if not found[key]:
                raise unknown_sample(partition, key)
        return found

    async def keys(self, request: KeysRequest) -> KeysResult:
        """Samples and their columns."""
        samples: dict[tuple[str, str], tuple[str, ...]] = {}
        query = "SELECT partition, key, name FROM cells"
        for partition, key, name in await self._with(lambda database: database.execute(query).fetchall()):
            if request.partition in (None, partition):
                samples[partition, key] = (*samples.get((partition, key), ()), name)
        return KeysResult(samples=samples)

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Forget rows; unknown keys are ignored."""

        def remove(database: sqlite3.Connection) -> DeleteResult:
            before = self._count(database)
            with database:
                where = [(request.partition, key) for key in request.keys]
                database.executemany("DELETE FROM cells WHERE partition = ? AND key = ?", where)
            after = self._count(database)
            return DeleteResult(samples=before[0] - after[0], bytes=before[1] - after[1])

        return await self._with(remove)

    async def stats(self) -> StatsResult:
        """Rows and bytes."""
        rows, size = await self._with(self._count)
        return StatsResult(samples=rows, bytes=size)

    @staticmethod
    def _count(database: sqlite3.Connection) -> tuple[int, int]:
        query = "SELECT count(DISTINCT partition || char(0) || key), coalesce(sum(length(content)), 0) FROM cells"
        rows, size = database.execute(query).fetchone()
        return rows, size

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """A consistent copy; SQLite lets writers go on. The file appears whole or not at all."""
        folder = Path(request.folder)

        def copy(database: sqlite3.Connection) -> tuple[int, int]:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{_SNAPSHOT}.partial"
            partial.unlink(missing_ok=True)
            target = sqlite3.connect(partial)
            database.backup(target)
            target.close()
            partial.replace(folder / _SNAPSHOT)
            return self._count(database)

        rows, size = await self._with(copy)
        return SnapshotResult(samples=rows, bytes=size)

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Replace everything by a checkpoint."""
        file = Path(request.folder) / _SNAPSHOT

        def replace(database: sqlite3.Connection) -> tuple[int, int]:
            if not file.is_file():
                raise QueueError("no checkpoint of this backend", where=request.folder, expected=_SNAPSHOT)
            source = sqlite3.connect(file)
            source.backup(database)
            source.close()
            return self._count(database)

        rows, size = await self._with(replace)
        return SnapshotResult(samples=rows, bytes=size)

    async def close(self) -> None:
        """Close the file and end the thread."""
        if self._database is not None:
            database, self._database = self._database, None
            await self._run(database.close)
        self._thread.shutdown()  # idle by now

    async def _with(self, work: Callable[[sqlite3.Connection], T]) -> T:
        database = self._database
        if database is None:
            raise QueueError("the SQLite backend is closed", code="queue.closed")
        return await self._run(lambda: work(database))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
