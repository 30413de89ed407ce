"""NIXL's agent: reusable pieces of registered memory, and transfers to and from peers' memory.

An agent is not thread-safe, and transfers must be polled. So each agent has its own thread, which makes all calls and
copies outside of Python's lock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import attrs
import torch
from nixl import nixl_agent, nixl_agent_config

from jackfield.sdk.buckets import aligned

T = TypeVar("T")

_BACKEND = "UCX"
_SPIN_SECONDS = 0.02  #: of polling a transfer within the host, where polling is what copies the bytes
_PAUSE_SECONDS = 5e-5  #: between two polls of another transfer
_PROGRESS_SECONDS = 5e-4  #: between two polls of peers' requests

if "NIXL_LOG_LEVEL" not in os.environ:
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints to standard output


@attrs.frozen
class Place:
    """Bytes in the memory of an agent."""

    address: int
    size: int
    device: int = 0  #: of a GPU
    memory: str = "DRAM"  #: or ``VRAM``

    def part(self, start: int, size: int) -> Place:
        """Return a part of these bytes."""
        return attrs.evolve(self, address=self.address + start, size=size)


def place_of(tensor: torch.Tensor) -> Place:
    """Return the place of a contiguous tensor."""
    host = tensor.device.type == "cpu"
    return Place(tensor.data_ptr(), tensor.nbytes, 0 if host else tensor.get_device(), "DRAM" if host else "VRAM")


def devices_of(devices: str | None, host: str) -> str | None:
    """Return the network devices for UCX: the setting's, or only loopback if ``host`` is loopback."""
    return "lo" if devices is None and host in {"127.0.0.1", "::1", "localhost"} else devices


