"""The first SIGTERM or SIGINT ends a run at its next boundary, a second one at once."""

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

_WORKING = 0.8  #: share of the grace period for reaching a boundary; the rest is for closing
_STARTING_SECONDS = 2.0  #: grace period of a run that is still starting and has nothing to save


class Stop:
    """A request to stop a run early, made by a signal.

    ``grace`` is the maximum of seconds from the first signal to the end of the process, which is then killed. A run
    that is still starting gets less.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._until = ""
        self.begun = False  #: whether everything has started, so that closing may take the whole grace period
        self.code: int | None = None  #: exit code of the first signal: 128 + its number
        self.requested = asyncio.Event()  #: set by the first signal

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Let this object receive the signals. Call it in the main thread."""
        before = {number: signal.signal(number, self._received) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def boundary(self, until: str) -> Iterator[None]:
        """Declare that the enclosed code ends soon after a signal, at the boundary ``until``."""
        self.begun, self._until = True, until
        try:
            yield
        finally:
            self._until = ""

    async def bounded(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``; a signal cancels it (``CancelledError``), inside a :meth:`boundary` only after some time."""
        self._loop = asyncio.get_running_loop()
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self.requested.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if self._until and not task.done():
                await asyncio.wait({task}, timeout=_WORKING * self._grace)
        finally:
            asked.cancel()
            task.cancel()  # no effect on a finished task
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
            raise SystemExit(self.code)  # no work is running
        self._loop.call_soon_threadsafe(self.requested.set)


def _end_now(number: int) -> NoReturn:
    """Kill this process and, as far as Linux's ``/proc`` lists them, all processes that it has started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    descendants = list(children.get(os.getpid(), ()))
    for pid in descendants:  # it grows during the loop
        descendants += children.get(pid, ())
    for pid in descendants:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    os._exit(128 + number)
