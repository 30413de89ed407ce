"""Event loops in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread: operators that compute for long do not keep the loop of the caller from answering."""

    def __init__(self, name: str) -> None:
        self._loop, ready = asyncio.new_event_loop(), threading.Event()

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels what is left, and closes the loop
                runner.get_loop()
                ready.set()
                self._loop.run_forever()

        threading.Thread(target=run, name=name, daemon=True).start()
        ready.wait()

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop run a coroutine; return its result. A cancellation is passed on, and not waited for."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def end(self) -> None:
        """End the loop and what it runs, without waiting."""
        self._loop.call_soon_threadsafe(self._loop.stop)
