"""The ledger of a run: what the queue did with rows, acks and commits first of all, one JSON object per line.

A line is in the file when the queue's call returns, so the ledger of a killed run is complete up to the kill. A run
that resumes takes nothing out: it appends a rollback that names what the restored checkpoint does not contain. Each
line has a digest of itself and all lines before it (:mod:`jackfield.files`), and a checkpoint knows length and digest.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import QueueError
from jackfield.files import seal, seal_of, unseal

__all__ = ["Ledger", "LedgerEnd", "check_ledger", "effective_acks", "read_ledger"]


@attrs.frozen
class LedgerEnd:
    """The end of a ledger at some moment."""

    bytes: int = 0
    digest: str = ""  #: of the last line, and through it of all


class Ledger:
    """The file, open for appending. Nothing is changed before the first entry is written."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: of the file; what is there stays, without the line that a kill tore.
        """
        self._path = path
        self._file: io.FileIO | None = None
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self.end = LedgerEnd(len(whole), seal_of(whole[:-1]))

    def _opened(self) -> io.FileIO:
        """The file, which ends where the last whole entry does."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            self._file = io.FileIO(self._path, "r+b")  # unbuffered: one entry is one write of the operating system
            self._file.truncate(self.end.bytes)
            self._file.seek(self.end.bytes)
        return self._file

    def _end_at(self, end: LedgerEnd) -> None:
        self.close()
        self.end = end

    def clear(self) -> None:
        """Begin anew."""
        self._end_at(LedgerEnd())
        self._opened()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append an entry."""
        line = seal(json.dumps(entry), self.end.digest).encode()
        rest = memoryview(line + b"\n")
        while rest:
            rest = rest[self._opened().write(rest) :]
        self.end = LedgerEnd(self.end.bytes + len(line) + 1, seal_of(line))

    def verify(self, end: LedgerEnd) -> None:
        """Compare the file with what it was at a checkpoint. Damage after that costs only the lines behind it.

        Args:
            end: of the ledger when the checkpoint was cut.

        Raises:
            QueueError: ``queue.ledger`` where something of what the checkpoint knows was changed or is not there.
        """
        last, damage = check_ledger(self._path, end)
        if damage is not None:
            lost = self.end.bytes - last.bytes
            logging.getLogger("jackfield").warning(
                "%s is damaged after the checkpoint (%s); its last %d bytes are removed", self._path, damage, lost
            )
            self._end_at(last)

    def roll_back(self, end: LedgerEnd, step: int | None, *, kept: Sequence[str] = ()) -> None:
        """Take back, for the record, the acks after ``end``: the state that is restored does not have them.

        Args:
            end: of the ledger when the checkpoint was cut.
            step: the last one that the checkpoint contains, where somebody said.
            kept: consumers whose acks the state has.
        """
        self._opened()
        for consumer, uses in _uses(entry for _, entry in _read(self._path, end)).items():
            if consumer in kept:
                continue
            keys = [key for key, steps in uses.items() for _ in steps]
            self.write({"event": "rollback", "consumer": consumer, "step": step, "keys": keys})

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        os.fsync(self._opened().fileno())

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def check_ledger(path: Path, end: LedgerEnd) -> tuple[LedgerEnd, object]:
    """Compare the file with what it was at a checkpoint; nothing is changed.

    Args:
        path: of the ledger.
        end: of the ledger when the checkpoint was cut.

    Returns:
        Where its whole entries end, and what is damaged behind the checkpoint (None: nothing).

    Raises:
        QueueError: ``queue.ledger`` where something of what the checkpoint knows was changed or is not there.
    """
    found, last = LedgerEnd(), LedgerEnd()
    damage: object = None
    try:
        for last, _ in _read(path, LedgerEnd()):
            if last.bytes <= end.bytes:
                found = last
    except FileNotFoundError:
        damage = "no file"
    except QueueError as error:
        damage = error.found
    if found != end:
        size = path.stat().st_size if path.exists() else end.bytes
        short = f"{size} bytes" if size < end.bytes else "other contents"
        raise _damaged(path, end, damage or short)
    return last, None if damage == "no file" else damage


def read_ledger(path: Path) -> Iterator[dict[str, Any]]:
    """The entries, without a last line that is not whole.

    Raises:
        QueueError: ``queue.ledger`` at the first line that is not as it was written.
    """
    return (entry for _, entry in _read(path, LedgerEnd()))


def _read(path: Path, start: LedgerEnd) -> Iterator[tuple[LedgerEnd, dict[str, Any]]]:
    """The entries after a place, and the place behind each."""
    end = start
    with path.open("rb") as file:
        file.seek(start.bytes)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                entry = unseal(line[:-1], end.digest)
            except ValueError as error:
                raise _damaged(path, None, f"another line at byte {end.bytes}") from error
            end = LedgerEnd(end.bytes + len(line), seal_of(line[:-1]))
            yield end, entry


def _damaged(path: Path, end: LedgerEnd | None, found: object) -> QueueError:
    return QueueError(
        "the run's ledger is not the one that was written",
        code="queue.ledger",
        where=str(path),
        expected="every line" if end is None else f"{end.bytes} bytes with the digest {end.digest}",
        found=found,
        fix="restore the file from a copy; without one, take the model out (jackfield checkpoint export) and begin a "
        "run with it in another folder, or begin anew here with checkpoint.resume=false",
    )


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
