"""Both ends of a weight transfer: chunks to numbered messages, and messages to chunks.

A *chunk* is a bucket of small tensors, or a piece of a large one. A worker says which chunk it needs next when it
connects, and again when a lost connection was restored. So nothing is sent twice that it has.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import torch
import zmq

from jackfield.errors import RpcError
from jackfield.sdk.buckets import Bucket, Entry
from jackfield.sdk.transfer import OneSenderEngine, Peer
from jackfield_transport_zmq.sockets import Gate, Keys, dealer, listening, readable, whole
from jackfield_transport_zmq.wire import Buffer, Message, Schema, Wire

_WINDOW = 6  #: chunks that a worker takes ahead of what it has read

MESSAGES: dict[str, Schema] = {
    "want": {"worker": int, "chunk": int},
    # start and size: of the bytes in the message, among those of the tensors; tensors: of the first piece, unless the
    # worker knows them from the last transfer
    "chunk": {"number": int, "start": int, "size": int, "tensors": list[Entry] | None},
}


class _Attached:
    """A socket whose messages are taken on the event loop."""

    def __init__(self, socket: zmq.Socket[Any], take: Any) -> None:
        self.socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._file = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file, self.read)
        self.read()

    def read(self) -> None:
        """All that has come; due after each sending, too, which may swallow the notice of it."""
        while not self.socket.closed and readable(self.socket):
            self._take(self.socket)

    def close(self) -> None:
        """Let go of the socket."""
        self._loop.remove_reader(self._file)
        self.socket.close(0)


@attrs.define(eq=False)
class _Worker:
    """What the sender knows of a worker's connection."""

    identity: bytes
    chunk: int  #: that it gets next


class Sending:
    """The sender's socket, and the chunks that some worker has not received."""

    def __init__(self, host: str, keys: Keys | None, tcp: bool, port: int, secret: str) -> None:
        """Listen by TCP with a port, or within this host; ``zmq.ZMQError`` if the address is taken."""
        self._context = zmq.Context[Any]()
        try:
            self._gate = Gate(self._context, keys, bytes.fromhex(secret))
            self._router, self.address = listening(self._context, host, keys, tcp, port)
        except zmq.ZMQError:
            self._context.destroy(0)
            raise
        self._wire = Wire(MESSAGES, bytes.fromhex(secret))
        self._attached: list[_Attached] = []
        self._peers: Mapping[int, Peer] = {}
        self._workers: dict[int, _Worker] = {}
        self._chunks: deque[list[Buffer]] = deque()  #: frames of the chunks that some worker has not received
        self._first = 0  #: number of the first of them

    def begin(self, peers: Mapping[int, Peer]) -> None:
        """Serve the workers of the transfer."""
        self._peers = peers
        self._attached.append(_Attached(self._router, self._wanted))
        self._attached.append(_Attached(self._gate.socket, lambda _: self._gate.answer()))

    def _wanted(self, router: zmq.Socket[Any]) -> None:
        identity, *frames = router.recv_multipart(copy=False)
        with suppress(RpcError):
            message = self._wire.decode(whole(frames))
            if message.kind == "want" and 0 <= message["chunk"] - self._first <= len(self._chunks):
                self._workers[message["worker"]] = _Worker(bytes(identity.buffer), message["chunk"])
                self._pump()

    def _pump(self) -> None:
        for number, worker in self._workers.items():
            room = self._peers[number].said.get("room", 0) if number in self._peers else 0
            while worker.chunk < min(room, self._first + len(self._chunks)):
                frames = self._chunks[worker.chunk - self._first]
                self._router.send_multipart([worker.identity, *frames], copy=False)
                worker.chunk += 1
        for attached in self._attached:
            attached.read()

    def heard(self) -> None:
        """Forget the chunks that all workers have received, and continue to send."""
        received = min((peer.got for peer in self._peers.values()), default=self._first + len(self._chunks))
        while self._chunks and self._first < received:
            self._chunks.popleft()
            self._first += 1
        self._pump()

    def send(self, fields: Mapping[str, Any], content: torch.Tensor) -> None:
        """Send a chunk, uint8 ``[bytes]``, to each worker once it has room for it."""
        self._chunks.append(self._wire.encode("chunk", fields, [content.numpy().data]))
        self._pump()

    def close(self) -> None:
        """Close the sockets."""
        for attached in self._attached:
            attached.close()
        self._attached.clear()
        self._chunks.clear()
        self._context.destroy(0)


