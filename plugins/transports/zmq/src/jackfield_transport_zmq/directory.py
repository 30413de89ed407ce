"""The units of a queue: their processes, which the queue's owner starts, addresses, and places of rows."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import xxhash

from jackfield.errors import QueueError
from jackfield.sdk import replace_file
from jackfield_transport_zmq.sockets import Keys

FILE = "units.json"
_FORMAT = 1


@attrs.frozen
class UnitAddress:
    """The address of one unit."""

    number: int
    pid: int
    address: str
    place: str  #: where its process runs

    @property
    def name(self) -> str:
        """Return the unit's name in errors."""
        return f"storage unit {self.number} (process {self.pid}, {self.address})"


@attrs.define
class Directory:
    """The units of a queue. Units are added, never removed; dead ones are recorded as lost."""

    initial: int  #: units at the start
    secret: bytes
    keys: Keys | None = None
    units: list[UnitAddress] = attrs.field(factory=list)
    lost: set[int] = attrs.field(factory=set)

    @classmethod
    def new(cls, units: int, encrypted: bool) -> Directory:
        """Make the directory of a queue that is about to start."""
        return cls(units, secrets.token_bytes(32), Keys.make() if encrypted else None)

    def entries(self) -> list[tuple[int, int, str, str]]:
        """Return the units' entries in messages."""
        return [(unit.number, unit.pid, unit.address, unit.place) for unit in self.units]

    def add(self, entries: Iterable[Sequence[Any]]) -> None:
        """Add units that another process has announced."""
        known = {unit.number for unit in self.units}
        self.units += [UnitAddress(*entry) for entry in entries if entry[0] not in known]
        self.units.sort(key=lambda unit: unit.number)

    def places(self, partition: str, key: str) -> list[int]:
        """Return the living units that may hold a row, the one for new rows first; none if all are lost.

        A row is put into the unit with the highest hash weight for its name (rendezvous hashing). So an added unit
        takes its share of new rows from all others, existing rows stay, and a lost unit does not affect rows of the
        others.
        """
        if len(self.units) == 1:
            return [0] if not self.lost else []
        return self._winners(partition, key, self.lost)

    def was_at_a_lost_unit(self, partition: str, key: str) -> bool:
        """Return whether a row may have been at a unit that died."""
        return bool(self.lost) and not self.lost.isdisjoint(self._winners(partition, key, set()))

    def _winners(self, partition: str, key: str, without: set[int]) -> list[int]:
        name = f"{len(partition)}:{partition}{key}".encode("utf-8", "surrogatepass")
        weights = [(xxhash.xxh3_64_intdigest(name, seed=unit.number), unit.number) for unit in self.units]
        winners: list[int] = []
        for count in range(len(weights), self.initial - 1, -1):
            left = [weight for weight in weights[:count] if weight[1] not in without]
            if left and (winner := max(left)[1]) not in winners:
                winners.append(winner)
        return winners

    def write(self, folder: Path) -> None:
        """Write ``units.json``, readable only by this user: it gives read and write access to samples."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "format": _FORMAT,
            "initial": self.initial,
            "secret": self.secret.hex(),
            "keys": None if self.keys is None else self.keys.of_clients(),
            "units": self.entries(),
            "lost": sorted(self.lost),
        }
        replace_file(folder / FILE, json.dumps(content), mode=0o600, durable=False)

    @classmethod
    def read(cls, path: Path) -> Directory:
        """Read the file; ``queue.unreachable`` if it is missing, ``queue.store`` for another format."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise QueueError(
                f"no queue can be joined: {error}",
                code="queue.unreachable",
                where=str(path),
                fix="start the run, or `jackfield queue serve`, whose queue folder this is, with transfer_queue zmq",
            ) from error
        except ValueError as error:
            raise QueueError("the list of units is damaged", code="queue.store", where=str(path)) from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise QueueError("the list of units is of another format", code="queue.store", where=str(path))
        made = cls(content["initial"], bytes.fromhex(content["secret"]))
        made.keys = None if content["keys"] is None else Keys(**content["keys"])
        made.add(content["units"])
        made.lost = set(content["lost"])
        return made


_START_SECONDS = 30.0


@attrs.define(eq=False)
class UnitProcess:
    """One child process."""

    process: subprocess.Popen[bytes]
    unit: UnitAddress | None = None

    @classmethod
    def begin(cls, number: int, host: str, directory: Directory) -> UnitProcess:
        """Start the process without waiting for it."""
        command = [sys.executable, "-m", "jackfield_transport_zmq.serve"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        order = {
            "number": number,
            "owner": os.getpid(),
            "host": host,
            "secret": directory.secret.hex(),
            "keys": None if directory.keys is None else attrs.asdict(directory.keys),
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.close()
        return cls(process)

    def answer(self, number: int, until: float) -> UnitAddress:
        """Wait for its address; ``queue.store`` if it does not start."""
        assert self.process.stdout is not None
        with self.process.stdout as output:
            ready, _, _ = select.select([output], [], [], max(until - time.monotonic(), 0.0))
            line = output.readline() if ready else b""
        if not line:
            raise QueueError(
                f"storage unit {number} did not start within {_START_SECONDS:g} s",
                code="queue.store",
                where=f"process {self.process.pid}",
                found=f"exit status {self.process.poll()}",
                fix="its standard error says why",
            )
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise QueueError(said["error"], code="queue.store", where=said["where"], fix=said["fix"])
        self.unit = UnitAddress(number, self.process.pid, said["address"], said["place"])
        return self.unit

    def end(self) -> None:
        """Kill the process, which has nothing to save."""
        self.process.kill()
        self.process.wait()


def started(numbers: Sequence[int], host: str, directory: Directory) -> list[UnitProcess]:
    """Start units in parallel, and block until they run; if one fails, end all and raise ``QueueError``."""
    children: list[UnitProcess] = []
    try:
        children.extend(UnitProcess.begin(number, host, directory) for number in numbers)
        until = time.monotonic() + _START_SECONDS
        for number, child in zip(numbers, children, strict=True):
            child.answer(number, until)
    except BaseException:
        for child in children:
            child.end()
        raise
    return children
