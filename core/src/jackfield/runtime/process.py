"""Processes of workers: the host that makes and serves a worker, its services, and connections to them.

``python -m jackfield.runtime.process MODULE:FUNCTION FD PARENT`` makes a worker by a :data:`MakeWorker` and serves the
socket ``FD``, of which only ``PARENT`` has the other end. When that end closes for any reason, the process ends
together with all processes that it has started. In a Ray cluster the process is an actor, and listens.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import ipaddress
import os
import pkgutil
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, cast

import attrs
import psutil

from jackfield.abc.rollout import BaseRolloutServer, GenerateChunk, GenerateRequest, GenerateResult
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, PluginError, RolloutError, WorkerLost
from jackfield.imports import collection_paused, own_process
from jackfield.plugins import PluginRecord
from jackfield.plugins.interpreters import environment_of, introduce, refusals
from jackfield.routing import Replica
from jackfield.sdk.child import ChildProcess
from jackfield.sdk.rpc import Address, Connection, Contract, Process, Server, Service, caller, connect, stub

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


@attrs.frozen(kw_only=True)
class Place:
    """Where a process runs."""

    node: str  #: Ray's id of the node
    address: str  #: address of the node
    port: int  #: a port that was free on the node
    versions: Mapping[str, str]  #: installed versions of jackfield and ray


class RayHost(Host):
    """The Ray actor, a host that listens for the controller and other workers."""

    def __init__(
        self,
        make: MakeWorker,
        name: str,
        folder: str,
        one_thread: bool,
        heartbeat_seconds: float,
        gpus: str | None = None,
    ) -> None:
        """Create the host of the worker ``name``.

        Relative paths in the configuration start from ``folder``, the controller's working directory. With
        ``one_thread`` the worker's threaded calls share one thread and run in order. Clients consider the process dead
        after ``heartbeat_seconds`` without a heartbeat. It sees only ``gpus``, which is set before torch is imported:
        Ray leaves the variable of an actor alone that takes no GPU from Ray itself.
        """
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        super().__init__(make)
        self.services["host"] = Service(target=self, contract=RAY_HOST)
        self._one_thread = one_thread
        self._server = Server(name, self.services, Clock(), heartbeat_seconds, watches=False)
        own_process()
        _outlive_sigterm()
        if os.path.isdir(folder):
            os.chdir(folder)

    async def listen(self) -> Address:
        """Return where this process is served. Ray calls this method; the RPC calls all others."""
        if self._one_thread:
            pool = ThreadPoolExecutor(1, thread_name_prefix="jackfield-compute")
            asyncio.get_running_loop().set_default_executor(pool)
        address = await self._server.listen(node_address())
        return attrs.evolve(address, process=attrs.evolve(address.process, host=f"node {node_address()}"))

    async def place(self) -> Place:
        """Return where this process runs."""
        import ray

        address = node_address()
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        node, versions = ray.get_runtime_context().get_node_id(), {each: version(each) for each in ("jackfield", "ray")}
        return Place(node=node, address=address, port=port, versions=versions)

    async def end(self) -> None:
        """End the worker, and the calls of others than the one who asks for it."""
        others = [client for client in self._server.clients.values() if client is not caller()]
        await asyncio.gather(*(client.close() for client in others))
        await super().end()


RAY_HOST = Contract(RayHost, without=("introduce", "listen"))


def _outlive_sigterm() -> None:
    """Ignore SIGTERM in this process: the run needs its workers for the last checkpoint.

    Schedulers send the signal to every process, and Ray would end this one. The handler is a function without effect;
    unlike ``SIG_IGN`` it is not inherited, so child processes still receive the signal.
    """
    libc = ctypes.CDLL(None)  # Python's signal module works in the main thread only
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(int(signal.SIGTERM), ctypes.cast(libc.abs, ctypes.c_void_p))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address, or the loopback interface."""
    wanted = "127.0.0.1" if ipaddress.ip_address(address).is_loopback else address
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, has in interfaces if wanted in [each.address for each in has]), None)


def node_address() -> str:
    """Return the IP address of this process's node."""
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def given_gpus() -> list[str]:
    """Return the names of the GPUs that Ray has given to this task, for ``CUDA_VISIBLE_DEVICES``."""
    import ray

    return list(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def kill_if_stopped(process: Process) -> None:
    """Kill a process of this machine that cannot react to Ray."""
    if not process.can_run():
        process.kill()


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
        what, fix = f"the interpreter {python} cannot hold the {record.label}", "jackfield plugins doctor --python PATH"
        details = {"where": python, "expected": "an installation of jackfield like this one", "found": error.found}
        raise PluginError(what, code="plugin.interpreter", fix=fix, **details) from error
    for problem in refusals(record, found, python):
        raise problem
    return host


def rollout_service(server: BaseRolloutServer, number: int) -> Service:
    """Return a replica's service; the process exits if a failed request finds it unhealthy."""
    replica = Replica(server, number=number)

    @asynccontextmanager
    async def exits() -> AsyncIterator[None]:
        try:
            yield
        except Exception as error:
            if await replica.is_lost(error):
                print(replica.lost.result(), file=sys.stderr, flush=True)
                os._exit(1)
            raise

    async def generate(request: GenerateRequest) -> GenerateResult:
        async with exits():
            return await server.generate(request)

    async def generate_stream(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        async with exits(), aclosing(cast(Any, server.generate_stream(request))) as chunks:
            async for chunk in chunks:
                yield chunk

    methods = {method.name: getattr(server, method.name) for method in ROLLOUT}
    methods |= {"generate": generate, "generate_stream": generate_stream}
    return Service(target=SimpleNamespace(**methods), contract=ROLLOUT)


def use_process(replica: Replica, connection: Connection, place: Literal["process", "cluster"], seconds: float) -> None:
    """Use the server in a process as a replica, which dies with the connection. Calls have ``seconds``."""
    replica.server = stub(connection, "worker", ROLLOUT, cast(Any, BaseRolloutServer), seconds)
    replica.place = place
    connection.lost.add_done_callback(lambda _: replica.lose(connection.error()))


async def connect_worker(address: Address, name: str, client: str, clock: Clock, *, kills: bool = False) -> Connection:
    """Connect to the process of worker ``name`` as ``client``. After its death, calls raise ``WorkerLost``.

    ``kills``: kill a worker that sends no heartbeats. The controller does, and reports why it died.
    """

    def lost(reason: str) -> JackfieldError:
        return death(name, f"{name}, {address.process}", f"it {reason}")

    return await connect(address, client, clock, {}, lost_error=lost, kills=kills)


def death(name: str, where: str, found: str) -> WorkerLost:
    """Return the error for a worker that died."""
    fix = "look at the worker's log in Ray's session folder; lack of memory is the usual reason"
    return WorkerLost(f"{name} died", where=where, found=found, fix=fix)


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
