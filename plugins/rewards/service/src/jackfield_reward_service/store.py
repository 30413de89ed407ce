"""The SQLite file of rewards that arrive later: samples that wait, and the rewards that came for them."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import xxhash

from jackfield.errors import RewardError

FILE = "rewards.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS pending (number INTEGER PRIMARY KEY, key TEXT UNIQUE, sample TEXT, since REAL, run TEXT,
    data_source TEXT, prompt TEXT, response TEXT, ground_truth TEXT, is_over INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS pending_sample ON pending (sample);
CREATE INDEX IF NOT EXISTS pending_open ON pending (number) WHERE NOT is_over;
CREATE TABLE IF NOT EXISTS rewards (number INTEGER PRIMARY KEY, key TEXT UNIQUE, time REAL, reward TEXT);
"""
_BUSY_SECONDS = 10.0  #: for another process to end its transaction
_SHOWN = 4


@attrs.frozen(kw_only=True)
class Pending:
    """A sample that waits for its reward."""

    key: str  #: by which its reward is pushed: the sample's key and a digest of its text
    sample: str  #: the sample's key in the run
    since: float  #: when it was first scored, in seconds since 1970
    run: str = ""
    data_source: str = ""
    prompt: str = ""
    response: str = ""
    ground_truth: str = ""


@attrs.frozen(kw_only=True)
class Reward:
    """A reward for a sample that waits."""

    key: str  #: of a :class:`Pending` sample
    score: float
    explanation: str | None = None
    dimensions: Mapping[str, float] = attrs.field(factory=dict)

    @classmethod
    def of(cls, values: Any, where: str) -> Reward:
        """Make a reward of plain values, or raise ``reward.pushed``."""
        names = [field.name for field in attrs.fields(cls)]
        expected = "an object with key (a text), score (a finite number), and perhaps explanation and dimensions"
        refused: Any = {"code": "reward.pushed", "where": where, "expected": expected}
        if not isinstance(values, Mapping):
            raise RewardError("a reward is not an object", found=repr(values)[:200], **refused)
        if unknown := values.keys() - set(names):
            raise RewardError("a reward has unknown fields", found=", ".join(map(str, unknown)), **refused)
        made = {name: values[name] for name in names if values.get(name) is not None}
        dimensions = made.get("dimensions", {})
        good = _is_key(made.get("key")) and isinstance(made.get("explanation", ""), str)
        if not (
            good and isinstance(dimensions, Mapping) and all(map(_finite, [made.get("score"), *dimensions.values()]))
        ):
            raise RewardError("a reward is wrong", found=repr(dict(values))[:200], **refused)
        return cls(**{**made, "score": float(made["score"])})


@attrs.frozen(kw_only=True)
class Pushed:
    """What became of pushed rewards."""

    new: int
    known: int  #: the same reward was already there


def _finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _is_key(value: Any) -> bool:
    return isinstance(value, str) and _text(value) == value  # the file cannot hold lone surrogates


def _text(value: Any) -> Any:
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit all of the block, or nothing of it."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        database.execute("ROLLBACK")
        raise


def _use_journal(database: sqlite3.Connection) -> None:
    """Switch to a write-ahead log; SQLite does not wait by itself while another process opens or recovers the file."""
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            database.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.01)


def key_of(sample: str, prompt: str, response: str) -> str:
    """Return the key for the reward of one text of a sample."""
    return f"{sample}@{xxhash.xxh3_64_hexdigest(f'{len(prompt)} {prompt}{response}'.encode(errors='replace'))}"


