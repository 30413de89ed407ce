"""What is said between the store and those who put and get: our messages over TCP."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.errors import RpcError
from jackfield.wire import Buffer, Limits, Message, Schema, Wire

__all__ = ["REPLIES", "REQUESTS", "Stream", "limits"]

_COUNT = struct.Struct(">I")
_SIZE = struct.Struct(">Q")

_CELL: Schema = (str, int, int)  #: type, offset in the block or the buffer, size
_ROWS: dict[str, Schema] = {"id": int, "partition": str, "keys": [str], "columns": [str]}

REQUESTS: dict[str, dict[str, Schema]] = {
    "agent": {"id": int},
    "put": {**_ROWS, "cells": [_CELL]},  # row after row
    "room": {"id": int, "size": int},
    "keep": {**_ROWS, "cells": [_CELL], "block": int},
    "get": dict(_ROWS),
    "let_go": {"id": int, "block": int},  # room that is not needed; no reply
    "done": {"id": int, "lease": int},  # no reply
    "delete": {"id": int, "partition": str, "keys": [str]},
    "stats": {"id": int},
    "keys": {"id": int},
    "checkpoint": {"id": int, "folder": str},
    "restore": {"id": int, "folder": str},
}

_PLACE: Schema = (int, int, int, str)  #: address, size, device, sort of memory

REPLIES: dict[str, dict[str, Schema]] = {
    "agent": {"id": int, "metadata": bytes, "regions": [(int, _PLACE)]},
    "counted": {"id": int, "rows": int, "bytes": int},
    "room": {"id": int, "block": int, "region": int, "start": int},
    # region: -1 for what is in the buffer
    "cells": {"id": int, "unknown": [int], "lacking": [(int, str, [str])], "lease": int,
              "cells": [(str, int, int, int)]},
    "samples": {"id": int, "samples": [(str, str, [str])]},
    "state": {"id": int, "rows": int, "bytes": int, "details": {float}},
    "error": {"id": int, "code": str, "message": str, "where": str},
}  # fmt: skip


_FIRST_BYTES = 1 << 16  #: of the first message, by somebody who has not shown yet that it knows the secret


def limits(inline_bytes: int) -> Limits:
    """Of a request: its values are fewer than ``inline_bytes``. A reply may have many small ones together."""
    return Limits(buffers=1, total_bytes=max(inline_bytes, 1))


class Stream:
    """Messages over a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: Wire, allowed: Limits) -> None:
        self._reader = reader
        self.writer = writer
        self._wire = wire
        self._allowed = allowed
        self._known = False  #: whether a message has come that was signed with the secret

    def send(self, kind: str, fields: Mapping[str, Any], buffers: Sequence[Buffer] = ()) -> None:
        """Say something."""
        frames = self._wire.encode(kind, fields, buffers)
        sizes = b"".join(_SIZE.pack(len(frame)) for frame in frames)
        self.writer.writelines([_COUNT.pack(len(frames)) + sizes, *frames])

    async def receive(self) -> Message:
        """What is said next.

        Raises:
            RpcError: it is not one of our messages; the connection is of no use any more.
            EOFError, OSError: the other end has gone.
        """
        (count,) = _COUNT.unpack(await self._reader.readexactly(_COUNT.size))
        if not 1 <= count <= 1 + self._allowed.buffers:
            self._wire.refused["rpc.size"] += 1
            raise RpcError("a message of another number of frames", code="rpc.size", found=count)
        sizes = [_SIZE.unpack(await self._reader.readexactly(_SIZE.size))[0] for _ in range(count)]
        allowed = self._allowed
        too_large = sizes[0] > allowed.head_bytes or sum(sizes[1:]) > allowed.total_bytes
        if too_large or (not self._known and sum(sizes) > _FIRST_BYTES):
            self._wire.refused["rpc.size"] += 1
            raise RpcError("a message is too large", code="rpc.size", found=sizes)
        message = self._wire.decode([await self._reader.readexactly(size) for size in sizes])
        self._known = True
        return message
