"""Workers in Ray actors, in each of which a host makes a worker and serves it."""

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

_END_SECONDS = 15.0  #: for a worker to close its resources

unavailable = partial(RunError, code="cluster.unavailable")

#: Makes a worker and returns its services; the stack is closed when the worker has to end.
MakeServices: TypeAlias = Callable[[AsyncExitStack], Awaitable[Mapping[str, Service]]]


@attrs.frozen(kw_only=True)
class Place:
    """Where a worker's process runs, as it reports in the handshake."""

    pid: int
    node: str  #: Ray's id of the node
    address: str  #: address of the node
    port: int  #: a port that was free on the node
    versions: Mapping[str, str]  #: installed versions of jackfield and ray


class Host:
    """The Ray actor, which holds one worker at a time and can make another later."""

    def __init__(self, name: str, folder: str, one_thread: bool, heartbeat_seconds: float) -> None:
        """
        Args:
            name: Name of the worker.
            folder: The controller's working directory, which relative paths in the configuration start from.
            one_thread: Whether the worker's threaded calls share one thread and run in order.
            heartbeat_seconds: Silence after which clients consider this process dead.
        """
        self._name, self._one_thread, self._heartbeat_seconds = name, one_thread, heartbeat_seconds
        self._lock, self._stack = asyncio.Lock(), AsyncExitStack()
        own_process()
        _outlive_sigterm()
        if os.path.isdir(folder):
            os.chdir(folder)

    async def place(self) -> Place:
        """Free the memory of an earlier worker, and return where this process runs."""
        import ray

        gc.unfreeze()  # imports were frozen together with the earlier worker
        gc.collect()
        address = node_address()
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        node, versions = ray.get_runtime_context().get_node_id(), {each: version(each) for each in ("jackfield", "ray")}
        return Place(pid=os.getpid(), node=node, address=address, port=port, versions=versions)

    async def make(self, make: bytes) -> Address:
        """Make the worker, and return where it is served.

        Args:
            make: A :data:`MakeServices`, pickled by Ray's ``cloudpickle``.
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
        """End the worker, if there is one, and close its resources."""
        async with self._lock:
            await self._stack.aclose()


def rollout_service(server: BaseRolloutServer, name: str) -> Service:
    """Return a replica's service; the process exits if a failed request finds it unhealthy."""

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
    import psutil

    wanted = "127.0.0.1" if ipaddress.ip_address(address).is_loopback else address
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, has in interfaces if wanted in [each.address for each in has]), None)


def node_address() -> str:
    """Return the IP address of this process's node."""
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


@attrs.frozen(kw_only=True)
class WorkerSpec:
    """Describes which worker to start, and where."""

    name: str
    make: Callable[[], MakeServices]  #: returns the function that makes it; called once all processes are known
    group: Any = None  #: Ray placement group; None: anywhere
    bundle: int = 0  #: index of the bundle in the group
    resources: Mapping[str, float] = attrs.field(factory=dict)  #: what it takes from the bundle
    python: str | None = None  #: another interpreter, which :func:`check_interpreter` has accepted
    restarts: bool = False  #: a call that finds the worker dead restarts it; it is not watched otherwise


@attrs.define(eq=False)
class Actor:
    """A process of the cluster and the worker in it."""

    spec: WorkerSpec
    handle: Any  #: Ray's actor handle
    clock: Clock
    start_seconds: float  #: deadline for the process to start, and for the worker to be made
    place: Place = attrs.field(init=False)
    address: Address | None = attrs.field(default=None, init=False)  #: where the worker is served; None: there is none
    _connection: Connection | None = attrs.field(default=None, init=False)

    @property
    def connection(self) -> Connection:
        """Return the connection to the worker.

        Raises:
            WorkerLost: If the worker has not been made.
        """
        if self._connection is None:
            raise _death(self.spec.name, self.spec.name, "it was not made")
        return self._connection

    @property
    def lives(self) -> bool:
        """Return whether the worker has been made and is alive."""
        return self._connection is not None and not self._connection.lost.done()

    async def find(self) -> None:
        """Wait for the process, and compare its versions.

        Raises:
            RunError: ``cluster.unavailable`` if it has another version of Jackfield or Ray.
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
            JackfieldError: If making it raises this error in the process.
        """
        from ray import cloudpickle

        making = self.handle.make.remote(cast(Any, cloudpickle).dumps(self.spec.make()))
        self.address = address = cast(Address, await self._answer(making, self.start_seconds, "to be ready"))
        self._connection = await connect_worker(address, self.spec.name, "the controller", self.clock, kills=True)
        self._connection.lost.add_done_callback(self._forget)
        return address

    def _forget(self, lost: asyncio.Future[str]) -> None:
        address, self.address = self.address, None
        if address is not None and self.spec.restarts:  # the death of a watched worker is reported elsewhere
            log = logging.getLogger("jackfield")
            log.warning("%s (%s) died: it %s", self.spec.name, address.process, lost.result())

    async def empty(self) -> None:
        """End the worker, so that the process can make another.

        Raises:
            JackfieldError: If the worker has died or does not end in time.
        """
        self.address = None
        if self._connection is not None:
            if self._connection.lost.done():
                raise self._connection.error()
            await self._connection.close()
        await self._answer(self.handle.end.remote(), _END_SECONDS, "to end")

    async def kill(self) -> None:
        """End the process; a stopped one cannot react to Ray, so it is killed on its node."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        process = None if self._connection is None else self._connection.process
        if process is not None and process.is_near:
            _kill_if_stopped(process)
        elif process is not None:
            strategy = NodeAffinitySchedulingStrategy(self.place.node, soft=False)
            task = ray.remote(_kill_if_stopped).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
            with suppress(RayError, DeadlineExceeded):  # the node may be gone
                await self.clock.wait_for(task.remote(process), _END_SECONDS, f"{process} to be killed")
        ray.kill(self.handle, no_restart=True)

    async def _answer(self, reference: Any, seconds: float, what: str) -> Any:
        """Return the result of a call of the actor.

        Raises:
            JackfieldError: The call's own error; ``RunError`` with the worker's name for any other exception;
                ``WorkerLost`` if the actor died; ``DeadlineExceeded``.
        """
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        name = self.spec.name
        try:
            return await self.clock.wait_for(reference, seconds, f"{name} {what}")
        except (asyncio.CancelledError, DeadlineExceeded):
            if ray.is_initialized():  # otherwise Ray would start a cluster to cancel
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
    """Connect to a worker. After its death, calls raise ``WorkerLost``.

    Args:
        address: Where the worker is served.
        name: Name of the worker.
        client: Name of this process, for the worker's messages.
        clock: Time source for all waits and deadlines.
        kills: Whether to kill a worker that sends no heartbeats. The controller does, and reports why it died.
    """

    def lost(reason: str) -> JackfieldError:
        return _death(name, f"{name}, {address.process}", f"it {reason}")

    return await connect(address, client, clock, {}, lost_error=lost, kills=kills)


def _death(name: str, where: str, found: str) -> WorkerLost:
    fix = "look at the worker's log in Ray's session folder; lack of memory is the usual reason"
    return WorkerLost(f"{name} died", where=where, found=found, fix=fix)


def _reason(text: str) -> str:
    """Return the line of Ray's explanation that gives the cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "creation task" in text:
        return lines[-1][:300]
    telling = [line for line in lines if "exit" in line.lower() or "dead" in line.lower()]
    return (telling or lines or ["no reason is known"])[0][:300]
