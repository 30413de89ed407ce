"""Waiting without polling: whoever changes something wakes those who wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded

__all__ = ["Line", "Signal", "wait"]


class Signal:
    """Wakes everybody who waits for it."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def next(self) -> asyncio.Future[None]:
        """A future that the next :meth:`notify` sets."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def notify(self) -> None:
        """Wake everybody."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)


class Line:
    """Consumers in a line: news wake the first, who passes them on when something is left.

    So news of n rows wake as many waiters as there is work for, not all of them.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._news = 0

    def join(self) -> asyncio.Future[None]:
        """Stand at the end, until there are news that came after joining."""
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((future, self._news))
        return future

    def leave(self, future: asyncio.Future[None]) -> None:
        """Step out; news that were meant for a waiter who leaves go to the next one."""
        if not future.done():
            future.cancel()
        elif not future.cancelled():
            self.pass_on()

    def news(self) -> None:
        """Something has become available."""
        self._news += 1
        self.pass_on()

    def pass_on(self) -> None:
        """Wake the first one who has not heard the latest news."""
        while self._waiting and (self._waiting[0][0].done() or self._waiting[0][1] < self._news):
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                return

    def wake_all(self) -> None:
        """Wake everybody (the queue closes)."""
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_result(None)


async def wait(clock: Clock, future: asyncio.Future[None], until: float, describe: Callable[[], str]) -> None:
    """Wait for ``future`` until the time ``until`` of ``clock``.

    Raises:
        DeadlineExceeded: naming what ``describe`` says *then*.
    """
    start = clock.time()
    try:
        await clock.wait_for(future, max(until - start, 0.0), "the TransferQueue")
    except DeadlineExceeded:
        raise DeadlineExceeded(
            f"waited {until - start:.6g} s for {describe()}",
            fix="look at why it did not come, or raise the deadline",
        ) from None
