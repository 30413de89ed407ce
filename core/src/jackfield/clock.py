"""The time source of all waits and deadlines of a run."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Awaitable, Generator
from functools import partial
from typing import Any, TypeVar

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

        A passed deadline raises ``DeadlineExceeded``, which names ``waiting_for``. What ends at once needs no timer.
        """
        if isinstance(awaitable, asyncio.Future) and not isinstance(awaitable, asyncio.Task):
            return await _future(awaitable, seconds, waiting_for)
        steps = awaitable.__await__()
        try:
            waited = next(steps)
        except StopIteration as ended:
            return ended.value
        task, late = asyncio.current_task(), False
        assert task is not None
        before = task.cancelling()

        def expire() -> None:
            nonlocal late
            late = True
            task.cancel()

        timer = task.get_loop().call_later(seconds, expire)
        try:
            return await _resumed(steps, waited)
        except asyncio.CancelledError as error:
            if late and task.cancelling() == before + 1:
                raise too_late(seconds, waiting_for) from error
            raise
        finally:
            timer.cancel()
            if late:
                task.uncancel()


@types.coroutine
def _resumed(steps: Generator[Any, Any, T], waited: Any) -> Generator[Any, Any, T]:
    """Go on with an awaitable that waits for ``waited`` after its first step."""
    while True:
        try:
            resume = partial(steps.send, (yield waited))
        except BaseException as error:
            resume = partial(steps.throw, error)
        try:
            waited = resume()
        except StopIteration as ended:
            return ended.value


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
