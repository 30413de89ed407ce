"""The ledger of a run: every ack, commit, rollback, expiry, drop and release of the queue, one JSON object per line.

A line is in the file when the queue's call returns, so the ledger of a killed run is complete up to the kill. A run
that resumes takes nothing out: it appends a rollback that names what the restored checkpoint does not contain.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Ledger", "effective_acks", "read_ledger"]


class Ledger:
    """The file, open for appending."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """
        Args:
            path: of the file.
            resume: go on after what is there, without the line that a kill tore; False: begin anew.
        """
        path.touch()
        self._path = path
        self._file = path.open("r+b", buffering=0)  # unbuffered: one entry is one write of the operating system
        kept = path.read_bytes().rfind(b"\n") + 1 if resume else 0
        self._file.truncate(kept)
        self._file.seek(kept)

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append an entry."""
        rest = memoryview(json.dumps(entry).encode() + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]

    def roll_back(self, position: int, step: int) -> None:
        """Take back, for the record, the acks after ``position``: the state that is restored does not have them.

        Args:
            position: of the ledger when the checkpoint was cut.
            step: the last one that the checkpoint contains.
        """
        for consumer, acks in effective_acks(read_ledger(self._path, position)).items():
            self.write({"event": "rollback", "consumer": consumer, "step": step, "keys": list(acks)})

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
    """The acks that no rollback has taken back: consumer to row key to the step that used the row."""
    acks: dict[str, dict[str, int | None]] = {}
    for entry in entries:
        if entry["event"] == "ack":
            acks.setdefault(entry["consumer"], {}).update(dict.fromkeys(entry["keys"], entry["step"]))
        elif entry["event"] == "rollback":
            for key in entry["keys"]:
                acks[entry["consumer"]].pop(key, None)
    return {consumer: rows for consumer, rows in acks.items() if rows}
