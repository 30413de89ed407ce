"""The queue's state, ledger and lineage in one SQLite file.

In WAL mode a transaction is with the operating system when it returns, so it survives ``kill -9``. It is on the disk
after :meth:`Store.sync`, which every checkpoint of the run calls. A checkpoint is a file of the same tables.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from jackfield.errors import QueueError
from jackfield.queue.meta import Lineage
from jackfield.queue.saving import Row, every_row, few_rows, place_rows
from jackfield.queue.state import State
from jackfield.queue.tables import (
    SCHEMA,
    LedgerEnd,
    chained,
    damaged,
    entries_of,
    insert,
    open_file,
    open_readable,
    rows_of,
    transaction,
    translated_errors,
)

STORE_FILE = "controller.sqlite"
_ANCESTORS = """
with recursive found(key) as (select value from json_each(?) union
    select parent.value from found join lineage using(key), json_each(lineage.parents) parent)
select key, operation, parents from lineage join found using(key)
"""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Store:
    """The file, with one writer; others may read it meanwhile. It is opened when it is first needed."""

    def __init__(self, path: Path | None, *, durable: bool = False) -> None:
        """
        Args:
            path: of the file; None: in memory.
            durable: write the state with every call once :meth:`begin` was called, not only the ledger.
        """
        self.path = path
        self.durable = durable and path is not None
        self._connection: sqlite3.Connection | None = None
        self._few: dict[tuple[str, str, int, int], str] | None = None  #: rows that were written; None: not begun
        self._end = LedgerEnd()
        self._failure: QueueError | None = None

    @property
    def _db(self) -> sqlite3.Connection:
        if self._failure is not None:
            raise self._failure
        if self._connection is None:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with translated_errors(self.path):
                self._connection = open_file(self.path)
                row = self._connection.execute("select number, digest from ledger order by number desc").fetchone()
                self._end = LedgerEnd(*row) if row else LedgerEnd()
        return self._connection

    @property
    def end(self) -> LedgerEnd | None:
        """The end of the ledger; None where it is gone with the process."""
        return self._last() if self.path is not None else None

    def _last(self) -> LedgerEnd:
        assert self._db is not None
        return self._end

    # -- writing

    def write(self, state: State) -> None:
        """Add what one call changed, in one transaction; after a failure no later call succeeds."""
        if state.entries or state.derived or (self.durable and self._few is not None):
            with self._writing():
                self._write_ledger(state)
                if self._few is not None and self.durable:
                    self._write_state(state)
        for changed in (state.entries, state.derived, state.places, state.batches):
            changed.clear()

    def _write_ledger(self, state: State) -> None:
        for entry in state.entries:
            self._append(entry)
        rows = [(key, made.operation, _encode(made.parents)) for key, made in state.derived.items()]
        self._db.executemany("insert or replace into lineage values(?, ?, ?)", rows)

    def _append(self, entry: Mapping[str, Any]) -> None:
        value, before = _encode(entry), self._last()
        digest = chained(before.digest, value)
        row = (before.number + 1, entry["event"], entry.get("step"), entry.get("consumer"), value, digest)
        self._db.execute("insert into ledger values(?, ?, ?, ?, ?, ?)", row)
        self._end = LedgerEnd(row[0], digest)

    def _write_state(self, state: State) -> None:
        gone = [batch for batch in state.batches if batch.number not in batch.partition.batches]
        places = [(place, whole) for place, whole in state.places.items() if place.batch not in gone]
        rows = [row for place, whole in places for row in place_rows(place, whole=whole)]
        assert self._few is not None
        few = {row[:4]: row[4] for row in few_rows(state)}
        rows += [(*key, value) for key, value in few.items() if self._few.get(key) != value]
        self._few = few
        for batch in gone:
            self._db.execute("delete from state where name = ? and batch = ?", (batch.partition.name, batch.number))
        for place, whole in places:
            if whole and place.published is None:
                at = (place.batch.partition.name, place.batch.number, place.index)
                self._db.execute("delete from state where kind = 'body' and name = ? and batch = ? and place = ?", at)
        insert(self._db, rows)

    def begin(self, state: State) -> None:
        """Replace the state that the file has, whatever it is; from now on it follows."""
        self._few = {}
        if self.durable:
            with self._writing():
                self._db.execute("delete from state")
                self._write_ledger(state)
                insert(self._db, every_row(state))
            state.entries.clear()
            state.derived.clear()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with translated_errors(self.path), transaction(self._db):
                yield
        except QueueError as error:
            self._failure = error
            raise

    def clear(self) -> None:
        """Begin with an empty file."""
        self.close()
        self._failure, self._end = None, LedgerEnd()
        if self.path is not None:
            for suffix in ("", "-wal", "-shm"):
                self.path.with_name(f"{self.path.name}{suffix}").unlink(missing_ok=True)

    def sync(self) -> None:
        """Return when everything is on the disk."""
        with translated_errors(self.path):
            self._db.execute("pragma synchronous=full")
            self._db.execute("pragma wal_checkpoint(truncate)")
            self._db.execute("pragma synchronous=normal")

    def close(self) -> None:
        """Close the file. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # -- reading

    def rows(self) -> list[Row]:
        """Read the state that the file has.

        Raises:
            QueueError: ``queue.invalid`` where one of its rows is not what was written.
        """
        return rows_of(self._db, self.path)

    def ancestors(self, keys: Sequence[str]) -> dict[str, Lineage]:
        """Find what is known of samples, of their parents, and so on."""
        with translated_errors(self.path):
            if self._db.execute("select 1 from lineage limit 1").fetchone() is None:
                return {}
            found = self._db.execute(_ANCESTORS, (_encode(keys),))
            return {key: Lineage(operation, tuple(json.loads(parents))) for key, operation, parents in found}

    def entries(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """Read the entries of the ledger behind a number.

        Raises:
            QueueError: ``queue.ledger`` at the first that is not as it was written.
        """
        return (entry for end, entry in entries_of(self._db, self.path) if end.number > after)

    def verify(self, end: LedgerEnd) -> None:
        """Compare the ledger with what a checkpoint knows of it; what is damaged behind that is cut off.

        Raises:
            QueueError: ``queue.ledger`` where something of what the checkpoint knows was changed or is not there.
        """
        good = _checked(self._db, self.path, end)
        with translated_errors(self.path, "queue.ledger"):
            self._db.execute("delete from ledger where number > ?", (good.number,))
        self._end = good


def check_ledger(path: Path, end: LedgerEnd) -> None:
    """Compare a ledger with what a checkpoint knows of it, and change nothing.

    Raises:
        QueueError: ``queue.ledger`` as :meth:`Store.verify`, or where there is no file.
    """
    if not path.is_file():
        raise damaged(path, f"entry {end.number} with the digest {end.digest}", "no file")
    with closing(open_readable(path)) as db:
        _checked(db, path, end)


def _checked(db: sqlite3.Connection, path: Path | None, end: LedgerEnd) -> LedgerEnd:
    """Return the end of the undamaged part, which has all that a checkpoint knows."""
    good, known = LedgerEnd(), LedgerEnd()
    try:
        for good, _ in entries_of(db, path):
            known = good if good.number <= end.number else known
    except QueueError as error:
        if known != end:
            raise
        message = "the ledger is damaged after the checkpoint (%s); what comes after entry %d is removed"
        logging.getLogger("jackfield").warning(message, error.found, good.number)
    if known != end:
        raise damaged(path, f"entry {end.number} with the digest {end.digest}", known)
    return good


def save(path: Path, rows: Iterable[Row], lineage: Mapping[str, Lineage]) -> None:
    """Write a checkpoint: a file of the same tables, which is whole when it has its name."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with translated_errors(path), closing(sqlite3.connect(partial, isolation_level=None)) as db:
        db.execute("pragma journal_mode=off")
        db.execute("pragma synchronous=full")
        db.executescript(SCHEMA)
        with transaction(db):
            insert(db, rows)
            derived = [(key, made.operation, _encode(made.parents)) for key, made in lineage.items()]
            db.executemany("insert into lineage values(?, ?, ?)", derived)
    partial.replace(path)


def read_lineage(path: Path) -> dict[str, Lineage]:
    """Read what is known of samples that were made of others.

    Raises:
        QueueError: ``queue.ledger`` where the file is damaged.
    """
    with translated_errors(path, "queue.ledger"), closing(open_readable(path)) as db:
        return _lineage(db)


def _lineage(db: sqlite3.Connection) -> dict[str, Lineage]:
    found = db.execute("select key, operation, parents from lineage")
    return {key: Lineage(operation, tuple(json.loads(parents))) for key, operation, parents in found}


def read_rows(path: Path) -> tuple[list[Row], dict[str, Lineage]]:
    """Read a checkpoint: the rows of its state, and what is known of its samples' ancestors.

    Raises:
        QueueError: ``queue.invalid`` where there is none, or it is damaged.
    """
    if not path.is_file():
        raise QueueError("the folder holds no checkpoint of a queue", where=str(path.parent), expected=path.name)
    with translated_errors(path, "queue.invalid"), closing(open_readable(path)) as db:
        return rows_of(db, path), _lineage(db)


def find_store(folder: Path) -> Path | None:
    """Find the file of a run's queue, in the folder of the run or of its queue."""
    return next((path for path in (folder / "queue" / STORE_FILE, folder / STORE_FILE) if path.is_file()), None)


def read_ledger(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the ledger of the run in ``folder``, whether or not it is still running.

    Raises:
        QueueError: ``queue.ledger`` where there is none, or at the first entry that is not as it was written.
    """
    path = find_store(folder)
    if path is None:
        raise damaged(folder / "queue" / STORE_FILE, "the ledger of a run", "no file")
    with closing(open_readable(path)) as db:
        for _, entry in entries_of(db, path):
            yield entry


def effective_acks(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int | None]]:
    """Find the acks that no rollback has taken back: consumer to sample to the step that used it, the last time."""
    return {name: {key: steps[-1] for key, steps in keys.items()} for name, keys in uses(entries).items()}


def uses(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[int | None]]]:
    """Find the steps that used a sample, by consumer and key; a rollback names a sample once for each use of it."""
    found: dict[str, dict[str, list[int | None]]] = {}
    for entry in entries:
        if entry["event"] == "clear":
            found.clear()
        elif entry["event"] == "ack":
            for key in entry["keys"]:
                found.setdefault(entry["consumer"], {}).setdefault(key, []).append(entry["step"])
        elif entry["event"] == "rollback":
            for key in entry["keys"]:
                steps = found.get(entry["consumer"], {}).get(key)
                if steps:
                    steps.pop()
    used = {name: {key: steps for key, steps in keys.items() if steps} for name, keys in found.items()}
    return {name: keys for name, keys in used.items() if keys}
