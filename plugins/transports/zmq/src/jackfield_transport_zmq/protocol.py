"""What clients and storage units say to each other: the messages, and values in them.

A value is a *cell* as :mod:`jackfield.sdk.cells` has it: ``[type, source, offset, size]``. Its bytes
are in the message's buffer ``source``, or, where that is negative, in shared memory: in block ``-1 - source`` of the
message. A block is a piece of an arena, a ``memfd`` that its maker keeps open: ``[pid, descriptor, bytes, device,
inode, start]``; offsets are those in the arena. ``inode`` and ``start`` are the block's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from jackfield_transport_zmq.wire import Buffer, Schema

CellEntry: TypeAlias = "Sequence[Any]"

CELL = (str, int, int, int)
BLOCK = (int, int, int, int, int, int)
UNIT = (int, int, str, str)  #: number, pid, address, where it runs

_VALUES: dict[str, Schema] = {"cells": [CELL], "blocks": [BLOCK]}
_MARK: dict[str, Schema] = {"id": int, "mark": str}
_ROWS: dict[str, Schema] = {"id": int, "units": int, "partition": str, "keys": [str]}

REQUESTS: dict[str, dict[str, Schema]] = {
    "hello": {"pid": int, "place": str},
    "put": {**_ROWS, "columns": [str], **_VALUES},
    "get": {**_ROWS, "columns": [str]},
    "has": _ROWS,
    "keys": {"id": int},
    "delete": _ROWS,
    "stats": {"id": int},
    "hold": _MARK,  # puts and deletions wait, until begin, swap or end of the same mark
    "begin": _MARK,  # a checkpoint: what is there now
    "take": _MARK,  # some rows of it
    "stage": {**_MARK, "partition": str, "keys": [str], "columns": [str], **_VALUES},
    "swap": _MARK,  # what was staged, in the place of everything
    "end": _MARK,
    "release": {"leases": [int]},
    "add": {"id": int, "units": [UNIT]},
    "lose": {"units": [int]},
    "bye": {},
}

_REPLY: dict[str, Schema] = {"id": int, "lost": [int]}

REPLIES: dict[str, dict[str, Schema]] = {
    "counted": {**_REPLY, "rows": int, "bytes": int},
    "cells": {**_REPLY, "unknown": [int], "lacking": [(int, str, [str])], **_VALUES, "lease": int},
    "known": {**_REPLY, "known": [int]},
    "samples": {**_REPLY, "samples": [(str, str, [str])]},
    "state": {**_REPLY, "rows": int, "bytes": int, "details": {int}},
    "batch": {**_REPLY, "rows": [(str, str, [str])], **_VALUES, "lease": int},
    "stale": {**_REPLY, "units": [UNIT]},
    "refused": {**_REPLY, "code": str, "message": str},
    "freed": {"blocks": [(int, int)]},  # of the client that is told; no reply
}

_SMALL = 1 << 16  #: bytes; smaller cells share a buffer


class Packer:
    """Puts cells into a message's buffers: small ones copied together, large ones as they lie."""

    def __init__(self) -> None:
        self._small = bytearray()
        self._large: list[Buffer] = []

    def add(self, content: Buffer) -> tuple[int, int]:
        """Source and offset of these bytes."""
        if len(content) < _SMALL:
            start = len(self._small)
            self._small += content
            return 0, start
        self._large.append(content)
        return len(self._large), 0

    def buffers(self) -> list[Buffer]:
        """Return the buffers of the message."""
        return [bytes(self._small), *self._large]


def bytes_of(entry: CellEntry, buffers: Sequence[Buffer]) -> memoryview:
    """The bytes of a cell that is not in shared memory.

    Raises:
        ValueError: it points beyond its message.
    """
    _, source, offset, size = entry
    buffer = memoryview(buffers[source]) if 0 <= source < len(buffers) else memoryview(b"")
    if offset < 0 or size < 0 or offset + size > len(buffer):
        raise ValueError("a cell lies outside of its message")
    return buffer[offset : offset + size]
