"""The process of a storage unit: ``python -m jackfield_transport_zmq.serve``, started by who owns the queue.

It reads its identity from standard input, writes its address to standard output, and ends when it is killed, or when
the process that started it has ended in any way.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import zmq

from jackfield.errors import QueueError
from jackfield_transport_zmq.arenas import place_of_this_process
from jackfield_transport_zmq.sockets import Gate, Keys, listening, pieces, readable, whole
from jackfield_transport_zmq.unit import Unit
from jackfield_transport_zmq.wire import REQUESTS, Buffer, Wire

_LARGE = 1 << 16  #: bytes; such buffers are sent from where they lie


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
    context = zmq.Context[Any]()
    keys = None if order["keys"] is None else Keys(**order["keys"])
    gate = Gate(context, keys, bytes.fromhex(order["secret"]))
    try:
        router, address = listening(context, order["host"], keys, tcp=keys is not None)
    except zmq.ZMQError as error:
        raise QueueError(
            f"a storage unit cannot listen: {error}",
            code="queue.store",
            where=order["host"],
            fix="name an address of this host",
        ) from error

    def send(identity: bytes, frames: list[Buffer]) -> None:
        # a client that has gone is none of our concern: ZeroMQ drops what is for it
        router.send_multipart([identity, *pieces(frames)], copy=max(map(len, frames)) < _LARGE)

    place = place_of_this_process()
    unit = Unit(order["number"], Wire(REQUESTS, bytes.fromhex(order["secret"])), send, place)
    print(json.dumps({"address": address, "place": place}), flush=True)
    poller = zmq.Poller()
    for source in (owner, router, gate.socket):
        poller.register(source, zmq.POLLIN)
    watched: dict[int, bytes] = {}
    while True:
        wait = unit.wait_seconds()
        for source, _ in poller.poll(None if wait is None else int(wait * 1000) + 1):
            if source is router:
                _receive(router, unit)
            elif source is gate.socket:
                gate.answer()
                unit.refused_keys = gate.refused
            elif source == owner:
                return
            else:
                poller.unregister(source)
                if unit.clients.get(watched[source]) is not None:
                    unit.gone(watched[source])
                del watched[source]
        unit.tick()
        _watch(unit, watched, poller)


def _receive(router: zmq.Socket[Any], unit: Unit) -> None:
    while readable(router):
        identity, *frames = router.recv_multipart(copy=False)
        unit.receive(bytes(identity.buffer), whole(frames))


def _watch(unit: Unit, watched: dict[int, bytes], poller: zmq.Poller) -> None:
    now = {client.process: identity for identity, client in unit.clients.items() if client.process is not None}
    if now == watched:
        return
    for descriptor in watched.keys() - now.keys():
        poller.unregister(descriptor)
    for descriptor in now.keys() - watched.keys():
        poller.register(descriptor, zmq.POLLIN)
    watched.clear()
    watched.update(now)


if __name__ == "__main__":
    main()
