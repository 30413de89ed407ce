"""Databases that die, hang, refuse or are something else: every wait ends, and the error says whose fault it is."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import QueueError
from jackfield_servers import PASSWORD, QUOTED_PASSWORD, PostgresServer
from jackfield_stores import Opened, check_a_hanging_server_is_named, check_kill_9_of_the_server, put, values
from jackfield_testing import in_loop, refused
from jackfield_transport_sql.schema import FORMAT


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that these tests may kill."""
    with contextlib.closing(PostgresServer()) as server:
        server.start()
        yield server


@pytest.mark.needs("postgres")
@in_loop
async def test_what_was_put_survives_kill_9_of_the_server(own_server: PostgresServer, opened: Opened) -> None:
    await check_kill_9_of_the_server(opened, own_server, rows=12, before=16)


@pytest.mark.needs("postgres")
@in_loop
async def test_a_server_that_hangs_or_is_gone_is_named_within_the_deadline(
    own_server: PostgresServer, opened: Opened
) -> None:
    await check_a_hanging_server_is_named(opened, own_server, seconds=0.5)


@pytest.mark.needs("postgres")
@in_loop
async def test_logins_and_databases_that_are_refused(postgres_server: PostgresServer, opened: Any) -> None:
    url = postgres_server.url
    for wrong in (url.replace(QUOTED_PASSWORD, "secret-guess"), url.replace("/postgres", "/no_such_database")):
        with pytest.raises(QueueError) as caught:
            async with opened(url=wrong):
                pass
        assert "queue.store" == caught.value.code
        assert not [secret for secret in ("secret-guess", PASSWORD, QUOTED_PASSWORD) if secret in str(caught.value)]


@in_loop
async def test_nobody_at_the_address_is_told_at_once(opened: Any, unused_port: int) -> None:
    with refused("queue.unreachable", f"127.0.0.1:{unused_port}") as caught:
        async with opened(url=f"postgresql://me@127.0.0.1:{unused_port}/x", seconds=50.0):
            pass
    assert "queue.unreachable" == caught.value.code


@in_loop
async def test_tables_of_another_format_are_refused(url: str, opened: Any) -> None:
    import sqlalchemy as sql

    async with opened(url=url):
        pass
    engine = sql.create_engine(sql.make_url(url).set(drivername="postgresql+psycopg") if "postgres" in url else url)
    try:
        _set_format(engine, 99)
        with refused("queue.store", "format 99") as caught:
            async with opened(url=url):
                pass
        assert "queue.store" == caught.value.code
    finally:
        _set_format(engine, FORMAT)
        engine.dispose()
    async with opened(url=url):
        pass


def _set_format(engine: Any, version: int) -> None:
    import sqlalchemy as sql

    with engine.begin() as connection:
        connection.execute(sql.text(f"UPDATE jackfield_format SET version = {version}"))


@in_loop
async def test_a_file_that_is_no_database_is_refused(opened: Any, tmp_path: Path) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear reader, " * 1000)
    with pytest.raises(QueueError) as caught:
        async with opened(url=f"sqlite:///{file}"):
            pass
    assert "queue.store" == caught.value.code


@in_loop
async def test_a_file_that_another_program_has_locked_is_named_within_the_deadline(opened: Any, tmp_path: Path) -> None:
    file = tmp_path / "samples.sqlite"
    async with opened(url=f"sqlite:///{file}", seconds=0.3) as backend:
        await put(backend, "a")
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(QueueError) as caught:
                await put(backend, "b")
            assert "samples.sqlite" in str(caught.value.where)
            assert "queue.unreachable" == caught.value.code
            assert [1.0] == await values(backend, ["a"])
            other.execute("ROLLBACK")
        await put(backend, "b")
