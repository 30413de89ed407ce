"""Reusable pieces of shared memory: the first touch of a page costs many times a copy into it.

Where the system can, an arena consists of huge pages, mapped as such by producer and readers: the first touch then
costs less, and copies and reads are faster, because the processor looks up fewer addresses.

An arena is a ``memfd``: it has no name that could be left behind when processes are killed. Others open it through
``/proc/PID/fd``, which the system allows to processes of the same user, and keep it while they need it, also when its
maker is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import attrs

from jackfield.errors import QueueError
from jackfield.sdk.buckets import aligned

_ARENA_BYTES = 64 * 2**20  #: larger blocks have an arena of their own
_HUGE = 2**21  #: bytes of a huge page
_COLLAPSE = 25  #: MADV_COLLAPSE: make huge pages now, whatever the system's setting for shared memory
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def mapped(descriptor: int, size: int, writable: bool) -> tuple[memoryview, int]:
    """Map a file to where huge pages fit, which ``mmap`` alone does not see to; return its bytes and their address."""
    reserved = mmap.mmap(-1, size + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # its end unmaps the file, too
    place = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    start = -place % _HUGE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(place + start, size, protection, flags, descriptor, 0) != place + start:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    view = memoryview(reserved)[start : start + size]
    return view if writable else view.toreadonly(), place + start


def place_of_this_process() -> str:
    """Return host, process namespace and user. Processes of one place can open each other's memory."""
    if not hasattr(os, "memfd_create"):
        return ""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}:{os.stat('/proc/self/ns/pid').st_ino}:{os.getuid()}"


def has_ended(process: int, milliseconds: int = 0) -> bool:
    """Return whether the process of a ``pidfd`` ends within ``seconds``: its files are closed a moment earlier."""
    poller = select.poll()
    poller.register(process, select.POLLIN)
    return bool(poller.poll(milliseconds))


class ForeignArena:
    """Another process's arena, opened read-only: a write is a segmentation fault and changes nothing."""

    def __init__(self, block: Sequence[int]) -> None:
        """Open the arena of a message; ``OSError`` if it is gone or belongs to another user."""
        pid, descriptor, self.size, self.device, self.inode, _ = block
        self._descriptor = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if (status.st_dev, status.st_ino) != (self.device, self.inode) or status.st_size < self.size:
            self.close()
            raise FileNotFoundError("another file is there")
        self.blocks = 0  #: that a unit needs

    @cached_property
    def _mapped(self) -> tuple[memoryview, int]:
        return mapped(self._descriptor, self.size, writable=False)

    @property
    def view(self) -> memoryview:
        """Return the bytes of the mapped file."""
        return self._mapped[0]

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return self._mapped[1]

    def entry(self, start: int) -> list[int]:
        """Return the entry of a block, for readers who open the arena here."""
        return [os.getpid(), self._descriptor, self.size, self.device, self.inode, start]


class Held:
    """Bytes that tensors show. Once the last such tensor is gone, ``gone`` is called."""

    def __init__(self, memory: Any, address: int, size: int, gone: Callable[[], object]) -> None:
        """``memory`` keeps ``size`` bytes at ``address`` there; ``gone`` is called from any thread."""
        self._memory = memory
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        weakref.finalize(self, gone).atexit = False

    def tensor(self) -> Any:
        """Return the bytes as uint8 ``[size]``."""
        import numpy as np
        import torch

        return torch.from_numpy(np.asarray(self))


@attrs.define(eq=False)
class Arena:
    """Memory of this process that others read."""

    descriptor: int
    size: int
    memory: memoryview
    address: int
    identity: tuple[int, int]  #: device and inode
    free: list[tuple[int, int]]  #: start and size, in order
    backed: int = 0  #: bytes from the start that have had memory

    @classmethod
    def make(cls, size: int) -> Arena:
        """Create an arena; ``queue.full`` if the system has no memory."""
        descriptor = os.memfd_create("jackfield-samples", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            memory, address = mapped(descriptor, size, writable=True)
        except OSError as error:
            os.close(descriptor)
            raise QueueError(
                f"shared memory cannot be had: {error}", code="queue.full", expected=f"{size} bytes"
            ) from error
        status = os.fstat(descriptor)
        arena = cls(descriptor, size, memory, address, (status.st_dev, status.st_ino), [(0, size)])
        weakref.finalize(arena, os.close, descriptor)
        return arena

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
        return self.free == [(0, self.size)]


@attrs.frozen(eq=False)
class Block:
    """A piece of an arena."""

    arena: Arena
    start: int
    size: int

    @property
    def address(self) -> int:
        return self.arena.address + self.start

    def back(self) -> None:
        """Give the block huge pages if it is the first at its place; it gets others as it is written otherwise."""
        arena, begin = self.arena, self.arena.backed
        end = min(-(-(self.start + self.size) // _HUGE) * _HUGE, arena.size)
        if begin < end:
            arena.memory[begin:end:_HUGE].tobytes()  # only what has a page becomes a huge one
            _libc.madvise(arena.address + begin, end - begin, _COLLAPSE)
            arena.backed = end

    @property
    def name(self) -> tuple[int, int]:
        """Return inode and start, the block's name in messages."""
        return self.arena.identity[1], self.start

    @property
    def entry(self) -> list[int]:
        """Return the block's entry in messages."""
        return [os.getpid(), self.arena.descriptor, self.arena.size, *self.arena.identity, self.start]


class Arenas:
    """All arenas of one process. They are freed after this object, once they have no readers."""

    def __init__(self, max_bytes: int) -> None:
        """Create them. Only a single block larger than ``max_bytes`` may exceed that total."""
        self._max_bytes = max_bytes
        self._arenas: list[Arena] = []
        self._returned: deque[Block] = deque()

    def take(self, size: int) -> Block | None:
        """Return a block of ``size`` bytes, or None if it must wait."""
        while self._returned:
            block = self._returned.popleft()
            block.arena.give(block.start, block.size)
        size = aligned(max(size, 1))
        for arena in self._arenas:
            if (start := arena.take(size)) is not None:
                return Block(arena, start, size)
        needed = max(size, min(_ARENA_BYTES, self._max_bytes))
        if self.bytes + needed > self._max_bytes:
            self._arenas = [arena for arena in self._arenas if not arena.unused]
            if self._arenas and self.bytes + needed > self._max_bytes:
                return None
        arena = Arena.make(needed)
        self._arenas.append(arena)
        start = arena.take(size)
        assert start is not None
        return Block(arena, start, size)

    def give(self, block: Block) -> None:
        """Free a block, from any thread."""
        self._returned.append(block)

    @property
    def bytes(self) -> int:
        """Return the bytes of all arenas."""
        return sum(arena.size for arena in self._arenas)
