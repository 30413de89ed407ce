"""A rollout server in its own process and interpreter: stub and main program.

``python -m jackfield.runtime.process FD PARENT`` serves the socket ``FD``, of which only ``PARENT`` has the other end.
When that end closes for any reason, the process ends together with all processes that it has started.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
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
from jackfield.errors import DeadlineExceeded, JackfieldError, PluginError, RolloutError
from jackfield.imports import own_process
from jackfield.plugins.interpreters import environment_of, resolve_interpreter
from jackfield.plugins.registry import PluginRecord, introduce, load_plugin, refusals
from jackfield.rpc import Connection, Contract, Service, stub
from jackfield.sdk.child import ChildProcess

_ORPHAN_SECONDS = 10.0  #: for the server to stop what it has started, once its owner is gone
_STOP_SECONDS = 30.0
_END_SECONDS = 15.0  #: for the process to exit by itself, once its socket is closed
_OWN = ("start", "stop", "health", "generate", "generate_stream")  #: methods that do more than forward the call


class Host:
    """The service of a new process; it makes a rollout server and serves that, too."""

    def __init__(self) -> None:
        self.services = {"host": Service(target=self, contract=HOST)}

    async def introduce(self, kind: str, name: str) -> dict[str, Any]:
        """Return which installation of jackfield and which plugin this interpreter has."""
        return introduce(kind, name)

    async def make(self, name: str, settings: dict[str, Any], context: RolloutContext) -> None:
        """Make a rollout server from its plugin, without starting it."""
        server = load_plugin("rollout", name).build(settings, context, "rollout")
        self.services["worker"] = Service(target=server, contract=ROLLOUT)


HOST, ROLLOUT = Contract(Host), Contract(BaseRolloutServer)


async def _serve(descriptor: int) -> None:
    host = Host()
    connection = Connection("the run", host.services, Clock())
    await asyncio.get_running_loop().create_connection(lambda: connection, sock=socket.socket(fileno=descriptor))
    await connection.lost
    await connection.close()
    if "worker" in host.services:
        with suppress(DeadlineExceeded):
            await Clock().wait_for(host.services["worker"].target.stop(), _ORPHAN_SECONDS, "the server to stop")


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


def _forwarded(name: str) -> Callable[..., Any]:
    async def call(self: RolloutProcess, *arguments: Any) -> Any:
        return await getattr(self.remote(), name)(*arguments)

    return call


_Forwarding: Any = type(
    "_Forwarding", (BaseRolloutServer,), {each.name: _forwarded(each.name) for each in ROLLOUT if each.name not in _OWN}
)


@attrs.define(eq=False, slots=False)
class RolloutProcess(_Forwarding):
    """A replica that runs in another process, which is started and stopped with it.

    All methods raise the replica's errors with the same class and code, ``rollout.stopped`` if its process has ended
    (the error says how), and a ``DeadlineExceeded`` that names the replica.
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
        self._used = self._stopped = False
        self.on_lost: Callable[[JackfieldError], None] = lambda error: None  #: called with how the process ended

    def remote(self, seconds: float | None = None) -> BaseRolloutServer:
        """Return a stub of the server in the process, whose calls have a deadline of ``seconds``.

        Raises:
            RolloutError: ``rollout.stopped`` if it has not been started.
        """
        if self._child is None:
            raise self._gone("was not started")
        seconds = self._seconds if seconds is None else seconds
        return stub(self._child.connection, "worker", ROLLOUT, BaseRolloutServer, seconds)  # type: ignore[type-abstract]

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
            await host.make(self._record.name, dict(self.config), self.context)
            return await self.remote().start()
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

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample. Cancelling the call aborts the request."""
        with self._refusing(request):
            return await self.remote().generate(request)

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Generate a sample and yield its tokens; closing the iterator aborts the request."""
        with self._refusing(request):
            async with aclosing(self.remote().generate_stream(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk

    @contextmanager
    def _refusing(self, request: GenerateRequest) -> Iterator[None]:
        """Name the request in decoding errors, and refuse one that cannot be encoded."""
        name = request.request_id
        try:
            yield
        except JackfieldError as error:
            if error.code == "rpc.value":
                details: Any = {"expected": "plain values, and integers of 64 bits", "found": error.found}
                raise RolloutError(error.message, code="rollout.request", where=name, **details) from error
            if error.code == "rollout.request" and name not in str(error):
                error.where = f"{name}, {error.where}"
            raise

    async def stop(self) -> None:
        """Stop the server, and end its process and all processes that it has started."""
        stopped, self._stopped = self._stopped, True
        if stopped or self._child is None:
            return
        try:
            with suppress(JackfieldError):
                await self.remote(_STOP_SECONDS).stop()
        finally:
            await self._child.close(grace_seconds=_END_SECONDS)

    async def health(self) -> HealthReport:
        """Report whether the replica can serve, and its load; or how its process ended."""
        try:
            return await self.remote().health()
        except RolloutError as error:
            if error.code != "rollout.stopped":
                raise
            return HealthReport(healthy=False, detail=f"{error.message}: {error.found or ''}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
