"""The two ways from a client to a unit: a Unix socket within a host, and ZeroMQ between hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import zmq

from jackfield_transport_zmq.directory import Directory
from jackfield_transport_zmq.near import SCHEME, connected
from jackfield_transport_zmq.sockets import dealer, pieces, readable, whole
from jackfield_transport_zmq.wire import Buffer

_GOODBYE_MS = 200  #: for the last words to leave
_LARGE = 1 << 16  #: bytes; such buffers are sent from where they lie

Received: TypeAlias = Callable[[list[Buffer]], object]  #: is called with the frames of each message


class Near:
    """A Unix socket."""

    def __init__(self, address: str, secret: bytes, received: Received, ended: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._received, self._ended = received, ended
        self._stream = connected(address, secret, self._blocked)
        self._loop.add_reader(self._stream.socket, self._read)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message."""
        self._stream.send(frames)

    def _blocked(self, waits: bool) -> None:
        if waits:
            self._loop.add_writer(self._stream.socket, self._stream.flush)
        else:
            self._loop.remove_writer(self._stream.socket)

    def _read(self) -> None:
        for frames in self._stream.receive():
            self._received(frames)
        if self._stream.ended:
            self._ended()

    def close(self, *, at_once: bool) -> None:
        """Close it; what the system has taken still arrives."""
        if self._stream.socket.fileno() >= 0:
            self._loop.remove_reader(self._stream.socket)
            self._loop.remove_writer(self._stream.socket)
            self._stream.socket.close()


class Far:
    """A socket of ZeroMQ's, which connects and connects again by itself."""

    def __init__(self, context: zmq.Context[Any], address: str, directory: Directory, received: Received) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = received
        self._socket: zmq.Socket[Any] = dealer(context, directory.keys, directory.secret)
        self._socket.connect(address)
        self._file = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file, self._read)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message."""
        self._socket.send_multipart(pieces(frames), copy=max(map(len, frames)) < _LARGE)
        self._read()  # sending may have swallowed the socket's notice that something is there to be read

    def _read(self) -> None:
        while not self._socket.closed and readable(self._socket):
            self._received(whole(self._socket.recv_multipart(copy=False)))

    def close(self, *, at_once: bool) -> None:
        """Close it; the last words leave first, unless ``at_once``."""
        self._loop.remove_reader(self._file)
        self._socket.close(0 if at_once else _GOODBYE_MS)


def opened(
    context: zmq.Context[Any], address: str, directory: Directory, received: Received, ended: Callable[[], object]
) -> Near | Far:
    """Connect to the unit at this address; ``OSError`` if no process listens there, where that can be seen.

    ``ended`` is called when the unit has closed it.
    """
    if address.startswith(SCHEME):
        return Near(address, directory.secret, received, ended)
    return Far(context, address, directory, received)
