"""Anonymous shared memory: made by the sender, mapped by workers, gone with the last process that holds it.

A segment is a ``memfd``: it has no name that could be left behind when processes are killed. A worker opens it through
the sender's entry in ``/proc``, which the system allows to processes of the same user.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from jackfield.errors import WeightsError


@attrs.define(eq=False)
class Segment:
    """A piece of shared memory, as its maker sees it."""

    number: int  #: among all that the pool has made
    descriptor: int
    buffer: torch.Tensor  #: uint8, ``[bytes]``
    bucket: int | None = None  #: the last bucket of this transfer that was put here

    def place(self) -> dict[str, Any]:
        """Return what a worker needs in order to map it: plain values."""
        status = os.fstat(self.descriptor)
        return {
            "pid": os.getpid(),
            "descriptor": self.descriptor,
            "segment": self.number,
            "bytes": self.buffer.numel(),
            "file": [status.st_dev, status.st_ino],
        }


class Pool:
    """The sender's segments. Touching fresh memory is many times slower than copying, so they are used again.

    They go with the pool: with its last reference, or with the process, however it ends.
    """

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` of all segments are exceeded only for a single one that is larger."""
        self._max_bytes = max_bytes
        self._segments: list[Segment] = []
        self._made = 0

    @property
    def bytes(self) -> int:
        """Return the bytes of all segments."""
        return sum(segment.buffer.numel() for segment in self._segments)

    def oldest(self) -> int | None:
        """The first bucket that may still be read."""
        return min((segment.bucket for segment in self._segments if segment.bucket is not None), default=None)

    def begin(self) -> None:
        """A transfer begins: everything is free."""
        for segment in self._segments:
            segment.bucket = None

    def drop(self) -> None:
        """Give everything back. Processes that have it mapped keep what is in it."""
        self._segments.clear()

    def take(self, size: int, free: Callable[[Segment], bool]) -> Segment | None:
        """A segment of at least ``size`` bytes: the smallest that is ``free`` of readers, or a new one; None: wait."""
        fitting = [segment for segment in self._segments if segment.buffer.numel() >= size and free(segment)]
        if fitting:
            return min(fitting, key=lambda segment: segment.buffer.numel())
        if self.bytes + size > self._max_bytes:
            self._segments = [segment for segment in self._segments if not free(segment)]
            if self._segments and self.bytes + size > self._max_bytes:
                return None
        segment = _made(self._made, size)
        self._made += 1
        self._segments.append(segment)
        return segment


def _made(number: int, size: int) -> Segment:
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
    segment = Segment(number, descriptor, buffer)
    weakref.finalize(segment, os.close, descriptor)
    return segment


def mapped(place: Mapping[str, Any]) -> torch.Tensor:
    """A worker's private view of a segment, uint8 ``[bytes]``, to be read, so that no worker spoils the others'.

    Raises ``WeightsError``: the sender is not a process of this user on this host, or is gone.
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
