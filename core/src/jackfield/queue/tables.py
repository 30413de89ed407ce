"""The tables of a queue's SQLite file: opening it, reading its rows, and its errors. Internal to the package."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import xxhash

from jackfield.errors import QueueError
from jackfield.queue.saving import Row

SCHEMA = """
create table if not exists state(kind text, name text, batch int, place int, value text not null, digest text not null,
    primary key(kind, name, batch, place)) without rowid;
create table if not exists lineage(key text primary key, operation text not null, parents text not null) without rowid;
create table if not exists ledger(number integer primary key, event text not null, step int, consumer text,
    value text not null, digest text not null);
create view if not exists uses as select step, consumer, event, key.value as key from ledger,
    json_each(ledger.value, '$.keys') key where event in ('ack', 'rollback');
"""
_SETTINGS = ("journal_mode=wal", "synchronous=normal", "wal_autocheckpoint=4000")


@attrs.frozen
class LedgerEnd:
    """The end of a ledger at some moment; a checkpoint knows it."""

    number: int = 0
    digest: str = ""  #: of the last entry and, through it, of all


def open_file(path: Path | None) -> sqlite3.Connection:
    """Open the file to write it; None: in memory."""
    db = sqlite3.connect(":memory:" if path is None else path, isolation_level=None, timeout=5.0)
    for setting in _SETTINGS:
        found = db.execute(f"pragma {setting}").fetchone()
        if path is not None and setting == "journal_mode=wal" and found != ("wal",):
            db.execute("pragma locking_mode=exclusive")  # a file system without shared memory
            db.execute("pragma journal_mode=wal")
    db.executescript(SCHEMA)
    return db


def open_readable(path: Path) -> sqlite3.Connection:
    """Open a file to read it. Where no process writes it, and none was killed, nothing is put beside it."""
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None)


def insert(db: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Write rows of the state with their digests."""
    db.executemany("insert or replace into state values(?, ?, ?, ?, ?, ?)", [(*row, _digest(row)) for row in rows])


def rows_of(db: sqlite3.Connection, path: Path | None) -> list[Row]:
    """Read the rows of the state, and compare their digests."""
    rows = []
    with translated_errors(path, "queue.invalid"):
        for *found, digest in db.execute("select * from state"):
            row: Row = tuple(found)
            if digest != _digest(row):
                raise QueueError("a queue's saved state is damaged", where=str(path), found="/".join(map(str, row[:4])))
            rows.append(row)
    return rows


def entries_of(db: sqlite3.Connection, path: Path | None) -> Iterator[tuple[LedgerEnd, dict[str, Any]]]:
    """Read the entries of the ledger, each with the end that it makes."""
    end = LedgerEnd()
    with translated_errors(path, "queue.ledger"):
        for number, event, step, consumer, value, digest in db.execute("select * from ledger order by number"):
            entry = json.loads(value) if digest == chained(end.digest, value) else {}
            shown = (entry.get("event"), entry.get("step"), entry.get("consumer"))
            if number != end.number + 1 or shown != (event, step, consumer):
                raise damaged(path, f"entry {end.number + 1} as it was written", f"entry {number}")
            end = LedgerEnd(number, digest)
            yield end, entry


def _digest(row: Row) -> str:
    return xxhash.xxh3_64_hexdigest("/".join(map(str, row)).encode())


def chained(before: str, value: str) -> str:
    """Compute the digest of an entry from that of the entry before it."""
    return xxhash.xxh3_128_hexdigest(f"{before}{value}".encode())


def damaged(path: Path | None, expected: object, found: object) -> QueueError:
    """Make the error of a damaged ledger."""
    return QueueError(
        "the run's ledger is not the one that was written",
        code="queue.ledger",
        where=str(path),
        expected=expected,
        found=found,
        fix="restore the file from a copy; without one, take the model out (jackfield checkpoint export) and begin a "
        "run with it in another folder, or begin again here with checkpoint.resume=false",
    )


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit at the end of the block, or roll back."""
    db.execute("begin immediate")
    try:
        yield
        db.execute("commit")
    except BaseException:
        if db.in_transaction:
            db.execute("rollback")
        raise


@contextmanager
def translated_errors(path: Path | None, code: str = "queue.store") -> Iterator[None]:
    """Raise errors of SQLite as errors of the queue."""
    try:
        yield
    except sqlite3.Error as error:
        if code == "queue.ledger":
            raise damaged(path, "a file of SQLite that is whole", str(error)) from error
        message = f"the queue's own file cannot be used: {error}"
        raise QueueError(message, code=code, where=str(path), found=type(error).__name__) from error
