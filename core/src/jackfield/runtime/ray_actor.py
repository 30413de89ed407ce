"""Processes of a Ray cluster. Ray places and starts each as an actor; everything else goes over connections to it."""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from types import SimpleNamespace

import attrs

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult
from jackfield.clock import Clock
from jackfield.errors import JackfieldError, WorkerLost
from jackfield.imports import own_process
from jackfield.routing import Replica
from jackfield.rpc import Address, Connection, Contract, Process, Server, Service, caller, connect
from jackfield.runtime.process import ROLLOUT, Host


@attrs.frozen(kw_only=True)
class Place:
    """Where a process runs."""

    node: str  #: Ray's id of the node
    address: str  #: address of the node
    port: int  #: a port that was free on the node
    versions: Mapping[str, str]  #: installed versions of jackfield and ray


class RayHost(Host):
    """The Ray actor, a host that listens for the controller and other workers."""

    def __init__(self, name: str, folder: str, one_thread: bool, heartbeat_seconds: float) -> None:
        """
        Args:
            name: Name of the worker.
            folder: The controller's working directory, which relative paths in the configuration start from.
            one_thread: Whether the worker's threaded calls share one thread and run in order.
            heartbeat_seconds: Silence after which clients consider this process dead.
        """
        super().__init__()
        self.services["host"] = Service(target=self, contract=RAY_HOST)
        self._one_thread = one_thread
        self._server = Server(name, self.services, Clock(), heartbeat_seconds, watches=False)
        own_process()
        _outlive_sigterm()
        if os.path.isdir(folder):
            os.chdir(folder)

    async def listen(self) -> Address:
        """Return where this process is served from now on. Only this method is called by Ray."""
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


RAY_HOST = Contract(RayHost, ["place", "make", "end"])


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


def kill_if_stopped(process: Process) -> None:
    """Kill a process of this machine that cannot react to Ray."""
    if not process.can_run():
        process.kill()


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
