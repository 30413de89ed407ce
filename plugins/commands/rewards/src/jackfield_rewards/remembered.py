"""Scores that a service has paid for, which a run asks for again if it did not get the answer."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import xxhash

from jackfield.abc.reward import ScoreRequest, ScoreResult
from jackfield.errors import RewardError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS scores (id BLOB PRIMARY KEY, time REAL, results BLOB);
CREATE INDEX IF NOT EXISTS scores_time ON scores (time);
"""
_EVERY = 1000  #: scores after which old ones are forgotten


def id_of(served: Sequence[str | None], run: str, requests: Sequence[ScoreRequest]) -> bytes:
    """Return what identifies the requests of a call: the run, its keys and their contents, but no number of a retry.

    ``served`` are the reward's name, settings and version: another one is asked again.
    """
    plain = [attrs.evolve(each, retry=0, deadline_seconds=0.0, priority=0) for each in requests]
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode([served, run, plain]))


@attrs.define(eq=False)
class Remembered:
    """Results in a SQLite file, which survives a kill of the process."""

    _file: Path
    _seconds: float  #: for how long
    _count: int = attrs.field(default=0, init=False)
    _database: sqlite3.Connection = attrs.field(init=False)
    _is_open: bool = attrs.field(default=True, init=False)

    def __attrs_post_init__(self) -> None:
        try:
            self._database = sqlite3.connect(self._file, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=OFF")  # after a power failure, scores are paid again
            self._database.executescript(_SCHEMA)
            self._forget()
        except sqlite3.Error as error:
            fix = "give the service a folder that can be written, or remove the file"
            details: Any = {"where": str(self._file), "found": error, "fix": fix}
            raise RewardError("the scores of the service cannot be opened", code="reward.store", **details) from error

    def get(self, key: bytes) -> list[ScoreResult] | None:
        """Return the results of a call; None if they are not known."""
        row = self._database.execute("SELECT results FROM scores WHERE id = ?", (key,)).fetchone()
        return None if row is None else msgspec.msgpack.decode(row[0], type=list[ScoreResult])

    def put(self, key: bytes, results: Sequence[ScoreResult]) -> None:
        """Keep the results of a call; they are on the disk after this turn of the event loop."""
        if not self._database.in_transaction:
            self._database.execute("BEGIN")
            asyncio.get_running_loop().call_soon(self._commit)
        row = (key, time.time(), msgspec.msgpack.encode(list(results)))
        self._database.execute("INSERT OR REPLACE INTO scores VALUES (?, ?, ?)", row)
        self._count += 1
        if self._count % _EVERY == 0:
            self._forget()

    def _forget(self) -> None:
        self._database.execute("DELETE FROM scores WHERE time < ?", (time.time() - self._seconds,))

    def _commit(self) -> None:
        if self._is_open and self._database.in_transaction:
            self._database.execute("COMMIT")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._commit()
        self._is_open = False
        self._database.close()
