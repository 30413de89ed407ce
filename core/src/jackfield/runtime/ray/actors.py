"""Workers in actors, from both sides: Ray places a process; there a host makes the worker and serves it by the RPC."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import attrs

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RunError, WorkerLost
from jackfield.imports import collection_paused, own_process
from jackfield.routing.router import cause_of_death
from jackfield.rpc import Address, Connection, Process, Server, Service, connect
from jackfield.runtime.process import ROLLOUT

_END_SECONDS = 15.0  #: for a worker to close what it has opened

unavailable = partial(RunError, code="cluster.unavailable")

#: Makes a worker and returns what is served of it; the stack is closed when the worker has to end.
MakeServices: TypeAlias = Callable[[AsyncExitStack], Awaitable[Mapping[str, Service]]]


@attrs.frozen(kw_only=True)
class Place:
    """Where a worker turned out to live: its part of the handshake."""

    pid: int
    node: str  #: Ray's id of it
    address: str  #: of its node
    port: int  #: free there, at the moment
    versions: Mapping[str, str]  #: of jackfield and ray


class Host:
    """Lives in an actor. It has one worker at a time: another may be made once the first has ended."""

    def __init__(self, name: str, folder: str, one_thread: bool, heartbeat_seconds: float) -> None:
        """
        Args:
            name: of the worker.
            folder: the controller's working directory, against which paths in the configuration stand.
            one_thread: whether what the worker does in threads goes through one, in order.
            heartbeat_seconds: after which clients take this process for dead.
        """
        self._name, self._one_thread, self._heartbeat_seconds = name, one_thread, heartbeat_seconds
        self._lock, self._stack = asyncio.Lock(), AsyncExitStack()
        own_process()
        _outlive_sigterm()
        if os.path.isdir(folder):
            os.chdir(folder)

    async def place(self) -> Place:
        """Return where this is, once the memory of an earlier worker is free for the next one's."""
        import ray

        gc.unfreeze()  # an earlier worker was made with the imports
        gc.collect()
        address = node_address()
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        node, versions = ray.get_runtime_context().get_node_id(), {each: version(each) for each in ("jackfield", "ray")}
        return Place(pid=os.getpid(), node=node, address=address, port=port, versions=versions)

    async def make(self, make: bytes) -> Address:
        """Make the worker, and return where it is served.

        Args:
            make: a :data:`MakeServices` as Ray's ``cloudpickle`` writes it.
        """
        from ray import cloudpickle

        async with self._lock:
            if self._one_thread:
                self._one_thread, pool = False, ThreadPoolExecutor(1, thread_name_prefix="jackfield-compute")
                asyncio.get_running_loop().set_default_executor(pool)
            with collection_paused():
                services = await cloudpickle.loads(make)(self._stack)
            server = Server(self._name, services, Clock(), self._heartbeat_seconds, watches=False)
            self._stack.push_async_callback(server.close)
            served = await server.listen(node_address())
            return attrs.evolve(served, process=attrs.evolve(served.process, host=f"node {node_address()}"))

    async def end(self) -> None:
        """Close what the worker has opened, if there is one."""
        async with self._lock:
            await self._stack.aclose()


