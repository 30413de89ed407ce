"""An event loop in processor time: other programs on the machine do not count, and nothing waits."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Passes over the time until the next timer instead of waiting for it."""

    skipped = 0.0  #: seconds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout and 0)
        if timeout and not found:
            self.skipped += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Selector()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Return this process's processor time, and all that was passed over, in seconds."""
        return time.process_time() + self._skipping.skipped


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing but timers, and at most at its end for threads."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)


def now() -> float:
    """Return the time of the running loop."""
    return asyncio.get_running_loop().time()
