"""The processes below this one, orphans included, and which of them are left after a deadline.

On Linux; elsewhere none are found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["adopting", "descendants", "names", "remaining"]

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36


def descendants() -> frozenset[int]:
    """Ids of all live processes below this one."""
    if not (_PROC / "self" / "stat").exists():
        return frozenset()
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # the name in parentheses may hold anything; after it come the state and the parent
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return frozenset(found)


def remaining(pids: frozenset[int], seconds: float) -> frozenset[int]:
    """Those that have not ended after ``seconds``."""
    ends = time.monotonic() + seconds
    left = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid) if sys.platform == "linux" else -1
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                if not poll.poll(max(ends - time.monotonic(), 0) * 1000):
                    left.add(pid)
            finally:
                os.close(descriptor)
    return frozenset(left)


def names(pids: frozenset[int]) -> list[str]:
    """Ids and command lines, for messages."""
    found = []
    for pid in sorted(pids):
        with contextlib.suppress(OSError):
            command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found.append(f"{pid} ({command.strip()[:80]})")
    return found


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """While inside, a process whose parent ends becomes our child in the place of init's, so that it is found."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is None:
        yield
        return
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
