"""The process of a storage unit: ``python -m jackfield_transport_zmq.serve``, started by who owns the queue.

It reads its identity from standard input, writes its address to standard output, and ends when it is killed, or when
the process that started it has ended in any way.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import zmq

from jackfield.errors import QueueError
from jackfield_transport_zmq import near
from jackfield_transport_zmq.arenas import place_of_this_process
from jackfield_transport_zmq.sockets import Gate, Keys, listening, pieces, readable, whole
from jackfield_transport_zmq.unit import Unit
from jackfield_transport_zmq.wire import REQUESTS, Buffer, Wire

_LARGE = 1 << 16  #: bytes; such buffers are sent from where they lie
_HANDSHAKE_SECONDS = 5.0  #: from a connection to its password
_PAUSE_SECONDS = 0.1  #: without new connections, where no more files can be open


def main() -> None:
    """Run a storage unit."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a scheduler, to all processes; the owner decides
        signal.signal(number, signal.SIG_IGN)
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    with contextlib.suppress(ProcessLookupError):
        owner = os.pidfd_open(order["owner"])
        if os.getppid() == order["owner"]:
            try:
                _serve(order, owner)
            except QueueError as error:
                print(json.dumps({"error": error.message, "where": error.where, "fix": error.fix}), flush=True)


def _serve(order: Mapping[str, Any], owner: int) -> None:
    secret = bytes.fromhex(order["secret"])
    with selectors.DefaultSelector() as selector:
        server: _Near | _Far
        if order["keys"] is None:
            server = _Near(selector, secret)
        else:
            server = _Far(selector, secret, Keys(**order["keys"]), order["host"])
        place = place_of_this_process()
        unit = server.unit = Unit(order["number"], Wire(REQUESTS, secret), server.send, place)
        print(json.dumps({"address": server.address, "place": place}), flush=True)
        selector.register(owner, selectors.EVENT_READ)
        watched: dict[int, bytes] = {}
        while True:
            waits = [seconds for each in (unit, server) if (seconds := each.wait_seconds()) is not None]
            for key, events in selector.select(min(waits, default=None)):
                if key.fd == owner:
                    return
                key.data(events)
                _watch(unit, watched, selector)  # before somebody else has a descriptor that was closed
            unit.tick()
            server.look()


class _Near:
    """Clients of this host, over Unix sockets."""

    unit: Unit

    def __init__(self, selector: selectors.BaseSelector, secret: bytes) -> None:
        self._selector, self._secret = selector, secret
        self._listener, self.address = near.listening()
        self._streams: dict[bytes, near.Stream] = {}
        self._guests: dict[near.Guest, float] = {}  #: when their time ends; the oldest is the first
        self._paused = 0.0  #: until when no connection is accepted; 0: they are
        self._numbers = itertools.count()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def send(self, identity: bytes, frames: list[Buffer]) -> None:
        """Send a message to a client, which may have gone."""
        if identity in self._streams:
            self._streams[identity].send(frames)

    def wait_seconds(self) -> float | None:
        """Until :meth:`look` is due."""
        ends = [*itertools.islice(self._guests.values(), 1), *filter(None, [self._paused])]
        return max(min(ends) - time.monotonic(), 0.0) if ends else None

    def look(self) -> None:
        """Turn away guests who have not shown the password in time, and accept connections again."""
        now = time.monotonic()
        for guest, end in list(self._guests.items()):
            if end > now:
                break
            self._turn_away(guest)
        if self._paused and now >= self._paused:
            self._paused = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _: int) -> None:
        try:
            connection = self._listener.accept()[0]
        except OSError as error:  # it has gone already, or
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            return
        guest = near.Guest(connection, self._secret)
        self._guests[guest] = time.monotonic() + _HANDSHAKE_SECONDS
        self._selector.register(guest.socket, selectors.EVENT_READ, lambda _: self._admit(guest))
        if not near.is_ours(connection):
            self._turn_away(guest)

    def _make_room(self) -> None:
        """Where no more files can be open: turn the oldest guest away, or pause accepting."""
        if oldest := next(iter(self._guests), None):
            self._turn_away(oldest)
        else:
            self._selector.unregister(self._listener)
            self._paused = time.monotonic() + _PAUSE_SECONDS

    def _turn_away(self, guest: near.Guest) -> None:
        del self._guests[guest]
        self._selector.unregister(guest.socket)
        guest.socket.close()
        self.unit.refused_keys += 1

    def _admit(self, guest: near.Guest) -> None:
        if guest not in self._guests or (known := guest.is_known()) is None:
            return
        if not known:
            self._turn_away(guest)
            return
        del self._guests[guest]
        self._selector.unregister(guest.socket)
        identity = b"%d" % next(self._numbers)

        def blocked(waits: bool) -> None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
            self._selector.modify(guest.socket, events, serve)

        def serve(events: int) -> None:
            if events & selectors.EVENT_WRITE:
                stream.flush()
            if events & selectors.EVENT_READ:
                self._receive(identity, stream)

        stream = self._streams[identity] = near.Stream(guest.socket, blocked)
        self._selector.register(guest.socket, selectors.EVENT_READ, serve)

    def _receive(self, identity: bytes, stream: near.Stream) -> None:
        for frames in stream.receive():
            self.unit.receive(identity, frames)
        if stream.ended:
            del self._streams[identity]
            self._selector.unregister(stream.socket)
            stream.socket.close()
            self.unit.left(identity)


class _Far:
    """Clients of any host, over ZeroMQ."""

    unit: Unit

    def __init__(self, selector: selectors.BaseSelector, secret: bytes, keys: Keys, host: str) -> None:
        context = zmq.Context[Any]()
        self._gate = Gate(context, keys, secret)
        try:
            self._router, self.address = listening(context, host, keys, tcp=True)
        except zmq.ZMQError as error:
            raise QueueError(
                f"a storage unit cannot listen: {error}",
                code="queue.store",
                where=host,
                fix="name an address of this host",
            ) from error
        for source in (self._router, self._gate.socket):
            selector.register(int(source.getsockopt(zmq.FD)), selectors.EVENT_READ, lambda _: self.look())

    def send(self, identity: bytes, frames: list[Buffer]) -> None:
        """Send a message to a client; ZeroMQ drops it where that has gone."""
        self._router.send_multipart([identity, *pieces(frames)], copy=max(map(len, frames)) < _LARGE)

    def wait_seconds(self) -> None:
        """libzmq has its own deadlines."""

    def look(self) -> None:
        """Take what has come. The descriptors tell of it once, and sending may have swallowed that."""
        while readable(self._gate.socket):
            self._gate.answer()
            self.unit.refused_keys = self._gate.refused
        while readable(self._router):
            identity, *frames = self._router.recv_multipart(copy=False)
            self.unit.receive(bytes(identity.buffer), whole(frames))


def _watch(unit: Unit, watched: dict[int, bytes], selector: selectors.BaseSelector) -> None:
    """Have the end of each client's process noticed."""
    now = {client.process: identity for identity, client in unit.clients.items() if client.process is not None}
    if now == watched:
        return
    for descriptor in watched.keys() - now.keys():
        selector.unregister(descriptor)
    for descriptor in now.keys() - watched.keys():
        selector.register(descriptor, selectors.EVENT_READ, functools.partial(_end, unit, now[descriptor]))
    watched.clear()
    watched.update(now)


def _end(unit: Unit, identity: bytes, _: int) -> None:
    if identity in unit.clients:
        unit.gone(identity)


if __name__ == "__main__":
    main()
