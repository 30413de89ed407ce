"""A socket that carries messages, without a task or a transport: it opens and closes at once."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from jackfield_user_code import _frames

_READ_BYTES = 1 << 18


class Link:
    """One end of a socket pair. Messages that are sent in one turn of the event loop go together.

    ``heard`` gets each item of a message; ``broken`` is called once, with the reason if the other end broke the
    protocol, and with None if it has closed.
    """

    def __init__(
        self, own: socket.socket, limit: int, heard: Callable[[Any], None], broken: Callable[[str | None], None]
    ) -> None:
        self._socket, self._heard, self._broken = own, heard, broken
        self._reader = _frames.Reader(limit)
        self._loop = asyncio.get_running_loop()
        self._items: list[str] = []
        self._waiting: deque[tuple[bytes, Sequence[int]]] = deque()  #: messages with descriptors
        self._is_open = True
        own.setblocking(False)
        self._loop.add_reader(own.fileno(), self.read)

    def send(self, item: str) -> None:
        """Send an item of JSON text."""
        if not self._items:
            self._loop.call_soon(self._flush)
        self._items.append(item)

    def send_with(self, item: str, descriptor: int) -> None:
        """Send an item with a descriptor at once, of which the caller keeps its own copy open until then."""
        self._flush()
        self._queue(f"[{item}]", [descriptor])

    def _flush(self) -> None:
        if self._items:
            items, self._items = self._items, []
            self._queue(f"[{','.join(items)}]", [])

    def _queue(self, text: str, descriptors: Sequence[int]) -> None:
        if self._is_open:
            self._waiting.append((_frames.packed(text), descriptors))
            if len(self._waiting) == 1:
                self._write()

    def _write(self) -> None:
        while self._waiting:
            data, descriptors = self._waiting.popleft()
            try:
                sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:  # reading tells that it has closed
                self._waiting.clear()
                break
            if sent < len(data):
                self._waiting.appendleft((data[sent:], descriptors if sent == 0 else ()))
                self._loop.add_writer(self._socket.fileno(), self._write)
                return
        self._loop.remove_writer(self._socket.fileno())

    def read(self) -> bool:
        """Handle what has arrived; return whether more may have."""
        if not self._is_open:
            return False
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        try:
            for message in self._reader.feed(data):
                for item in message:
                    self._heard(item)
        except _frames.BrokenProtocol as error:
            self._end(str(error))
        else:
            if not data:
                self._end(None)
        return self._is_open

    def _end(self, reason: str | None) -> None:
        if self._is_open:
            self.close()
            self._broken(reason)

    def end(self) -> None:
        """Let the other end see that nothing more comes."""
        if self._is_open:
            self._flush()
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            with suppress(OSError):
                self._socket.close()
