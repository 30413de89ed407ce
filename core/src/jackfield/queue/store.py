"""The SQLite store of the queue's state, ledger and lineage, whose transactions survive ``kill -9`` (WAL mode)."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import attrs
import xxhash

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.files import replacing
from jackfield.queue.meta import Lineage, partition_of
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
_KEPT_FAILURES = 10_000
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@attrs.define(eq=False)
class Store:
    """The store file with one writer and any number of readers. It is opened at the first use.

    Reading raises ``queue.invalid`` if the state differs from what was written, and ``queue.ledger`` at the first entry
    of the ledger that does.
    """

    path: Path | None  #: None: in memory
    durable: bool = attrs.field(default=False, kw_only=True)  #: it has the state, too
    coming: list[dict[str, Any]] = attrs.field(factory=list, init=False)  #: unwritten ledger entries
    derived: dict[str, Lineage] = attrs.field(factory=dict, init=False)  #: unwritten lineage
    changed: dict[Group, None] = attrs.field(factory=dict, init=False)  #: groups whose rows are to be written
    _connection: sqlite3.Connection | None = attrs.field(default=None, init=False)
    _head: Row | None = attrs.field(default=None, init=False)  # last written head; None: no state is kept
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
                db = sqlite3.connect(self.path or ":memory:", isolation_level=None, timeout=5.0)
                if self.path is not None and db.execute("pragma journal_mode=wal").fetchone() != ("wal",):
                    db.executescript("pragma locking_mode=exclusive; pragma journal_mode=wal")  # no shared memory
                db.executescript("pragma synchronous=normal; pragma wal_autocheckpoint=4000;" + _SCHEMA)
                self._connection, self._end = db, _end_of(db)
        return self._connection

    @property
    def end(self) -> LedgerEnd | None:
        """The end of the ledger, or None for a ledger in memory."""
        return self._end if self.path is not None and self._db is not None else None

    def write(self, state: State, *, begin: bool = False) -> None:
        """Write the changes of one call in one transaction. After a failure no later call succeeds.

        ``begin`` replaces the file's state if the store is durable. From then on, each call updates it.
        """
        rows: list[Row] = []
        gone: list[str] | None = []
        if begin and self.durable:
            rows, gone = list(state.rows()), None
        elif self._head is not None and ((head := next(state.rows())) != self._head or self.changed):
            living = [group for group in self.changed if group.batch.number in group.batch.partition.batches]
            rows = [head, *(group.row() for group in living)]
            gone = [group.row_key() for group in self.changed.keys() - set(living)]
        if rows or self.coming or self.derived:
            self._write(rows, gone)
        self.changed.clear()

    def _write(self, rows: Sequence[Row], gone: Sequence[str] | None) -> None:
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
        self._head = rows[0] if rows else self._head
        self.coming.clear()
        self.derived.clear()

    def save(self, path: Path, rows: Sequence[Row], keys: Sequence[str]) -> None:
        """Write a checkpoint atomically: the rows of a state and the lineage of samples."""
        with _translated_errors(self.path):
            ancestors = self.lineage(_ANCESTORS, _encode(keys))
        with replacing(path) as partial, closing(Store(partial, durable=True)) as saved:
            saved.derived = ancestors
            saved._write(rows, None)
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
        before, query = "", "select * from ledger order by number"
        with _translated_errors(self.path, "queue.ledger"):
            for place, (number, event, step, consumer, value, digest) in enumerate(self._db.execute(query), 1):
                entry = json.loads(value) if digest == _chained(before, value) else {}
                shown = (entry.get("event"), entry.get("step"), entry.get("consumer"))
                if number != place or shown != (event, step, consumer):
                    raise _damaged(self.path, f"entry {place} as it was written", f"entry {number}")
                before = digest
                if number > after:
                    yield entry

    def check(self, end: LedgerEnd, *, cut: bool = False) -> None:
        """Check the ledger up to the end that a checkpoint recorded; ``cut`` removes damaged entries after it."""
        whole = 0
        try:
            for _ in self.entries():
                whole += 1
        except QueueError as error:
            if whole < end.number:
                raise
            message = "the ledger is damaged after the checkpoint (%s); what comes after entry %d is removed"
            logging.getLogger("jackfield").warning(message, error.found, whole)
        with _translated_errors(self.path, "queue.ledger"):
            if (found := _end_of(self._db, end.number)) != end:
                raise _damaged(self.path, f"entry {end.number} with the digest {end.digest}", found)
            if cut:
                self._end = _end_of(self._db, whole)
                self._db.execute("delete from ledger where number > ?", (whole,))


@attrs.define(eq=False)
class Controller:
    """The shared state, store, waits, failures and pending deletions of the queue."""

    backend: TransferQueueBackend
    clock: Clock
    store: Store
    caller: Callable[[], str | None]  #: returns the calling client
    state: State = attrs.field(factory=State, init=False)
    change: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)  #: set at any change
    moved: float = attrs.field(default=0.0, init=False)  #: time of the last change of any group
    failures: dict[str, str] = attrs.field(factory=dict, init=False)  #: reasons of failed or dropped data, by name
    metrics: Any = attrs.field(factory=Counter, init=False)  #: sums of numbers, by name
    discarded: dict[str, list[str]] = attrs.field(factory=dict, init=False)  #: unused keys to delete, by partition
    deletion: asyncio.Task[None] | None = attrs.field(default=None, init=False)  #: None: the queue is closed

    def require_open(self) -> None:
        if self.deletion is None:
            raise QueueError("the TransferQueue is closed", code="queue.closed", fix="start() it, and close it last")
        if self.deletion.done():
            error = self.deletion.exception()
            raise QueueError(f"the backend failed to delete samples: {error}") from error

    def wake(self) -> None:
        """Wake all waiters, which evaluate their conditions again."""
        self.change.set()
        self.change = asyncio.Event()

    async def wait(self, until: float, describe: Callable[[], str]) -> None:
        """Wait for the next change until a time of the clock. ``describe`` says what is missing at the deadline."""
        start = self.clock.time()
        try:
            await self.clock.wait_for(self.change.wait(), max(until - start, 0.0), "the TransferQueue")
        except DeadlineExceeded:
            message, fix = f"waited {until - start:.6g} s for", "look at why it did not come, or raise the deadline"
            raise DeadlineExceeded(f"{message} {describe()}", fix=fix) from None
        self.require_open()

    def touch(self, group: Group) -> None:
        """Record a changed group: it is stored, and its batch's deadlines restart."""
        self.store.changed[group] = None
        group.batch.moved = self.moved = self.clock.time()

    def record(self, event: str, **fields: Any) -> None:
        """Add an entry to the ledger."""
        self.store.coming.append({"event": event, "time": self.clock.time(), **fields})

    def fail(self, subject: str, reason: str) -> None:
        """Record why something will not become training data."""
        self.failures[subject] = reason
        if len(self.failures) > _KEPT_FAILURES:
            del self.failures[next(iter(self.failures))]

    def discard(self, keys: Iterable[str], partition: str | None = None) -> None:
        """Schedule the deletion of values from the backend."""
        for key in keys:
            self.discarded.setdefault(partition or partition_of(key), []).append(key)


