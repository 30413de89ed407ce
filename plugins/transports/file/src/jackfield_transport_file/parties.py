"""Who takes part in a transfer: a file for each, to which only it appends, and which it holds locked while it lives.

So a process that is killed is noticed: the system gives its lock back. On a file system whose locks do not
work between machines it is noticed at the deadline.
"""

from __future__ import annotations

import fcntl
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield_transport_file.failures import guarded


@attrs.define(eq=False)
class Other:
    """Another party, as far as it has said something."""

    name: str  #: as errors call it
    path: Path
    said: dict[str, Any] = attrs.field(factory=dict)  #: the last value of each thing
    broken: str | None = None  #: why it will say no more
    _read: int = 0  #: bytes of its file

    def look(self) -> None:
        """Read what is new. A party that said ``done`` may leave."""
        there = self.path.exists()
        left = there and abandoned(self.path)  # before reading: what it said last counts
        if there:
            with self.path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
            lines = content[: content.rfind(b"\n") + 1]
            self._read += len(lines)
            for line in lines.splitlines():
                self.said.update(json.loads(line))
        if self.said.get("broken"):
            self.broken = self.said["broken"]
        elif (left or (self.said and not there)) and not self.said.get("done"):
            self.broken = "died or was cut off"


class Parties:
    """This party, and the others that it listens to."""

    def __init__(self, own: Path, seconds: float, poll_seconds: float) -> None:
        """
        Args:
            own: this party's file, which is made.
            seconds: the deadline of the transfer, from now.
            poll_seconds: how often the others' files are looked at.

        Raises:
            WeightsError: another process is this party; ``weights.storage``.
        """
        self.others: list[Other] = []
        self._clock = Clock()
        self._seconds = seconds
        self._ends = self._clock.time() + seconds
        self._poll_seconds = poll_seconds
        self._folder = own.parent
        if own.exists():
            raise WeightsError(f"{own.name} takes part already", where=str(own))
        with guarded(self._folder):
            partial = own.with_name(f".{own.name}.{secrets.token_hex(4)}")
            self._file = partial.open("xb", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            partial.rename(own)  # only now: nobody may find it without its lock

    def restart(self) -> None:
        """The deadline counts from now."""
        self._ends = self._clock.time() + self._seconds

    def tell(self, message: Mapping[str, Any]) -> None:
        """Write something for the others to read."""
        with guarded(self._folder):
            self._file.write(json.dumps(dict(message)).encode() + b"\n")

    def look(self) -> None:
        """See what the others have said.

        Raises:
            WeightsError: one of them broke off.
        """
        with guarded(self._folder):
            for other in self.others:
                other.look()
        broken = [f"{other.name} {other.broken}" for other in self.others if other.broken is not None]
        if broken:
            raise WeightsError("; ".join(broken))

    async def until(self, ready: Callable[[Other], bool], what: str) -> None:
        """Wait until all others are ready, because of what they said.

        Raises:
            WeightsError: one of them broke off.
            DeadlineExceeded: naming who is not ready to do ``what``.
        """
        while True:
            self.look()
            late = [other.name for other in self.others if not ready(other)]
            if not late:
                return
            if self._clock.time() >= self._ends:
                raise DeadlineExceeded(
                    f"waited {self._seconds:g} s for {' and '.join(late)} to {what}, in a weight transfer",
                    fix="look at why the peer did not answer, or raise the deadline of the sync",
                )
            await self._clock.sleep(min(self._poll_seconds, max(self._ends - self._clock.time(), 0.0)))

    def close(self, broken: str | None = None) -> None:
        """Leave; say why, where it is before the end."""
        try:
            if broken is not None and not self._file.closed:
                self.tell({"broken": broken})
        finally:
            self._file.close()


def abandoned(path: Path) -> bool:
    """Return whether a file that was made is held by no process."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return False
    except OSError:  # no locks here
        return False
    return True
