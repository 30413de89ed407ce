"""Anonymous shared memory: created by the sender, mapped by workers, freed with its last holder.

A segment is a ``memfd``: it has no name that could be left behind when processes are killed. A worker opens it through
the sender's entry in ``/proc``, which the system allows to processes of the same user.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch

from jackfield.errors import WeightsError


class Segment(Protocol):
    """A piece of memory that other processes can read, as seen by its creator."""

    buffer: torch.Tensor  #: uint8, ``[bytes]``
    bucket: int  #: it is free once all workers have received so many buckets

    def place(self) -> dict[str, Any]:
        """Return the plain values that a worker needs to map it."""

    def free(self) -> None:
        """Free what does not go with the last reference."""


@attrs.define(eq=False)
class HostSegment:
    """A piece of shared memory of the host, as seen by its creator."""

    number: int  #: among all that the pool has made
    descriptor: int
    buffer: torch.Tensor  #: uint8, ``[bytes]``
    bucket: int = 0  #: it is free once all workers have received so many buckets

    def place(self) -> dict[str, Any]:
        """Return the plain values that a worker needs to map it."""
        status = os.fstat(self.descriptor)
        return {
            "pid": os.getpid(),
            "descriptor": self.descriptor,
            "segment": self.number,
            "bytes": self.buffer.numel(),
            "file": [status.st_dev, status.st_ino],
        }

    def free(self) -> None:
        """Do nothing: the memory goes with the last reference to it."""


class Pool:
    """The sender's segments. They are reused, because touching fresh memory is slower than copying.

    They are freed with the pool's last reference, or with the process, however it ends.
    """

    def __init__(self, max_bytes: int, make: Callable[[int, int], Segment] | None = None) -> None:
        """Create a pool of segments that ``make`` makes of a number and a size, by default in the host's memory.

        Only a single segment larger than ``max_bytes`` may exceed that total.
        """
        self._max_bytes, self._make = max_bytes, make or host_segment
        self._segments: list[Segment] = []
        self._made = 0

    @property
    def bytes(self) -> int:
        """Return the bytes of all segments."""
        return sum(segment.buffer.numel() for segment in self._segments)

    def oldest(self) -> int:
        """Return the number of received buckets with which the next segment is free."""
        return min(segment.bucket for segment in self._segments)

    def begin(self) -> None:
        """Begin a transfer: all segments are free."""
        for segment in self._segments:
            segment.bucket = 0

    def drop(self) -> None:
        """Release all segments. Processes that have mapped them keep the contents, unless they are a GPU's."""
        self._release(self._segments)
        self._segments = []

    def _release(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            segment.free()

    def take(self, size: int, received: int) -> Segment | None:
        """Return a segment of at least ``size`` bytes: the smallest free one, or a new one; None if it must wait.

        ``received`` is the number of buckets that all workers have received.
        """
        free = [segment for segment in self._segments if segment.bucket <= received]
        fitting = [segment for segment in free if segment.buffer.numel() >= size]
        if fitting:
            return min(fitting, key=lambda segment: segment.buffer.numel())
        if self.bytes + size > self._max_bytes:
            self._segments = [segment for segment in self._segments if segment not in free]
            self._release(free)
            if self._segments and self.bytes + size > self._max_bytes:
                return None
        segment = self._make(self._made, size)
        self._made += 1
        self._segments.append(segment)
        return segment


def host_segment(number: int, size: int) -> HostSegment:
    """Make a segment of the host's memory."""
    if not hasattr(os, "memfd_create"):
        raise WeightsError("this system has no anonymous shared memory", expected="Linux", fix="use nccl or file")
    descriptor = os.memfd_create("jackfield-weights", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        buffer = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        os.close(descriptor)
        raise WeightsError(
            f"shared memory cannot be had: {error}", expected=f"{size} bytes", fix="lower max_bytes"
        ) from error
    segment = HostSegment(number, descriptor, buffer)
    weakref.finalize(segment, os.close, descriptor)
    return segment


def mapped(place: Mapping[str, Any]) -> torch.Tensor:
    """Map a segment for a worker, uint8 ``[bytes]``, privately, so that no worker can change others' data.

    Raises ``WeightsError`` if the sender is not a process of this user on this host, or is gone.
    """
    path = f"/proc/{place['pid']}/fd/{place['descriptor']}"
    try:
        status = os.stat(path)
        if [status.st_dev, status.st_ino] != place["file"]:
            raise FileNotFoundError("another file is there")
        return torch.from_file(path, shared=False, size=place["bytes"], dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise WeightsError(
            f"the sender's shared memory cannot be opened: {error}",
            where=path,
            expected="a sender that lives, on the same host, of the same user and in the same container",
            fix="use nccl, zmq or file between hosts or containers",
        ) from error
