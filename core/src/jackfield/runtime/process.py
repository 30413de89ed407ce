"""A process that makes a worker and serves it.

``python -m jackfield.runtime.process MODULE:FUNCTION FD PARENT`` makes a worker by a :data:`MakeWorker` and serves the
socket ``FD``, of which only ``PARENT`` has the other end. When that end closes for any reason, the process ends
together with all processes that it has started.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pkgutil
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, cast

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, PluginError, RolloutError
from jackfield.imports import collection_paused, own_process
from jackfield.plugins import PluginRecord
from jackfield.plugins.interpreters import environment_of, introduce, refusals
from jackfield.routing import Replica
from jackfield.sdk.child import ChildProcess
from jackfield.sdk.rpc import Connection, Contract, Service, stub

_ORPHAN_SECONDS = 10.0  #: for the worker to stop what it has started, once its owner is gone

#: Makes a worker from its description in plain values, and returns its services; the stack is closed when it ends.
MakeWorker: TypeAlias = Callable[[dict[str, Any], AsyncExitStack], Awaitable[Mapping[str, Service]]]


class Host:
    """The service of a process that makes a worker and serves it, too. Another worker can follow its end."""

    def __init__(self, make: MakeWorker) -> None:
        self.services = {"host": Service(target=self, contract=HOST)}
        self._make, self._lock, self._stack = make, asyncio.Lock(), AsyncExitStack()

    async def introduce(self, kind: str, name: str) -> dict[str, Any]:
        """Return which installation of jackfield and which plugin this interpreter has."""
        return introduce(kind, name)

    async def make(self, worker: dict[str, Any]) -> None:
        """Make the worker of a description, or raise the error of making it."""
        async with self._lock:
            gc.unfreeze()  # imports were frozen together with an earlier worker
            gc.collect()
            with collection_paused():
                self.services |= await self._make(worker, self._stack)

    async def end(self) -> None:
        """End the worker, if there is one, and close its resources."""
        async with self._lock:
            for name in self.services.keys() - {"host"}:
                del self.services[name]
            await self._stack.aclose()


HOST, ROLLOUT = Contract(Host), Contract(BaseRolloutServer)


async def open_host(
    child: ChildProcess, python: str, make: str, record: PluginRecord, environment: Mapping[str, str], seconds: float
) -> Host:
    """Start a host for a plugin in another interpreter, and return its stub.

    Raise a ``PluginError`` if the interpreter, or the plugin in it, is not what this process expects.
    """
    try:
        command = [python, "-m", "jackfield.runtime.process", make]
        connection = await child.start(command, {**environment_of(python), **environment})
        host = stub(connection, "host", HOST, Host, seconds)
        found = await host.introduce(record.kind, record.name)
    except BaseException as error:
        child.kill()  # it may never read the request to stop
        if not isinstance(error, RolloutError):
            raise
        raise PluginError(
            f"the interpreter {python} cannot hold the {record.label}",
            code="plugin.interpreter",
            where=python,
            expected="an installation of jackfield like this one",
            found=error.found,
            fix="`jackfield plugins doctor --python PATH` looks at it",
        ) from error
    for problem in refusals(record, found, python):
        raise problem
    return host


def rollout_service(server: BaseRolloutServer, number: int) -> Service:
    """Return a replica's service; the process exits if a failed request finds it unhealthy."""
    replica = Replica(server, number=number)

    async def generate(request: GenerateRequest) -> GenerateResult:
        try:
            return await replica.generate(request)
        except Exception as error:
            if replica.lost.done():
                print(error, file=sys.stderr, flush=True)
                os._exit(1)
            raise

    methods = {method.name: getattr(server, method.name) for method in ROLLOUT}
    return Service(target=SimpleNamespace(**methods | {"generate": generate}), contract=ROLLOUT)


def use_process(replica: Replica, connection: Connection, place: Literal["process", "cluster"], seconds: float) -> None:
    """Use the server in a process as a replica, which dies with the connection. Calls have ``seconds``."""
    replica.server = stub(connection, "worker", ROLLOUT, cast(Any, BaseRolloutServer), seconds)
    replica.place = place
    connection.lost.add_done_callback(lambda _: replica.lose(connection.error()))


async def _serve(make: str, descriptor: int) -> None:
    host = Host(pkgutil.resolve_name(make))
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


def main(make: str, descriptor: int, parent: int) -> None:
    """Serve until the parent's end of the socket closes."""
    own_process()
    os.set_inheritable(descriptor, False)
    watch = threading.Thread(target=_end_with, args=(parent, os.dup(descriptor)), name="jackfield-parent", daemon=True)
    watch.start()
    asyncio.run(_serve(make, descriptor))
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getppid() != parent:  # the parent is gone, so nothing else ends what the server may have left
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
