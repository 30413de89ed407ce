"""A process in another interpreter, seen from the run that has started it: its life, and the connection to it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RolloutError
from jackfield.plugins.interpreters import environment_of, resolve_interpreter
from jackfield.rpc import Connection, Process
from jackfield.rpc.sockets import watch

__all__ = ["HostProcess"]

_END_SECONDS = 15.0  #: for a process to end by itself, once its socket is closed
_OUTPUT_BYTES = 4096
_OUTPUT_LINES = 8


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
        heartbeat_seconds: float = 30.0,
    ) -> None:
        """
        Args:
            python: path of the interpreter.
            name: of what the process holds, for messages.
            clock: through which every wait goes.
            log: where its output goes; None: only its end is kept, for messages.
            environment: variables that it gets beside this process's.
            heartbeat_seconds: time in which none of its threads can run, after which it is killed.
        """
        self.python = resolve_interpreter(python, name)
        self._name, self._clock, self._seconds = name, clock, heartbeat_seconds
        self._log_path, self._environment = log, dict(environment)
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reaped = False  #: its number may be another process's by now
        self._socket: socket.socket | None = None
        self._connection: Connection | None = None
        self._watching: asyncio.Task[str] | None = None
        self._death: str | None = None

    @property
    def death(self) -> str | None:
        """How the process ended, in words; None: it lives, or was never started."""
        return self._death

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        return None if self._process is None else self._process.pid

    @property
    def connection(self) -> Connection:
        """The connection to the process.

        Raises:
            RolloutError: ``rollout.stopped``: it is not running.
        """
        if self._connection is None or self._death is not None:
            raise self._gone()
        return self._connection

    async def open(self) -> Connection:
        """Start the process, unless an earlier event loop has started it, and connect to it."""
        if self._process is None:
            self._spawn()
        assert self._process is not None
        assert self._socket is not None
        connection = self._connection = Connection(self._name, {}, self._clock, lost_error=self._lost)
        connection.process = Process.of(self._process.pid)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=self._socket.dup())
        self._watching = asyncio.create_task(watch(connection, self._seconds, self._clock), name=f"{self._name}, watch")
        return connection

    def _spawn(self) -> None:
        own, other = socket.socketpair()
        self._log = self._open_log()
        try:
            command = [self.python, "-m", "jackfield.runtime.process.host", str(other.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[other.fileno()],
                env={**environment_of(self.python), **self._environment},
                start_new_session=True,
            )
        except BaseException:
            own.close()
            self._log.close()
            raise
        finally:
            other.close()
        self._socket = own

    def _open_log(self) -> IO[bytes]:
        return tempfile.TemporaryFile() if self._log_path is None else self._log_path.open("ab+")

    async def detach(self) -> None:
        """Leave the process as it is, without an event loop's things."""
        connection, self._connection = self._connection, None
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        if connection is not None:
            await connection.leave("was left")

    async def close(self) -> None:
        """End the process and everything that it has started; idempotent."""
        if self._death is None:
            self._death = "was ended"
        await self.detach()
        if self._socket is not None:
            self._socket.close()  # the process ends by this
            self._socket = None
        if self._process is not None and not self._reaped:
            await self._wait(self._process)
        if self._log is not None:
            self._log.close()
            self._log = None

    async def _wait(self, process: subprocess.Popen[bytes]) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="jackfield-process-end")
        try:
            ending = asyncio.get_running_loop().run_in_executor(pool, process.wait)
            with suppress(DeadlineExceeded):
                await self._clock.wait_for(asyncio.shield(ending), _END_SECONDS, f"the process of {self._name}")
        finally:
            self.kill()
            process.wait()  # it has been killed: this ends
            pool.shutdown()
            self._reaped = True

    def kill(self) -> None:
        """Kill the process and everything that it has started."""
        if self._process is not None and not self._reaped:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _lost(self, reason: str) -> JackfieldError:
        """Make the error of calls to a process whose connection has ended."""
        process = self._process
        if self._death is None and process is not None:
            self.kill()  # what it had started; itself, where only its socket is gone
            code = process.wait()
            self._reaped = True
            ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            silent = "deadlines.heartbeat" in reason
            if silent:
                logging.getLogger("jackfield").warning("%s (%s) %s", self._name, Process.of(process.pid), reason)
            self._death = f"{reason if silent else ended}{self._output()}"
        return self._gone()

    def _gone(self) -> JackfieldError:
        return RolloutError(
            f"the process of {self._name} is not running",
            code="rollout.stopped",
            where=f"{self._name}, process {self.pid}",
            expected=f"a process of {self.python}",
            found="it was not started" if self.pid is None else f"{Process.of(self.pid)} {self._death}",
            fix=None if self._log_path is None else f"what it printed is in {self._log_path}",
        )

    def _output(self) -> str:
        """Return the last lines of its output, for messages."""
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _OUTPUT_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()[-_OUTPUT_LINES:]
        return "; it printed:\n" + "\n".join(lines) if lines else ""
