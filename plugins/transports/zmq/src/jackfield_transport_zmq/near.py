"""Messages within a host: over a Unix stream socket, which wakes only the reader.

ZeroMQ takes a message through a thread of its own at either end: of the six wakes of a request and its answer, four are
of these threads. A message is the number of its frames, their sizes, and the frames themselves.

The address is an abstract one: it has no file, so nothing is left behind by processes that were killed, and its length
does not depend on the queue's folder. But it has no permissions either, and any user of the host can list it. So each
end asks the kernel for the other's user, and goes on only with its own and with root: a client before it shows the
password, which is made of the secret, and a server before it reads anything. A client that does not show
the password is turned away before anything else that it sends is read.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from jackfield.errors import QueueError
from jackfield_transport_zmq.sockets import password
from jackfield_transport_zmq.wire import Buffer, Limits

SCHEME = "unix:@"  #: of an address without a file
_READ = 1 << 16  #: bytes; frames of a longer message have memory of their own, which ends with them
_PARTS = 64  #: that are sent with one call
_NUMBER = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("iII")  #: process, user and group, as the kernel has them


class Stream:
    """One end of a connection. Nothing blocks."""

    def __init__(self, connection: socket.socket, blocked: Callable[[bool], object]) -> None:
        """``blocked`` is called with whether something waits until the other end reads; :meth:`flush` goes on then."""
        connection.setblocking(False)
        self.socket = connection
        self.ended = False  #: the other end is gone, or talks nonsense
        self._blocked, self._waits = blocked, False
        self._left: deque[memoryview] = deque()  #: to be sent
        self._rest = b""  #: the beginning of a message
        self._frames: list[Buffer] = []  #: of a long message
        self._missing: deque[memoryview] = deque()  #: parts of them that have not come

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message, whose frames may not change until it has left."""
        views = [memoryview(frame).cast("B") for frame in frames]
        head = struct.pack(f"<{len(views) + 1}Q", len(views), *map(len, views))
        self._left += [memoryview(head), *filter(len, views)]
        if not self._waits:
            self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        left = self._left
        while left:
            try:
                sent = self.socket.sendmsg([*islice(left, _PARTS)])
            except BlockingIOError:
                break
            except OSError:  # who reads is gone, which receive tells
                left.clear()
                break
            while left and sent >= len(left[0]):
                sent -= len(left.popleft())
            if sent:
                left[0] = left[0][sent:]
        if self._waits != bool(left):
            self._waits = bool(left)
            self._blocked(self._waits)

    def receive(self) -> Iterator[list[Buffer]]:
        """The messages that have come."""
        try:
            if not self._missing:
                content = self.socket.recv(_READ)
                self.ended = not content
                yield from self._messages(self._rest + content)
            while self._missing:
                target = self._missing[0]
                count = self.socket.recv_into(target)
                if not count:
                    self.ended = True
                    return
                self._missing[0] = target[count:]
                if count == len(target):
                    self._missing.popleft()
                if not self._missing:
                    yield self._frames
        except BlockingIOError:
            return
        except (OSError, struct.error):
            self.ended = True

    def _messages(self, content: bytes) -> Iterator[list[Buffer]]:
        start, limits = 0, Limits()
        while len(content) - start >= _NUMBER.size:
            (count,) = _NUMBER.unpack_from(content, start)
            first = start + _NUMBER.size * (1 + count)
            if count > limits.buffers + 1:
                raise struct.error("too many frames")
            if first > len(content):
                break
            sizes = struct.unpack_from(f"<{count}Q", content, start + _NUMBER.size)
            end = first + sum(sizes)
            if end > len(content) and end - start > _READ:
                if end > limits.total_bytes or max(sizes) > limits.buffer_bytes:
                    raise struct.error("a frame is too large")
                self._begin(sizes, content[first:])
                start = len(content)
                break
            if end > len(content):
                break
            frames, view = list[Buffer](), memoryview(content)
            for size in sizes:
                frames.append(view[first : first + size])
                first += size
            start = end
            yield frames
        self._rest = content[start:]

    def _begin(self, sizes: Sequence[int], content: bytes) -> None:
        """Begin a long message, of which some has come."""
        frames = [bytearray(size) for size in sizes]
        self._frames = [*frames]
        for frame in frames:
            here, content = content[: len(frame)], content[len(frame) :]
            frame[: len(here)] = here
            if len(here) < len(frame):
                self._missing.append(memoryview(frame)[len(here) :])


def listening() -> tuple[socket.socket, str]:
    """A server's socket and its address."""
    name = f"jackfield-{secrets.token_hex(12)}"
    server = socket.socket(socket.AF_UNIX)
    server.setblocking(False)
    server.bind(f"\0{name}")
    server.listen(128)
    return server, SCHEME + name


def connected(address: str, secret: bytes, blocked: Callable[[bool], object]) -> Stream:
    """Open a client's stream; ``OSError`` if no process listens there, ``queue.unreachable`` if another user's does."""
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(f"\0{address.removeprefix(SCHEME)}")
        if not is_ours(client):
            raise QueueError(
                "a process of another user listens at the address of a storage unit",
                code="queue.unreachable",
                where=address,
                fix="run all processes of a run as one user",
            )
        client.sendall(password(secret))
    except (OSError, QueueError):
        client.close()
        raise
    return Stream(client, blocked)


def is_ours(connection: socket.socket) -> bool:
    """Return whether this user's process is at the other end, or root's."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(content)[1] in (os.geteuid(), 0)


class Guest:
    """A connection that has not shown the password yet."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._password = password(secret)
        self._shown = b""

    def is_known(self) -> bool | None:
        """Return whether it has shown the password; None where more is to come."""
        try:
            content = self.socket.recv(len(self._password) - len(self._shown))
        except BlockingIOError:
            return None
        except OSError:
            return False
        self._shown += content
        if content and len(self._shown) < len(self._password):
            return None
        return hmac.compare_digest(self._shown, self._password)
