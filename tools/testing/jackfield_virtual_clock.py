"""A clock for simulations and tests, which jumps from deadline to deadline."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from jackfield.clock import Clock

T = TypeVar("T")


class VirtualClock(Clock):
    """A clock that jumps to the next deadline as soon as every task waits.

    Use :meth:`run` instead of :func:`asyncio.run`; ``asyncio.sleep`` and ``asyncio.timeout`` inside it also use
    virtual time. Work in threads or other processes does not stop the clock.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        """Return the virtual seconds since the clock was created."""
        return self.now

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` to its end on virtual time and return its result."""
        with asyncio.Runner(loop_factory=self.make_loop) as runner:
            return runner.run(main)

    def make_loop(self) -> asyncio.AbstractEventLoop:
        """Create an event loop that runs on virtual time."""
        loop = asyncio.SelectorEventLoop(_JumpingSelector(self))
        loop.time = self.time  # type: ignore[method-assign]
        return loop


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the virtual clock instead of waiting."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None:
            self._clock.now += max(timeout, 0.0)
        return super().select(None if timeout is None else 0)