def rollout_service(server: BaseRolloutServer, name: str) -> Service:
    """Return the service of a replica whose process ends once it fails a request and is not healthy any more."""

    async def generate(request: GenerateRequest) -> GenerateResult:
        try:
            return await server.generate(request)
        except Exception as error:
            state = await cause_of_death(server, Clock(), name, error)
            if state is not None:
                print(f"{name} is not healthy: {state}; after: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            raise

    methods = {method.name: getattr(server, method.name) for method in ROLLOUT}
    return Service(target=SimpleNamespace(**methods | {"generate": generate}), contract=ROLLOUT)


def _outlive_sigterm() -> None:
    """Ignore SIGTERM here: it asks the run to end, which needs its workers for the last checkpoint.

    Ray would end this process, and schedulers send the signal to every process. The handler is a function without
    effects, which other than ``SIG_IGN`` is not inherited by what this process starts: that hears the signal.
    """
    libc = ctypes.CDLL(None)  # Python would want the main thread for this
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(int(signal.SIGTERM), ctypes.cast(libc.abs, ctypes.c_void_p))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address; the loopback one for any address of loopback."""
    import psutil

    wanted = "127.0.0.1" if ipaddress.ip_address(address).is_loopback else address
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, has in interfaces if wanted in [each.address for each in has]), None)


def node_address() -> str:
    """Return the address of this process's node."""
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


@attrs.frozen(kw_only=True)
class WorkerSpec:
    """Which worker to start, and where."""

    name: str
    make: Callable[[], MakeServices]  #: what makes it there; asked for once the processes of all workers are known
    group: Any = None  #: of places; None: anywhere
    bundle: int = 0  #: in the group
    resources: Mapping[str, float] = attrs.field(factory=dict)  #: that it takes of the bundle
    python: str | None = None  #: an interpreter of its own, looked at beforehand with :func:`check_interpreter`
    restarts: bool = False  #: a call that finds it dead restarts it, and nothing else watches it


@attrs.define(eq=False)
class Actor:
    """One process of the cluster, and the worker in it."""

    spec: WorkerSpec
    handle: Any  #: Ray's
    clock: Clock
    start_seconds: float  #: for the process, and for the worker, to be there
    place: Place = attrs.field(init=False)
    address: Address | None = attrs.field(default=None, init=False)  #: where the worker is served; None: it is not
    _connection: Connection | None = attrs.field(default=None, init=False)

    @property
    def connection(self) -> Connection:
        """Return the connection to the worker.

        Raises:
            WorkerLost: It is not made yet.
        """
        if self._connection is None:
            raise _death(self.spec.name, self.spec.name, "it was not made")
        return self._connection

    @property
    def lives(self) -> bool:
        """Return whether the worker is made and has not died."""
        return self._connection is not None and not self._connection.lost.done()

    async def find(self) -> None:
        """Wait for the process, and compare its versions.

        Raises:
            RunError: ``cluster.unavailable``: it has another version of Jackfield or Ray.
        """
        self.place = place = await self._answer(self.handle.place.remote(), self.start_seconds, "to start")
        ours = {package: version(package) for package in place.versions}
        if place.versions != ours:
            raise unavailable(
                f"{self.spec.name} has other versions than the controller",
                where=f"node {place.address}",
                expected=ours,
                found=place.versions,
                fix="install the same versions on every node",
            )

    async def make(self) -> Address:
        """Make the worker in its process, connect to it, and return where it is served.

        Raises:
            JackfieldError: What it raises there.
        """
        from ray import cloudpickle

        making = self.handle.make.remote(cast(Any, cloudpickle).dumps(self.spec.make()))
        self.address = address = cast(Address, await self._answer(making, self.start_seconds, "to be ready"))
        self._connection = await connect_worker(address, self.spec.name, "the controller", self.clock, kills=True)
        self._connection.lost.add_done_callback(self._forget)
        return address

    def _forget(self, lost: asyncio.Future[str]) -> None:
        address, self.address = self.address, None
        if address is not None and self.spec.restarts:  # any other death is reported by what watches for it
            log = logging.getLogger("jackfield")
            log.warning("%s (%s) died: it %s", self.spec.name, address.process, lost.result())

    async def empty(self) -> None:
        """End the worker, so that the process can make another.

        Raises:
            JackfieldError: It cannot.
        """
        self.address = None
        if self._connection is not None:
            if self._connection.lost.done():
                raise self._connection.error()
            await self._connection.close()
        await self._answer(self.handle.end.remote(), _END_SECONDS, "to end")

    async def kill(self) -> None:
        """End the process; on its node, if it cannot run: then it does not hear when Ray asks it to end."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        process = None if self._connection is None else self._connection.process
        if process is not None and process.is_near:
            _kill_if_stopped(process)
        elif process is not None:
            strategy = NodeAffinitySchedulingStrategy(self.place.node, soft=False)
            task = ray.remote(_kill_if_stopped).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
            with suppress(RayError, DeadlineExceeded):  # the node is gone, and Ray knows it, or will
                await self.clock.wait_for(task.remote(process), _END_SECONDS, f"{process} to be killed")
        ray.kill(self.handle, no_restart=True)

    async def _answer(self, reference: Any, seconds: float, what: str) -> Any:
        """Return what the actor's method returns.

        Raises:
            JackfieldError: What it raises; ``RunError`` naming the worker for any other exception; ``WorkerLost`` when
                the actor died; ``DeadlineExceeded``.
        """
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        name = self.spec.name
        try:
            return await self.clock.wait_for(reference, seconds, f"{name} {what}")
        except (asyncio.CancelledError, DeadlineExceeded):
            if ray.is_initialized():  # Ray would start a cluster in order to cancel
                with suppress(RayError):
                    ray.cancel(reference)
            raise
        except RayTaskError as error:
            if isinstance(error.cause, JackfieldError):
                raise error.cause from None
            found = f"{name} raised {type(error.cause).__name__}: {error.cause}"
            raise RunError(found, where=name, fix="the traceback is in error.txt") from error
        except RayActorError as error:
            raise _death(name, name, _reason(str(error))) from None


def _kill_if_stopped(process: Process) -> None:
    if not process.can_run():
        process.kill()


async def connect_worker(address: Address, name: str, client: str, clock: Clock, *, kills: bool = False) -> Connection:
    """Connect to a worker; after its death calls raise ``WorkerLost``.

    Args:
        address: where it is served.
        name: of the worker.
        client: name of this process, for the worker.
        clock: Time source for all waits and deadlines.
        kills: whether a worker that sends no heartbeats is killed: the controller does, and says why it died.
    """

    def lost(reason: str) -> JackfieldError:
        return _death(name, f"{name}, {address.process}", f"it {reason}")

    return await connect(address, client, clock, {}, lost_error=lost, kills=kills)


def _death(name: str, where: str, found: str) -> WorkerLost:
    fix = "look at the worker's log in Ray's session folder; lack of memory is the usual reason"
    return WorkerLost(f"{name} died", where=where, found=found, fix=fix)


def _reason(text: str) -> str:
    """Return the line of Ray's explanation that says why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "creation task" in text:
        return lines[-1][:300]
    telling = [line for line in lines if "exit" in line.lower() or "dead" in line.lower()]
    return (telling or lines or ["no reason is known"])[0][:300]
