"""The SQLite store of the queue's state, ledger and lineage.

In WAL mode the operating system has a transaction when it returns, so it survives ``kill -9``. It is on the disk after
:meth:`Store.sync`, which every checkpoint of the run calls. A checkpoint is a file with the same tables.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import attrs
import xxhash

from jackfield.errors import QueueError
from jackfield.files import replacing
from jackfield.queue.meta import Lineage
from jackfield.queue.records import Group, LedgerEnd, Row, State

STORE_FILE, VALUES_FOLDER = "controller.sqlite", "values"  #: names in the folder of a checkpoint
_SCHEMA = """
create table if not exists state(key text primary key, value text not null, digest text not null) without rowid;
create table if not exists lineage(key text primary key, operation text not null, parents text not null) without rowid;
create table if not exists ledger(number integer primary key, event text not null, step int, consumer text,
    value text not null, digest text not null);
create view if not exists uses as select step, consumer, event, key.value as key from ledger,
    json_each(ledger.value, '$.keys') key where event in ('ack', 'rollback');
"""
_ANCESTORS = """
with recursive found(key) as (select value from json_each(?) union
    select parent.value from found join lineage using(key), json_each(lineage.parents) parent)
select key, operation, parents from lineage join found using(key)
"""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@attrs.define(eq=False)
class Store:
    """The store file with one writer and any number of readers. It is opened at the first use.

    Reading raises ``queue.invalid`` if the state differs from what was written, and ``queue.ledger`` at the first entry
    of the ledger that does.
    """

    path: Path | None  #: None: in memory
    durable: bool = attrs.field(default=False, kw_only=True)  #: after :meth:`begin` it has the state, too
    coming: list[dict[str, Any]] = attrs.field(factory=list, init=False)  #: unwritten ledger entries
    derived: dict[str, Lineage] = attrs.field(factory=dict, init=False)  #: unwritten lineage
    changed: dict[Group, None] = attrs.field(factory=dict, init=False)  #: groups whose rows are to be written
    _connection: sqlite3.Connection | None = attrs.field(default=None, init=False)
    _head: Row | None = attrs.field(default=None, init=False)  # last written head; None: not begun
    _end: LedgerEnd = attrs.field(factory=LedgerEnd, init=False)
    _failure: QueueError | None = attrs.field(default=None, init=False)

    @property
    def _db(self) -> sqlite3.Connection:
        if self._failure is not None:
            raise self._failure
        if self._connection is None:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with _translated_errors(self.path):
                place = self.path or ":memory:"
                db = sqlite3.connect(place, isolation_level=None, timeout=5.0)
                if self.path is not None and db.execute("pragma journal_mode=wal").fetchone() != ("wal",):
                    db.executescript("pragma locking_mode=exclusive; pragma journal_mode=wal")  # no shared memory
                db.executescript("pragma synchronous=normal; pragma wal_autocheckpoint=4000;" + _SCHEMA)
                row = db.execute("select number, digest from ledger order by number desc").fetchone()
                self._connection, self._end = db, LedgerEnd(*row) if row else LedgerEnd()
        return self._connection

    @property
    def end(self) -> LedgerEnd | None:
        """The end of the ledger, or None for a ledger in memory."""
        return self._end if self.path is not None and self._db is not None else None

    def write(self, state: State) -> None:
        """Write the changes of one call in one transaction. After a failure no later call succeeds."""
        head = None if self._head is None or not self.durable else next(state.rows())
        is_new = head is not None and (bool(self.changed) or head != self._head)
        if self.coming or self.derived or is_new:
            changed = {} if head is None else self.changed
            living = [group for group in changed if group.batch.number in group.batch.partition.batches]
            rows = [] if head is None else [head, *(group.row() for group in living)]
            self._write(rows, [group.row_key() for group in changed.keys() - set(living)])
            self._head = head
        self.changed.clear()

    def begin(self, rows: Sequence[Row]) -> None:
        """Replace the file's state. From now on each :meth:`write` updates it."""
        self._head = rows[0]
        self.changed.clear()
        if self.durable:
            self._write(rows, None)

    def _write(self, rows: Iterable[Row], gone: Iterable[str] | None) -> None:
        """Write ledger, lineage and rows of the state in one transaction; without ``gone`` all other rows go."""
        end = self._end
        try:
            with _translated_errors(self.path), self._db as db:  # it commits or rolls back
                db.execute("begin immediate")
                for entry in self.coming:
                    value = _encode(entry)
                    self._end = LedgerEnd(self._end.number + 1, _chained(self._end.digest, value))
                    row = (self._end.number, entry["event"], entry.get("step"), entry.get("consumer"), value)
                    db.execute("insert into ledger values(?, ?, ?, ?, ?, ?)", (*row, self._end.digest))
                made = [(key, each.operation, _encode(each.parents)) for key, each in self.derived.items()]
                db.executemany("insert or replace into lineage values(?, ?, ?)", made)
                if gone is None:
                    db.execute("delete from state")
                db.executemany("delete from state where key = ?", [(key,) for key in gone or ()])
                db.executemany("insert or replace into state values(?, ?, ?)", [(*row, _digest(*row)) for row in rows])
        except BaseException as error:
            self._end, self._failure = end, error if isinstance(error, QueueError) else None
            raise
        self.coming.clear()
        self.derived.clear()

    def save(self, path: Path, rows: Sequence[Row], keys: Sequence[str]) -> None:
        """Write a checkpoint atomically: the rows of a state and the lineage of samples."""
        with _translated_errors(self.path):
            ancestors = self.lineage(_ANCESTORS, _encode(keys))
        with replacing(path) as partial, closing(Store(partial, durable=True)) as saved:
            saved.derived = ancestors
            saved.begin(rows)
            saved.sync()

    def clear(self) -> None:
        """Empty the file."""
        self.close()
        self._failure, self._end = None, LedgerEnd()
        if self.path is not None:
            for suffix in ("", "-wal", "-shm"):
                self.path.with_name(f"{self.path.name}{suffix}").unlink(missing_ok=True)

    def sync(self) -> None:
        """Write everything through to the disk."""
        with _translated_errors(self.path):
            steps = "pragma synchronous=full; pragma wal_checkpoint(truncate); pragma synchronous=normal"
            self._db.executescript(steps)

    def close(self) -> None:
        """Close the file. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def rows(self) -> dict[str, str]:
        """Read the rows of the file's state by key."""
        rows = {}
        with _translated_errors(self.path, "queue.invalid"):
            for key, value, digest in self._db.execute("select * from state"):
                if digest != _digest(key, value):
                    raise QueueError("a queue's saved state is damaged", where=str(self.path), found=key)
                rows[key] = value
        return rows

    def lineage(self, query: str = "select * from lineage", *values: str) -> dict[str, Lineage]:
        """Read derivations of samples, by key."""
        found = self._db.execute(query, values)
        return {key: Lineage(operation, tuple(json.loads(parents))) for key, operation, parents in found}

    def entries(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the entries of the ledger after a number."""
        return (entry for end, entry in self._entries() if end.number > after)

    def _entries(self) -> Iterator[tuple[LedgerEnd, dict[str, Any]]]:
        """Yield the entries of the ledger, each with the ledger's end after it."""
        end = LedgerEnd()
        with _translated_errors(self.path, "queue.ledger"):
            for number, event, step, consumer, value, digest in self._db.execute(
                "select * from ledger order by number"
            ):
                entry = json.loads(value) if digest == _chained(end.digest, value) else {}
                shown = (entry.get("event"), entry.get("step"), entry.get("consumer"))
                if number != end.number + 1 or shown != (event, step, consumer):
                    raise _damaged(self.path, f"entry {end.number + 1} as it was written", f"entry {number}")
                end = LedgerEnd(number, digest)
                yield end, entry

    def check(self, end: LedgerEnd) -> LedgerEnd:
        """Check the ledger up to the end that a checkpoint recorded; return the end of its undamaged part."""
        good, known = LedgerEnd(), LedgerEnd()
        try:
            for good, _ in self._entries():
                known = good if good.number <= end.number else known
        except QueueError as error:
            if known != end:
                raise
            message = "the ledger is damaged after the checkpoint (%s); what comes after entry %d is removed"
            logging.getLogger("jackfield").warning(message, error.found, good.number)
        if known != end:
            raise _damaged(self.path, f"entry {end.number} with the digest {end.digest}", known)
        return good

    def cut(self, end: LedgerEnd) -> None:
        """Remove damaged entries after the end that a checkpoint recorded; see :meth:`check`."""
        self._end = self.check(end)
        with _translated_errors(self.path, "queue.ledger"):
            self._db.execute("delete from ledger where number > ?", (self._end.number,))


@contextmanager
def _reading(path: Path, code: str = "queue.ledger") -> Iterator[Store]:
    """Open a file for reading. No further file is created unless a process writes it or was killed."""
    store = Store(path)
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    uri = f"{path.absolute().as_uri()}?{how}"
    with _translated_errors(path, code), closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as db:
        store._connection = db
        yield store


def check_ledger(path: Path, checkpoint: Path) -> None:
    """Check a ledger against a checkpoint without changing it.

    Raises:
        QueueError: ``queue.ledger`` as in :meth:`Store.check`, or if there is no file; ``queue.invalid`` if the
            checkpoint is damaged.
    """
    end = read_checkpoint(checkpoint)[0].ledger
    if end is None:
        return
    if not path.is_file():
        raise _damaged(path, f"entry {end.number} with the digest {end.digest}", "no file")
    with _reading(path) as store:
        store.check(end)


def read_checkpoint(path: Path) -> tuple[State, dict[str, Lineage]]:
    """Read a checkpoint: the state, and the derivations of its samples and their ancestors.

    A checkpoint that is missing or damaged raises ``queue.invalid``.
    """
    if not path.is_file():
        raise QueueError("the folder holds no checkpoint of a queue", where=str(path.parent), expected=path.name)
    with _reading(path, "queue.invalid") as store:
        return State.load(store.rows()), store.lineage()


def find_store(folder: Path) -> Path | None:
    """Return the store file of a run's queue, given the folder of the run or of its queue."""
    return next((path for path in (folder / "queue" / STORE_FILE, folder / STORE_FILE) if path.is_file()), None)


def read_ledger(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the ledger of the run in ``folder``, whether or not it is still running.

    Raises:
        QueueError: ``queue.ledger`` if there is none, or at the first entry that differs from what was written.
    """
    path = find_store(folder)
    if path is None:
        raise _damaged(folder / "queue" / STORE_FILE, "the ledger of a run", "no file")
    with _reading(path) as store:
        yield from store.entries()


def trace(key: str, checkpoint: Path | None, store: Path | None) -> dict[str, Any]:
    """Return the ancestors of a sample, which may have left the queue, as a tree of plain values.

    ``checkpoint`` has the queue's samples and their ancestors; the ``store`` file of the run has every derivation.

    Returns:
        ``key``, ``in_queue``, ``operation`` (None: not made from other samples, or unknown) and ``parents``.

    Raises:
        QueueError: ``queue.unknown-sample`` if neither has the sample; ``queue.ledger``, ``queue.invalid`` if damaged.
    """
    derived, living = dict[str, Lineage](), set[str]()
    if store is not None:
        with _reading(store) as ledger:
            derived = ledger.lineage()
    if checkpoint is not None:
        saved, lineage = read_checkpoint(checkpoint / STORE_FILE)
        derived |= lineage
        living = saved.keys()
    if key not in derived and key not in living and not any(key in made.parents for made in derived.values()):
        where = ", ".join(str(each) for each in (checkpoint, store) if each is not None)
        raise QueueError(f"the sample {key!r} is unknown", code="queue.unknown-sample", where=where)

    def ancestor(key: str, below: frozenset[str]) -> dict[str, Any]:
        made = derived.get(key)
        parents = () if made is None or key in below else made.parents  # an imported sample may have its parent's key
        return {
            "key": key,
            "operation": None if made is None else made.operation,
            "in_queue": key in living,
            "parents": [ancestor(parent, below | {key}) for parent in parents],
        }

    return ancestor(key, frozenset())


def effective_acks(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int | None]]:
    """Return the acks that no rollback has revoked: consumer to sample to the last step that used it."""
    return {name: {key: steps[-1] for key, steps in keys.items()} for name, keys in uses(entries).items()}


def uses(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[int | None]]]:
    """Return the steps that used a sample, by consumer and key. A rollback names a sample once per use."""
    found: dict[str, dict[str, list[int | None]]] = {}
    for entry in entries:
        if entry["event"] == "clear":
            found.clear()
        elif entry["event"] in ("ack", "rollback"):
            mine = found.setdefault(entry["consumer"], {})
            for key in entry["keys"]:
                steps = mine.pop(key, [])
                steps = [*steps, entry["step"]] if entry["event"] == "ack" else steps[:-1]
                mine |= {key: steps} if steps else {}
    return {name: keys for name, keys in found.items() if keys}


def _digest(key: str, value: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{key}/{value}".encode())


def _chained(before: str, value: str) -> str:
    """Compute the digest of an entry from that of the entry before it."""
    return xxhash.xxh3_128_hexdigest(f"{before}{value}".encode())


def _damaged(path: Path | None, expected: object, found: object) -> QueueError:
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
def _translated_errors(path: Path | None, code: str = "queue.store") -> Iterator[None]:
    """Raise errors of SQLite as errors of the queue."""
    try:
        yield
    except sqlite3.Error as error:
        if code == "queue.ledger":
            raise _damaged(path, "a file of SQLite that is whole", str(error)) from error
        message = f"the queue's own file cannot be used: {error}"
        raise QueueError(message, code=code, where=str(path), found=type(error).__name__) from error
