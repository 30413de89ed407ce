"""Rollout servers in processes that outlive them, and event loops: a start of torch or vLLM takes seconds."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from contextlib import suppress
from typing import Any, ClassVar, cast

from jackfield.plugins.interpreters import environment_of
from jackfield.runtime.process import RolloutProcess
from jackfield.sdk.rpc import Connection, Process

_END_SECONDS = 15.0


class _Kept:
    """A process with the members of a ``ChildProcess`` that a rollout process uses."""

    connection: Connection

    def __init__(self, python: str, environment: dict[str, str]) -> None:
        self._socket, other = socket.socketpair()
        command = [python, "-m", "jackfield.runtime.process", str(other.fileno()), str(os.getpid())]
        with other:
            self._process = subprocess.Popen(
                command,
                pass_fds=[other.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                env={**environment_of(python), **environment},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def connect(self, server: RolloutProcess) -> Connection:
        connection = Connection("the replica", {}, server.context.clock, lost_error=server._gone)
        self.connection, connection.process = connection, Process.of(self.pid)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=self._socket.dup())
        return connection

    async def close(self, *, grace_seconds: float = 0.0) -> None:
        died = self.connection.lost.done()
        replied = died or await self._replied()
        self.connection.end("was left")
        if died or not replied:
            await asyncio.to_thread(self.end)
        else:
            KeptRolloutProcess.idle.append(self)

    async def _replied(self) -> bool:
        """Wait for the replies to open calls, which would else come to the next connection."""
        while waiting := [answer for _, answer in self.connection._asked.values()]:
            _, pending = await asyncio.wait(waiting, timeout=_END_SECONDS)
            if pending:
                return False
        return True

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._socket.close()  # the process ends by this
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._process.kill()
        self._process.wait(_END_SECONDS)


class KeptRolloutProcess(RolloutProcess):
    """Takes the process that an earlier server has left, and leaves it to the next one."""

    idle: ClassVar[list[_Kept]] = []

    async def _spawn(self) -> Connection:
        kept = self.idle.pop() if self.idle else _Kept(self._python, self._environment)
        self._child = cast(Any, kept)
        return await kept.connect(self)

    @classmethod
    def end_all(cls) -> None:
        """End the processes that were kept."""
        while cls.idle:
            cls.idle.pop().end()
