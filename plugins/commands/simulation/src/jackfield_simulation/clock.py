"""A clock that jumps to the next deadline."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from jackfield.clock import Clock

T = TypeVar("T")


class VirtualClock(Clock):
    """A clock that jumps to the next deadline as soon as every task waits. Work in threads does not stop it.

    Use :meth:`run` instead of :func:`asyncio.run`; ``asyncio.sleep`` and ``asyncio.timeout`` also use virtual time.
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
        selector: Any = selectors.DefaultSelector()
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            self.now += max(timeout or 0.0, 0.0)
            return select(None if timeout is None else 0)

        selector.select = jump
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = self.time  # type: ignore[method-assign]
        return loop
