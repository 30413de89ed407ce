"""SIGTERM and SIGINT: the first asks a run to end at its next boundary, a second one ends the process at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_WORKING = 0.8  #: share of the grace in which a boundary may be reached; the rest is for closing
_STARTING_SECONDS = 2.0  #: for what has only begun to start to be closed; it has nothing to save


class Stop:
    """Whether a run is to end before its time.

    Args:
        grace: seconds between the first signal and the end of the process, whatever it does then; fewer where it has
            only begun to start.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._until = ""
        self.begun = False  #: whether everything has started: from then on, closing is worth waiting for
        self.code: int | None = None  #: the exit code that the first signal asks for, 128 and its number
        self.requested = asyncio.Event()  #: set by the first signal

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Have this object receive the signals; of the main thread."""
        before = {number: signal.signal(number, self._received) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def boundary(self, until: str) -> Iterator[None]:
        """Declare that what runs inside ends soon after a signal, so that it is worth waiting for ``until`` then."""
        self.begun, self._until = True, until
        try:
            yield
        finally:
            self._until = ""

    async def bounded(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work``; after a signal it is cancelled, once it has had its time where it has a boundary.

        Raises:
            CancelledError: a signal has ended it.
        """
        self._loop = asyncio.get_running_loop()
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self.requested.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if self._until and not task.done():
                await asyncio.wait({task}, timeout=_WORKING * self._grace)
        finally:
            asked.cancel()
            task.cancel()  # no effect on what is done
            await asyncio.wait({task})
            self._loop = None
        return task.result()

    def _received(self, number: int, _: FrameType | None) -> None:
        if self.code is not None:
            _end_now(number)
        self.code = 128 + number
        how = f"ending {self._until}, within {self._grace:g} s" if self._until else "ending"
        os.write(2, f"{signal.Signals(number).name}: {how}; a second signal ends at once\n".encode())
        timer = threading.Timer(self._grace if self.begun else min(self._grace, _STARTING_SECONDS), _end_now, [number])
        timer.daemon = True
        timer.start()
        if self._loop is None:
            raise SystemExit(self.code)  # nothing has begun, or everything has ended
        self._loop.call_soon_threadsafe(self.requested.set)


def _end_now(number: int) -> NoReturn:
    """End this process and everything that it has started."""
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    os._exit(128 + number)


def _descendants(ancestor: int) -> list[int]:
    """List the processes below one, from Linux's process table; elsewhere none are found."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(ancestor, ()))
    for pid in found:
        found += children.get(pid, ())
    return found
