"""The actor that holds a worker: it makes the worker in its own process, and serves it by the RPC."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import ipaddress
import os
import platform
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TypeAlias

import attrs

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult
from jackfield.clock import Clock
from jackfield.imports import collection_paused, own_process
from jackfield.routing.health import cause_of_death
from jackfield.rpc import Address, Server, Service
from jackfield.runtime.process.host import ROLLOUT

_SIOCGIFADDR = 0x8915  #: of Linux: an interface's address

#: Makes a worker and returns what is served of it; the stack is closed when the worker has to end.
MakeServices: TypeAlias = Callable[[AsyncExitStack], Awaitable[Mapping[str, Service]]]


@attrs.frozen(kw_only=True)
class Place:
    """Where a worker turned out to live: its part of the handshake."""

    pid: int
    node: str  #: Ray's id of it
    address: str  #: of its node
    port: int  #: free there, at the moment
    versions: Mapping[str, str | None]  #: of python, jackfield, ray


class Host:
    """Lives in an actor. It has one worker at a time: another may be made once the first has ended."""

    _emptied = False  # whether a worker has ended here

    def __init__(self, name: str, folder: str, one_thread: bool, heartbeat_seconds: float) -> None:
        """
        Args:
            name: of the worker.
            folder: the controller's working directory, against which paths in the configuration stand.
            one_thread: whether what the worker does in threads goes through one, in order.
            heartbeat_seconds: after which clients take this process for dead.
        """
        self._name, self._one_thread, self._heartbeat_seconds = name, one_thread, heartbeat_seconds
        self._lock = asyncio.Lock()
        self._served: Address | None = None
        self._stack = AsyncExitStack()
        own_process()
        _outlive_sigterm()
        if os.path.isdir(folder):
            os.chdir(folder)

    async def place(self) -> Place:
        """Return where this is, once the memory of an earlier worker is free for the next one's."""
        import ray

        if self._emptied:
            gc.unfreeze()  # the earlier worker was made with the imports
            gc.collect()
        address, node = _node_address(), ray.get_runtime_context().get_node_id()
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        versions = {"python": platform.python_version(), **{name: _version(name) for name in ("jackfield", "ray")}}
        return Place(pid=os.getpid(), node=node, address=address, port=port, versions=versions)

    async def make(self, make: bytes) -> Address:
        """Make the worker, if it is not there, and return where it is served.

        Args:
            make: as Ray's ``cloudpickle`` writes it: a :data:`MakeServices`.
        """
        from ray import cloudpickle

        async with self._lock:
            if self._served is None:
                if self._one_thread:
                    self._one_thread, pool = False, ThreadPoolExecutor(1, thread_name_prefix="jackfield-compute")
                    asyncio.get_running_loop().set_default_executor(pool)
                with collection_paused():
                    services = await cloudpickle.loads(make)(self._stack)
                server = Server(self._name, services, Clock(), self._heartbeat_seconds, watches=False)
                self._stack.push_async_callback(server.close)
                served, node = await server.listen(_node_address()), f"node {_node_address()}"
                self._served = attrs.evolve(served, process=attrs.evolve(served.process, host=node))
            return self._served

    async def end(self) -> None:
        """Let the worker put its things away, if it has any."""
        async with self._lock:
            self._served = None
            await self._stack.aclose()
            self._emptied = True


def rollout_service(server: BaseRolloutServer, name: str) -> Service:
    """Return the service of a replica whose process ends once it fails a request and is not healthy any more."""
    return Service(target=_Mortal(server, name), contract=ROLLOUT)


class _Mortal:
    """A replica. When it is broken (a process of its own has died), its death is that of this process."""

    def __init__(self, server: BaseRolloutServer, name: str) -> None:
        self._server, self._name = server, name
        for method in ROLLOUT:
            if method.name != "generate":
                setattr(self, method.name, getattr(server, method.name))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample."""
        try:
            return await self._server.generate(request)
        except Exception as error:
            state = await cause_of_death(self._server, Clock(), self._name, error)
            if state is not None:
                print(f"{self._name} is not healthy: {state}; after: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            raise


def _outlive_sigterm() -> None:
    """Have SIGTERM do nothing here: it asks the run to end, which needs its workers for the last checkpoint.

    Ray would end this process, and schedulers send the signal to every process. The handler is a function without
    effects, which other than ``SIG_IGN`` is not inherited by what this process starts: that hears the signal.
    """
    libc = ctypes.CDLL(None)  # Python would want the main thread for this
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(int(signal.SIGTERM), ctypes.cast(libc.abs, ctypes.c_void_p))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; the loopback one for any of its addresses. Linux only."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo" if "lo" in (name for _, name in socket.if_nameindex()) else None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
