"""ZeroMQ sockets of both ends: where servers listen, and who gets in.

Within a host a server listens at an abstract Unix address, which is no file; elsewhere at a TCP port, where connections
are encrypted by CURVE and only clients with the server's client key get in. Every message is signed with a secret in
either case (:mod:`jackfield.wire`).
"""

from __future__ import annotations

import ipaddress
import secrets
import sys
from typing import Any

import attrs
import zmq
from zmq.utils import z85

__all__ = ["Gate", "Keys", "dealer", "is_loopback", "listening", "readable"]

_POLLIN = int(zmq.POLLIN)  #: an enumeration's own arithmetic takes longer than all the rest of a look
_LARGEST = 1 << 33  #: bytes of a frame, as in jackfield.wire
_HEARTBEAT_MS = 2_000  #: a TCP peer that is gone is noticed after some of these


@attrs.frozen
class Keys:
    """CURVE keys of a queue, as text: its processes are one server, their clients one client."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def make(cls) -> Keys:
        """New ones."""
        return cls(*(key.decode() for _ in range(2) for key in zmq.curve_keypair()))

    def of_clients(self) -> dict[str, str]:
        """What clients may know."""
        return attrs.asdict(self) | {"server_secret": ""}


def is_loopback(host: str) -> bool:
    """Whether only this machine gets there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening(
    context: zmq.Context[Any], host: str, keys: Keys | None, tcp: bool, port: int = 0
) -> tuple[zmq.Socket[Any], str]:
    """A server's socket and its address.

    Args:
        context: of the process.
        host: an address of this machine, for TCP.
        keys: for CURVE.
        tcp: whether others than this host's processes are to come.
        port: for TCP; 0: any that is free.

    Raises:
        zmq.ZMQError: nobody can listen there.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _tune(socket)
    if keys is not None:
        socket.curve_server = True
        socket.curve_publickey = keys.server_public.encode()
        socket.curve_secretkey = keys.server_secret.encode()
        socket.setsockopt(zmq.ZAP_DOMAIN, b"jackfield")
    try:
        if not tcp and sys.platform == "linux":
            address = f"ipc://@jackfield-{secrets.token_hex(12)}"
            socket.bind(address)
        else:
            socket.setsockopt(zmq.IPV6, ":" in host)
            place = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
            socket.bind(f"{place}:{port or '*'}")
            endpoint: Any = socket.getsockopt(zmq.LAST_ENDPOINT)
            address = f"{place}:{endpoint.decode().rpartition(':')[2].rstrip(chr(0))}"
    except zmq.ZMQError:
        socket.close(0)
        raise
    return socket, address


def dealer(context: zmq.Context[Any], keys: Keys | None) -> zmq.Socket[Any]:
    """A client's socket, which is not connected yet."""
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.IDENTITY, b"c" + secrets.token_bytes(15))
    _tune(socket)
    if keys is not None:
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
    return socket


def readable(socket: zmq.Socket[Any]) -> bool:
    """Whether a message is there."""
    events: Any = socket.getsockopt(zmq.EVENTS)
    return bool(events & _POLLIN)


def _tune(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)  # else who announces more has it allocated


class Gate:
    """Lets in who has the key of the queue's clients (ZAP, RFC 27), and counts the others."""

    def __init__(self, context: zmq.Context[Any], keys: Keys) -> None:
        self._key = z85.decode(keys.client_public.encode())
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """One question of libzmq's."""
        version, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
        known = mechanism == b"CURVE" and credentials == [self._key]
        self.refused += not known
        status = [b"200", b"OK", b"client", b""] if known else [b"400", b"refused", b"", b""]
        self.socket.send_multipart([version, number, *status])
