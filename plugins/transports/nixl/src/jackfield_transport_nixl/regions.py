"""Registered memory in pieces that are used again."""

from __future__ import annotations

import asyncio
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import torch

from jackfield_transport_nixl.agents import Agent, Place, place_of

_ALIGNMENT = 64  #: of each block, in bytes: a multiple of every dtype's size


def aligned(size: int) -> int:
    """So many bytes, and what is needed for the next ones to be aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


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
        """
        Args:
            agent: that registers them.
            device: of the memory.
            region_bytes: of a region; a block that is larger has one of its own.
            max_bytes: of all regions; exceeded for a single block that is larger,
            waits: and, without this, for what would have to wait otherwise.
        """
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
        """A block of so many bytes; None where that has to wait.

        Raises:
            OSError: memory cannot be registered.
        """
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
