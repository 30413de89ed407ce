"""Messages on a socket: a length and JSON, perhaps with one descriptor. It needs only the standard library."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEAD = struct.Struct(">I")
LONGEST = 1 << 28  #: bytes of a message


def send(channel: socket.socket, message: Any, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message."""
    data = json.dumps(message).encode()
    if descriptors:
        socket.send_fds(channel, [_HEAD.pack(len(data))], list(descriptors))
    else:
        channel.sendall(_HEAD.pack(len(data)))
    channel.sendall(data)


def receive(channel: socket.socket, longest: int = LONGEST) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors.

    ``EOFError``: the other end has closed the socket; ``ValueError``: it sent something else.
    """
    head, descriptors, _, _ = socket.recv_fds(channel, _HEAD.size, 1)
    head += _exactly(channel, _HEAD.size - len(head)) if head else b""
    if not head:
        raise EOFError
    (size,) = _HEAD.unpack(head)
    if size > longest:
        raise ValueError(f"a message of {size} bytes, at most {longest} are allowed")
    return json.loads(_exactly(channel, size)), descriptors


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
