"""Rollout servers in processes, some of which outlive servers and event loops: starting torch takes seconds."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias, cast
from unittest import mock

import attrs

from jackfield.abc.rollout import GenerateChunk, GenerateRequest, HealthReport, RolloutContext, ServerInfo
from jackfield.clock import Clock
from jackfield.compose import workers
from jackfield.config import make_config
from jackfield.config.sections import PluginSection
from jackfield.errors import JackfieldError, RolloutError, RpcError
from jackfield.plugins import PluginRecord
from jackfield.routing import Replica
from jackfield.runtime.process import HOST, Host
from jackfield.sdk.child import ChildProcess
from jackfield.sdk.rpc import Connection, Process, stub

_END_SECONDS = 15.0
_FOLDER = mkdtemp(prefix="jackfield-replicas-")  #: for what processes print
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)

_Running: TypeAlias = tuple[socket.socket, subprocess.Popen[bytes]]


class RolloutProcess:
    """A replica in a process, with the methods of a rollout server. A run makes it in the same way."""

    child: ClassVar[type[Any]] = ChildProcess  #: starts the process

    def __init__(
        self,
        settings: Mapping[str, Any],
        context: RolloutContext,
        *,
        record: PluginRecord,
        python: str,
        seconds: float,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.replica = Replica(number=context.replica, clock=context.clock)
        self._python, self._environment, self._used = python, environment, False
        deadlines = dict.fromkeys(("start", "rollout", "sync"), seconds)
        config = make_config({"model": {"path": "m"}, "deadlines": deadlines}, ())
        config = attrs.evolve(
            config,
            folder=str(folder or _FOLDER),
            model=context.model,
            seed=context.seed - context.replica,
            rollout=PluginSection(name=record.name, settings=settings),
            cluster=attrs.evolve(config.cluster, device=context.device, max_model_len=context.max_model_len),
        )
        registry: Any = SimpleNamespace(resolve=lambda name, kind: record)
        self._factory = workers.WorkerFactory(config=config, registry=registry, clock=context.clock)

    @property
    def process(self) -> ChildProcess:
        return self._factory._children[self.replica.number]

    @property
    def pid(self) -> int:
        process = self.process.connection.process
        assert process is not None
        return process.pid

    def __getattr__(self, name: str) -> Any:
        if self.replica.server is None:
            raise RolloutError("it was not started", code="rollout.stopped")
        return getattr(self.replica if name == "generate" else self.replica.server, name)

    async def start(self) -> ServerInfo:
        if self._used:
            raise RolloutError("it cannot be started twice", code="rollout.stopped")
        self._used = True
        await self.make(self.replica)
        try:
            return await self.replica.server.start()
        except BaseException:
            await self.stop()
            raise

    async def make(self, replica: Replica) -> None:
        """Make the server of a replica without starting it."""
        self.replica = replica
        child = self.child if self._environment is None else partial(self.child, environment=self._environment)
        with mock.patch.object(workers, "ChildProcess", child):
            await self._factory.start_process(replica, self._python)

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream as the contract has it; runs stream only within the server's process."""
        try:
            async with aclosing(cast(Any, self.replica.server.generate_stream(request))) as chunks:
                async for chunk in chunks:
                    yield chunk
        except RpcError as error:
            if error.code != "rpc.value":
                raise
            raise RolloutError(error.message, code="rollout.request", where=error.where) from error

    async def health(self) -> HealthReport:
        try:
            return await self.replica.health()
        except RolloutError as error:
            return HealthReport(healthy=False, detail=f"{error.message}: {error.found}")

    async def stop(self) -> None:
        self._used = True
        with suppress(JackfieldError):
            if self.replica.server is not None:
                await self.replica.server.stop()
        await self._factory.end(self.replica.number)


class _Kept:
    """A process with the members of a ``ChildProcess`` that a run uses."""

    idle: ClassVar[list[_Running]] = []

    def __init__(self, name: str, clock: Clock, **options: Any) -> None:
        self.connection = Connection(name, {}, clock, lost_error=options["lost_error"])
        self._environment: Mapping[str, str] = options.get("environment", {})
        self._running: _Running

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> Connection:
        self._running = self.idle.pop() if self.idle else _started(command, {**environment, **self._environment})
        own, process = self._running
        self.connection.process = Process.of(process.pid)
        await asyncio.get_running_loop().create_connection(lambda: self.connection, sock=own.dup())
        return self.connection

    def end(self) -> None:
        _end(*self._running)

    async def close(self, *, grace_seconds: float = 0.0) -> None:
        left = False
        try:
            with suppress(JackfieldError):
                await stub(self.connection, "host", HOST, Host, 2 * _END_SECONDS).end()
            left = not self.connection.lost.done() and await self._replied()
        finally:
            self.connection.end("was left")
            if left:
                self.idle.append(self._running)
            else:
                await asyncio.to_thread(self.end)

    async def _replied(self) -> bool:
        """Wait for the replies to open calls, which would else come to the next connection."""
        while waiting := [answer for _, answer in self.connection._asked.values()]:
            _, pending = await asyncio.wait(waiting, timeout=_END_SECONDS)
            if pending:
                return False
        return True

    def kill(self) -> None:
        self._running[1].kill()


def _started(command: Sequence[str], environment: Mapping[str, str]) -> _Running:
    own, other = socket.socketpair()
    with other:
        process = subprocess.Popen(
            [*command, str(other.fileno()), str(os.getpid())],
            pass_fds=[other.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    return own, process


def _end(own: socket.socket, process: subprocess.Popen[bytes]) -> None:
    own.close()  # the process ends by this
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    process.kill()
    process.wait(_END_SECONDS)


class KeptRolloutProcess(RolloutProcess):
    """Takes the process that an earlier server has left, and leaves it to the next one."""

    child = _Kept

    @classmethod
    def end_all(cls) -> None:
        """End the processes that were kept."""
        while _Kept.idle:
            _end(*_Kept.idle.pop())
