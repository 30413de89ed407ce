"""A process that makes and serves a worker, and a rollout server in such a process and its own interpreter.

``python -m jackfield.runtime.process FD PARENT`` serves the socket ``FD``, of which only ``PARENT`` has the other end.
When that end closes for any reason, the process ends together with all processes that it has started.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.rollout import (
    BaseRolloutServer,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    HealthReport,
    RolloutContext,
    ServerInfo,
)
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, PluginError, RolloutError, RpcError
from jackfield.imports import collection_paused, own_process
from jackfield.plugins import PluginRecord, load_plugin
from jackfield.plugins.interpreters import environment_of, introduce, refusals, resolve_interpreter
from jackfield.sdk.child import ChildProcess
from jackfield.sdk.rpc import Connection, Contract, Service, stub

_ORPHAN_SECONDS = 10.0  #: for the worker to stop what it has started, once its owner is gone
_STOP_SECONDS = 30.0
_END_SECONDS = 15.0  #: for the process to exit by itself, once its socket is closed


class Host:
    """The service of a process that makes a worker and serves it, too. Another worker can follow its end."""

    def __init__(self) -> None:
        self.services = {"host": Service(target=self, contract=HOST)}
        self._lock, self._stack = asyncio.Lock(), AsyncExitStack()

    async def introduce(self, kind: str, name: str) -> dict[str, Any]:
        """Return which installation of jackfield and which plugin this interpreter has."""
        return introduce(kind, name)

    async def make_rollout(self, name: str, settings: dict[str, Any], context: RolloutContext) -> None:
        """Make a rollout server of its plugin, without starting it."""
        async with self._making() as stack:
            server = load_plugin("rollout", name).build(settings, context, "rollout")
            stack.push_async_callback(server.stop)
            self.services["worker"] = Service(target=server, contract=ROLLOUT)

    @asynccontextmanager
    async def _making(self) -> AsyncIterator[AsyncExitStack]:
        """Yield the stack of what ends with the worker that is made meanwhile."""
        async with self._lock:
            gc.unfreeze()  # imports were frozen together with an earlier worker
            gc.collect()
            with collection_paused():
                yield self._stack

    async def end(self) -> None:
        """End the worker, if there is one, and close its resources."""
        async with self._lock:
            for name in self.services.keys() - {"host"}:
                del self.services[name]
            await self._stack.aclose()


HOST, ROLLOUT = Contract(Host), Contract(BaseRolloutServer)


async def _serve(descriptor: int) -> None:
    host = Host()
    connection = Connection("the run", host.services, Clock())
    await asyncio.get_running_loop().create_connection(lambda: connection, sock=socket.socket(fileno=descriptor))
    await connection.lost
    await connection.close()
    with suppress(DeadlineExceeded):
        await Clock().wait_for(host.end(), _ORPHAN_SECONDS, "the worker to end")


def _end_with(parent: int, descriptor: int) -> None:
    """Kill this process group soon after the parent is gone, even with a blocked loop."""
    poller = select.poll()
    poller.register(descriptor, getattr(select, "POLLRDHUP", select.POLLHUP))
    if hasattr(os, "pidfd_open"):
        with suppress(ProcessLookupError):
            poller.register(os.pidfd_open(parent), select.POLLIN)
    poller.poll()
    time.sleep(_ORPHAN_SECONDS + 5.0)
    os.killpg(0, signal.SIGKILL)


def main(descriptor: int, parent: int) -> None:
    """Serve until the parent's end of the socket closes."""
    own_process()
    os.set_inheritable(descriptor, False)
    watch = threading.Thread(target=_end_with, args=(parent, os.dup(descriptor)), name="jackfield-parent", daemon=True)
    watch.start()
    asyncio.run(_serve(descriptor))
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getppid() != parent:  # the parent is gone, so nothing else ends what the server may have left
        os.killpg(0, signal.SIGKILL)


