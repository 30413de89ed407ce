"""What all kinds of tools have in common: the source of an entry's tools, and the results of calls."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from jackfield.abc.agent import AgentContext, AgentWorkerContext, ToolResult
from jackfield.errors import AgentError
from jackfield_tools.settings import Tool

Arguments = Mapping[str, Any]


class Source(ABC):
    """The tools of one entry of the section, in one agent worker."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self.places = asyncio.Semaphore(tool.concurrency)  #: for calls that run

    @property
    @abstractmethod
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas by the tools' names. They are known before the start, unless a process has to tell them."""

    async def start(self, context: AgentWorkerContext) -> None:
        """Open what all rollouts of the worker share; ``tools.start`` if that fails."""
        return

    @abstractmethod
    def session(self, context: AgentContext, fields: Mapping[str, Any]) -> Session:
        """Return what one rollout uses."""

    async def close(self) -> None:
        """Close what :meth:`start` opened. It may be called again."""
        return

    def cannot_start(self, why: object, fix: str | None = None) -> AgentError:
        """Return the error of a tool that cannot be used."""
        message = f"the tool {self.tool.name} cannot be started"
        return AgentError(message, code="tools.start", where=self.tool.where, found=str(why), fix=fix)


class Session(ABC):
    """The tools of one entry, in one rollout."""

    @abstractmethod
    async def call(self, name: str, arguments: Arguments, seconds: float) -> Any:
        """Call a tool for at most ``seconds``, and return its result or a plain value.

        ``Refused`` says what is wrong in words for the model, ``DeadlineExceeded`` that the time was over; any other
        exception is the tool's own.
        """

    async def close(self) -> None:
        """Close what the rollout has opened."""
        return


class Refused(Exception):
    """A call failed, for a reason that the model can act on."""


class Threads:
    """Calls of functions that may block, each in a thread. One that is not awaited any longer runs to its end."""

    def __init__(self, most_left: int) -> None:
        self.left = 0  #: threads of calls that were given up
        self._most_left = most_left

    async def run(self, function: Callable[[], Any], name: str) -> Any:
        """Return what a function returns; its exceptions are raised here."""
        if self.left >= self._most_left:
            raise Refused(f"{self.left} earlier calls do not end, so this one was not made")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        given_up = False

        def ended(value: Any, error: BaseException | None) -> None:
            self.left -= given_up
            if not answer.done():
                answer.set_result((value, error))

        def work() -> None:
            value, error = None, None
            try:
                value = function()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended, value, error)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(work,), name=f"tool {name}", daemon=True).start()
        try:
            value, error = await answer
        except asyncio.CancelledError:
            given_up = True
            self.left += 1
            raise
        if error is not None:
            raise _plain(error)
        return value


async def awaited(coroutine: Awaitable[Any]) -> Any:
    """Await a tool's coroutine. What it raises to end a program, or to cancel itself, is an exception like others."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        return await coroutine
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling() > before:
            raise
        raise RuntimeError("it was cancelled by itself") from error
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        raise _plain(error) from error


def _plain(error: BaseException) -> Exception:
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    return RuntimeError(f"it raised {type(error).__name__} {error}".strip())


def as_result(value: Any) -> ToolResult:
    """Return the result of a tool that returned a value: a text as it is, anything else as JSON.

    A value without a JSON form is an error that names its type.
    """
    if isinstance(value, ToolResult):
        return value if isinstance(value.text, str) else _no_result(f"a result whose text is a {_type(value.text)}")
    if isinstance(value, str):
        return ToolResult(text=value)
    if value is None:
        return ToolResult(text="")
    try:
        return ToolResult(text=msgspec.json.encode(value, enc_hook=_simpler).decode())
    except _NoJson as error:
        part = str(error)
    except (TypeError, ValueError, RecursionError) as error:  # keys that are no texts, lone surrogates, circles
        part = f"{_type(value)} ({error})"
    own = _type(value)
    return _no_result(f"a {part}" if part.startswith(own) else f"a {own} that contains a {part}")


class _NoJson(TypeError):
    """A value has no JSON form."""


def _simpler(value: Any) -> Any:
    """Return what stands for scalars and arrays of NumPy and torch, and for paths."""
    if hasattr(value, "tolist") and hasattr(value, "ndim"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise _NoJson(_type(value))


def _type(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _no_result(what: str) -> ToolResult:
    return ToolResult(text=f"the tool returned {what}, which is neither a text nor JSON", is_error=True)
