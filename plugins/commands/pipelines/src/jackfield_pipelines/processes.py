"""Processes of operators that run with another interpreter: how they begin, what they may ask, and how they end.

A process belongs to the pipeline, and operators of one plugin and interpreter share it. When it dies or hangs, the next
call of an operator begins another one.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import attrs

from jackfield.abc.operator import OperatorContext
from jackfield.abc.reward import GeneratedText, HttpAnswer
from jackfield.clock import Clock
from jackfield.errors import PluginError, WorkerLost
from jackfield.plugins.registry import PluginRecord
from jackfield.runtime.operators import (
    SERVICES,
    OperatorHost,
    OperatorServices,
    operators_of,
)
from jackfield.runtime.process import open_host
from jackfield.sdk.child import ChildProcess
from jackfield.sdk.rpc import Service

T = TypeVar("T")

_ANSWER_SECONDS = 2.0  #: for a process to show that it has ended a cancelled request
_END_SECONDS = 3.0  #: for a process to close its operators


class Asks(Protocol):
    """An operator in the process, which asks its context."""

    context: OperatorContext

    async def asked(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run what it asks in the event loop of the pipeline."""


@attrs.define(eq=False)
class OperatorProcess:
    """The process of an interpreter for operators of a plugin. It is started when the first one is made.

    Its connection is served by a thread, so that heartbeats go on while the pipeline computes, and so that methods of
    operators that are not coroutines can wait for it.
    """

    record: PluginRecord
    python: str
    log: Path  #: gets its output
    start_seconds: float = 600.0  #: to start the interpreter, and to make or start an operator
    heartbeat_seconds: float = 30.0  #: it is killed when it cannot run for so long
    threads: int | None = None
    life: int = attrs.field(default=0, init=False)  #: number of processes so far
    deaths: int = attrs.field(default=0, init=False)  #: since the last request that was processed
    operators: dict[int, Asks] = attrs.field(factory=dict, init=False)
    _numbers: Any = attrs.field(factory=itertools.count, init=False)
    _loop: asyncio.AbstractEventLoop | None = attrs.field(default=None, init=False)
    _thread: threading.Thread | None = attrs.field(default=None, init=False)
    _child: ChildProcess | None = attrs.field(default=None, init=False)
    _clock: Clock = attrs.field(factory=Clock, init=False)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"the process of the operator '{self.record.name}'"

    @property
    def pid(self) -> int | None:
        """The id of the process that runs now."""
        connection = None if self._child is None else self._child.connection
        process = None if connection is None or connection.lost.done() else connection.process
        return None if process is None else process.pid

    def add(self, operator: Asks) -> int:
        """Give an operator its number."""
        number = int(next(self._numbers))
        self.operators[number] = operator
        return number

    def submit(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Run work in the thread; cancelling cancels it there."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._running()))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work in the thread, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._running()).result()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=self.name, daemon=True)
            self._thread.start()
        return self._loop

    async def open(self) -> OperatorHost:
        """Return the operators of the process that runs, or of a new one."""
        if self._child is None or self._child.connection.lost.done():
            await self.end()
            child: ChildProcess
            options: Any = {
                "lost_error": lambda how: self._lost(child, how),
                "log": self.log,
                "heartbeat_seconds": self.heartbeat_seconds,
            }
            self._child = child = ChildProcess(self.name, self._clock, **options)
            child.connection.services = {"context": Service(target=_Services(self), contract=SERVICES)}
            threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
            make = "jackfield.runtime.operators:make_operators"
            try:
                host = await open_host(child, self.python, make, self.record, threads, self.start_seconds)
                await host.make({})
            except BaseException as error:
                await self.end()
                if isinstance(error, WorkerLost) and not self.life:
                    raise self._unusable(error) from error
                raise
            self.life += 1
        return operators_of(self._child.connection, self.start_seconds)

    @property
    def is_lost(self) -> bool:
        """Return whether there is no process that runs."""
        return self.pid is None

    async def end_if_silent(self) -> None:
        """End the process, unless it shows that it can answer."""
        if self._child is not None:
            asking = asyncio.ensure_future(operators_of(self._child.connection, self.start_seconds).ping())
            await asyncio.wait({asking}, timeout=_ANSWER_SECONDS)
            if not asking.done() or asking.exception() is not None:
                await self.end()
            await asyncio.gather(asking, return_exceptions=True)

    async def end(self, grace_seconds: float = 0.0) -> None:
        """Give the process some time to close its operators, then kill it, and all that it has started."""
        child, self._child = self._child, None
        if child is not None:
            await child.close(grace_seconds=grace_seconds)

    def close(self) -> None:
        """End the process, which first closes its operators, and the thread."""
        if self._loop is None or self._thread is None:
            return
        try:
            self.call(self.end(_END_SECONDS))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None

    def _lost(self, child: ChildProcess, how: str) -> WorkerLost:
        where = str(child.connection.process)
        fix = f"what it printed is in {self.log}; lack of memory is the usual reason"
        return WorkerLost(f"{self.name} died", where=where, found=f"it {how}", fix=fix)

    def _unusable(self, error: WorkerLost) -> PluginError:
        what, fix = f"the interpreter {self.python} cannot hold the {self.record.label}", "jackfield plugins doctor"
        details = {"where": self.python, "expected": "an installation of jackfield like this one", "found": error.found}
        return PluginError(what, code="plugin.interpreter", fix=f"{fix} --python {self.python}", **details)


class _Services(OperatorServices):
    """Answers what operators in the process ask, by the contexts that they have here."""

    def __init__(self, process: OperatorProcess) -> None:
        self._process = process

    async def request(
        self, operator: int, method: str, url: str, body: Any, headers: dict[str, str] | None, limit: int
    ) -> HttpAnswer:
        asked = self._process.operators[operator]
        return await asked.asked(
            lambda: asked.context.http.request(method, url, body=body, headers=headers, limit=limit)
        )

    async def generate(
        self, operator: int, model: str, messages: list[dict[str, Any]], sampling: dict[str, Any]
    ) -> GeneratedText:
        asked = self._process.operators[operator]
        return await asked.asked(lambda: asked.context.generate(model, messages, **sampling))

    async def score(self, operator: int, values: dict[str, Any], response: str) -> float:
        asked = self._process.operators[operator]
        return await asked.asked(lambda: asked.context.score(values, response))
