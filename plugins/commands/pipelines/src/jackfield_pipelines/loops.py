"""Event loops in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread: operators that compute for long do not keep the loop of the caller from answering."""

    def __init__(self, name: str) -> None:
        self._loop, self._has_ended, ready = asyncio.new_event_loop(), False, threading.Event()

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels what is left, and closes the loop
                runner.get_loop()
                ready.set()
                while not self._has_ended:
                    with suppress(SystemExit, KeyboardInterrupt):  # of a task, of which the one that waits gets it
                        self._loop.run_forever()

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()
        ready.wait()

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop run a coroutine; return its result. A cancellation is passed on, and not waited for."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop run a coroutine; wait for its result in this thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def end(self, *, waits: bool = False) -> None:
        """Cancel what the loop runs, and end it."""
        self._has_ended = True
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        if waits:
            self._thread.join()
