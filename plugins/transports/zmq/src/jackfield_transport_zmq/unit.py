"""A storage unit: keeps cells by partition, key and column, and does what clients ask for.

It loads no torch: what cells mean is their readers' concern. Values that a producer of this host put into shared memory
stay there; the unit keeps that memory open, knows who reads which block, and tells the producer when
one is not needed any more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from jackfield.errors import RpcError
from jackfield_transport_zmq.keeping import Client, Kept, Memory, size_of
from jackfield_transport_zmq.wire import Buffer, Message, Wire

_HOLD_SECONDS = 10.0  #: after which a hold is over whose holder does not end it
_BATCH_ROWS, _BATCH_BYTES = 500, 1 << 25

Row = dict[str, Kept]
Rows = dict[tuple[str, str], Row]


@attrs.define(eq=False)
class _Moment:  # a checkpoint that is read, or a restore that is staged
    rows: Rows = attrs.field(factory=dict)
    pending: deque[tuple[str, str]] = attrs.field(factory=deque)


class Unit:
    """The state of one unit. Each message is done whole before the next."""

    def __init__(self, number: int, wire: Wire, send: Callable[[bytes, list[Buffer]], None], place: str) -> None:
        """``send`` gives frames to a client; ``place``, where this process runs, says whose memory it can open."""
        self._number = number
        self._wire = wire
        self._send = send
        self._place = place
        self.refused_keys = 0  #: connections without the key of the queue
        self.clients: dict[bytes, Client] = {}
        self._rows: Rows = {}
        self._bytes = 0
        self._memory = Memory()
        self._units: list[Any] = []
        self._lost: set[int] = set()
        self._moments: dict[str, _Moment] = {}
        self._holder: str | None = None
        self._hold_ends = 0.0
        self._waiting: list[tuple[bytes, Message]] = []
        self._replies: list[tuple[bytes, list[Buffer]]] = []

    def receive(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        """Do what a client asks for; what is no request of ours is counted by the wire, and dropped."""
        try:
            message = self._wire.decode(frames)
        except RpcError:
            return
        self._handle(identity, message)

    def wait_seconds(self) -> float | None:
        """Until :meth:`tick` is due."""
        return None if self._holder is None else max(self._hold_ends - time.monotonic(), 0.0)

    def tick(self) -> None:
        """End a hold whose owner does not end it."""
        if self._holder is not None and time.monotonic() >= self._hold_ends:
            self._moments.pop(self._holder, None)
            self._go_on()

    def _handle(self, identity: bytes, message: Message) -> None:
        fields = message.fields
        if self._holder is not None and message.kind in ("put", "delete", "hold"):
            self._waiting.append((identity, message))
            return
        if message.kind in ("put", "get", "has", "delete") and fields["units"] < len(self._units):
            self._reply(identity, message, "stale", {"units": self._units})
            self._answer()
            return
        try:
            getattr(self, f"_do_{message.kind}")(identity, message)
        except (ValueError, IndexError, OverflowError, OSError) as error:
            answer = {"code": "queue.store", "message": str(error)}
            self._reply(identity, message, "refused", answer)
        self._answer()

    def _reply(
        self, identity: bytes, message: Message, kind: str, fields: Mapping[str, Any], buffers: Sequence[Buffer] = ()
    ) -> None:
        answer = {"id": message.fields.get("id", -1), "lost": sorted(self._lost), **fields}
        self._replies.append((identity, self._wire.encode(kind, answer, buffers)))

    def _counted(self, identity: bytes, message: Message, rows: int = 0, size: int = 0) -> None:
        self._reply(identity, message, "counted", {"rows": rows, "bytes": size})

    def _answer(self) -> None:
        """Say what is free before what was asked for: a client that deletes rows may use their memory at once."""
        self._tell_freed()
        replies, self._replies = self._replies, []
        for identity, frames in replies:
            self._send(identity, frames)

    def _tell_freed(self) -> None:
        freed = self._memory.freed
        for producer in list(freed):
            blocks = freed.pop(producer)
            if producer in self.clients:
                self._send(producer, self._wire.encode("freed", {"blocks": blocks}))

    def _do_hello(self, identity: bytes, message: Message) -> None:
        shares = bool(self._place) and message["place"] == self._place
        self.clients[identity] = Client.watched(message["pid"] if shares else None)

    def gone(self, identity: bytes) -> None:
        """A client's process has ended: what it read is read no more."""
        client = self.clients.pop(identity)
        for lease in list(client.leases):
            self._memory.give_back(client, lease)
        client.close()
        self._tell_freed()

    def _do_bye(self, identity: bytes, _: Message) -> None:
        self.left(identity)

    def left(self, identity: bytes) -> None:
        """A client has closed its connection."""
        client = self.clients.get(identity)
        if client is not None and not client.leases:  # tensors that are still read go with its process
            self.gone(identity)

    def _do_release(self, identity: bytes, message: Message) -> None:
        client = self.clients.get(identity)
        if client is not None:
            for lease in message["leases"]:
                self._memory.give_back(client, lease)

    def _do_add(self, identity: bytes, message: Message) -> None:
        self._units = message["units"]
        self._counted(identity, message)

    def _do_lose(self, _: bytes, message: Message) -> None:
        self._lost.update(message["units"])

    def _do_put(self, identity: bytes, message: Message) -> None:
        client = self.clients.get(identity)
        if client is None or client.has_ended:
            return  # its rows may have been deleted already, because it died: nobody would delete them again
        stored, replaced = self._write(self._rows, identity, message)
        self._bytes += stored - replaced
        self._counted(identity, message, len(message["keys"]), stored)

    def _write(self, rows: Rows, identity: bytes, message: Message) -> tuple[int, int]:
        """Bytes that were stored, and that they replaced. All or nothing: cells are looked at before any is stored."""
        keys, names, partition = message["keys"], message["columns"], message["partition"]
        if len(message["cells"]) != len(names):
            raise ValueError(f"cells of {len(message['cells'])} columns for {len(names)}")
        memory, replaced, stored = self._memory, list[Kept](), 0
        blocks = memory.opened(identity, message["blocks"])
        try:
            columns = [memory.kept(entry, len(keys), message.buffers, blocks) for entry in message["cells"]]
            for cells in columns:
                stored += size_of(cells)
                if blocks:
                    memory.use(cells)
        finally:
            memory.drop(blocks)
        into = [rows.setdefault((partition, key), {}) for key in keys]
        for name, cells in zip(names, columns, strict=True):
            for row, cell in zip(into, cells, strict=True):
                if name in row:
                    replaced.append(row[name])
                row[name] = cell
        return stored, memory.let_go(replaced) if replaced else 0

    def _do_get(self, identity: bytes, message: Message) -> None:
        partition, names = message["partition"], message["columns"]
        rows = [self._rows.get((partition, key)) for key in message["keys"]]
        there = [(number, row) for number, row in enumerate(rows) if row is not None]
        lacking = [(number, name, sorted(row)) for number, row in there for name in names if name not in row]
        columns = [] if lacking else [[row[name] for _, row in there] for name in names]
        unknown = [number for number, row in enumerate(rows) if row is None]
        values, buffers = self._memory.packed(columns, self.clients.get(identity))
        self._reply(identity, message, "cells", {"unknown": unknown, "lacking": lacking, **values}, buffers)

    def _do_has(self, identity: bytes, message: Message) -> None:
        known = [number for number, key in enumerate(message["keys"]) if (message["partition"], key) in self._rows]
        self._reply(identity, message, "known", {"known": known})

    def _do_keys(self, identity: bytes, message: Message) -> None:
        samples = [(*place, list(row)) for place, row in self._rows.items()]
        self._reply(identity, message, "samples", {"samples": samples})

    def _do_delete(self, identity: bytes, message: Message) -> None:
        rows = [self._rows.pop((message["partition"], key), None) for key in message["keys"]]
        there = [row for row in rows if row is not None]
        size = self._memory.let_go([cell for row in there for cell in row.values()])
        self._bytes -= size
        self._counted(identity, message, len(there), size)

    def _do_stats(self, identity: bytes, message: Message) -> None:
        refused = {f"refused {code}": count for code, count in self._wire.refused.items()}
        details = {"clients": len(self.clients), "refused connections": self.refused_keys, **refused}
        self._reply(identity, message, "state", {"rows": len(self._rows), "bytes": self._bytes, "details": details})

    def _do_hold(self, identity: bytes, message: Message) -> None:
        self._holder = message["mark"]
        self._hold_ends = time.monotonic() + _HOLD_SECONDS
        self._counted(identity, message)

    def _go_on(self) -> None:
        self._holder = None
        waiting, self._waiting = self._waiting, []
        for identity, message in waiting:
            self._handle(identity, message)

    def _held_by(self, mark: str) -> None:
        if self._holder != mark:
            raise ValueError("the hold is over: it took too long")

    def _do_begin(self, identity: bytes, message: Message) -> None:
        self._held_by(message["mark"])
        rows = {place: dict(row) for place, row in self._rows.items()}
        for row in rows.values():
            self._memory.use(row.values())
        self._moments[message["mark"]] = _Moment(rows, deque(rows))
        self._counted(identity, message, len(rows), self._bytes)
        self._go_on()

    def _do_take(self, identity: bytes, message: Message) -> None:
        moment = self._moments.get(message["mark"])
        if moment is None:
            raise ValueError("the checkpoint has ended")
        names: list[tuple[str, str, list[str]]] = []
        cells: list[Kept] = []
        size = 0
        while moment.pending and len(names) < _BATCH_ROWS and size < _BATCH_BYTES:
            partition, key = moment.pending.popleft()
            row = moment.rows.pop((partition, key))
            names.append((partition, key, list(row)))
            cells.extend(row.values())
            size += size_of(row.values())
        values, buffers = self._memory.packed([cells], self.clients.get(identity))
        self._memory.let_go(cells)
        self._reply(identity, message, "batch", {"rows": names, **values}, buffers)

    def _do_stage(self, identity: bytes, message: Message) -> None:
        moment = self._moments.setdefault(message["mark"], _Moment())
        stored, _ = self._write(moment.rows, identity, message)
        self._counted(identity, message, len(message["keys"]), stored)

    def _do_swap(self, identity: bytes, message: Message) -> None:
        self._held_by(message["mark"])
        staged = self._moments.pop(message["mark"], _Moment()).rows
        for row in self._rows.values():
            self._memory.let_go(row.values())
        self._rows = staged
        self._bytes = sum(size_of(row.values()) for row in staged.values())
        self._counted(identity, message, len(staged), self._bytes)
        self._go_on()

    def _do_end(self, identity: bytes, message: Message) -> None:
        moment = self._moments.pop(message["mark"], _Moment())
        for row in moment.rows.values():
            self._memory.let_go(row.values())
        self._counted(identity, message)
        if self._holder == message["mark"]:
            self._go_on()
