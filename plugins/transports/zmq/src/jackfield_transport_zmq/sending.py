"""Both halves of a weight transfer: tensors into numbered messages, and messages into tensors.

A message is a *chunk*: a bucket of small tensors, or a piece of a large one. A worker says which chunk it wants next
when it connects, and again when its connection was lost and is there again; so nothing is sent twice that it has.
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
from jackfield.sdk.buckets import Entry, aligned, entry_of, put, raw
from jackfield.sdk.transfer import TransferSession
from jackfield_transport_zmq.sockets import Gate, Keys, dealer, listening, pieces, readable, whole
from jackfield_transport_zmq.wire import Buffer, Message, Schema, Wire

_WINDOW = 6  #: chunks that a worker takes ahead of what it has read
_SLOTS = 6  #: buckets that are filled or on their way
_WHOLE = 4  #: buckets; a tensor up to this is one message, which nobody copies; pieces are put together

MESSAGES: dict[str, Schema] = {
    "want": {"worker": int, "chunk": int},
    # start and size: of the bytes in the message, among those of the tensors; tensors: none but in the first piece
    "chunk": {"number": int, "start": int, "size": int, "tensors": list[Entry]},
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


# -- the sender --------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Worker:
    """What the sender knows of a worker's connection."""

    identity: bytes
    chunk: int  #: that it gets next


