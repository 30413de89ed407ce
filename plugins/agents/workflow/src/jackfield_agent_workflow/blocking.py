"""Workflows whose ``run`` is a plain function: it runs in a thread, and calls block there."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from jackfield_agent_workflow.conversations import RolloutEnded

_LEAVE_SECONDS = 1.0  #: a thread whose rollout was cancelled has so long to end


class Caller:
    """Makes calls of coroutine functions from a thread; after :meth:`stop` they raise ``RolloutEnded``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._stopped, self._lock = False, threading.Lock()

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a coroutine function in the event loop, and wait for its result."""
        with self._lock:
            if self._stopped:
                raise RolloutEnded("cancelled")
            future = asyncio.run_coroutine_threadsafe(function(*arguments, **keywords), self._loop)
            self._running.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise RolloutEnded("cancelled") from error
        finally:
            self._running.discard(future)

    def stop(self) -> None:
        """Cancel the calls that run, and refuse further ones."""
        with self._lock:
            self._stopped, running = True, list(self._running)
        for future in running:
            future.cancel()


class Blocking:
    """An object whose coroutine functions are called as plain ones, also those of what it returns."""

    def __init__(self, target: Any, caller: Caller) -> None:
        self._target, self._caller = target, caller

    def __getattr__(self, name: str) -> Any:
        return _blocking(getattr(self._target, name), self._caller)

    def __getitem__(self, name: Any) -> Any:
        return _blocking(self._target[name], self._caller)

    def __repr__(self) -> str:
        return f"Blocking({self._target!r})"


def _blocking(value: Any, caller: Caller) -> Any:
    if inspect.iscoroutinefunction(value):
        return functools.partial(caller.call, value)
    return Blocking(value, caller) if _has_coroutines(type(value)) else value


def _has_coroutines(cls: type) -> bool:
    own = (getattr(cls, name, None) for name in dir(cls) if not name.startswith("_"))
    return any(map(inspect.iscoroutinefunction, own))


async def run_in_thread(run: Callable[[], Any], caller: Caller, name: str) -> Any:
    """Run a function in a thread of its own. If this is cancelled, its calls end, and so should it."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result(value) if error is None else ended.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = run()
        except Exception as raised:
            error = raised
        except BaseException as raised:  # SystemExit is the user's code's, too
            error = RuntimeError(repr(raised))
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, error)

    thread = threading.Thread(target=work, name=f"workflow {name}", daemon=True)
    thread.start()
    try:
        value = await asyncio.shield(ended)
    except BaseException:
        caller.stop()
        await asyncio.wait({ended}, timeout=_LEAVE_SECONDS)
        if not ended.done():
            text = "the thread of workflow %s still runs after its rollout was cancelled: a thread cannot be killed"
            logging.getLogger("jackfield").warning(text, name)
        elif not ended.cancelled():
            ended.exception()  # its calls were refused
        raise
    thread.join(_LEAVE_SECONDS)
    return value
