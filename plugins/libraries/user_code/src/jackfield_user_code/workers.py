"""A pool of processes that call a user's functions."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, RunError
from jackfield_user_code._parent import Death, Died, Forked, Parent

_CHILD = Path(__file__).with_name("_child.py")
_LEAVE_SECONDS = 0.25  #: wait for the answer to an abandoned call; then the process is killed
_HEED_SECONDS = 1.0  #: a process that makes many calls and does not see a cancellation for so long is blocked
_END_SECONDS = 5.0  #: a cancelled call among many must end; then its process is killed
_REPEATS = 8  #: a call is made so often again if its process died through the fault of other calls


@attrs.frozen(kw_only=True)
class WorkerLimits:
    """The limits of one worker process."""

    memory_bytes: int | None = 4 * 2**30  #: of address space (RLIMIT_AS); None: unlimited
    cpu_seconds: float | None = None  #: per call (RLIMIT_CPU); None: the deadline on all cores, and a little more
    start_seconds: float = 60.0  #: until the code is imported
    heartbeat_seconds: float = 30.0  #: after which a process that cannot run is killed


@attrs.frozen(kw_only=True)
class WorkerResult:
    """The result of a call, or why there is none."""

    #: failed: the function raised; died: its process ended, or sent an answer without a request
    status: Literal["ok", "failed", "died", "timeout"]
    value: Any = None  #: JSON value, with ``ok``
    error: str | None = None  #: the last lines of a traceback, how the process died, or what was waited for


def _absolute(target: str) -> str:
    place, separator, name = target.rpartition(":")
    if not separator or not name or not place:
        raise RunError(
            "a target of a worker is not of the form module:function",
            code="worker.start",
            where=target,
            expected="package.module:function or folder/file.py:function",
        )
    return f"{os.path.abspath(os.path.expanduser(place))}:{name}" if place.endswith(".py") else target


@attrs.define(eq=False, slots=False)
class _Slot:
    """The place of one process."""

    number: int
    log: Path | None
    process: Forked | None = None
    running: int = 0  #: calls


def _running(slot: _Slot) -> int:
    return slot.running


@attrs.define(eq=False, slots=False)
class UserCodePool:
    """Processes that call a user's functions, in the order of the calls.

    ``target`` is ``package.module:function``, ``folder/file.py:function`` or ``@GROUP:NAME`` (an entry point): a
    function, or a class (constructed once per process) or instance whose ``method`` is called. ``keywords`` are JSON
    values for the constructor of a class, else for each call.

    A parent process imports the code once and forks ``workers`` processes from it when they are needed; each is killed
    alone, with everything that it has started in whatever session, and replaced in milliseconds. With ``fork`` False,
    and if the import leaves threads, each process imports the code itself. A process makes one call at a time; if the
    function is a coroutine function, ``in_flight`` calls.

    ``adapter`` is a file, which needs only the standard library, with ``adapt(target, module, request)``: it returns
    the functions that can be called, by name, and what :attr:`about` is to say about them.

    Worker ``n`` prints to the file ``{logs}-{n}.log``; above 4 MiB it gets the suffix ``.1`` and a new one is begun.
    Without ``logs`` only the end of the output is kept, for messages.
    """

    _target: str = attrs.field(converter=_absolute)
    _method: str = attrs.field(default="__call__", kw_only=True)
    _keywords: Mapping[str, Any] = attrs.field(factory=dict, converter=dict, kw_only=True)
    _limits: WorkerLimits = attrs.field(factory=WorkerLimits, kw_only=True)
    _clock: Clock = attrs.field(factory=Clock, kw_only=True)
    _python: str = attrs.field(default=sys.executable, kw_only=True)
    _workers: int = attrs.field(default=1, kw_only=True)
    _in_flight: int = attrs.field(default=10_000, kw_only=True)
    _fork: bool = attrs.field(default=True, kw_only=True)
    _adapter: Path | None = attrs.field(default=None, kw_only=True)
    _logs: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        logs = None if self._logs is None else os.path.abspath(self._logs)
        self._slots = [_Slot(n, Path(f"{logs}-{n}.log") if logs else None) for n in range(self._workers)]
        self._parent: Parent | None = None
        self._forks = self._fork
        self._about: Mapping[str, Any] | None = None
        self._is_async = False
        self._idle = self._slots[::-1]
        self._turns = asyncio.Semaphore(0)

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the ids of the worker processes."""
        found = [slot.process for slot in self._slots if slot.process is not None and not slot.process.gone.done()]
        return tuple(process.pid for process in found if process.pid is not None)

    @property
    def capacity(self) -> int:
        """Return the number of calls that are executed at a time. It is known after :meth:`start`."""
        return self._workers * (self._in_flight if self._is_async else 1)

    @property
    def about(self) -> Mapping[str, Any]:
        """Return what the adapter says about the functions, after :meth:`start`."""
        return self._about or {}

    async def start(self) -> None:
        """Import the code and start one process; the others start when needed.

        Raises:
            RunError: ``worker.start`` if that fails or is late.
        """
        process = await self._running(self._slots[0])
        if self._about is None:
            self._about = about = process.loaded.result()[1]
            self._is_async = about["async"]
            self._turns = asyncio.Semaphore(self.capacity)

    async def call(
        self,
        arguments: Mapping[str, Any],
        seconds: float,
        name: str = "",
        function: str = "call",
        again: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    ) -> WorkerResult:
        """Call a function with keyword arguments (JSON values), when its turn comes.

        ``seconds`` is the deadline of its execution; a wait for other calls does not count. ``name`` is the scored
        sample, for messages. A call that runs alone in its process is killed at the deadline; one of many is cancelled,
        and its process is killed if its event loop is blocked. If a process dies, calls that are not the cause are made
        again: once if the cause is not known. ``again`` is called before that; it returns the arguments of the next
        attempt. A process that cannot start gives a failed result.
        """
        try:
            text = json.dumps(arguments if type(arguments) is dict else dict(arguments))
        except (TypeError, ValueError) as error:
            return WorkerResult(status="failed", error=f"the arguments of {self._target} are not JSON: {error}")
        try:
            if self._about is None:
                await self.start()
            await self._turns.acquire()
            slot = min(self._slots, key=_running) if self._is_async else self._idle.pop()
            slot.running += 1
            try:
                return await self._made(slot, function, text, seconds, name, again=again)
            finally:
                slot.running -= 1
                if not self._is_async:
                    self._idle.append(slot)
                self._turns.release()
        except RunError as error:
            return WorkerResult(status="failed", error=str(error))

    def _free(self, slot: _Slot) -> None:
        self._idle.append(slot)
        self._turns.release()

    async def close(self) -> None:
        """Kill all processes. May be called again; a later call starts them again."""
        if self._parent is not None:
            await self._parent.close()

    async def _running(self, slot: _Slot) -> Forked:
        """Return the process of a slot, which has loaded the code."""
        while (process := slot.process) is None or process.is_ending:
            if process is not None and not process.gone.done():
                await process.kill()
                continue
            parent = await self._ready()
            if slot.process is process and not parent.is_ending:
                slot.process = parent.fork(slot.number, slot.log)
        if not process.loaded.done():
            await self._loaded(process.loaded, process)
        status, value = process.loaded.result()
        if status != "ok":
            await process.kill()
            raise self._cannot_start(value)
        return process

    async def _ready(self) -> Parent:
        """Return the parent process, which has imported the code if workers are to be forked with it."""
        while True:
            if self._parent is not None and self._parent.is_ending:
                await self._parent.close()
            if self._parent is None or self._parent.gone.done():
                self._parent = self._spawn()
            parent = self._parent
            if not parent.loaded.done():
                await self._loaded(parent.loaded, parent)
            error, threads = parent.loaded.result()
            if error is not None:
                await parent.close()
                raise self._cannot_start(error)
            if not (threads and parent.imports):
                return parent
            self._forks = False
            text = "the import of %s left %s threads, which a fork would lose: each worker process imports it"
            logging.getLogger("jackfield").info(text, self._target, threads)
            await parent.close()

    async def _loaded(self, loading: asyncio.Future[Any], process: Forked | Parent) -> None:
        what = f"{self._target} to import its code"
        try:
            await self._clock.wait_for(asyncio.shield(loading), self._limits.start_seconds, what)
        except DeadlineExceeded as error:
            death = await (process.parent if isinstance(process, Forked) else process).close()
            raise self._cannot_start(f"{error}{death.output}") from error
        except Died as died:
            if isinstance(process, Parent):
                await process.close()
            raise self._cannot_start(f"its process {died.death.how}{died.death.output}") from died

    def _spawn(self) -> Parent:
        more = [_bytecode()] if sys.dont_write_bytecode else []  # else large libraries are compiled at each start
        request = {
            "target": self._target,
            "method": self._method,
            "keywords": self._keywords,
            "memory_bytes": self._limits.memory_bytes,
            "sys_path": [os.path.abspath(path) for path in sys.path] if self._python == sys.executable else [],
            "adapter": None if self._adapter is None else str(self._adapter),
        }
        options: dict[str, Any] = {"heartbeat_seconds": self._limits.heartbeat_seconds, "here": self._forks}
        options |= {"log": self._slots[0].log, "ended": self._ended}
        try:
            command = [self._python, "-P", "-u", str(_CHILD), *more]
            return Parent(self._target, command, request, self._clock, **options)
        except OSError as error:
            raise self._cannot_start(str(error)) from error

    async def _made(
        self,
        slot: _Slot,
        function: str,
        text: str,
        seconds: float,
        name: str,
        held: Forked | None = None,
        again: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    ) -> WorkerResult:
        """Make a call, and again if its process died and it is not the cause; in a ``held`` process, only once."""
        what = f"answer for {name}" if name else "answer"
        cpu_seconds = None
        if not self._is_async:
            cpu_seconds = self._limits.cpu_seconds or seconds * (os.cpu_count() or 1) + 1
        repeats = doubts = 0
        while True:
            process = held or await self._running(slot)
            used = process.served > 0
            number, answering = process.ask(function, text, cpu_seconds)
            try:
                who = f"{self._target} to {what}"
                answer = answering if self._is_async else asyncio.shield(answering)
                status, value = await self._clock.wait_for(answer, seconds, who)
                return WorkerResult(status="ok", value=value) if status == "ok" else self._failed(status, value)
            except DeadlineExceeded as error:
                death = await self._late(process, number)
                blocks = self._is_async and death is not None and death.running == number
                if death is None or not self._is_async or death.running <= 0 or blocks or repeats >= _REPEATS:
                    error.found = "it blocked the event loop of its process" if blocks else None
                    return WorkerResult(status="timeout", error=f"{error}{death.output if death else ''}")
            except Died as died:
                death = died.death
                doubts += self._is_suspect(death, number)
                if held or not self._is_innocent(death, number, used) or doubts > 1 or repeats >= _REPEATS:
                    return WorkerResult(status="died", error=str(self._death(process.pid, death, f"had to {what}")))
            except BaseException:
                await self._leave(process, number, answering)
                raise
            repeats += 1
            text = text if again is None else json.dumps(dict(await again()))

    def _failed(self, status: str, value: Any) -> WorkerResult:
        error = value if status == "failed" else f"the call was {status} in its process"
        return WorkerResult(status="failed", error=str(error))

    def _is_suspect(self, death: Death, number: int) -> bool:
        """Return whether a call may be why its process has died. It gets one more chance."""
        return not self._is_async or abs(death.running) in (0, number)

    def _is_innocent(self, death: Death, number: int, used: bool) -> bool:
        """Return whether it is not certain that a call is why its process has died."""
        if death.ordered and death.of_parent:  # the pool was closed
            return False
        if self._is_async:
            return death.running != number
        return used or death.of_parent

    async def _late(self, process: Forked, number: int) -> Death | None:
        """End a call at its deadline; return how its process ended, unless it lives."""
        if not self._is_async:
            return await process.kill("was killed at a deadline")
        heeded = self._cancelled(process, number)
        try:
            await self._clock.wait_for(asyncio.shield(heeded), _HEED_SECONDS, "the event loop of a process")
        except DeadlineExceeded:
            process.catch_up()  # this event loop may be the one that was blocked
            if not heeded.done():
                await process.kill("was killed: a call blocked its event loop")
        return process.gone.result() if process.gone.done() else None

    def _cancelled(self, process: Forked, number: int) -> asyncio.Future[None]:
        """Cancel one of many calls; its process is killed if the call does not end soon."""

        def check() -> None:
            if number in process.calls and not process.is_ending:
                why = f"was killed: a call of {self._target} did not end {_END_SECONDS:g} s after it was cancelled"
                process.end(why)

        asyncio.get_running_loop().call_later(_END_SECONDS, check)
        return process.cancel(number)

    async def _leave(self, process: Forked, number: int, answering: asyncio.Future[Any]) -> None:
        """End an abandoned call. A process that is busy with it is killed, unless it ends in a moment."""
        if self._is_async:
            self._cancelled(process, number)
            return
        try:
            await self._clock.wait_for(asyncio.shield(answering), _LEAVE_SECONDS, "an answer that is not wanted")
        except BaseException:
            await process.kill()

    def _ended(self, process: Forked, death: Death) -> None:
        """Warn about a process that has ended by itself."""
        if not (death.ordered or death.of_parent):
            what = "had nothing to do" if not process.calls else f"had {len(process.calls)} calls"
            error = self._death(process.pid, death, what)
            logging.getLogger("jackfield").warning("%s at %s; another one takes its place", error.message, error.where)

    def _death(self, pid: int | None, death: Death, what: str) -> RunError:
        """Return the error for a process that has ended."""
        return RunError(
            f"the worker process {pid} {death.how}",
            code="worker.answer" if death.wrong else "worker.died",
            where=f"{self._target}, which {what}",
            expected="one answer to each request" if death.wrong else None,
            found=death.output.removeprefix("; ") or None,
        )

    def _cannot_start(self, found: Any) -> RunError:
        """Return the error of code that cannot be loaded, or that its adapter refuses."""
        details: dict[str, Any] = {"message": "the worker process cannot load the user's code", "found": found}
        details["fix"] = "check the path, and that the code imports with this interpreter: " + self._python
        details |= found if isinstance(found, dict) else {}
        message = details.pop("message")
        return RunError(message, **{"code": "worker.start", "where": self._target, **details})


@functools.cache
def _bytecode() -> str:
    """Return a bytecode folder for worker processes, which is removed with this process."""
    folder = tempfile.mkdtemp(prefix="jackfield-bytecode-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
