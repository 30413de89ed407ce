"""The actor that holds a worker: it makes it in its own process, when it is told how, and forwards calls to it."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import inspect
import ipaddress
import itertools
import os
import platform
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import attrs

from jackfield.abc.rollout import GenerateRequest
from jackfield.clock import Clock
from jackfield.errors import WorkerLost
from jackfield.imports import collection_paused, own_process
from jackfield.queue import BatchMeta
from jackfield.rpc import Process
from jackfield.runtime.agent_worker import RolloutJob
from jackfield.workers.health import cause_of_death

__all__ = ["Host", "Place", "Sign", "interface_of"]

_SIOCGIFADDR = 0x8915  #: of Linux: an interface's address


@attrs.frozen(kw_only=True)
class Place:
    """Where a worker turned out to live: its part of the handshake."""

    pid: int
    address: str  #: of its node
    port: int  #: free there, at the moment
    versions: Mapping[str, str | None]  #: of python, jackfield, ray


@attrs.frozen(kw_only=True)
class Sign:
    """What a process says of itself when it is asked for a heartbeat."""

    process: Process
    node: str  #: Ray's id of its node
    ready: bool  #: whether its worker was made; until then it imports what it needs, and has the deadline of a start
    doing: tuple[str, ...]  #: calls that its worker has not answered, with what they are about


class Host:
    """Lives in an actor. It has one worker at a time: another may be made once the first has ended."""

    def __init__(self, name: str, folder: str, one_thread: bool) -> None:
        """
        Args:
            name: of the worker.
            folder: the controller's working directory, against which paths in the configuration stand.
            one_thread: whether what the worker does in threads goes through one, in order.
        """
        self._name = name
        self._one_thread = one_thread
        self._worker: Any = None
        self._making = asyncio.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._doing: dict[int, str] = {}
        self._calls = itertools.count()
        own_process()
        _outlive_sigterm()
        if os.path.isdir(folder):
            os.chdir(folder)

    async def place(self) -> Place:
        """Where this is."""
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        versions = {"python": platform.python_version(), **{name: _version(name) for name in ("jackfield", "ray")}}
        return Place(pid=os.getpid(), address=address, port=port, versions=versions)

    async def heartbeat(self) -> Sign:
        """Say that this process lives."""
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return Sign(
            process=attrs.evolve(Process.of(os.getpid()), host=f"node {address}"),
            node=ray.get_runtime_context().get_node_id(),
            ready=self._worker is not None,
            doing=tuple(self._doing.copy().values()),
        )

    async def make(self, make: bytes) -> None:
        """Make the worker, if it is not there.

        Args:
            make: as Ray's ``cloudpickle`` writes it: what makes the worker, or a coroutine that does.
        """
        from ray import cloudpickle

        async with self._making:
            if self._worker is not None:
                return
            if self._one_thread and self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jackfield-compute")
                asyncio.get_running_loop().set_default_executor(self._pool)
            with collection_paused():
                made = cloudpickle.loads(make)()
                self._worker = await made if inspect.isawaitable(made) else made

    async def call(self, member: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a method of the worker, or read an attribute; dots lead to its parts.

        Raises:
            WorkerLost: Ray has started this process again, and there is no worker yet.
        """
        target = self._worker
        if target is None:
            raise self._lost()
        for part in member.split("."):
            target = getattr(target, part)
        number = next(self._calls)
        self._doing[number] = _described(member, arguments)
        try:
            result = target(*arguments, **keywords) if callable(target) else target
            return await result if inspect.isawaitable(result) else result
        finally:
            del self._doing[number]

    async def serve(self, member: str, arguments: tuple[Any, ...]) -> Any:
        """The same as :meth:`call`, of a rollout server.

        A server that fails and is not healthy any more (a process of its own has died) ends with this process, so that
        its death is one of those that everybody knows of.
        """
        server = self._worker
        try:
            return await self.call(member, arguments, {})
        except Exception as error:
            state = None if server is None else await cause_of_death(server, Clock(), self._name, error)
            if state is not None and server is self._worker:
                print(f"{self._name} is not healthy: {state}; after: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            raise

    async def live(self) -> None:
        """Never returns: whoever waits for it learns of the death of this process at once.

        Raises:
            WorkerLost: Ray has started this process again, and there is no worker yet.
        """
        if self._worker is None:
            raise self._lost()
        await asyncio.Event().wait()

    async def end(self) -> None:
        """Let the worker put its things away, if it has any."""
        async with self._making:
            close: Callable[[], Awaitable[None]] | None = getattr(self._worker, "close", None)
            self._worker = None
            if close is not None:
                await close()
            del close
            gc.unfreeze()  # it was made with the imports
            gc.collect()  # its memory is the next one's

    def _lost(self) -> WorkerLost:
        return WorkerLost(f"{self._name} died", where=self._name, found="its process was started again")


def _outlive_sigterm() -> None:
    """Have SIGTERM do nothing here: it asks the run to end, which needs its workers for the last checkpoint.

    Ray would end this process, and schedulers send the signal to every process. The handler is a function without
    effects, which other than ``SIG_IGN`` is not inherited by what this process starts: that hears the signal.
    """
    libc = ctypes.CDLL(None)  # Python would want the main thread for this
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(int(signal.SIGTERM), ctypes.cast(libc.abs, ctypes.c_void_p))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _described(member: str, arguments: tuple[Any, ...]) -> str:
    """A call with the request, run or rows that it is about."""
    subjects = filter(None, map(_subject, arguments))
    return " ".join([member, *list(subjects)[:1]])


def _subject(argument: Any) -> str:
    if isinstance(argument, GenerateRequest):
        return argument.request_id
    if isinstance(argument, RolloutJob):
        return f"sample {argument.id}"
    keys = argument.keys if isinstance(argument, BatchMeta) else argument
    if not isinstance(keys, list | tuple) or not keys or not isinstance(keys[0], str):
        return ""
    return f"sample {keys[0]}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")


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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
