"""Detection of dead processes: one that cannot run for ``deadlines.heartbeat`` seconds is killed.

Of a process on this machine the kernel says whether any of its threads can run: work, however long, is no silence. From
a process of another machine heartbeats come over its connections. A process that is dead is killed where that is
possible, so that it does no harm when it wakes up, and its death is then noticed as every other death is.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import attrs

LOOKS = 4  #: looks at a process, and heartbeats that it sends, in the deadline
_CAN_RUN = "RSI"  #: states of a thread that is neither stopped, frozen nor waiting for a device


@attrs.frozen(kw_only=True)
class Process:
    """One process, distinguished from later ones with its number."""

    pid: int
    host: str = attrs.field(factory=socket.gethostname)
    place: str = ""  #: processes with the same place see each other: boot and process namespace
    began: int = 0  #: ticks between the boot and its start

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process of this machine with a number."""
        return cls(pid=pid, place=_place(), began=_stat(f"/proc/{pid}/stat")[1])

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def is_near(self) -> bool:
        """Return whether the kernel can be asked about it."""
        return bool(self.place) and self.place == _place()

    def can_run(self) -> bool:
        """Return whether any thread of a near process can run."""
        folder = f"/proc/{self.pid}/task"
        try:
            return any(_stat(f"{folder}/{thread}/stat")[0] in _CAN_RUN for thread in os.listdir(folder))
        except OSError:  # it has ended
            return False

    def kill(self) -> bool:
        """Kill the process if it is near and still the same. Returns whether it was killed."""
        state, began = _stat(f"/proc/{self.pid}/stat")
        if self.is_near and began == self.began and state not in "ZX":
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


def _stat(file: str) -> tuple[str, int]:
    """Read the state of a process or thread, and when it began; ``X`` and 0 where there is none."""
    try:
        fields = Path(file).read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])
