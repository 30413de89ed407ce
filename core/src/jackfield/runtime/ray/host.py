"""The actor that holds a worker: it makes it at the first call, in its own process, and forwards calls to it."""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import ipaddress
import os
import platform
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import attrs

__all__ = ["Host", "Place", "interface_of"]

_SIOCGIFADDR = 0x8915  #: of Linux: an interface's address


@attrs.frozen(kw_only=True)
class Place:
    """Where a worker turned out to live: its part of the handshake."""

    pid: int
    address: str  #: of its node
    port: int  #: free there, at the moment
    versions: Mapping[str, str | None]  #: of python, jackfield, ray


class Host:
    """Lives in an actor. After a restart by Ray the worker is made anew."""

    def __init__(self, make: bytes, folder: str, one_thread: bool) -> None:
        """
        Args:
            make: as Ray's ``cloudpickle`` writes it: what makes the worker, or a coroutine that does; called with what
                :meth:`settle` was given.
            folder: the controller's working directory, against which paths in the configuration stand.
            one_thread: whether what the worker does in threads goes through one, in order.
        """
        from ray import cloudpickle

        self._make: Callable[..., Any] = cloudpickle.loads(make)
        self._one_thread = one_thread
        self._settled: dict[str, Any] = {}
        self._worker: Any = None
        self._making = asyncio.Lock()
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

    async def settle(self, **keywords: Any) -> None:
        """What the worker is told beside what :class:`Host` was made with."""
        self._settled = keywords

    async def ready(self) -> None:
        """Make the worker, if it is not there."""
        await self._get()

    async def call(self, member: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a method of the worker, or read an attribute; dots lead to its parts."""
        target = await self._get()
        for part in member.split("."):
            target = getattr(target, part)
        result = target(*arguments, **keywords) if callable(target) else target
        return await result if inspect.isawaitable(result) else result

    async def live(self) -> None:
        """Never returns: whoever waits for it learns of the death of this process at once."""
        await asyncio.Event().wait()

    async def end(self) -> None:
        """Let the worker put its things away, if it has any."""
        close: Callable[[], Awaitable[None]] | None = getattr(self._worker, "close", None)
        self._worker = None
        if close is not None:
            await close()

    async def _get(self) -> Any:
        async with self._making:
            if self._worker is None:
                if self._one_thread:
                    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jackfield-compute")
                    asyncio.get_running_loop().set_default_executor(pool)
                made = self._make(**self._settled)
                self._worker = await made if inspect.isawaitable(made) else made
        return self._worker


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
