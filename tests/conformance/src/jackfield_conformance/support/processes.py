"""The processes below this one, orphans included, and which of them are left after a deadline."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import time
from collections.abc import Iterable, Iterator

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def descendants() -> frozenset[psutil.Process]:
    """Return all live processes below this one; elsewhere than on Linux, none."""
    found = set()
    for process in psutil.Process().children(recursive=True) if sys.platform == "linux" else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return frozenset(found)


def remaining(processes: Iterable[psutil.Process], seconds: float) -> frozenset[psutil.Process]:
    """Return the processes that have not ended after ``seconds``; none is reaped, as psutil's own wait would do."""
    ends = time.monotonic() + seconds
    left = set()
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process.pid) if sys.platform == "linux" else -1
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                if not poll.poll(max(ends - time.monotonic(), 0) * 1000):
                    left.add(process)
            finally:
                os.close(descriptor)
    return frozenset(left)


def names(processes: Iterable[psutil.Process]) -> list[str]:
    """Return ids and command lines, for messages."""
    found = []
    for process in sorted(processes, key=lambda each: each.pid):
        with contextlib.suppress(psutil.Error):
            found.append(f"{process.pid} ({' '.join(process.cmdline())[:80]})")
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
