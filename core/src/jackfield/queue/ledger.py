"""The ledger of a run: what the queue did with rows, acks and commits first of all, one JSON object per line.

A line is in the file when the queue's call returns, so the ledger of a killed run is complete up to the kill. A run
that resumes takes nothing out: it appends a rollback that names what the restored checkpoint does not contain.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Ledger", "effective_acks", "read_ledger"]


class Ledger:
    """The file, open for appending."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: of the file; what is there stays, without the line that a kill tore.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._path = path
        self._file = path.open("r+b", buffering=0)  # unbuffered: one entry is one write of the operating system
        self._end_at(path.read_bytes().rfind(b"\n") + 1)

    def _end_at(self, position: int) -> None:
        self._file.truncate(position)
        self._file.seek(position)

    def clear(self) -> None:
        """Begin anew."""
        self._end_at(0)

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append an entry."""
        rest = memoryview(json.dumps(entry).encode() + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]

    def roll_back(self, position: int, step: int | None, *, kept: Sequence[str] = ()) -> None:
        """Take back, for the record, the acks after ``position``: the state that is restored does not have them.

        Args:
            position: of the ledger when the checkpoint was cut.
            step: the last one that the checkpoint contains, where somebody said.
            kept: consumers whose acks the state has.
        """
        for consumer, uses in _uses(read_ledger(self._path, position)).items():
            if consumer in kept:
                continue
            keys = [key for key, steps in uses.items() for _ in steps]
            self.write({"event": "rollback", "consumer": consumer, "step": step, "keys": keys})

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_ledger(path: Path, position: int = 0) -> Iterator[dict[str, Any]]:
    """The entries from a position on."""
    with path.open("rb") as file:
        file.seek(position)
        for line in file:
            yield json.loads(line)


def effective_acks(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int | None]]:
    """The acks that no rollback has taken back: consumer to row key to the step that used the row, the last time."""
    return {consumer: {key: steps[-1] for key, steps in rows.items()} for consumer, rows in _uses(entries).items()}


def _uses(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[int | None]]]:
    """The steps that used a row, by consumer and key; a rollback names a row as often as it takes a use of it back."""
    uses: dict[str, dict[str, list[int | None]]] = {}
    for entry in entries:
        if entry["event"] == "ack":
            rows = uses.setdefault(entry["consumer"], {})
            for key in entry["keys"]:
                rows.setdefault(key, []).append(entry["step"])
        elif entry["event"] == "clear":
            uses.clear()
        elif entry["event"] == "rollback":
            for key in entry["keys"]:
                rows = uses.get(entry["consumer"], {})
                if rows.get(key):
                    rows[key].pop()
    used = {name: {key: steps for key, steps in rows.items() if steps} for name, rows in uses.items()}
    return {consumer: rows for consumer, rows in used.items() if rows}
