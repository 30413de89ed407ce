"""Heartbeats of processes: one that sends none for ``deadlines.heartbeat`` seconds is dead, and is killed.

A thread of each process says that it lives, whatever the rest of it does. A process whose threads cannot run, but that
uses processor time (code that holds the interpreter's lock), is busy. What is left is stopped, frozen, or waits for a
device that does not answer: it is killed, so that it can do no harm when it wakes up, and its death is then noticed as
every other death is.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import attrs

from jackfield.clock import Clock

__all__ = ["HEARTBEAT_SECONDS", "LOOKS", "Heartbeat", "Process", "Work", "beat", "silence", "until_silent"]

HEARTBEAT_SECONDS = 30.0  #: the default of ``deadlines.heartbeat``
_BUSY = 0.05  #: of one processor's time
LOOKS = 4  #: at a process, and heartbeats that it sends, in that time


@attrs.frozen
class Process:
    """One process, told apart from later ones that have its number."""

    pid: int
    host: str = attrs.field(factory=socket.gethostname)
    place: str = ""  #: processes with the same place see each other: boot and process namespace; empty: unknown
    began: int = 0  #: ticks of the clock between the boot and its start

    @classmethod
    def of(cls, pid: int) -> Process:
        """A process of this machine."""
        return cls(pid, place=_place(), began=_times(pid)[0])

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def is_near(self) -> bool:
        """Whether this process can look at it."""
        return bool(self.place) and self.place == _place()

    def lives(self) -> bool | None:
        """Whether it exists, stopped or not; None: that cannot be seen from here."""
        return _times(self.pid)[0] == self.began if self.is_near and self.began else None

    def processor_seconds(self) -> float:
        """Processor time that it has used; 0 where that cannot be seen."""
        began, used = _times(self.pid) if self.is_near else (0, 0)
        return used / os.sysconf("SC_CLK_TCK") if began == self.began else 0.0

    def kill(self) -> bool:
        """Kill it, if it is near and still this one."""
        if not self.lives():
            return False
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
            return True
        return False


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux
        return ""


def _times(pid: int) -> tuple[int, int]:
    """When a process began, and the processor time that it has used, in ticks; zeros where that cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0, 0
    return int(fields[19]), int(fields[11]) + int(fields[12])


class Work:
    """Whether a process uses the processor: more than what threads that only wait need now and then."""

    def __init__(self) -> None:
        self._used = self._at = 0.0

    def goes_on(self, process: Process) -> bool:
        """Since the last call."""
        used, now = process.processor_seconds(), time.monotonic()
        worked = used - self._used > _BUSY * (now - self._at)
        self._used, self._at = used, now
        return worked


class Heartbeat:
    """The parent's end of a pipe over which a child says that it lives."""

    def __init__(self) -> None:
        self._reading, self.descriptor = os.pipe()  #: the second is the child's
        os.set_blocking(self._reading, False)
        self._process: Process | None = None
        self._work = Work()

    def started(self, pid: int) -> None:
        """The child has its end."""
        os.close(self.descriptor)
        self._process = Process.of(pid)

    def heard(self) -> bool:
        """Whether the child has sent a heartbeat, or used processor time, since the last call."""
        assert self._process is not None
        if self._reading < 0:
            return True
        works = self._work.goes_on(self._process)
        try:
            return bool(os.read(self._reading, 1 << 16)) or works
        except BlockingIOError:
            return works

    def close(self) -> None:
        """Close the pipe; the child is not watched any more. Idempotent."""
        reading, self._reading = self._reading, -1
        if reading >= 0:
            os.close(reading)
            if self._process is None:
                os.close(self.descriptor)


def beat(descriptor: int, seconds: float) -> None:
    """In a child: have a thread say that this process lives, until the parent closes its end.

    Args:
        descriptor: the child's end of a :class:`Heartbeat`.
        seconds: the silence after which the parent takes this process for dead.
    """
    os.set_inheritable(descriptor, False)
    os.set_blocking(descriptor, False)

    def live() -> None:
        pause = threading.Event()
        with suppress(BrokenPipeError):
            while True:
                with suppress(BlockingIOError):  # the parent does not look at the moment
                    os.write(descriptor, b".")
                pause.wait(seconds / LOOKS)

    threading.Thread(target=live, name="jackfield-heartbeat", daemon=True).start()


async def until_silent(heard: Callable[[], bool], clock: Clock, seconds: float) -> None:
    """Return when nothing was heard for ``seconds``.

    It looks a few times in that time, so that a process that was stopped itself does not take the others for dead.

    Args:
        heard: whether there was a heartbeat since its last call.
        clock: Time source.
        seconds: the silence.
    """
    silent = 0
    while silent <= LOOKS:
        await clock.sleep(seconds / LOOKS)
        silent = 0 if heard() else silent + 1


def silence(who: str, process: object, seconds: float, doing: str = "", *, killed: bool = True) -> str:
    """What is said of a process that is taken for dead because of its silence."""
    at_work = f" while it had to {doing}" if doing else ""
    end = "and was killed " if killed else ""
    return f"{who} ({process}) sent no heartbeat for {seconds:g} s{at_work} {end}(deadlines.heartbeat)"
