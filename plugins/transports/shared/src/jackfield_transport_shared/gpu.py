"""Memory of a GPU that processes share by CUDA IPC. Its handle is 64 bytes, which travel as text.

The memory comes from the CUDA driver and not from torch's allocator, whose expandable segments have no handle.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from jackfield.errors import WeightsError

_LIBRARY, _LAZY = "libcuda.so.1", 1  #: the flag CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """The driver's handle of a piece of memory, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Driver:
    """The functions of the CUDA driver that are needed, on the GPU of one process."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._library = ctypes.CDLL(_LIBRARY)

    def _call(self, name: str, *arguments: Any) -> None:
        torch.cuda.synchronize(self.device)  # the driver needs torch's context in this thread
        status = getattr(self._library, name)(*arguments)
        if status:
            message = f"CUDA cannot share memory between processes: {name} returned {status}"
            fix = "use nccl or zmq; containers need a common IPC namespace"
            raise WeightsError(message, where=self.device, expected="0, success", found=status, fix=fix)

    def allocate(self, size: int) -> int:
        """Allocate memory, and return its address."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def free(self, pointer: int) -> None:
        """Free memory that was allocated here."""
        self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def handle(self, pointer: int) -> bytes:
        """Return the handle by which other processes open memory that was allocated here."""
        found = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(found), ctypes.c_uint64(pointer))
        return ctypes.string_at(ctypes.byref(found), 64)

    def open(self, handle: bytes) -> int:
        """Map another process's memory, and return its address here."""
        pointer, wanted = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), wanted, ctypes.c_uint(_LAZY))
        return pointer.value

    def close(self, pointer: int) -> None:
        """End the mapping of another process's memory."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def tensor(self, pointer: int, size: int) -> torch.Tensor:
        """Return the bytes at an address of the GPU, uint8 ``[size]``, which stay the caller's."""
        interface = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3}
        memory = type("Memory", (), {"__cuda_array_interface__": interface})()
        return torch.as_tensor(memory, device=self.device)

    def wait(self) -> None:
        """Wait until all copies of this process that were begun have ended."""
        torch.cuda.synchronize(self.device)


@attrs.define(eq=False)
class GpuSegment:
    """A piece of a GPU's memory, as seen by its creator. :meth:`free` ends it."""

    number: int  #: among all that the pool has made
    driver: Driver
    pointer: int
    buffer: torch.Tensor  #: uint8, ``[bytes]``
    bucket: int = 0  #: it is free once all workers have received so many buckets

    def place(self) -> dict[str, Any]:
        """Return the plain values that a worker needs to map it."""
        handle = self.driver.handle(self.pointer).hex()
        return {"segment": self.number, "bytes": self.buffer.numel(), "handle": handle}

    def free(self) -> None:
        """Free the memory, which no worker has mapped any more."""
        self.driver.free(self.pointer)


def gpu_segment(driver: Driver, number: int, size: int) -> GpuSegment:
    """Allocate a segment."""
    pointer = driver.allocate(size)
    return GpuSegment(number, driver, pointer, driver.tensor(pointer, size))


def gpu_mapped(driver: Driver, place: Mapping[str, Any]) -> tuple[int, torch.Tensor]:
    """Map a segment for a worker; return its address and its bytes, uint8 ``[bytes]``."""
    pointer = driver.open(bytes.fromhex(place["handle"]))
    return pointer, driver.tensor(pointer, place["bytes"])
