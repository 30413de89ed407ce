"""The time source of all waits and deadlines of a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from jackfield.errors import DeadlineExceeded

T = TypeVar("T")


class Clock:
    """The real clock. ``time()`` is monotonic, in seconds, with an arbitrary origin."""

    def time(self) -> float:
        """Return the seconds on a monotonic clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task for ``seconds``."""
        await asyncio.sleep(seconds)

    async def wait_for(self, awaitable: Awaitable[T], seconds: float, waiting_for: str) -> T:
        """Await ``awaitable`` for at most ``seconds`` from now; then cancel it.

        A passed deadline raises ``DeadlineExceeded``, which names ``waiting_for``.
        """
        if isinstance(awaitable, asyncio.Future) and not isinstance(awaitable, asyncio.Task):
            return await _future(awaitable, seconds, waiting_for)
        task, late = asyncio.current_task(), False
        assert task is not None
        before = task.cancelling()

        def expire() -> None:
            nonlocal late
            late = True
            task.cancel()

        timer = task.get_loop().call_later(seconds, expire)
        try:
            return await awaitable
        except asyncio.CancelledError as error:
            if late and task.cancelling() == before + 1:
                raise too_late(seconds, waiting_for) from error
            raise
        finally:
            timer.cancel()
            if late:
                task.uncancel()


async def _future(future: asyncio.Future[T], seconds: float, waiting_for: str) -> T:
    """Do the same as :meth:`Clock.wait_for` at a third of its cost, which halves that of an RPC call."""
    timer = future.get_loop().call_later(seconds, future.cancel, waiting_for)
    try:
        return await future
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if error.args != (waiting_for,) or (task is not None and task.cancelling()):
            raise
        raise too_late(seconds, waiting_for) from error
    finally:
        timer.cancel()


def too_late(seconds: float, waiting_for: str) -> DeadlineExceeded:
    """Return the error of a wait that has reached its deadline."""
    fix = "look at why it did not answer, or raise the deadline"
    return DeadlineExceeded(f"waited {seconds:g} s for {waiting_for}", fix=fix)
