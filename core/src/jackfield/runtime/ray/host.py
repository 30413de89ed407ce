"""The actor that holds a worker: it makes the worker in its own process, and serves it by the RPC."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from importlib.metadata import version
from types import SimpleNamespace
from typing import TypeAlias

import attrs

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult
from jackfield.clock import Clock
from jackfield.imports import collection_paused, own_process
from jackfield.routing.router import cause_of_death
from jackfield.rpc import Address, Server, Service
from jackfield.runtime.process import ROLLOUT

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
