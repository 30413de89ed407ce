"""Processes that descend from another one. It needs only the standard library."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

_SUBREAPER, _DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG of linux/prctl.h
_PASSES = 1000  #: a tree that still grows after so many is killed as it is


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends, whatever session they are in."""
    _prctl(_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Get a signal when the parent ends; end at once if it has ended already."""
    _prctl(_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os._exit(1)


def children(pid: int) -> list[int]:
    """Return the children of a process, also those that have ended and were not waited for."""
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found.extend(map(int, file.read().split()))
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # a kernel without these files
            found = [int(each) for each in os.listdir("/proc") if each.isdecimal() and _parent(each) == pid]
    return found


def _parent(pid: str) -> int:
    with suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return 0


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children and so on."""
    found, seen = children(pid), set[int]()
    for each in found:  # which grows meanwhile
        if each not in seen:
            seen.add(each)
            found.extend(children(each))
    return found


def kill_tree(pid: int) -> None:
    """Kill a process that adopts orphans, and all its descendants. They are stopped first, so that none can fork."""
    stopped = [pid]
    _signal([pid], signal.SIGSTOP)
    for _ in range(_PASSES):
        new = [each for each in descendants(pid) if each not in stopped]
        if not new:
            break
        _signal(new, signal.SIGSTOP)
        stopped += new
    _signal(stopped[::-1], signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):  # where /proc does not tell: its process group
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
