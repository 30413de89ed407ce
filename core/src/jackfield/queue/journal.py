"""What changed in the controller since its last checkpoint, in a file that a killed process leaves behind.

The first line is a *base*: the whole state as :func:`~jackfield.queue.snapshot.state_dict` has it. Each further line is
what one call changed, whole or not at all::

    xxh3-64 of the rest, 16 hexadecimal digits | space | JSON list of entries | newline

A line that a kill tore, and whatever would stand behind it, does not count. A line is with the operating system when
the call returns, so it survives the death of the process; the disk has it at the next checkpoint at the latest.

Entries are lists of a kind and its fields:

========== =======================================================================
``ticket``   partition, number, slots: a new ticket
``slot``     partition, number, index, state: what became of a slot, with its group and rows
``failure``  partition, number, reason: a ticket failed
``gone``     partition, number: all rows of a ticket were consumed
``commit``   step: acks up to it are final
``consumer`` name, state
``lineage``  key, operation, parents
``forget``   partition, keys: the backend may forget them, unless a slot has them later
``forgotten`` partition, keys: it has
========== =======================================================================
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from jackfield.errors import QueueError

__all__ = ["Journal", "read_journal", "saved_rows"]

Entry = Sequence[Any]

_DIGEST = 16


class Journal:
    """The file, which one controller writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a base to which changes can be added."""
        return self._file is not None

    def begin(self, base: str) -> None:
        """Begin anew with a state as JSON, in the place of everything that is there.

        A kill in the middle leaves what was there before.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _write(file, base)
            partial.replace(self.path)
        except BaseException:
            os.close(file)
            raise
        self.close()
        self._file = file

    def append(self, entries: Sequence[Entry]) -> None:
        """Add what one call changed."""
        assert self._file is not None, "begin() comes first"
        _write(self._file, json.dumps(entries, ensure_ascii=False, separators=(",", ":")))

    def sync(self) -> None:
        """Return when everything is on the disk."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _write(file: int, text: str) -> None:
    content = text.encode()
    rest = memoryview(xxhash.xxh3_64_hexdigest(content).encode() + b" " + content + b"\n")
    while rest:
        rest = rest[os.write(file, rest) :]


def read_journal(path: Path) -> dict[str, Any] | None:
    """The state after the last whole line; None where there is no file.

    Raises:
        QueueError: ``queue.invalid`` where there is no whole base.
    """
    if not path.is_file():
        return None
    lines = _lines(path)
    base = next(lines, None)
    if not isinstance(base, dict):
        raise QueueError("a queue's journal has no whole beginning", where=str(path), fix="go on from a checkpoint")
    state = _State(base)
    for entries in lines:
        for kind, *fields in entries:
            getattr(state, f"do_{kind}")(*fields)
    return state.saved()


def _lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            content = line[_DIGEST + 1 : -1]
            if not line.endswith(b"\n") or xxhash.xxh3_64_hexdigest(content).encode() != line[:_DIGEST]:
                if file.read(1):  # else a kill tore it
                    message = "%s is damaged in line %d: what the queue did after that is done again"
                    logging.getLogger("jackfield").warning(message, path, number)
                return
            yield json.loads(content)


class _State:
    """A state to which changes are added."""

    def __init__(self, base: dict[str, Any]) -> None:
        self._base = base
        self._tickets: dict[str, dict[int, dict[str, Any]]] = {}
        for name, partition in base["partitions"].items():
            self._tickets[name] = {ticket["number"]: ticket for ticket in partition["tickets"]}
        self._forget = {name: dict.fromkeys(keys) for name, keys in base["discarded"].items()}

    def do_ticket(self, partition: str, number: int, slots: int) -> None:
        empty: dict[str, Any] = {"attempt": 0, "claim": 0, "explorer": None, "reasons": [], "group": None}
        ticket = {"number": number, "failure": None, "slots": [dict(empty) for _ in range(slots)]}
        self._tickets.setdefault(partition, {})[number] = ticket
        known = self._base["partitions"].setdefault(partition, {"next_ticket": 0})
        known["next_ticket"] = max(known["next_ticket"], number + 1)

    def do_slot(self, partition: str, number: int, index: int, state: dict[str, Any]) -> None:
        self._tickets[partition][number]["slots"][index] = state

    def do_failure(self, partition: str, number: int, reason: str) -> None:
        self._tickets[partition][number]["failure"] = reason

    def do_gone(self, partition: str, number: int) -> None:
        del self._tickets[partition][number]

    def do_commit(self, step: int) -> None:
        self._base["committed"] = step

    def do_consumer(self, name: str, state: dict[str, Any]) -> None:
        self._base["consumers"][name] = state

    def do_lineage(self, key: str, operation: str, parents: list[str]) -> None:
        self._base["lineage"][key] = [operation, parents]

    def do_forget(self, partition: str, keys: list[str]) -> None:
        self._forget.setdefault(partition, {}).update(dict.fromkeys(keys))

    def do_forgotten(self, partition: str, keys: list[str]) -> None:
        for key in keys:
            self._forget.get(partition, {}).pop(key, None)

    def saved(self) -> dict[str, Any]:
        """As :func:`~jackfield.queue.snapshot.load_state` takes it."""
        partitions = {}
        for name, fields in self._base["partitions"].items():
            tickets = list(self._tickets.get(name, {}).values())
            partitions[name] = {"next_ticket": fields["next_ticket"], "tickets": tickets}
            for row in _rows(tickets):
                self._forget.get(name, {}).pop(row["key"], None)
                for consumer, (step, final) in row["acks"].items():
                    committed = self._base["committed"]
                    done = final or (step is not None and committed is not None and step <= committed)
                    row["acks"][consumer] = [step, done]
        discarded = {name: sorted(self._forget.get(name, ())) for name in {**partitions, **self._forget}}
        return {**self._base, "partitions": partitions, "discarded": discarded}


def saved_rows(saved: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a controller's state, as it is saved."""
    for partition in saved["partitions"].values():
        yield from _rows(partition["tickets"])


def _rows(tickets: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for ticket in tickets:
        for slot in ticket["slots"]:
            if slot["group"] is not None:
                yield from slot["group"]["rows"]