@contextmanager
def _reading(path: Path, code: str = "queue.ledger") -> Iterator[Store]:
    """Open a file for reading. No further file is created unless a process writes it or was killed."""
    if not path.is_file():
        none = QueueError("the folder holds no checkpoint of a queue", where=str(path.parent), expected=path.name)
        raise none if code == "queue.invalid" else _damaged(path, "the ledger of a run", "no file")
    store = Store(path)
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    uri = f"{path.absolute().as_uri()}?{how}"
    with _translated_errors(path, code), closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as db:
        store._connection = db
        yield store


def check_ledger(path: Path, checkpoint: Path) -> None:
    """Check a ledger against a checkpoint without changing it; ``queue.invalid`` if the checkpoint is damaged.

    If the ledger is missing or differs, raise ``queue.ledger``.
    """
    end = read_checkpoint(checkpoint)[0].ledger
    if end is not None:
        with _reading(path) as store:
            store.check(end)


def read_checkpoint(path: Path) -> tuple[State, dict[str, Lineage]]:
    """Read a checkpoint: the state, and the derivations of its samples and their ancestors.

    A checkpoint that is missing or damaged raises ``queue.invalid``.
    """
    with _reading(path, "queue.invalid") as store:
        return State.load(store.rows()), store.lineage()


def find_store(folder: Path) -> Path | None:
    """Return the store file of a run's queue, given the folder of the run or of its queue."""
    return next((path for path in (folder / "queue" / STORE_FILE, folder / STORE_FILE) if path.is_file()), None)


def read_ledger(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the ledger of the run in ``folder``, whether or not it is still running.

    If there is none, and at the first entry that differs from what was written, raise ``queue.ledger``.
    """
    if (path := find_store(folder)) is None:
        what, expected, fix = "the folder has no ledger of a run", f"queue/{STORE_FILE}", "name the folder of a run"
        raise QueueError(what, code="queue.ledger", where=str(folder), expected=expected, fix=fix)
    with _reading(path) as store:
        yield from store.entries()


def trace(key: str, checkpoint: Path | None, store: Path | None) -> dict[str, Any]:
    """Return the ancestors of a sample, which may have left the queue, as a tree of plain values.

    ``checkpoint`` has the queue's samples and their ancestors; the ``store`` file of the run has every derivation. The
    tree has ``key``, ``in_queue``, ``operation`` (None: not made from other samples, or unknown) and ``parents``.
    If neither has the sample, raise ``queue.unknown-sample``; if one is damaged, ``queue.ledger`` or ``queue.invalid``.
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


def _end_of(db: sqlite3.Connection, most: int = sys.maxsize) -> LedgerEnd:
    """Return the last entry of a ledger, or of its first ``most`` entries."""
    row = db.execute("select number, digest from ledger where number <= ? order by number desc", (most,)).fetchone()
    return LedgerEnd(*row) if row else LedgerEnd()


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