class Receiving:
    """A worker's socket, and the chunks that have come."""

    def __init__(self, engine: OneSenderEngine, place: Mapping[str, Any], pool: list[torch.Tensor]) -> None:
        """``place`` is the worker's in the topology; the caller keeps ``pool``, for tensors that come in pieces."""
        self._engine = engine
        self._worker, secret = place["worker"], bytes.fromhex(place["session"]["secret"])
        self._wire = Wire(MESSAGES, secret)
        self._pool = pool
        self._chunks = 0  #: chunks that have come
        self._room = self._told = _WINDOW  #: chunks that may come; and the number that the sender knows
        self._pieces: Sequence[Entry] = []  #: entry of the large tensor that is coming
        self._buffer: torch.Tensor | None = None  #: of that tensor
        keys = None if place["keys"] is None else Keys(**place["keys"])
        self._context = zmq.Context[Any]()
        # whoever listens there is known by its messages alone, which are in memory by then
        socket = dealer(self._context, keys, secret, place["largest"])
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._attached = _Attached(socket, self._take)
        self._monitor = _Attached(monitor, self._connected)
        socket.connect(place["data"])  # after the monitor, which is to see it
        engine.tell({"room": self._room})

    def _connected(self, monitor: zmq.Socket[Any]) -> None:
        """For the first time, or after the connection broke: say what is missing."""
        monitor.recv_multipart()
        socket = self._attached.socket
        socket.send_multipart(self._wire.encode("want", {"worker": self._worker, "chunk": self._chunks}))
        self._attached.read()

    def _take(self, socket: zmq.Socket[Any]) -> None:
        frames = socket.recv_multipart(copy=False)
        with suppress(RpcError):
            message = self._wire.decode([frame.buffer for frame in frames])
            if message.kind == "chunk" and message["number"] == self._chunks and len(message.buffers) == 1:
                self._chunks += 1
                self._told = self._room
                self._engine.tell({"got": self._chunks, "room": self._told})
                self._put(message)
                self._engine.notify()

    def _put(self, message: Message) -> None:
        content = torch.from_numpy(np.frombuffer(message.buffers[0], dtype=np.uint8))
        start, size, buffer = message["start"], message["size"], self._buffer
        if size == len(content) and content.data_ptr() % 8 == 0:
            entries = self._engine.layout.learned(message["tensors"])
            self._engine.arrived.append(Bucket(self._chunks, entries, (content, False)))
            return
        if start == 0 or buffer is None:
            self._pieces, buffer = self._engine.layout.learned(message["tensors"]), self._free(size)
            self._buffer = buffer
        buffer[start : start + len(content)] = content
        if start + len(content) == size:
            self._engine.arrived.append(Bucket(self._chunks, self._pieces, (buffer, True)))
        else:
            self._grant()  # this message is not needed any more

    def _free(self, size: int) -> torch.Tensor:
        """Return a buffer without readers. Buffers are kept, because touching fresh memory is slow."""
        fitting = [number for number, buffer in enumerate(self._pool) if buffer.numel() >= size]
        if fitting:
            return self._pool.pop(min(fitting, key=lambda number: self._pool[number].numel()))
        if self._pool:
            self._pool.pop()
        return torch.empty(size, dtype=torch.uint8)

    def was_read(self, bucket: Bucket) -> None:
        """Keep the buffer of a bucket that was read; there is room for another chunk."""
        content, pooled = bucket.place
        if pooled:
            self._pool.append(content)
        self._grant()

    def _grant(self) -> None:
        self._room += 1
        if self._room - self._told >= _WINDOW // 2:  # less is said with the next chunk
            self._told = self._room
            self._engine.tell({"room": self._told})

    def close(self) -> None:
        """Close the sockets."""
        self._monitor.close()
        self._attached.close()
        self._context.destroy(0)
