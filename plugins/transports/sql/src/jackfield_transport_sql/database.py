"""Transactions in threads, with deadlines, reconnection, and errors that name the cause."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import sqlalchemy as sql
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, PluginError, QueueError
from jackfield_transport_sql.config import Config

T = TypeVar("T")
Mode = Literal["read", "write"]
Work = Callable[[sql.Connection], T]

#: Failures caused by concurrent transactions, which are retried: serialization failure, deadlock.
_CONFLICTS = {"40001", "40P01"}
#: The server is starting, stopping or full.
_PASSING = {"57P01", "57P02", "57P03", "53300"}
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 1.0


class Database:
    """A pool of connections and the threads that use them.

    A request is one transaction. If its connection is lost, or it conflicts with another transaction, it is retried
    until its deadline; the backend's writes are idempotent.
    """

    def __init__(self, url: str, config: Config) -> None:
        self._url = sql.make_url(url)
        self._seconds = config.seconds
        self._embedded = self._url.get_backend_name() == "sqlite"
        self._engine = _engine(self._url, config)
        self._threads = ThreadPoolExecutor(config.connections, thread_name_prefix="jackfield-sql")
        self._writing = asyncio.Lock()  # SQLite has one writer: wait here rather than in its polling busy handler
        self._attempts: set[_Attempt] = set()
        self._clock = Clock()
        self._known = False  # it accepted a connection before: later refusals are temporary

    @property
    def label(self) -> str:
        """Return the database's address without its password."""
        return self._url.render_as_string(hide_password=True)

    async def first(self, work: Work[T]) -> T:
        """Run the first transaction, which writes: a missing database fails at once."""
        result = await self._attempt(work, "write", self._seconds)
        self._known = True
        return result

    async def run(self, work: Work[T], mode: Mode, seconds: float | None = None) -> T:
        """Do ``work`` in a transaction, in a thread; a reader sees one state of the database.

        Raises:
            QueueError: ``queue.unreachable`` if the database does not answer in time, ``queue.store`` if it refuses.
        """
        until = self._clock.time() + (seconds or self._seconds)
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self._attempt(work, mode, until - self._clock.time())
            except QueueError as error:
                if error.code != "queue.unreachable" or self._clock.time() + pause >= until:
                    raise
            await self._clock.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    def close(self) -> None:
        """End threads and connections; running requests on a server are aborted."""
        for attempt in self._attempts:
            attempt.abandon()
        self._threads.shutdown()
        self._engine.dispose()

    async def _attempt(self, work: Work[T], mode: Mode, seconds: float) -> T:
        attempt = _Attempt()
        self._attempts.add(attempt)
        try:
            async with self._writing if self._embedded and mode == "write" else contextlib.nullcontext():
                loop = asyncio.get_running_loop()
                future = loop.run_in_executor(self._threads, self._transact, work, mode, attempt)
                return await self._clock.wait_for(future, max(seconds, 0.001), f"the database {self.label}")
        except DeadlineExceeded as error:
            raise QueueError(
                f"the database did not answer within {seconds:.3g} s", code="queue.unreachable", where=self.label
            ) from error
        finally:
            attempt.abandon()
            self._attempts.discard(attempt)

    def _transact(self, work: Work[T], mode: Mode, attempt: _Attempt) -> T:
        level = "SERIALIZABLE" if self._embedded else "REPEATABLE READ" if mode == "read" else "READ COMMITTED"
        options: dict[str, Any] = {"jackfield_mode": mode}
        if not self._embedded:
            options["isolation_level"] = level
        try:
            with self._engine.connect().execution_options(**options) as connection:
                attempt.use(connection)
                try:
                    with connection.begin():
                        return work(connection)
                finally:
                    attempt.done()
        except DBAPIError as error:
            raise self._explained(error) from error

    def _explained(self, error: DBAPIError) -> QueueError:
        cause: Any = error.orig
        told = " ".join(str(cause).split())
        explained = functools.partial(QueueError, where=self.label, found=told)
        if isinstance(cause, sqlite3.Error):
            passing = getattr(cause, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        else:
            state = getattr(cause, "sqlstate", None)
            refused = state is None and "FATAL" in told and not self._known
            passing = error.connection_invalidated or state in _CONFLICTS | _PASSING or (state is None and not refused)
        if passing:
            fix = "look whether the server runs and the URL is right"
            return explained("the database does not answer", code="queue.unreachable", fix=fix)
        if getattr(cause, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            fix = "restore the file, or move it away: a run goes on with its checkpoint's rows and makes the rest again"
            return explained("the file is damaged, or no database", code="queue.store", fix=fix)
        return explained("the database refuses", code="queue.store")


class _Attempt:
    """A transaction in a thread, whose caller may stop waiting."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def use(self, connection: sql.Connection) -> None:
        driver: Any = connection.connection.driver_connection
        if connection.dialect.name == "postgresql":
            self._socket = socket.socket(fileno=os.dup(driver.fileno()))

    def done(self) -> None:
        """Release the connection."""
        taken, self._socket = self._socket, None
        if taken is not None:
            taken.close()

    def abandon(self) -> None:
        """Break the connection of a running transaction, which frees its thread by an error."""
        taken, self._socket = self._socket, None
        if taken is not None:
            with contextlib.suppress(OSError):
                taken.shutdown(socket.SHUT_RDWR)
            taken.close()


def _engine(url: sql.URL, config: Config) -> sql.Engine:
    size = {"pool_size": config.connections, "max_overflow": 0}
    if url.get_backend_name() == "sqlite":
        engine = sql.create_engine(url, **size, connect_args={"check_same_thread": False, "timeout": config.seconds})
        event.listen(engine, "connect", lambda connection, _: _set_up_sqlite(connection, config.synchronous))
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    try:
        import psycopg
    except ImportError as error:
        message = "PostgreSQL needs the package psycopg"
        raise PluginError(message, where="url", fix="pip install 'jackfield-transport-sql[postgresql]'") from error

    class BinaryCursor(psycopg.Cursor[Any]):
        """Reads blobs as the bytes that they are: hexadecimal text takes thrice the time."""

        def __init__(self, connection: Any, **options: Any) -> None:
            super().__init__(connection, **options)
            self.format = psycopg.pq.Format.BINARY

    arguments = {
        "cursor_factory": BinaryCursor,
        "connect_timeout": max(2, round(config.seconds)),
        "application_name": "jackfield",
        "options": f"{url.query.get('options', '')} -c synchronous_commit=on".strip(),
    }
    return sql.create_engine(url.set(drivername="postgresql+psycopg"), **size, connect_args=arguments)


def _set_up_sqlite(connection: Any, synchronous: str) -> None:
    connection.isolation_level = None  # transactions begin as `_begin_sqlite` says
    for pragma in (
        "page_size = 16384",  # has an effect on a new file only
        "journal_mode = WAL",  # readers and the writer do not wait for each other
        f"synchronous = {synchronous.upper()}",
        "wal_autocheckpoint = 2000",
        "cache_size = -65536",
        "temp_store = MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: sql.Connection) -> None:
    writes = connection.get_execution_options().get("jackfield_mode") == "write"
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
