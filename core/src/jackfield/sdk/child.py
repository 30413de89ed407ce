"""A child process that serves one connection, with its start, output and end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

import attrs

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError
from jackfield.sdk.rpc import Connection, Process
from jackfield.sdk.rpc.sockets import watch
from jackfield.sdk.rpc.wire import LIMIT, Codec

_OUTPUT_BYTES = 8192  #: bytes of the end of the output that error messages show
_OUTPUT_LINES = 10
_LOG_BYTES = 4 * 2**20  #: bytes of output per file; the previous file is also kept
_DYING_SECONDS = 0.2  #: from the end of the connection to that of the process, and from that to its last output
_END_SECONDS = 5.0  #: from a kill to the end of the process and its pipe


@attrs.define(eq=False, slots=False)
class ChildProcess(asyncio.SubprocessProtocol):
    """A process that serves the other end of a socket pair.

    Its last two arguments are the number of its socket and this process's id. It is killed with its process group when
    it breaks the protocol, closes the socket or cannot run for ``heartbeat_seconds``. A grandchild in a session of its
    own is not killed.
    """

    _name: str  #: name of the process in errors
    _clock: Clock  #: time source for all waits
    _heartbeat_seconds: float = attrs.field(kw_only=True)  #: the process is killed when it cannot run for so long
    #: file of the output, at most 4 MiB; the previous file gets the suffix ``.1``. None: only the output's end is kept
    _log: Path | None = attrs.field(default=None, kw_only=True)
    #: encoding of messages; json is for a program that has only the standard library
    _codec: Literal["msgpack", "json"] = attrs.field(default="msgpack", kw_only=True)
    _limit: int = attrs.field(default=LIMIT, kw_only=True)  #: bytes of the longest message from the process
    #: creates the error of calls after the end of the process; None: ``rpc.lost``
    _lost_error: Callable[[str], JackfieldError] | None = attrs.field(default=None, kw_only=True)
    death: str | None = attrs.field(default=None, init=False)  #: how it ended
    _transport: asyncio.SubprocessTransport | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        options: Any = {"codec": Codec(self._codec), "limit": self._limit, "lost_error": self._lost_error}
        self.connection = Connection(self._name, {}, self._clock, on_failure=self._failed, **options)
        self._killed: str | None = None  #: why it was killed
        self._broke = False  #: whether it was killed for breaking the protocol
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exited = False
        self._output = bytearray()
        self._watching: asyncio.Task[str] | None = None

    async def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Connection:
        """Run a command and connect to the process; raise an ``OSError`` if the program cannot be started.

        ``environment`` has all environment variables of the process; None: those of this process.
        """
        if self._log is not None:
            _append(self._log, b"")  # errors name the file, also of a process that printed nothing
        own, other = socket.socketpair()
        loop = asyncio.get_running_loop()
        try:
            arguments = (*command, str(other.fileno()), str(os.getpid()))
            options: dict[str, Any] = {"pass_fds": [other.fileno()], "start_new_session": True, "env": environment}
            options |= {"stdin": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.STDOUT}
            await loop.subprocess_exec(lambda: self, *arguments, **options)
            other.close()
            await loop.create_connection(lambda: self.connection, sock=own)
        except BaseException:
            own.close()
            other.close()
            await self.close()
            raise
        watching = watch(self.connection, self._heartbeat_seconds, self._clock)
        self._watching = asyncio.create_task(watching, name=f"{self._name}, watch")
        return self.connection

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._transport is not None, "it was not started"
        return int(self._transport.get_pid())

    @property
    def is_ending(self) -> bool:
        """Return whether the process has ended or was killed."""
        return self._exited or self._killed is not None

    @property
    def broke_protocol(self) -> bool:
        """Return whether the process was killed because its messages broke the protocol."""
        return self._broke and self._transport is not None and self._transport.get_returncode() == -signal.SIGKILL

    def output(self) -> str:
        """Return the last lines of the output, as the end of an error message."""
        lines = self._output.decode(errors="replace").strip().splitlines()[-_OUTPUT_LINES:]
        return "; it printed:\n" + "\n".join(lines) if lines else ""

    def kill(self) -> None:
        """Kill the process group, unless the process, its leader, has exited: then its id may be reused."""
        if not self._exited:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def close(self, *, grace_seconds: float = 0.0) -> None:
        """Close the socket, wait ``grace_seconds`` for the process to exit, then kill it. Idempotent."""
        self.death = self.death or "was ended"
        self.connection.end(self.death)
        if self._transport is None:
            return
        with suppress(DeadlineExceeded):
            if grace_seconds and not self._exited:
                await self._clock.wait_for(asyncio.shield(self._gone), grace_seconds, f"{self._name} to end")
        self.kill()
        with suppress(DeadlineExceeded):  # a grandchild of another session may hold its pipe
            await self._clock.wait_for(asyncio.shield(self._gone), _END_SECONDS, f"{self._name}, killed, to be gone")
        self._transport.close()
        if self._watching is not None:
            self._watching.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, even if the start is cancelled."""
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self.connection.process = Process.of(self.pid)

    def _failed(self, why: Literal["closed", "invalid", "silent"], reason: str) -> None:
        """Kill a process that closed its socket without exiting, broke the protocol or is silent."""
        if why == "closed":
            if not self._exited and self.death is None:
                how = "closed the descriptor of its socket, or wrote to it"
                asyncio.get_running_loop().call_later(_DYING_SECONDS, self._failed, "invalid", how)
            return
        if not (self._exited or self._killed):
            self._killed, self._broke = f"was killed: it {reason}" if why == "invalid" else reason, why == "invalid"
        self.kill()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep the end of the output."""
        self._output += data
        del self._output[:-_OUTPUT_BYTES]
        if self._log is not None:
            _append(self._log, data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Record that the output has ended."""
        if self._exited:
            self._end()

    def process_exited(self) -> None:
        """Kill the process group and wait a moment for the last output."""
        self.kill()
        self._exited = True
        asyncio.get_running_loop().call_later(_DYING_SECONDS, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the process and its pipe are gone."""
        if not self._gone.done():
            self._gone.set_result(None)
        self._end()

    def _end(self) -> None:
        """End the connection and report how the process ended."""
        code = None if self._transport is None else self._transport.get_returncode()
        how = f"ended with exit status {code}"
        if self._killed is not None and code == -signal.SIGKILL:
            how = self._killed
        elif code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if self.death is None:
            self.death = f"{how}{self.output()}"
            if self._killed is not None and not self._broke:
                text = f"{self._name} ({self.connection.process}) {self._killed}"
                logging.getLogger("jackfield").warning("%s", text)
        self.connection.end(self.death)


def _append(file: Path, data: bytes) -> None:
    """Append output to a file of bounded size. A full disk does not end the process."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as log:
            log.write(data)
            size = log.tell()
        if size > _LOG_BYTES:
            file.replace(f"{file}.1")
