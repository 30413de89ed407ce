"""Where an environment's object lives: in a process, in a thread, or in the event loop."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from jackfield.clock import Clock
from jackfield.errors import AgentError, DeadlineExceeded, JackfieldError, described
from jackfield_environments._session import RESET_MARK, WRONG, Session, WrongResult
from jackfield_user_code import HeldWorker

_WRONG = "returned something else"
CLOSE_SECONDS = 5.0  #: deadline of an environment's ``close``


class Failed(Exception):
    """A call did not give a result, and the object must not be used again."""

    def __init__(self, what: str, found: str) -> None:
        super().__init__(what)
        self.what, self.found = what, found


class Host(ABC):
    """One object of an environment."""

    def __init__(self, number: int) -> None:
        self.number = number  #: counted from 0 in its pool; a replacement has a new one
        self._is_closed = False

    @abstractmethod
    async def call(self, method: str, arguments: Mapping[str, Any], seconds: float, name: str) -> Any:
        """Call a method under a deadline; raise :class:`Failed` if it has no result."""

    @abstractmethod
    async def discard(self) -> None:
        """End the object without calling it."""

    async def close(self) -> None:
        """Close the object, and end it."""
        self._is_closed = True
        try:
            await self.call("close", {}, CLOSE_SECONDS, "close")
        except Failed:
            pass
        finally:
            await self.discard()


class InlineHost(Host):
    """An object in the event loop."""

    def __init__(self, number: int, session: Session, clock: Clock) -> None:
        super().__init__(number)
        self._session, self._clock = session, clock

    async def call(self, method: str, arguments: Mapping[str, Any], seconds: float, name: str) -> Any:
        """Call a method, and wait for it if it is a coroutine function."""
        try:
            value = getattr(self._session, method)(**arguments)
            return await self._clock.wait_for(value, seconds, name) if inspect.isawaitable(value) else value
        except DeadlineExceeded as error:
            raise Failed("did not answer, and was cancelled", f"no answer within {seconds:g} s") from error
        except WrongResult as error:
            raise Failed(_WRONG, str(error)) from error
        except Exception as error:
            raise Failed("raised", described(error)) from error

    async def discard(self) -> None:
        """Close the object, which is all that can be done."""
        if not self._is_closed:
            await self.close()


class ThreadHost(Host):
    """An object in a thread of its own, where it is also made."""

    def __init__(self, number: int, make: Callable[[], Session], clock: Clock) -> None:
        super().__init__(number)
        self._make, self._clock = make, clock
        self._session: Session | None = None
        self._calls: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._serve, name=f"environment {number}", daemon=True)
        self._thread.start()

    async def start(self, seconds: float, name: str) -> None:
        """Make the object."""
        await self._do(self._open, seconds, name)

    async def call(self, method: str, arguments: Mapping[str, Any], seconds: float, name: str) -> Any:
        """Call a method in the thread."""
        return await self._do(lambda: _finished(getattr(self._session, method)(**arguments)), seconds, name)

    async def discard(self) -> None:
        """Let the thread end, after a call that hangs in it."""
        self._calls.put(None)

    def _open(self) -> None:
        self._session = self._make()

    async def _do(self, function: Callable[[], Any], seconds: float, name: str) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls.put((future, function))
        try:
            return await self._clock.wait_for(future, seconds, name)
        except DeadlineExceeded as error:
            what = "did not answer, and its thread was abandoned"
            raise Failed(what, f"no answer within {seconds:g} s") from error
        except JackfieldError:
            raise
        except WrongResult as error:
            raise Failed(_WRONG, str(error)) from error
        except Exception as error:
            raise Failed("raised", described(error)) from error

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                value, error = function(), None
            except BaseException as raised:  # SystemExit is the user's code's, too
                value, error = None, raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
            try:
                self._loop.call_soon_threadsafe(_settle, future, value, error)
            except RuntimeError:  # the loop has ended
                break
        if not self._is_closed and self._session is not None:
            with suppress(Exception):
                _finished(self._session.close())


class ProcessHost(Host):
    """An object in a process of its own."""

    def __init__(self, number: int, worker: HeldWorker) -> None:
        super().__init__(number)
        self._worker, self._released = worker, False

    @property
    def pid(self) -> int | None:
        """Return the process id."""
        return self._worker.pid

    async def call(self, method: str, arguments: Mapping[str, Any], seconds: float, name: str) -> Any:
        """Call a method in the process, which is killed at the deadline."""
        result = await self._worker.call(arguments, seconds, name, method)
        if result.status == "ok":
            if isinstance(result.value, dict) and WRONG in result.value:
                raise Failed(_WRONG, result.value[WRONG])
            return result.value
        what = {"timeout": "did not answer, and its process was killed", "died": "died"}.get(result.status, "raised")
        raise Failed(what, since_reset(result.error or ""))

    async def discard(self) -> None:
        """Kill the process."""
        if not self._released:
            self._released = True
            await self._worker.release(kill=True)


def since_reset(text: str) -> str:
    """Return an error's text without the output of earlier episodes; it shows the last lines that were printed."""
    before, mark, after = text.rpartition(RESET_MARK)
    if not mark:
        return text
    head, printed, _ = before.partition("it printed:\n")
    if not printed:
        return text
    return f"{head}{printed}{after.lstrip()}" if after.strip() else head.rstrip().removesuffix("found:").rstrip("; \n")


def _settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if not future.done():
        future.set_result(value) if error is None else future.set_exception(error)


def _finished(value: Any) -> Any:
    """Return a value; an awaitable is run in an event loop of the thread."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def named(error: Failed, environment: str, task: str, call: str) -> AgentError:
    """Return the error that names the environment, the task and the call."""
    return AgentError(
        f"the environment {environment} {error.what}",
        code="agent.environment",
        where=f"{task or 'a rollout'}, {call}",
        expected="a result of the call",
        found=error.found,
        fix="look at the environment; another object takes its place",
    )
