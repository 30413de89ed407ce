"""Worker processes for code that may hang, crash, print or eat memory: a user's functions.

One call at a time per process, as JSON lines over pipes. Each request has an id of its own, which nobody can guess, and
its answer repeats it. A process that answers anything else, or misses a deadline, is killed with everything it started
(its process group), and replaced at the next call. A grandchild that makes a session of its own escapes; untrusted
programs belong into a sandbox, not here.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import attrs

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, RunError
from jackfield.heartbeat import HEARTBEAT_SECONDS, LOOKS, Heartbeat, until_silent

__all__ = ["UserCodePool", "UserCodeWorker", "WorkerLimits", "WorkerResult"]

_CHILD = Path(__file__).with_name("_worker_child.py")
_ANSWER_BYTES = 64 * 2**20  #: a longer answer ends the process
_NOISE_BYTES = 8192  #: how much of the end of a process's output is kept
_NOISE_LINES = 10
_LOG_BYTES = 4 * 2**20  #: of the output of one worker in a file; the file before it is kept, too
_LEAVE_SECONDS = 0.25  #: for an answer that is not wanted any more; after it a process is killed
_DYING_SECONDS = 0.2  #: between the end of a process's pipe and its own, at most
_END_SECONDS = 5.0  #: between a kill and the end of a process and its pipes


@attrs.frozen(kw_only=True)
class WorkerLimits:
    """What one worker process may use."""

    memory_bytes: int | None = 4 * 2**30  #: of address space (RLIMIT_AS); None: unlimited
    cpu_seconds: float | None = None  #: per call (RLIMIT_CPU); None: the deadline on all cores, and a little more
    start_seconds: float = 60.0  #: until the code is imported
    heartbeat_seconds: float = HEARTBEAT_SECONDS  #: after which a process that sends no heartbeat is killed


@attrs.frozen(kw_only=True)
class WorkerResult:
    """What a call yielded, or why it did not."""

    #: failed: the function raised; died: its process ended, or gave an answer that belongs to no request
    status: Literal["ok", "failed", "died", "timeout"]
    value: Any = None  #: JSON value, with ``ok``
    error: str | None = None  #: the last lines of a traceback, how the process died, or who was waited for
    timed_out_after: float | None = None  #: seconds that the function had; None: it did not run out of time


class UserCodeWorker:
    """One process that calls one function, one call at a time. It starts with the first call.

    Args:
        target: ``package.module:function`` or ``folder/file.py:function``: a function, a class (constructed once)
            or an instance.
        method: what is called of a class or an instance.
        keywords: of the constructor where the target is a class, else of each call. JSON values.
        limits: resource limits.
        clock: through which deadlines go.
        python: the interpreter; this one by default.
        log: file to which what the code prints is added, 4 MiB at most; then it gets the suffix ``.1`` and another is
            begun. None: only the end is kept, for messages.
    """

    def __init__(
        self,
        target: str,
        *,
        method: str = "__call__",
        keywords: Mapping[str, Any] | None = None,
        limits: WorkerLimits | None = None,
        clock: Clock | None = None,
        python: str | None = None,
        log: Path | None = None,
    ) -> None:
        self._target = _absolute(target)
        self._method = method
        self._keywords = dict(keywords or {})
        self._limits = limits or WorkerLimits()
        self._clock = clock or Clock()
        self._python = python or sys.executable
        self._log = log
        self._process: _Process | None = None
        self._ending: asyncio.Future[None] | None = None  #: of the last process

    @property
    def pid(self) -> int | None:
        """The process, when there is one."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process and import the code, unless that is done.

        Raises:
            RunError: ``worker.start``: the interpreter or the code is missing, raised or took too long.
        """
        if self._process is None or self._process.broken:
            await self.close()
            try:
                self._process = await _Process.spawn(
                    self._python, self._limits.heartbeat_seconds, self._log, self._target
                )
            except OSError as error:
                raise self._cannot_start(str(error)) from error
            self._process.send(json.dumps(self._imports()))
        if self._process.loaded:
            return
        result = await self._exchange(self._limits.start_seconds, "import its code")
        if result.status != "ok":
            await self.close()
            raise self._cannot_start(result.error or "")

    def _imports(self) -> dict[str, Any]:
        """The first request of a process."""
        return {
            "target": self._target,
            "method": self._method,
            "keywords": self._keywords,
            "memory_bytes": self._limits.memory_bytes,
            "sys_path": [os.path.abspath(path) for path in sys.path] if self._python == sys.executable else [],
        }

    async def call(self, arguments: Mapping[str, Any], deadline_seconds: float, name: str = "") -> WorkerResult:
        """Call the function with keyword arguments (JSON values).

        After a timeout, a crash or a wrong answer the process is gone, and the next call starts another. So it is after
        a cancellation, unless the process answers within a moment, or still imports the code. Where a process that dies
        had served earlier calls, they may be to blame (a thread that one has left behind): then the call is repeated,
        once, in a new process.

        Args:
            arguments: of the function.
            deadline_seconds: for the answer.
            name: of the call, for messages: the sample that is scored.

        Raises:
            RunError: ``worker.start``.
        """
        cpu_seconds = self._limits.cpu_seconds
        if cpu_seconds is None:
            cpu_seconds = deadline_seconds * (os.cpu_count() or 1) + 1
        message = {"arguments": dict(arguments), "cpu_seconds": cpu_seconds}
        try:
            line = json.dumps(message)
        except (TypeError, ValueError) as error:
            return WorkerResult(status="failed", error=f"the arguments of {self._target} are not JSON: {error}")
        purpose = f"answer for {name}" if name else "answer"
        while True:
            await self.start()
            assert self._process is not None
            used, began = self._process.asked > 1, self._clock.time()  # the first request imported the code
            self._process.send(line)
            result = await self._exchange(deadline_seconds, purpose)
            if result.status != "died" or not used:
                return result
            deadline_seconds = max(deadline_seconds - (self._clock.time() - began), 0.0)

    async def close(self) -> None:
        """Kill the process and what it started. May be called at any time, and again."""
        process, self._process = self._process, None
        if process is not None:
            self._ending = asyncio.ensure_future(process.end(self._clock))
        if self._ending is not None:
            await asyncio.shield(self._ending)  # also of a caller that was cancelled

    async def _exchange(self, seconds: float, purpose: str) -> WorkerResult:
        """Wait for the answer to what the process was sent last."""
        process = self._process
        assert process is not None
        watching = asyncio.create_task(self._watch(process))
        try:
            answer = await self._clock.wait_for(process.answer(), seconds, f"{self._target} to {purpose}")
        except DeadlineExceeded as error:
            await self.close()
            return WorkerResult(status="timeout", error=str(error) + process.noise(), timed_out_after=seconds)
        except BaseException:  # cancelled: nobody wants the answer, but the next call wants a process with the code
            if process.loaded:
                await self._leave(process)
            raise
        finally:
            watching.cancel()
        if answer is None:
            await self.close()
            death = process.death(f"{self._target}, which had to {purpose}")
            _warn(death)
            return WorkerResult(status="died", error=str(death))
        if "error" in answer:
            return WorkerResult(status="failed", error=str(answer["error"]))
        process.loaded = True
        return WorkerResult(status="ok", value=answer["value"])

    async def _leave(self, process: _Process) -> None:
        """Kill a process that is busy with what nobody wants, unless it is done in a moment."""
        try:
            answer = await self._clock.wait_for(process.answer(), _LEAVE_SECONDS, "an answer that is not wanted")
        except BaseException:
            answer = None
        if answer is None:
            await self.close()

    async def _watch(self, process: _Process) -> None:
        """Kill a process that is silent; its death ends the call."""
        await until_silent(process.heartbeat.heard, self._clock, self._limits.heartbeat_seconds)
        process.end_for_silence(self._limits.heartbeat_seconds)

    def _cannot_start(self, found: str) -> RunError:
        return RunError(
            "the worker process cannot load the user's code",
            code="worker.start",
            where=self._target,
            found=found,
            fix="check the path, and that the code imports with this interpreter: " + self._python,
        )


class UserCodePool:
    """Several workers behind one fair queue: calls are served in the order in which they came.

    Takes the arguments of :class:`UserCodeWorker`; ``workers``, the number of processes; and ``logs`` in the place of
    ``log``: worker ``n`` prints to the file ``{logs}-{n}.log``.
    """

    def __init__(
        self,
        target: str,
        *,
        method: str = "__call__",
        keywords: Mapping[str, Any] | None = None,
        workers: int = 1,
        limits: WorkerLimits | None = None,
        clock: Clock | None = None,
        python: str | None = None,
        logs: str | None = None,
    ) -> None:
        self._target = target
        self._limits = limits or WorkerLimits()
        self._clock = clock or Clock()
        self._workers = [
            UserCodeWorker(
                target,
                method=method,
                keywords=keywords,
                limits=self._limits,
                clock=self._clock,
                python=python,
                log=None if logs is None else Path(f"{logs}-{number}.log"),
            )
            for number in range(workers)
        ]
        self._idle = list(reversed(self._workers))
        self._free = asyncio.Semaphore(workers)
        self._waiting = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that exist now."""
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    async def start(self) -> None:
        """Start one process now, to see early that the code can be loaded. The others start when they are needed.

        Raises:
            RunError: ``worker.start``.
        """
        async with self._worker(self._limits.start_seconds) as worker:
            await worker.start()

    async def call(
        self,
        arguments: Mapping[str, Any],
        deadline_seconds: float,
        call_seconds: float | None = None,
        name: str = "",
    ) -> WorkerResult:
        """Call the function in the next free process. What cannot start is a failed result, with the reason.

        Args:
            arguments: keyword arguments of the function, JSON values.
            deadline_seconds: for everything, the wait for a free process included.
            call_seconds: for the function alone; None: what is left of the deadline.
            name: of the call, for messages: the sample that is scored.
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
        """Kill all processes. May be called again; a later call starts them anew."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    @contextlib.asynccontextmanager
    async def _worker(self, seconds: float) -> AsyncIterator[UserCodeWorker]:
        if self._free.locked():
            self._waiting += 1
            try:
                for_whom = f"one of {len(self._workers)} workers of {self._target}, {self._waiting} calls waiting"
                await self._clock.wait_for(self._free.acquire(), seconds, for_whom)
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


