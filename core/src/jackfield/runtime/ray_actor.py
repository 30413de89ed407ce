"""What runs in the processes of a Ray cluster: their host, and the service of the queue's backend."""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TypeAlias, cast

import attrs

from jackfield.abc.transfer_queue import GetRequest, GetResult, PutRequest, PutResult, TransferQueueBackend
from jackfield.clock import Clock
from jackfield.errors import JackfieldError, WorkerLost
from jackfield.imports import own_process
from jackfield.runtime.process import Host, MakeWorker
from jackfield.sdk.archive import batches
from jackfield.sdk.cells import join, split_request
from jackfield.sdk.rpc import Address, Connection, Contract, Process, Server, Service, caller, connect, stub

_PIECE_BYTES = 16 * 2**20  #: a message is complete once its values reach this size

_Sample: TypeAlias = dict[str, tuple[str, bytes]]  #: encoded cells by column


@attrs.frozen(kw_only=True)
class Place:
    """Where a process runs."""

    node: str  #: Ray's id of the node
    address: str  #: address of the node
    port: int  #: a port that was free on the node
    versions: Mapping[str, str]  #: installed versions of jackfield and ray


class RayHost(Host):
    """The Ray actor, a host that listens for the controller and other workers."""

    def __init__(self, make: MakeWorker, name: str, folder: str, one_thread: bool, heartbeat_seconds: float) -> None:
        """Create the host of the worker ``name``.

        Relative paths in the configuration start from ``folder``, the controller's working directory. With
        ``one_thread`` the worker's threaded calls share one thread and run in order. Clients consider the process dead
        after ``heartbeat_seconds`` without a heartbeat.
        """
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


@attrs.frozen
class _Samples:
    """The service that puts and gets samples in pieces of limited size."""

    _backend: TransferQueueBackend

    async def put(self, partition: str, keys: list[str], samples: list[_Sample]) -> int:
        """Store samples. Return the size of their values in bytes."""
        columns = {name: join(name, [sample[name] for sample in samples]) for name in samples[0]}
        stored = await self._backend.put(PutRequest(partition=partition, keys=tuple(keys), columns=columns))
        return stored.bytes

    async def get(self, request: GetRequest) -> AsyncIterator[list[_Sample]]:
        """Yield the samples in order, several at a time."""
        columns = (await self._backend.get(request)).columns
        numbers = tuple(map(str, range(len(request.keys))))
        for piece in _pieces(PutRequest(partition=request.partition, keys=numbers, columns=columns)):
            yield piece


_BACKEND = Contract(TransferQueueBackend, without=("put", "get", "close"))
_SAMPLES = Contract(_Samples)


def store_services(backend: TransferQueueBackend) -> dict[str, Service]:
    """Return the services of a process that holds a backend."""
    return {
        "backend": Service(target=backend, contract=_BACKEND),
        "samples": Service(target=_Samples(backend), contract=_SAMPLES),
    }


def remote_backend(connection: Connection, seconds: float) -> TransferQueueBackend:
    """Return a stub of the backend at the other end, with a deadline of ``seconds`` per call."""
    made: TransferQueueBackend = stub(connection, "backend", _BACKEND, TransferQueueBackend, seconds)  # type: ignore[type-abstract]
    samples = stub(connection, "samples", _SAMPLES, _Samples, seconds)

    async def put(request: PutRequest) -> PutResult:
        size, first = 0, 0
        for piece in _pieces(request):
            size += await samples.put(request.partition, list(request.keys[first : first + len(piece)]), piece)
            first += len(piece)
        return PutResult(bytes=size)

    async def get(request: GetRequest) -> GetResult:
        found = [sample async for piece in samples.get(request) for sample in piece]
        return GetResult(columns={name: join(name, [sample[name] for sample in found]) for name in request.columns})

    async def close() -> None:
        """Do nothing: the backend's own process closes it."""

    vars(made).update(put=put, get=get, close=close, durable=False, joins=False)
    return made


def _pieces(request: PutRequest) -> Iterator[list[_Sample]]:
    samples = cast(Sequence[_Sample], split_request(request))  # of any bytes-like objects
    return batches(samples, lambda sample: sum(len(content) for _, content in sample.values()), _PIECE_BYTES)