@attrs.define(eq=False)
class Store:
    """The file in a folder, which several processes may have open. It belongs to one thread.

    Its methods raise ``reward.store`` if the file cannot be read or written.
    """

    folder: Path
    _database: sqlite3.Connection | None = attrs.field(default=None, init=False)
    _seen: int = attrs.field(default=-1, init=False)
    _coming: list[Pending] = attrs.field(factory=list, init=False)  #: registered, and not written yet
    _last: int = attrs.field(default=0, init=False)  #: number of the newest reward that :meth:`news` returned

    def open(self, *, create: bool) -> None:
        """Open the file; without ``create`` it must exist."""
        file = self.folder / FILE
        if not create and not file.is_file():
            expected, fix = "the setting folder of the reward `lagged`, or its URL", "correct the folder"
            details: Any = {"where": str(self.folder), "expected": expected, "found": f"no {FILE}", "fix": fix}
            raise RewardError("no rewards are expected there", code="reward.store", **details)
        with self._errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(file, timeout=_BUSY_SECONDS, isolation_level=None)
            self._database = database
            _use_journal(database)
            database.execute("PRAGMA synchronous=NORMAL")  # a sample that a power failure forgets is registered again
            database.executescript(_SCHEMA)
            self._last = database.execute("SELECT coalesce(max(number), 0) FROM rewards").fetchone()[0]

    def close(self) -> None:
        """Close the file. Idempotent."""
        self.commit()
        if self._database is not None:
            self._database.close()
            self._database = None

    def register(self, sample: Pending) -> float:
        """Add a sample that waits, unless it is there; return since when it waits.

        Others see it after :meth:`commit`: many samples come at a time, and a transaction costs more than a row.
        """
        with self._errors() as database:
            found = database.execute("SELECT since, is_over FROM pending WHERE key = ?", (sample.key,)).fetchone()
            if found is None:
                self._coming.append(sample)
            elif found[1] and self.reward(sample.key) is None:  # it waited in vain, and is asked for again
                database.execute("UPDATE pending SET is_over = 0, since = ? WHERE key = ?", (sample.since, sample.key))
            else:
                return float(found[0])
        return sample.since

    def commit(self) -> None:
        """Write what was registered."""
        if self._database is None or not self._coming:
            return
        names = [field.name for field in attrs.fields(Pending)]
        rows = [[_text(getattr(each, name)) for name in names] for each in self._coming]
        self._coming.clear()
        with self._errors() as database, _transaction(database):
            marks = ", ".join("?" * len(names))
            database.executemany(f"INSERT OR IGNORE INTO pending ({', '.join(names)}) VALUES ({marks})", rows)

    def reward(self, key: str) -> Reward | None:
        """Return the reward that was pushed for a key."""
        with self._errors() as database:
            row = database.execute("SELECT reward FROM rewards WHERE key = ?", (key,)).fetchone()
            return None if row is None else Reward(**json.loads(row[0]))

    def give_up(self, key: str) -> None:
        """Take no reward for this key any more."""
        self.commit()
        with self._errors() as database:
            database.execute("UPDATE pending SET is_over = 1 WHERE key = ?", (key,))

    def add(self, rewards: Sequence[Reward]) -> Pushed:
        """Add all of the rewards, or none: a reward for no known sample, or another than the first, is refused."""
        known = 0
        self.commit()
        with self._errors() as database:
            database.execute("PRAGMA synchronous=FULL")  # who pushed a reward will not push it again
            try:
                with _transaction(database):
                    for reward in rewards:
                        known += self._add(database, reward)
            finally:
                database.execute("PRAGMA synchronous=NORMAL")
        return Pushed(new=len(rewards) - known, known=known)

    def _add(self, database: sqlite3.Connection, reward: Reward) -> bool:
        """Add a reward; return whether it was known."""
        if (first := self.reward(reward.key)) is not None:
            if (first.score, first.dimensions) == (reward.score, reward.dimensions):
                return True
            details: Any = {
                "where": reward.key,
                "expected": f"score {first.score:g}",
                "found": f"score {reward.score:g}",
            }
            fix = "leave it: a run may have learnt from the first one"
            raise RewardError("the sample has another reward already", code="reward.conflict", fix=fix, **details)
        row = database.execute("SELECT is_over FROM pending WHERE key = ?", (reward.key,)).fetchone()
        if row is None or row[0]:
            sample = reward.key.partition("@")[0]
            query = "SELECT key FROM pending WHERE sample = ? AND NOT is_over LIMIT ?"
            there = [key for (key,) in database.execute(query, (sample, _SHOWN))]
            details = {"where": reward.key, "expected": "a key that `jackfield rewards pending` prints"}
            found = f"that sample waits as {', '.join(there)}" if there else "no such sample"
            found = "it has waited too long, and was given up" if row is not None else found
            raise RewardError("no sample waits for this reward", code="reward.unknown-sample", found=found, **details)
        text = json.dumps(attrs.asdict(reward))
        database.execute("INSERT INTO rewards (key, time, reward) VALUES (?, ?, ?)", (reward.key, time.time(), text))
        database.execute("UPDATE pending SET is_over = 1 WHERE key = ?", (reward.key,))
        return False

    def has_changed(self) -> bool:
        """Return whether another process has written since the last call."""
        with self._errors() as database:
            before, self._seen = self._seen, int(database.execute("PRAGMA data_version").fetchone()[0])
            return before != self._seen

    def news(self) -> list[Reward]:
        """Return the rewards that have been added since the last call, also by other processes."""
        with self._errors() as database:
            query = "SELECT number, reward FROM rewards WHERE number > ? ORDER BY number"
            rows = database.execute(query, (self._last,)).fetchall()
            self._last = rows[-1][0] if rows else self._last
            return [Reward(**json.loads(text)) for _, text in rows]

    def pending(self, limit: int) -> list[Pending]:
        """Return samples that wait, the oldest first."""
        names = [field.name for field in attrs.fields(Pending)]
        query = f"SELECT {', '.join(names)} FROM pending WHERE NOT is_over ORDER BY number LIMIT ?"
        with self._errors() as database:
            return [Pending(**dict(zip(names, row, strict=True))) for row in database.execute(query, (limit,))]

    @contextmanager
    def _errors(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._database  # type: ignore[misc]
        except (sqlite3.Error, OSError) as error:
            details: Any = {"where": str(self.folder / FILE), "found": error, "fix": "look at the disk and permissions"}
            raise RewardError("the rewards cannot be read or written", code="reward.store", **details) from error
