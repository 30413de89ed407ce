"""The transports beneath the checkpoint engines, without the engines: gloo, ZeroMQ and NIXL, for benchmarks/weights.py.

The sender and each receiver have one end, of the same class. All ends are asked at once for a transfer of the sender's
places into those of each receiver, uint8, in the same order. Places are the tensors of the model, where they lie and
where they are loaded, because the speed of a copy depends on the memory; small ones are one place, packed beforehand.
What ZeroMQ's receivers do with messages is said there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

_MB = 2**20
_WHOLE = 2**40  #: bytes: all of a place at once

#: By engine, in which ways its transport is tried; the best is what the engine is measured by.
WAYS: dict[str, tuple[Any, ...]] = {
    "nccl": (4 * _MB, 32 * _MB, _WHOLE),
    "zmq": (("copied", 4 * _MB), ("held", 12_500_000), ("held", 32 * _MB)),
    "nixl": (4 * _MB, 32 * _MB, _WHOLE),
}
#: Beside them, of ZeroMQ: nobody keeps what comes, and the same memory takes all messages.
DROPPED = (("dropped", 4 * _MB), ("dropped", 32 * _MB))


def pieces(places: list[Any], size: int) -> Iterator[Any]:
    """Parts of at most ``size`` bytes."""
    for place in places:
        yield from place.split(min(size, len(place)))


class Gloo:
    """A broadcast group; rank 0 sends."""

    def __init__(self, places: list[Any], seconds: float, store: str, rank: int, members: int) -> None:
        import torch.distributed

        distributed: Any = torch.distributed  # its stubs lack what its builds have
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=seconds)
        self.group = distributed.ProcessGroupGloo(distributed.FileStore(store, members), rank, members, options)
        self.places = places
        self.place = None  #: what the other ends have to know

    def move(self, size: int) -> None:
        """Two pieces are under way."""
        under_way: list[Any] = []
        for piece in pieces(self.places, size):
            under_way.append(self.group.broadcast(piece, 0))
            if len(under_way) > 1:
                under_way.pop(0).wait()
        for work in under_way:
            work.wait()
        self.group.barrier().wait()  # all have it

    def close(self) -> None:
        """Nothing is open that is not dropped with this."""


class ZeroMQ:
    """A ROUTER of the sender, a DEALER of each receiver, within the host."""

    def __init__(self, places: list[Any], seconds: float, peers: int = 0, place: str | None = None) -> None:
        import zmq

        self.peers, self.places = peers, places
        self.socket: Any = zmq.Context.instance().socket(zmq.DEALER if place else zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.place = place or f"ipc://@jackfield-benchmark-{os.getpid()}-{id(self.socket)}"
        (self.socket.connect if place else self.socket.bind)(self.place)

    def move(self, way: tuple[str, int]) -> None:
        """A receiver copies each message to its place, or holds each until it has the next, or drops it."""
        if self.peers:
            self._send(way[1])
        else:
            self._receive(*way)

    def _send(self, size: int) -> None:
        import zmq

        identities = [self.socket.recv_multipart()[0] for _ in range(self.peers)]
        for piece in pieces(self.places, size):
            for identity in identities:
                self.socket.send(identity, zmq.SNDMORE)
                self.socket.send(piece.numpy().data, copy=False)
        for _ in identities:
            self.socket.recv_multipart()

    def _receive(self, what: str, size: int) -> None:
        import numpy

        self.socket.send(b"ready")
        held = None
        for piece in pieces(self.places, size):
            frame = self.socket.recv(copy=False)
            if what == "copied":
                piece.numpy()[:] = numpy.frombuffer(frame.buffer, dtype=numpy.uint8)
            held = frame if what == "held" else None
            del frame
        del held
        self.socket.send(b"done")

    def close(self) -> None:
        """Close the socket."""
        self.socket.close(0)


class NIXL:
    """Over UCX: each receiver reads the sender's registered memory into its own, one piece after the other."""

    def __init__(self, places: list[Any], seconds: float, peers: list[Any] | None = None) -> None:
        from nixl import nixl_agent, nixl_agent_config

        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        config = nixl_agent_config(enable_prog_thread=False)
        self.agent = nixl_agent(f"benchmark-{os.getpid()}-{id(self)}-{time.monotonic_ns()}", config)
        self.places = places
        for memory in places:
            self.agent.register_memory(memory)
        self.others = [self.agent.add_remote_agent(metadata) for metadata, _ in peers or []]
        self.addresses: list[int] = []  #: of the sender's places
        self.place = self.agent.get_agent_metadata(), [memory.data_ptr() for memory in places]

    def meet(self, place: tuple[bytes, list[int]]) -> None:
        """A receiver knows the sender's memory."""
        self.others, self.addresses = [self.agent.add_remote_agent(place[0])], place[1]

    def move(self, size: int) -> None:
        """From the sender's word to the last receiver's."""
        if not self.addresses:
            for other in self.others:
                self.agent.send_notif(other, b"go")
            self._notified(len(self.others))
            return
        self._notified(1)
        for memory, address in zip(self.places, self.addresses, strict=True):
            for piece in pieces([memory], size):
                self._read(piece, address + piece.data_ptr() - memory.data_ptr())
        self.agent.send_notif(self.others[0], b"done")

    def _read(self, here: Any, address: int) -> None:
        there = self.agent.get_xfer_descs([(address, len(here), 0)], "DRAM")
        handle = self.agent.initialize_xfer("READ", self.agent.get_xfer_descs(here), there, self.others[0])
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise OSError(f"NIXL: {state}")

    def _notified(self, count: int) -> None:
        """Wait for so many words of others, who are answered meanwhile."""
        while count:
            count -= sum(map(len, self.agent.get_new_notifs().values()))
            time.sleep(1e-4)

    def close(self) -> None:
        """Nothing is open that is not dropped with this."""


KINDS: dict[str, Any] = {"nccl": Gloo, "zmq": ZeroMQ, "nixl": NIXL}
