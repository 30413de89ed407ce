"""Messages between processes: JSON behind a head with a magic number and the length. Standard library only."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

HEAD = struct.Struct(">4sI")  #: magic and bytes of the message
MAGIC = b"JKU2"


class BrokenProtocol(Exception):
    """What was received is no message."""


def packed(text: str) -> bytes:
    """Return a message of JSON text."""
    content = text.encode()
    return HEAD.pack(MAGIC, len(content)) + content


class Reader:
    """A splitter of received bytes into messages, each at most ``limit`` bytes long."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        """Yield the messages that are complete with further bytes; raise :class:`BrokenProtocol`."""
        self._bytes += data
        start = 0
        while len(self._bytes) - start >= HEAD.size:
            magic, size = HEAD.unpack_from(self._bytes, start)
            if magic != MAGIC or size > self._limit:
                found = bytes(self._bytes[start : start + HEAD.size])
                raise BrokenProtocol(f"a message is too long, or is not one of this protocol ({found!r})")
            end = start + HEAD.size + size
            if len(self._bytes) < end:
                break
            try:
                message = json.loads(self._bytes[start + HEAD.size : end])
            except (ValueError, RecursionError) as error:
                raise BrokenProtocol(f"a message is not JSON ({error})") from error
            if not isinstance(message, list):
                raise BrokenProtocol("a message is not a list")
            start = end
            yield message
        del self._bytes[:start]
