"""A process in another interpreter, seen from the run that has started it: its life, and calls to what it holds."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import attrs

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, PluginError, RolloutError, rebuilt_error
from jackfield.plugins.discovery import PluginRecord
from jackfield.plugins.interpreters import environment_of, resolve_interpreter
from jackfield.plugins.introduction import check_introduction
from jackfield.pulse import SILENCE_SECONDS, Process, Pulse, silence, until_silent
from jackfield.runtime.process.wire import frame, read

__all__ = ["HostProcess"]

_END_SECONDS = 15.0  #: for a process to end by itself, once its socket is closed
_CANCEL_SECONDS = 30.0  #: for a cancelled call to be over there
_NOISE_BYTES = 4096
_NOISE_LINES = 8


@attrs.define(eq=False)
class _Call:
    """One request, and what has come of it."""

    number: int
    answer: asyncio.Future[dict[str, Any]]
    what: str  #: the process is to do
    chunks: asyncio.Queue[dict[str, Any]] = attrs.field(factory=asyncio.Queue)  #: the answer comes last


class HostProcess:
    """Runs ``jackfield.runtime.process.host`` in an interpreter; only this object has the other end of its socket."""

    def __init__(
        self,
        python: str,
        name: str,
        clock: Clock,
        *,
        log: Path | None = None,
        environment: Mapping[str, str],
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """
        Args:
            python: path of the interpreter.
            name: of what it holds, for messages.
            clock: through which every wait goes.
            log: where its output goes; None: only its end is kept, for messages.
            environment: variables that it gets beside this process's.
            silence_seconds: without a sign of life, after which it is killed.
        """
        self._python = resolve_interpreter(python, name)
        self._name = name
        self._clock = clock
        self._log_path = log
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._reaped = False  #: its number may be another process's by now
        self._socket: socket.socket | None = None
        self._log: IO[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._silence = silence_seconds
        self._pulse: Pulse | None = None
        self._watching: asyncio.Task[None] | None = None
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._death: str | None = None
        self._silent: str | None = None  #: why it was killed

    @property
    def death(self) -> str | None:
        """How the process ended, in words; None: it lives, or was never started."""
        return self._death

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return None if self._process is None else self._process.pid

    # -- life ------------------------------------------------------------------------------------------------------

    async def open(self, record: PluginRecord, seconds: float) -> None:
        """Start the process, and see that it would load the same plugin as this one.

        Raises:
            PluginError: ``plugin.interpreter``, ``plugin.handshake``, or what gate 1 says there.
            DeadlineExceeded: it says nothing.
        """
        if self._process is None:
            self._spawn()
        assert self._socket is not None
        reader, self._writer = await asyncio.open_connection(sock=self._socket.dup())
        self._reading = asyncio.create_task(self._read(reader), name=f"{self._name}, its answers")
        self._watching = asyncio.create_task(self._watch(), name=f"{self._name}, its signs of life")
        call = self._send({"introduce": {"kind": record.kind, "name": record.name}}, "introduce itself")
        try:
            who = f"{self._name} to introduce itself, in a process of {self._python}"
            found = self._value(await self._clock.wait_for(asyncio.shield(call.answer), seconds, who))
        except RolloutError as error:
            raise PluginError(
                f"the interpreter {self._python} cannot hold {self._name}",
                code="plugin.interpreter",
                where=self._python,
                expected="an installation of jackfield like this one",
                found=error.found,
                fix="`jackfield plugins doctor --python PATH` looks at it",
            ) from error
        except BaseException:
            self._kill()  # it is of no use, and would not hear that it may leave
            raise
        check_introduction(record, found, self._python)

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._log, self._pulse = self._open_log(), Pulse()
        theirs_too = self._pulse.descriptor
        try:
            told = map(str, (theirs.fileno(), os.getpid(), theirs_too, self._silence))
            command = [self._python, "-m", "jackfield.runtime.process.host", *told]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno(), theirs_too],
                env={**environment_of(self._python), **self._environment},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            self._log.close()
            self._pulse.close()
            raise
        finally:
            theirs.close()
        self._pulse.started(self._process.pid)
        self._socket = ours

    def _open_log(self) -> IO[bytes]:
        return tempfile.TemporaryFile() if self._log_path is None else self._log_path.open("ab+")

    async def detach(self) -> None:
        """Leave the process as it is, without an event loop's things."""
        tasks = [task for task in (self._reading, self._watching) if task is not None]
        self._reading = self._watching = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def close(self) -> None:
        """End the process and everything that it has started; idempotent."""
        await self.detach()
        self._fail_all("was ended")
        process = self._process
        if self._socket is not None:
            self._socket.close()  # the process ends by this
            self._socket = None
        if process is not None and not self._reaped:
            pool = ThreadPoolExecutor(1, thread_name_prefix="jackfield-process-end")
            try:
                ending = asyncio.get_running_loop().run_in_executor(pool, process.wait)
                with suppress(DeadlineExceeded):
                    await self._clock.wait_for(asyncio.shield(ending), _END_SECONDS, f"the process of {self._name}")
            finally:
                self._kill()
                process.wait()  # it has been killed: this ends
                pool.shutdown()
                self._reaped = True
        if self._pulse is not None:
            self._pulse.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    async def _watch(self) -> None:
        """Kill a process that gives no sign of life; its death is noticed as every other is."""
        assert self._pulse is not None
        assert self._process is not None
        await until_silent(self._pulse.heard, self._clock, self._silence)
        at_work = ", ".join(call.what for call in self._calls.values())
        self._silent = silence(self._name, Process.of(self._process.pid), self._silence, at_work)
        logging.getLogger("jackfield").warning("%s", self._silent)
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and not self._reaped:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    # -- calls -----------------------------------------------------------------------------------------------------

    async def call(self, what: str, message: Mapping[str, Any], seconds: float) -> Any:
        """Send a request and wait for its answer. Cancelling this cancels it there, and waits until that is done.

        Args:
            what: the process is to do, for the deadline's message.
            message: see :class:`~jackfield.runtime.process.host.Host`.
            seconds: the deadline.

        Raises:
            JackfieldError: what was raised there; ``rollout.stopped`` when the process has ended.
            DeadlineExceeded: naming the process.
        """
        call = self._send(message, what)
        try:
            answer = await self._clock.wait_for(asyncio.shield(call.answer), seconds, f"{self._name} to {what}")
        except BaseException:
            await self._cancel(call)
            raise
        return self._value(answer)

    async def stream(self, what: str, message: Mapping[str, Any], seconds: float) -> AsyncGenerator[Any, None]:
        """As :meth:`call`, for what is streamed; the deadline is each value's. Closing it cancels the call."""
        call = self._send(message, what)
        try:
            while True:
                item = await self._clock.wait_for(call.chunks.get(), seconds, f"{self._name} to {what}")
                if "chunk" not in item:
                    self._value(item)
                    return
                yield item["chunk"]
        finally:
            await self._cancel(call)

    def _send(self, message: Mapping[str, Any], what: str) -> _Call:
        if self._death is not None or self._writer is None:
            raise self._gone()
        call = _Call(next(self._numbers), asyncio.get_running_loop().create_future(), what)
        try:
            data = frame({"number": call.number, **message})
        except (TypeError, ValueError) as error:
            raise RolloutError(
                "a request cannot go to another process",
                code="rollout.request",
                where=self._name,
                expected="values of JSON, and bytes",
                found=str(error),
            ) from error
        self._calls[call.number] = call
        self._writer.write(data)
        return call

    async def _cancel(self, call: _Call) -> None:
        """Have a call that nobody wants end, and wait for its end; no effect on one that has."""
        if call.answer.done() or self._writer is None:
            return
        self._writer.write(frame({"cancel": call.number}))
        with suppress(DeadlineExceeded):
            who = f"{self._name} to leave off"
            await self._clock.wait_for(asyncio.shield(call.answer), _CANCEL_SECONDS, who)

    def _value(self, answer: Mapping[str, Any]) -> Any:
        if "dead" in answer:
            raise self._gone()
        if "error" in answer:
            raise rebuilt_error(answer["error"], self._name)
        if "cancelled" in answer:
            raise RolloutError("a call was cancelled in its process", where=self._name)
        return answer["value"]

    # -- what comes ------------------------------------------------------------------------------------------------

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = await read(reader)
                call = self._calls.get(message["number"])
                if call is None:
                    continue
                if "chunk" not in message:
                    del self._calls[call.number]
                    call.answer.set_result(message)
                call.chunks.put_nowait(message)
        except (EOFError, OSError, ValueError) as error:
            self._fail_all(f"{await self._ending(error)}{self._noise()}")

    async def _ending(self, error: Exception) -> str:
        """How the process ended."""
        process = self._process
        if process is None or not isinstance(error, EOFError | OSError):
            return f"said what cannot be read: {error}"
        self._kill()  # what it had started; itself, where only its socket is gone
        code = process.wait()
        self._reaped = True
        if self._silent is not None:
            return f"was killed: {self._silent}"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"

    def _fail_all(self, how: str) -> None:
        if self._death is None:
            self._death = how
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.answer.set_result({"dead": True})
            call.chunks.put_nowait({"dead": True})

    def _gone(self) -> JackfieldError:
        return RolloutError(
            f"the process of {self._name} is not running",
            code="rollout.stopped",
            where=f"{self._name}, process {self.pid}",
            expected=f"a process of {self._python}",
            found="it was not started" if self.pid is None else f"{Process.of(self.pid)} {self._death}",
            fix=None if self._log_path is None else f"what it printed is in {self._log_path}",
        )

    def _noise(self) -> str:
        """The last lines of its output, for messages."""
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _NOISE_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()[-_NOISE_LINES:]
        return "; it printed:\n" + "\n".join(lines) if lines else ""