@attrs.define(eq=False, slots=False)
class RolloutProcess:
    """A replica that runs in another process, which is started and stopped with it.

    It has the methods of :class:`~jackfield.abc.rollout.BaseRolloutServer`, which raise the replica's errors with the
    same class and code, ``rollout.stopped`` if its process has ended (the error says how), and a ``DeadlineExceeded``
    that names the replica.
    """

    config: Mapping[str, Any]  #: plain settings of the plugin
    context: RolloutContext  #: the replica's context; its clock is used in this process only
    _record: PluginRecord = attrs.field(kw_only=True)  #: the plugin as installed here; the process must have the same
    _python: str = attrs.field(kw_only=True)  #: path of the interpreter
    _seconds: float = attrs.field(default=3600.0, kw_only=True)  #: deadline of any call
    _log: Path | None = attrs.field(default=None, kw_only=True)  #: file for the process's output
    _environment: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)  #: additional environment variables
    #: the process is killed if it cannot run for this long
    _heartbeat_seconds: float = attrs.field(default=30.0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._name = f"rollout replica {self.context.replica}"
        self._python = resolve_interpreter(self._python, self._name)
        self._child: ChildProcess | None = None
        self._server: BaseRolloutServer | None = None
        self._used = self._stopped = False
        self.on_lost: Callable[[JackfieldError], None] = lambda error: None  #: called with how the process ended

    def __getattr__(self, name: str) -> Any:
        """Return a method of the server in the process.

        Raises:
            RolloutError: ``rollout.stopped`` if it has not been started.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._started(), name)

    def _started(self) -> BaseRolloutServer:
        if self._server is None:
            raise self._gone("was not started")
        return self._server

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample. Cancelling the call aborts the request."""
        with _refusing():
            return await self._started().generate(request)

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Generate a sample and yield its tokens; closing the iterator aborts the request."""
        with _refusing():
            async with aclosing(self._started().generate_stream(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk

    def _gone(self, how: str) -> RolloutError:
        process = None if self._child is None else self._child.connection.process
        message, where = f"the process of {self._name} is not running", self._name
        if process is not None:
            where, how = f"{self._name}, process {process.pid}", f"{process} {how}"
        expected, fix = f"a process of {self._python}", f"what it printed is in {self._log}" if self._log else None
        return RolloutError(message, code="rollout.stopped", where=where, expected=expected, found=how, fix=fix)

    async def start(self) -> ServerInfo:
        """Start the process, compare installations, then make and start the server there.

        Raises:
            PluginError: If the interpreter, or the plugin in it, is not what this process expects.
            JackfieldError: If the server raises it.
        """
        if self._used or self._stopped:
            raise RolloutError("the server cannot be started twice", code="rollout.stopped", fix="make a new server")
        self._used, introduced = True, False
        try:
            connection = await self._spawn()
            connection.lost.add_done_callback(lambda _: self.on_lost(connection.error()))
            host = stub(connection, "host", HOST, Host, self._seconds)
            found = await host.introduce(self._record.kind, self._record.name)
            introduced = True
            for problem in refusals(self._record, found, self._python):
                raise problem
            await host.make_rollout(self._record.name, dict(self.config), self.context)
            server: Any = BaseRolloutServer
            self._server = stub(connection, "worker", ROLLOUT, server, self._seconds)
            return await self._server.start()
        except BaseException as error:
            if not introduced and self._child is not None:
                self._child.kill()  # it may never read the request to stop
            await self.stop()
            if introduced or not isinstance(error, RolloutError):
                raise
            raise PluginError(
                f"the interpreter {self._python} cannot hold {self._name}",
                code="plugin.interpreter",
                where=self._python,
                expected="an installation of jackfield like this one",
                found=error.found,
                fix="`jackfield plugins doctor --python PATH` looks at it",
            ) from error

    async def _spawn(self) -> Connection:
        options: dict[str, Any] = {"heartbeat_seconds": self._heartbeat_seconds, "log": self._log}
        self._child = ChildProcess(self._name, self.context.clock, lost_error=self._gone, **options)
        command = [self._python, "-m", "jackfield.runtime.process"]
        return await self._child.start(command, {**environment_of(self._python), **self._environment})

    async def health(self) -> HealthReport:
        """Report whether the replica can serve, and its load; or how its process ended."""
        try:
            return await self._started().health()
        except RolloutError as error:
            if error.code != "rollout.stopped":
                raise
            return HealthReport(healthy=False, detail=f"{error.message}: {error.found or ''}")

    async def stop(self) -> None:
        """Stop the server, and end its process and all processes that it has started."""
        stopped, self._stopped = self._stopped, True
        if stopped or self._child is None:
            return
        try:
            with suppress(JackfieldError):
                await stub(self._child.connection, "host", HOST, Host, _STOP_SECONDS).end()
        finally:
            await self._child.close(grace_seconds=_END_SECONDS)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except RpcError as error:
        if error.code != "rpc.value":
            raise
        details: Any = {"expected": "plain values, and integers of 64 bits", "found": error.found}
        raise RolloutError(error.message, code="rollout.request", where=error.where, **details) from error


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