class _Process(asyncio.SubprocessProtocol):
    """A child process and its pipes."""

    _transport: asyncio.SubprocessTransport

    def __init__(self, log: Path | None, target: str) -> None:
        self._log, self._target = log, target
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()  #: the process has ended
        self._gone: asyncio.Future[None] = loop.create_future()  #: and its pipes are closed
        self.loaded = False  #: it has imported the code
        self.asked = 0  #: requests so far
        self._id = b""  #: of the request whose answer is waited for
        self._answer: asyncio.Future[dict[str, Any] | None] | None = None
        self._buffer = bytearray()
        self._noise = bytearray()
        self._complaint = self._silence = ""
        self._wanted = True  #: it was not ended from here
        self._wrong = False  #: and not because of what it has written
        self.heartbeat = Heartbeat()

    @classmethod
    async def spawn(cls, python: str, heartbeat_seconds: float, log: Path | None, target: str) -> _Process:
        """Start a child in a session of its own, so that its process group can be killed as a whole."""
        loop = asyncio.get_running_loop()
        process = cls(log, target)
        beat = process.heartbeat.descriptor
        command = [python, "-P", "-u", str(_CHILD), str(os.getpid()), str(beat), str(heartbeat_seconds / LOOKS)]
        if sys.dont_write_bytecode:  # large libraries would be compiled again at each start, for seconds
            command.append(_bytecode())
        try:
            await loop.subprocess_exec(lambda: process, *command, start_new_session=True, pass_fds=[beat])
        except BaseException:
            process.heartbeat.close()
            raise
        return process

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # here, and not where the process was asked for: a start that is cancelled still has a process to end
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self.heartbeat.started(self.pid)

    @property
    def pid(self) -> int:
        pid: int = self._transport.get_pid()
        return pid

    def send(self, line: str) -> None:
        """Send a line, to which :meth:`answer` is the answer."""
        self.asked += 1
        self._id = secrets.token_hex(16).encode()
        self._answer = asyncio.get_running_loop().create_future()
        if self._gone.done():
            self._settle(None)
            return
        pipe: Any = self._transport.get_pipe_transport(0)
        pipe.write(b"%b %b\n" % (self._id, line.encode()))

    async def answer(self) -> dict[str, Any] | None:
        """The answer; None: the process died, or answered something else. May be waited for again."""
        assert self._answer is not None
        return await asyncio.shield(self._answer)

    @property
    def broken(self) -> bool:
        """Whether the process has ended, or is on its way because of what it has written."""
        return self.exited.done() or bool(self._complaint or self._silence)

    def kill(self) -> None:
        """Kill the process group; the process is its leader."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end_for_silence(self, seconds: float) -> None:
        """Kill it: it is stopped, or frozen."""
        self._silence = f"sent no heartbeat for {seconds:g} s and was killed (deadlines.heartbeat)"
        self.kill()

    async def end(self, clock: Clock) -> None:
        """Kill, and wait until nothing is left."""
        self._wanted = False
        if not self.exited.done():
            self.kill()
        with contextlib.suppress(DeadlineExceeded):  # a grandchild of another session may hold a pipe for ever
            await clock.wait_for(asyncio.shield(self._gone), _END_SECONDS, "a killed process to be gone")
        self._transport.close()
        self.heartbeat.close()

    def noise(self) -> str:
        """The last lines of what the process printed, for messages."""
        lines = self._noise.decode(errors="replace").strip().splitlines()[-_NOISE_LINES:]
        return "; it printed:\n" + "\n".join(lines) if lines else ""

    def death(self, who: str) -> RunError:
        """How the process ended, and what it was to do."""
        code = self._transport.get_returncode()
        wrong = self._wrong and code == -signal.SIGKILL
        if self._silence:
            how = self._silence
        elif wrong:
            how = f"was killed: {self._complaint}"
        elif code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit status {code}"
        return RunError(
            f"the worker process {self.pid} {how}",
            code="worker.answer" if wrong and not self._silence else "worker.died",
            where=who,
            expected="one answer to each request" if wrong else None,
            found=self.noise().removeprefix("; ") or None,
        )

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._noise += data
            del self._noise[:-_NOISE_BYTES]
            if self._log is not None:
                _keep(self._log, data)
            return
        self._buffer += data
        if b"\n" in data:
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                self._receive(bytes(line))
        if len(self._buffer) > _ANSWER_BYTES:
            self._complain(f"its answer is longer than {_ANSWER_BYTES} bytes")

    def _receive(self, line: bytes) -> None:
        id, _, text = line.partition(b" ")
        if self._complaint:
            return
        if self._answer is None or self._answer.done() or not secrets.compare_digest(id, self._id):
            self._complain("it answered what was not asked")
            return
        try:
            self._settle(json.loads(text))
        except (ValueError, RecursionError) as error:
            self._complain(f"its answer cannot be read: {error}")

    def _complain(self, complaint: str) -> None:
        """Nothing of what this process writes can be trusted any more."""
        self._complaint = self._complaint or complaint
        self._buffer.clear()
        self._punish()

    def _punish(self) -> None:
        if not self.exited.done():
            self._wrong = True
            self.kill()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 0 and not self.exited.done():  # asyncio gives up a pipe that the process has closed or written to
            self._complaint = self._complaint or "it closed the descriptor of its requests, or wrote to it"
            asyncio.get_running_loop().call_later(_DYING_SECONDS, self._punish)  # unless that was its death

    def process_exited(self) -> None:
        self.exited.set_result(None)
        self.kill()  # what it started; closes the pipes they hold

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set_result(None)
        if self._wanted and self._answer is not None and self._answer.done():
            _warn(self.death(f"{self._target}, which had nothing to do"))
        self._settle(None)  # last, so that everything the process printed has arrived

    def _settle(self, answer: dict[str, Any] | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)


def _warn(death: RunError) -> None:
    logging.getLogger("jackfield").warning("%s at %s; another one takes its place", death.message, death.where)


@functools.cache
def _bytecode() -> str:
    """A folder for the bytecode of what worker processes import; it goes with this process."""
    folder = tempfile.mkdtemp(prefix="jackfield-bytecode-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _keep(file: Path, data: bytes) -> None:
    """Add output to a file of bounded size. A disk that is full is no reason to lose a score."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as log:
            log.write(data)
            size = log.tell()
        if size > _LOG_BYTES:
            file.replace(f"{file}.1")


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