class Sending:
    """The sender's socket, and the chunks that some worker has not got yet."""

    def __init__(self, host: str, keys: Keys | None, tcp: bool, port: int, secret: str, bucket_bytes: int) -> None:
        """Listen: by TCP with a port, or within this host. All workers know the secret.

        Raises:
            zmq.ZMQError: the address is taken.
        """
        self._context = zmq.Context[Any]()
        try:
            self._gate = Gate(self._context, keys, bytes.fromhex(secret))
            self._router, self.address = listening(self._context, host, keys, tcp, port)
        except zmq.ZMQError:
            self._context.destroy(0)
            raise
        self._wire = Wire(MESSAGES, bytes.fromhex(secret))
        self._bucket_bytes = bucket_bytes
        self._attached: list[_Attached] = []
        self._session: TransferSession | None = None
        self._workers: dict[int, _Worker] = {}
        self._chunks: deque[list[Buffer]] = deque()  #: frames of those that somebody has not got
        self._first = 0  #: number of the first of them
        self._slots: list[torch.Tensor] = []
        self._entries: list[Entry] = []
        self._used = 0
        self._slot_free_at = [0] * _SLOTS  #: once everybody has all chunks before this one
        self._fills = 0  #: of slots
        self._lent = 0  #: chunks up to the last that lies in the memory of the tensor that came last; 0: it was copied

    def begin(self, session: TransferSession, slots: list[torch.Tensor]) -> None:
        """Take what workers want; the caller keeps ``slots``, the buffers."""
        self._session, self._slots = session, slots
        self._attached.append(_Attached(self._router, self._wanted))
        self._attached.append(_Attached(self._gate.socket, lambda _: self._gate.answer()))

    @property
    def made(self) -> int:
        """Chunks so far."""
        return self._first + len(self._chunks)

    def _wanted(self, router: zmq.Socket[Any]) -> None:
        identity, *frames = router.recv_multipart(copy=False)
        with suppress(RpcError):
            message = self._wire.decode(whole(frames))
            if message.kind == "want" and self._first <= message["chunk"] <= self.made:
                self._workers[message["worker"]] = _Worker(bytes(identity.buffer), message["chunk"])
                self.pump()

    def pump(self) -> None:
        """Send each worker what it has room for."""
        if self._session is None:
            return
        for number, worker in self._workers.items():
            peer = self._session.peers.get(number)
            room = peer.said.get("room", 0) if peer is not None else 0
            while worker.chunk < min(room, self.made):
                frames = self._chunks[worker.chunk - self._first]
                self._router.send_multipart([worker.identity, *pieces(frames)], copy=False)
                worker.chunk += 1
        for attached in self._attached:
            attached.read()

    def heard(self) -> None:
        """A worker has said what it has got, and what it has room for."""
        if self._session is None:
            return
        got = min((peer.said.get("got", 0) for peer in self._session.peers.values()), default=self.made)
        while self._chunks and self._first < got:
            self._chunks.popleft()
            self._first += 1
        self.pump()

    async def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a small tensor into a bucket, send a large one from where it lies; the one before has arrived then."""
        assert self._session is not None
        if not self._session.peers:
            return
        before, self._lent = self._lent, 0
        await self._add(name, tensor)
        if before:
            await self._arrived(before)

    async def _add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.nbytes
        if size > self._bucket_bytes:
            self._flush()
            content, entry = raw(tensor.detach().cpu()), entry_of(name, tensor)
            piece = size if size <= _WHOLE * self._bucket_bytes else self._bucket_bytes
            for start in range(0, size, piece):
                self._launch(content[start : start + piece], start, size, [entry])
            self._lent = self.made
            return
        if self._used + size > self._bucket_bytes:
            self._flush()
        entry = entry_of(name, tensor, self._used)
        put(await self._slot(), entry, tensor)
        self._entries.append(entry)
        self._used = aligned(self._used + size)

    async def _slot(self) -> torch.Tensor:
        """The buffer that is to be filled, once everybody has what was in it."""
        slot = self._fills % _SLOTS
        if not self._entries:
            await asyncio.sleep(0)  # to hear of workers: what they have room for, or that they broke off
            await self._arrived(self._slot_free_at[slot])
        while len(self._slots) <= slot:
            self._slots.append(torch.empty(self._bucket_bytes, dtype=torch.uint8))
        return self._slots[slot]

    async def end(self) -> None:
        """Send what is left, and wait until every chunk has arrived."""
        self._flush()
        await self._arrived(self.made)

    def _flush(self) -> None:
        entries, size = self._entries, min(self._used, self._bucket_bytes)
        self._entries, self._used = [], 0
        if entries:
            self._launch(self._slots[self._fills % _SLOTS][:size], 0, size, entries)
            self._slot_free_at[self._fills % _SLOTS] = self.made
            self._fills += 1

    def _launch(self, content: torch.Tensor, start: int, size: int, entries: Sequence[Entry]) -> None:
        fields = {"number": self.made, "start": start, "size": size, "tensors": [] if start else entries}
        self._chunks.append(self._wire.encode("chunk", fields, [content.numpy().data]))
        self.pump()

    async def _arrived(self, count: int) -> None:
        """Wait until everybody has so many chunks."""
        assert self._session is not None
        await self._session.until(lambda peer: peer.said.get("got", 0) >= count, f"take chunk {count - 1}")

    def close(self) -> None:
        """Close the sockets."""
        for attached in self._attached:
            attached.close()
        self._attached.clear()
        self._chunks.clear()
        self._context.destroy(0)


# -- a worker ----------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Arrived:
    """Tensors that have come together."""

    content: torch.Tensor  #: uint8 ``[bytes]``
    entries: Sequence[Entry]
    pooled: torch.Tensor | None = None  #: a buffer to be given back


class Receiving:
    """A worker's socket, and what has come."""

    def __init__(self, place: Mapping[str, Any], session: TransferSession, pool: list[torch.Tensor]) -> None:
        """``place`` is the worker's in the topology; the caller keeps ``pool``, for tensors that come in pieces."""
        self._session = session
        self._worker = place["worker"]
        self._wire = Wire(MESSAGES, bytes.fromhex(place["session"]["secret"]))
        self._pool = pool
        self.arrived: deque[Arrived] = deque()
        self.chunks = 0  #: that have come
        self._room = self._told = _WINDOW  #: chunks that may come; and that the sender knows of
        self._pieces: list[Entry] = []  #: of the large tensor that is coming,
        self._buffer = torch.empty(0, dtype=torch.uint8)  #: and where to
        keys = None if place["keys"] is None else Keys(**place["keys"])
        self._context = zmq.Context[Any]()
        socket = dealer(self._context, keys, bytes.fromhex(place["session"]["secret"]))
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._attached = _Attached(socket, self._take)
        self._monitor = _Attached(monitor, self._connected)
        socket.connect(place["data"])  # after the monitor, which is to see it

    def _connected(self, monitor: zmq.Socket[Any]) -> None:
        """For the first time, or after the connection broke: say what is missing."""
        monitor.recv_multipart()
        socket = self._attached.socket
        socket.send_multipart(self._wire.encode("want", {"worker": self._worker, "chunk": self.chunks}))
        self._attached.read()

    def _take(self, socket: zmq.Socket[Any]) -> None:
        frames = socket.recv_multipart(copy=False)
        with suppress(RpcError):
            message = self._wire.decode(whole(frames))
            if message.kind == "chunk" and message["number"] == self.chunks and len(message.buffers) == 1:
                self.chunks += 1
                self._told = self._room
                self._session.tell({"got": self.chunks, "room": self._told})
                self._put(message)
                self._session.notify()

    def _put(self, message: Message) -> None:
        content = torch.from_numpy(np.frombuffer(message.buffers[0], dtype=np.uint8))
        start, size = message["start"], message["size"]
        if size == len(content) and content.data_ptr() % 8 == 0:
            self.arrived.append(Arrived(content, message["tensors"]))
            return
        if start == 0:
            self._pieces = message["tensors"]
            self._buffer = self._free(size)
        self._buffer[start : start + len(content)] = content
        if start + len(content) == size:
            self.arrived.append(Arrived(self._buffer[:size], self._pieces, self._buffer))
        else:
            self._grant()  # this message is not needed any more

    def _free(self, size: int) -> torch.Tensor:
        """A buffer without readers; touching fresh memory is slow, so they are kept."""
        fitting = [number for number, buffer in enumerate(self._pool) if buffer.numel() >= size]
        if fitting:
            return self._pool.pop(min(fitting, key=lambda number: self._pool[number].numel()))
        if self._pool:
            self._pool.pop()
        return torch.empty(size, dtype=torch.uint8)

    def read(self, arrived: Arrived) -> None:
        """Tensors that have come were read; there is room for more."""
        if arrived.pooled is not None:
            self._pool.append(arrived.pooled)
        self._grant()

    def _grant(self) -> None:
        """There is room for one more."""
        self._room += 1
        if self._room - self._told >= _WINDOW // 2:  # less is said with the next chunk
            self._told = self._room
            self._session.tell({"room": self._told})

    def begin(self) -> None:
        """Have the sender send."""
        self._session.tell({"room": self._room})

    def close(self) -> None:
        """Close the sockets."""
        self._monitor.close()
        self._attached.close()
        self._context.destroy(0)
