"""Worker processes that each call one function of a user's code, one call at a time."""

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
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import attrs
import msgspec

from jackfield.abc.reward import RewardAgent, RewardContext
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RunError
from jackfield.sdk.child import ChildProcess

_CHILD = Path(__file__).with_name("_child.py")
_ANSWER_BYTES = 64 * 2**20  #: a longer answer ends the process
_LEAVE_SECONDS = 0.25  #: wait for the answer to an abandoned call; then the process is killed


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
    timed_out_after: float | None = None  #: seconds that the function had; None: it did not run out of time


class _Answer(msgspec.Struct):
    """The return value of a call in a process."""

    value: str = "null"  #: JSON as Python writes it: with NaN
    error: str | None = None


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
class UserCodeWorker:
    """One process that calls one function, one call at a time. It starts with the first call.

    ``target`` is ``package.module:function`` or ``folder/file.py:function``: a function, or a class (constructed once)
    or instance whose ``method`` is called. ``keywords`` are JSON values for the constructor of a class, else for each
    call. Output of the code is appended to the file ``log``; above 4 MiB the file gets the suffix ``.1`` and a new one
    is begun. Without ``log`` only the end of the output is kept, for messages.
    """

    _target: str = attrs.field(converter=_absolute)
    _method: str = attrs.field(default="__call__", kw_only=True)
    _keywords: Mapping[str, Any] = attrs.field(factory=dict, converter=dict, kw_only=True)
    _limits: WorkerLimits = attrs.field(factory=WorkerLimits, kw_only=True)
    _clock: Clock = attrs.field(factory=Clock, kw_only=True)
    _python: str = attrs.field(default=sys.executable, kw_only=True)
    _log: Path | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._process: ChildProcess | None = None
        self._is_loaded = False
        self._calls = 0  #: of this process
        self._answering: asyncio.Future[_Answer] | None = None
        self._ending: asyncio.Future[None] | None = None  #: of the last process

    @property
    def pid(self) -> int | None:
        """Return the process id; None without a process."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and import the code, once; ``worker.start`` if that fails or is late."""
        if self._process is None or self._process.is_ending:
            await self.close()
            await self._spawn()
            here = self._python == sys.executable
            self._ask(
                "load",
                {
                    "target": self._target,
                    "method": self._method,
                    "keywords": self._keywords,
                    "memory_bytes": self._limits.memory_bytes,
                    "sys_path": [os.path.abspath(path) for path in sys.path] if here else [],
                },
            )
        if self._is_loaded:
            return
        result = await self._result(self._limits.start_seconds, "import its code")
        if result.status != "ok":
            await self.close()
            raise self._cannot_start(result.error or "")
        self._is_loaded = True

    async def _spawn(self) -> None:
        process = ChildProcess(
            f"the worker process of {self._target}",
            self._clock,
            heartbeat_seconds=self._limits.heartbeat_seconds,
            log=self._log,
            codec="json",
            limit=_ANSWER_BYTES,
        )
        command = [self._python, "-P", "-u", str(_CHILD)]
        if sys.dont_write_bytecode:  # else large libraries are compiled at each start, which takes seconds
            command.append(_bytecode())
        try:
            connection = await process.start(command)
        except OSError as error:
            raise self._cannot_start(str(error)) from error
        self._process, self._calls, self._is_loaded, self._answering = process, 0, False, None
        connection.lost.add_done_callback(lambda _: self._died(process))

    def _died(self, process: ChildProcess) -> None:
        """Warn about a process that died while it was idle."""
        if process is self._process and self._answering is not None and self._answering.done():
            _warn(self._death(process, "had nothing to do"))

    def _ask(self, method: str, *arguments: Any) -> None:
        """Send a request; :meth:`_result` waits for its answer."""
        assert self._process is not None
        call = self._process.connection.call(f"code.{method}", list(arguments), float("inf"), _Answer, "answer")
        self._answering = asyncio.ensure_future(call)
        self._answering.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def call(self, arguments: Mapping[str, Any], deadline_seconds: float, name: str = "") -> WorkerResult:
        """Call the function with keyword arguments (JSON values).

        After a timeout, a crash or a wrong answer the process is gone, and the next call starts another. The same holds
        after a cancellation, unless the process answers within a moment or is still importing the code. If a process
        dies that has served earlier calls, one of them may be the cause (say, by a thread it left behind), so the call
        is repeated once in a new process. ``name`` is the scored sample, for messages.

        Raises:
            RunError: ``worker.start`` if the process cannot start.
        """
        cpu_seconds = self._limits.cpu_seconds
        if cpu_seconds is None:
            cpu_seconds = deadline_seconds * (os.cpu_count() or 1) + 1
        try:
            text = json.dumps(dict(arguments))
        except (TypeError, ValueError) as error:
            return WorkerResult(status="failed", error=f"the arguments of {self._target} are not JSON: {error}")
        while True:
            await self.start()
            used, began, self._calls = self._calls > 0, self._clock.time(), self._calls + 1
            self._ask("call", text, cpu_seconds)
            result = await self._result(deadline_seconds, f"answer for {name}" if name else "answer")
            if result.status != "died" or not used:
                return result
            deadline_seconds = max(deadline_seconds - (self._clock.time() - began), 0.0)

    async def close(self) -> None:
        """Kill the process and its descendants. May be called at any time, and again."""
        process, self._process = self._process, None
        if process is not None:
            self._ending = asyncio.ensure_future(process.close())
        if self._ending is not None:
            await asyncio.shield(self._ending)  # also started by a caller that was cancelled

    async def _result(self, seconds: float, purpose: str) -> WorkerResult:
        """Wait for the answer to the last request."""
        process, answering = self._process, self._answering
        assert process is not None
        assert answering is not None
        try:
            answer = await self._clock.wait_for(asyncio.shield(answering), seconds, f"{self._target} to {purpose}")
        except DeadlineExceeded as error:
            output = process.output()
            await self.close()
            return WorkerResult(status="timeout", error=f"{error}{output}", timed_out_after=seconds)
        except JackfieldError:
            death = self._death(process, f"had to {purpose}")
            await self.close()
            _warn(death)
            return WorkerResult(status="died", error=str(death))
        except BaseException:  # cancelled: the answer is discarded, but the next call can use the process
            if self._is_loaded:
                await self._leave(answering)
            raise
        if answer.error is not None:
            return WorkerResult(status="failed", error=answer.error)
        return WorkerResult(status="ok", value=json.loads(answer.value))

    async def _leave(self, answering: asyncio.Future[_Answer]) -> None:
        """Kill a process that is busy with an abandoned call, unless it ends in a moment."""
        try:
            await self._clock.wait_for(asyncio.shield(answering), _LEAVE_SECONDS, "an answer that is not wanted")
        except BaseException:
            await self.close()

    def _death(self, process: ChildProcess, what: str) -> RunError:
        """Return the error for a process that has ended."""
        how, _, output = (process.death or "has ended").partition("; it printed:")
        wrong = process.broke_protocol
        return RunError(
            f"the worker process {process.pid} {how}",
            code="worker.answer" if wrong else "worker.died",
            where=f"{self._target}, which {what}",
            expected="one answer to each request" if wrong else None,
            found=f"it printed:{output}" if output else None,
        )

    def _cannot_start(self, found: str) -> RunError:
        return RunError(
            "the worker process cannot load the user's code",
            code="worker.start",
            where=self._target,
            found=found,
            fix="check the path, and that the code imports with this interpreter: " + self._python,
        )


