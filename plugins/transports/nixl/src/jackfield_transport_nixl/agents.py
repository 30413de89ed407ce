"""NIXL's agent: registered memory in pieces that are used again, and transfers to and from that of peers.

An agent is not made for several threads, and a transfer has to be asked whether it is done: so each agent has a thread
of its own, which does everything with it and copies outside of Python's lock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
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
_PAUSE_SECONDS = 5e-5  #: between two looks at a transfer that is under way
_PROGRESS_SECONDS = 5e-4  #: between two looks at what peers want

if "NIXL_LOG_LEVEL" not in os.environ:
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it speaks on standard output


@attrs.frozen
class Place:
    """Bytes in the memory of an agent."""

    address: int
    size: int
    device: int = 0  #: of a GPU
    memory: str = "DRAM"  #: or ``VRAM``

    def part(self, start: int, size: int) -> Place:
        """Some of these bytes."""
        return attrs.evolve(self, address=self.address + start, size=size)


def place_of(tensor: torch.Tensor) -> Place:
    """Where a contiguous tensor lies."""
    host = tensor.device.type == "cpu"
    return Place(tensor.data_ptr(), tensor.nbytes, 0 if host else tensor.get_device(), "DRAM" if host else "VRAM")


def devices_of(devices: str | None, host: str) -> str | None:
    """The network devices that UCX may use: those of the settings, or loopback alone where ``host`` is loopback."""
    return "lo" if devices is None and host in {"127.0.0.1", "::1", "localhost"} else devices


class Agent:
    """One agent over UCX; :meth:`close` leaves nothing of it."""

    def __init__(self, devices: str | None) -> None:
        """Have UCX use these devices; None: all."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nixl")
        self._stopped = threading.Event()
        self._asked = threading.Event()  #: there is something to do
        self._registered: dict[tuple[int, int], Any] = {}  #: by address and size
        self._agent: Any = None
        self._lock = threading.Lock()
        self._needed = self._answering = False
        self.devices = devices

    def start(self) -> Future[None]:
        """Make the agent.

        The future raises OSError where UCX cannot work with the devices.
        """
        return self._do(self._make)

    def _make(self) -> None:
        settings = {} if self.devices is None else {"engine_config": f"NET_DEVICES={self.devices}"}
        # its own thread would turn all the time; a name that nobody else has
        agent = nixl_agent(secrets.token_hex(8), nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend(_BACKEND, settings)
        self._agent = agent

    def metadata(self) -> Future[bytes]:
        """Return what a peer has to know of this agent and its registered memory."""
        return self._do(self.metadata_now)

    def metadata_now(self) -> bytes:
        """Do the same in this agent's thread."""
        return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> Future[str]:
        """Know a peer; or more memory of a peer that is known. Returns its name."""
        return self._do(lambda: self.meet_now(metadata))

    def meet_now(self, metadata: bytes) -> str:
        """Do the same in this agent's thread."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, name: str) -> Future[None]:
        """Know a peer no longer."""
        return self._do(lambda: self._agent.remove_remote_agent(name))

    def register(self, tensor: torch.Tensor) -> Future[None]:
        """Let a tensor's memory be read, and read into; it has to be kept until it is released."""
        return self._do(lambda: self.register_now(tensor))

    def register_now(self, tensor: torch.Tensor) -> None:
        """Do the same in this agent's thread, once."""
        place = tensor.data_ptr(), tensor.nbytes
        if place not in self._registered:
            self._registered[place] = self._agent.register_memory(tensor, backends=[_BACKEND])

    def release(self, tensor: torch.Tensor) -> Future[None]:
        """Registered memory is not read any more."""
        return self._do(lambda: self.release_now(tensor))

    def release_now(self, tensor: torch.Tensor) -> None:
        """Do the same in this agent's thread."""
        found = self._registered.pop((tensor.data_ptr(), tensor.nbytes), None)
        if found is not None:
            self._agent.deregister_memory(found, backends=[_BACKEND])

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Do something in this agent's thread, after what was asked before."""
        return self._do(work)

    def read_now(self, name: str, theirs: Place, ours: Place) -> None:
        """Copy bytes of a peer into memory of this process; in this agent's thread. As :meth:`move_now`."""
        self.move_now("READ", name, [theirs], [ours])

    def move_now(
        self, way: Literal["READ", "WRITE"], name: str, theirs: Sequence[Place], ours: Sequence[Place]
    ) -> None:
        """Copy bytes from a peer's registered memory to ours (``READ``), or back; in this agent's thread.

        Both are as many places, of the same sizes, and each all of one sort.

        Raises:
            OSError: the peer has gone, or the agent is closed.
        """
        agent = self._agent
        here, there = (
            agent.get_xfer_descs([(place.address, place.size, place.device) for place in places], places[0].memory)
            for places in (ours, theirs)
        )
        handle = agent.initialize_xfer(way, here, there, name, backends=[_BACKEND])
        state = agent.transfer(handle)
        while state == "PROC" and not self._stopped.wait(_PAUSE_SECONDS):
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise OSError("the transfer was given up" if state == "PROC" else "the transfer failed")
        handle.release()

    def progress(self, needed: bool = True) -> None:
        """Answer peers from now on, or not: some ways of moving, and each first one, need an answer from here."""
        with self._lock:
            self._needed = needed
            if needed and not self._answering:
                self._answering = True
                self._thread.submit(self._answer)

    def _answer(self) -> None:
        """Once; and again after what else there is to do."""
        with self._lock:
            if self._stopped.is_set() or not self._needed:
                self._answering = False
                return
        self._agent.get_new_notifs()
        self._asked.wait(_PROGRESS_SECONDS)
        self._asked.clear()  # it is in the queue before this thread's next turn
        self._thread.submit(self._answer)

    def _do(self, work: Callable[[], T]) -> Future[T]:
        future = self._thread.submit(self._cleanly, work)
        self._asked.set()
        return future

    @staticmethod
    def _cleanly(work: Callable[[], T]) -> T:
        """Errors without NIXL's frames: these would keep the agent, its sockets and its memory."""
        try:
            return work()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        raise OSError(text)

    def close(self) -> None:
        """Let everything go; transfers that are under way are given up. Blocks for milliseconds."""
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
    """Memory that was registered at once."""

    number: int
    memory: torch.Tensor  #: uint8
    free: list[tuple[int, int]]  #: start and size, in order

    def take(self, size: int) -> int | None:
        """The start of a free piece, the first that fits."""
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
    """All regions of one agent. Methods are for one event loop, but for :meth:`give`."""

    def __init__(self, agent: Agent, device: str, region_bytes: int, max_bytes: int, waits: bool = True) -> None:
        """A block larger than a region has one of its own; with ``waits``, what exceeds ``max_bytes`` has to wait."""
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
        """A block of so many bytes; None where that has to wait. Raises ``OSError``: memory cannot be registered."""
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
        """Whether one more region may be made; those that are not used make room for it."""
        wanted = max(size, self._region_bytes)
        for region in [region for region in self.regions.values() if region.unused]:
            if self.bytes + wanted <= self._max_bytes:
                break
            del self.regions[region.number]
            await asyncio.wrap_future(self._agent.release(region.memory))
        return not self._waits or not self.regions or self.bytes + wanted <= self._max_bytes

    async def _new(self, size: int) -> Region:
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        await asyncio.wrap_future(self._agent.register(memory))
        region = self.regions[self._made] = Region(self._made, memory, [(0, size)])
        self._made += 1
        return region

    def give(self, block: Block) -> None:
        """A block is free again; from any thread."""
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