class Agent:
    """One agent over UCX; :meth:`close` releases everything.

    Methods with access to NIXL run in the agent's thread: call them by :meth:`run`.
    """

    def __init__(self, devices: str | None) -> None:
        """Let UCX use these devices; None: all."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nixl")
        self._stopped = threading.Event()
        self._asked = threading.Event()  #: there is something to do
        self._registered: dict[tuple[int, int], Any] = {}  #: by address and size
        self._agent: Any = None
        self._lock = threading.Lock()
        self._needed = self._answering = False
        self.devices = devices

    def start(self) -> Future[None]:
        """Make the agent; the future raises ``OSError`` if UCX cannot work with the devices."""
        return self.run(self._make)

    def _make(self) -> None:
        settings = {} if self.devices is None else {"engine_config": f"NET_DEVICES={self.devices}"}
        # its own thread would turn all the time; a name that nobody else has
        agent = nixl_agent(secrets.token_hex(8), nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend(_BACKEND, settings)
        self._agent = agent

    def run(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function in the agent's thread, after earlier calls."""
        future = self._thread.submit(self._cleanly, work, *arguments)
        self._asked.set()
        return future

    def metadata(self) -> bytes:
        """Return the metadata that peers need for this agent and its registered memory."""
        return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """Add a peer, or more memory of a known peer; return its name."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, name: str) -> None:
        """Remove a peer."""
        self._agent.remove_remote_agent(name)

    def register(self, tensor: torch.Tensor) -> None:
        """Register a tensor's memory for transfers, once; the tensor must live until it is released."""
        place = tensor.data_ptr(), tensor.nbytes
        if place not in self._registered:
            self._registered[place] = self._agent.register_memory(tensor, backends=[_BACKEND])

    def release(self, tensor: torch.Tensor) -> None:
        """Deregister a tensor's memory."""
        found = self._registered.pop((tensor.data_ptr(), tensor.nbytes), None)
        if found is not None:
            self._agent.deregister_memory(found, backends=[_BACKEND])

    def move(self, way: Literal["READ", "WRITE"], name: str, theirs: Sequence[Place], ours: Sequence[Place]) -> None:
        """Copy bytes from a peer's registered memory to ours (``READ``), or back.

        Both lists have places of the same sizes and one kind of memory each. Raises ``OSError`` if the peer is gone, or
        the agent is closed.
        """
        agent = self._agent
        here, there = (
            agent.get_xfer_descs([(place.address, place.size, place.device) for place in places], places[0].memory)
            for places in (ours, theirs)
        )
        handle = agent.initialize_xfer(way, here, there, name, backends=[_BACKEND])
        state = agent.transfer(handle)
        spins_until = time.monotonic() + (_SPIN_SECONDS if self.devices == "lo" else 0.0)
        while state == "PROC" and not self._stopped.is_set():
            if time.monotonic() > spins_until:
                self._stopped.wait(_PAUSE_SECONDS)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise OSError("the transfer was given up" if state == "PROC" else "the transfer failed")
        handle.release()

    def progress(self, needed: bool = True) -> None:
        """Switch answers to peers on or off: first transfers, and some kinds of transfers, need them."""
        with self._lock:
            self._needed = needed
            if needed and not self._answering:
                self._answering = True
                self._thread.submit(self._answer)

    def _answer(self) -> None:
        """Answer once, and again after other queued work."""
        with self._lock:
            if self._stopped.is_set() or not self._needed:
                self._answering = False
                return
        self._agent.get_new_notifs()
        self._asked.wait(_PROGRESS_SECONDS)
        self._asked.clear()  # it is in the queue before this thread's next turn
        self._thread.submit(self._answer)

    @staticmethod
    def _cleanly(work: Callable[..., T], *arguments: Any) -> T:
        """Strip NIXL's frames from errors: they would keep the agent, its sockets and its memory."""
        try:
            return work(*arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        raise OSError(text)

    def close(self) -> None:
        """Release everything and abandon running transfers. Blocks for milliseconds."""
        self._stopped.set()
        self._thread.submit(self._drop)
        self._asked.set()
        self._thread.shutdown()

    def _drop(self) -> None:
        for registered in self._registered.values():
            self._agent.deregister_memory(registered, backends=[_BACKEND])
        self._registered.clear()
        self._agent = None


@attrs.define(eq=False)
class Region:
    """Memory that was registered as one piece."""

    number: int
    memory: torch.Tensor  #: uint8
    free: list[tuple[int, int]]  #: start and size, in order

    def take(self, size: int) -> int | None:
        """Return the start of the first free piece that fits."""
        for index, (start, length) in enumerate(self.free):
            if length >= size:
                self.free[index : index + 1] = [(start + size, length - size)] if length > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """A piece is free again."""
        insort(self.free, (start, size))
        merged: list[tuple[int, int]] = []
        for begin, length in self.free:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self.free = merged

    @property
    def unused(self) -> bool:
        return self.free == [(0, self.memory.numel())]


@attrs.define(eq=False)
class Block:
    """A piece of a region."""

    region: Region
    start: int
    size: int
    uses: int = 0  #: by cells, readers and checkpoints, where somebody counts them

    @property
    def bytes(self) -> torch.Tensor:
        """Return the memory, uint8 ``[size]``."""
        return self.region.memory[self.start : self.start + self.size]

    @property
    def place(self) -> Place:
        """For a transfer."""
        return place_of(self.region.memory).part(self.start, self.size)


class Regions:
    """All regions of one agent. Methods except :meth:`give` belong to one event loop."""

    def __init__(self, agent: Agent, device: str, region_bytes: int, max_bytes: int, waits: bool = True) -> None:
        """Create it. A block larger than a region gets its own; with ``waits``, blocks above ``max_bytes`` wait."""
        self._agent = agent
        self._device = device
        self._region_bytes = region_bytes
        self._max_bytes = max_bytes
        self._waits = waits
        self._returned: deque[Block] = deque()
        self._made = 0
        self._making = asyncio.Lock()
        self.regions: dict[int, Region] = {}

    @property
    def bytes(self) -> int:
        """Return the number of registered bytes."""
        return sum(region.memory.numel() for region in self.regions.values())

    async def take(self, size: int) -> Block | None:
        """Return a block of ``size`` bytes, or None if it must wait; ``OSError`` if registering fails."""
        size = aligned(max(size, 1))
        async with self._making:
            found = self._found(size)
            if found is None and await self._room(size):
                region = await self._new(max(size, self._region_bytes))
                start = region.take(size)
                assert start is not None
                found = Block(region, start, size)
        return found

    def _found(self, size: int) -> Block | None:
        while self._returned:
            block = self._returned.popleft()
            block.region.give(block.start, block.size)
        for region in self.regions.values():
            start = region.take(size)
            if start is not None:
                return Block(region, start, size)
        return None

    async def _room(self, size: int) -> bool:
        """Return whether another region may be created; unused ones are released for it."""
        wanted = max(size, self._region_bytes)
        for region in [region for region in self.regions.values() if region.unused]:
            if self.bytes + wanted <= self._max_bytes:
                break
            del self.regions[region.number]
            await asyncio.wrap_future(self._agent.run(self._agent.release, region.memory))
        return not self._waits or not self.regions or self.bytes + wanted <= self._max_bytes

    async def _new(self, size: int) -> Region:
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        await asyncio.wrap_future(self._agent.run(self._agent.register, memory))
        region = self.regions[self._made] = Region(self._made, memory, [(0, size)])
        self._made += 1
        return region

    def give(self, block: Block) -> None:
        """Free a block, from any thread."""
        self._returned.append(block)


class _Held:
    """Bytes that are shown to torch."""

    def __init__(self, block: Block, size: int, gone: Callable[[], object]) -> None:
        self._block = block
        self.__array_interface__ = {
            "data": (block.place.address, False), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip
        weakref.finalize(self, gone).atexit = False


def shown(block: Block, size: int, gone: Callable[[], object]) -> Any:
    """The first bytes of a block in host memory, uint8 ``[size]``; once no tensor shows them any more, ``done`` is
    called, in any thread."""
    import numpy as np

    return torch.from_numpy(np.asarray(_Held(block, size, gone)))
