"""The one clock through which every wait and every deadline goes.

A run gets a :class:`Clock` injected; simulations and tests use a :class:`VirtualClock`, on which an
hour passes as soon as every task waits.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from jackfield.errors import DeadlineExceeded

__all__ = ["Clock", "VirtualClock"]

T = TypeVar("T")


class Clock:
    """The real clock. ``time()`` is monotonic, in seconds, with an arbitrary origin."""

    def time(self) -> float:
        """Seconds on a monotonic clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task for ``seconds``."""
        await asyncio.sleep(seconds)

    async def wait_for(self, awaitable: Awaitable[T], seconds: float, waiting_for: str) -> T:
        """Await ``awaitable`` for at most ``seconds``.

        Args:
            awaitable: a coroutine or future; it is cancelled when time runs out.
            seconds: the deadline, from now.
            waiting_for: who and what is waited for, for the error message.

        Raises:
            DeadlineExceeded: when time runs out; the message names ``waiting_for``.
        """
        if isinstance(awaitable, asyncio.Future) and not isinstance(awaitable, asyncio.Task):
            return await _future(awaitable, seconds, waiting_for)
        try:
            async with asyncio.timeout(seconds) as scope:
                return await awaitable
        except TimeoutError as error:
            if not scope.expired():
                raise  # a timeout of the awaitable's own
            raise _too_late(seconds, waiting_for) from error


async def _future(future: asyncio.Future[T], seconds: float, waiting_for: str) -> T:
    """What :meth:`Clock.wait_for` does, at a third of its cost: requests to queues wait for futures."""
    timer = future.get_loop().call_later(seconds, future.cancel, waiting_for)
    try:
        return await future
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if error.args != (waiting_for,) or (task is not None and task.cancelling()):
            raise
        raise _too_late(seconds, waiting_for) from error
    finally:
        timer.cancel()


def _too_late(seconds: float, waiting_for: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"waited {seconds:g} s for {waiting_for}", fix="look at why it did not answer, or raise the deadline"
    )


class VirtualClock(Clock):
    """A clock that jumps to the next deadline as soon as every task waits.

    Use :meth:`run` in the place of :func:`asyncio.run`; ``asyncio.sleep`` and ``asyncio.timeout``
    inside it run on virtual time, too. Work in threads or other processes does not hold the clock.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def time(self) -> float:
        """Virtual seconds since the clock was made."""
        return self._now

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` to its end on virtual time and return its result."""
        with asyncio.Runner(loop_factory=lambda: _VirtualTimeLoop(self)) as runner:
            return runner.run(main)


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the virtual clock instead of waiting."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        self._clock._now += max(timeout, 0.0)
        return super().select(0)


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self._virtual_clock = clock
        super().__init__(_JumpingSelector(clock))

    def time(self) -> float:
        return self._virtual_clock.time()