def _warn(death: RunError) -> None:
    logging.getLogger("jackfield").warning("%s at %s; another one takes its place", death.message, death.where)


@functools.cache
def _bytecode() -> str:
    """Return a bytecode folder for worker processes, which is removed with this process."""
    folder = tempfile.mkdtemp(prefix="jackfield-bytecode-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class UserCodePool:
    """Several workers behind one queue. Calls are served in the order of their arrival.

    It takes the arguments of :class:`UserCodeWorker`, the number of processes ``workers``, and ``logs`` instead of
    ``log``: worker ``n`` prints to the file ``{logs}-{n}.log``.
    """

    def __init__(self, target: str, *, workers: int = 1, logs: str | None = None, **options: Any) -> None:
        files = [None if logs is None else Path(f"{logs}-{number}.log") for number in range(workers)]
        self._target = target
        self._workers = [UserCodeWorker(target, log=file, **options) for file in files]
        self._limits: WorkerLimits = options.get("limits") or WorkerLimits()
        self._clock: Clock = options.get("clock") or Clock()
        self._idle = list(reversed(self._workers))
        self._free = asyncio.Semaphore(workers)
        self._waiting = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the ids of the existing processes."""
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    async def start(self) -> None:
        """Start one process, to find out early that the code loads. The others start when needed."""
        async with self._worker(self._limits.start_seconds) as worker:
            await worker.start()

    async def call(
        self, arguments: Mapping[str, Any], deadline_seconds: float, call_seconds: float | None = None, name: str = ""
    ) -> WorkerResult:
        """Call the function in the next free process. A process that cannot start gives a failed result.

        ``deadline_seconds`` includes the wait for a free process; ``call_seconds`` is for the function alone (default:
        the rest of the deadline). ``name`` is the scored sample, for messages.
        """
        began = self._clock.time()
        try:
            async with self._worker(deadline_seconds) as worker:
                left = round(max(deadline_seconds - (self._clock.time() - began), 0.0), 3)
                return await worker.call(arguments, left if call_seconds is None else min(left, call_seconds), name)
        except DeadlineExceeded as error:
            return WorkerResult(status="timeout", error=str(error))
        except RunError as error:
            return WorkerResult(status="failed", error=str(error))

    async def close(self) -> None:
        """Kill all processes. May be called again; a later call starts them again."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    @asynccontextmanager
    async def _worker(self, seconds: float) -> AsyncIterator[UserCodeWorker]:
        if self._free.locked():
            self._waiting += 1
            try:
                who = f"one of {len(self._workers)} workers of {self._target}, {self._waiting} calls waiting"
                await self._clock.wait_for(self._free.acquire(), seconds, who)
            finally:
                self._waiting -= 1
        else:
            await self._free.acquire()
        worker = self._idle.pop()
        try:
            yield worker
        finally:
            self._idle.append(worker)
            self._free.release()


class WorkerReward(RewardAgent):
    """A reward agent that calls a function in worker processes: ``workers`` of its config, with ``memory_bytes``.

    ``options`` are those of :class:`UserCodeWorker`.
    """

    def __init__(
        self, config: Any, context: RewardContext, target: str, *, start_seconds: float = 60.0, **options: Any
    ) -> None:
        super().__init__(config, context)
        seconds = {"start_seconds": start_seconds, "heartbeat_seconds": context.heartbeat_seconds}
        options["limits"] = WorkerLimits(memory_bytes=config.memory_bytes, **seconds)
        options |= {"workers": config.workers, "clock": context.clock, "logs": context.logs}
        self._pool = UserCodePool(target, **options)

    @property
    def concurrency(self) -> int:
        """Return the number of worker processes."""
        workers: int = self.config.workers
        return workers

    async def start(self) -> None:
        """Start a process, so that code that cannot be loaded fails at the start of a run (``worker.start``)."""
        await self._pool.start()

    async def close(self) -> None:
        """Kill the worker processes."""
        await self._pool.close()
