"""ZeroMQ sockets of both ends: where servers listen, and who gets in.

Within a host a server listens at an abstract Unix address, which is no file, and a client shows a password that is
made of the secret (PLAIN); elsewhere it listens at a TCP port, where connections are encrypted by CURVE and only
clients with the server's client key get in. Every message is signed with the secret in either case
(:mod:`jackfield_transport_zmq.wire`).

libzmq holds a frame in memory before it knows who sends it, up to the socket's largest. So frames are small, and longer
ones travel in pieces (:func:`pieces`, :func:`whole`), which only a client that was let in can send.
"""

from __future__ import annotations

import hmac
import secrets
import sys
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import attrs
import zmq
from zmq.utils import z85

from jackfield_transport_zmq.wire import Buffer

_POLLIN = int(zmq.POLLIN)  #: an enumeration's own arithmetic takes longer than all the rest of a look
_PIECE = 1 << 18  #: bytes of a frame
_LARGEST = _PIECE + 1024  #: with what encryption adds
_USER = b"jackfield"
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
        """Make new keys."""
        return cls(*(key.decode() for _ in range(2) for key in zmq.curve_keypair()))

    def of_clients(self) -> dict[str, str]:
        """Return the keys that clients may know."""
        return attrs.asdict(self) | {"server_secret": ""}


def listening(
    context: zmq.Context[Any], host: str, keys: Keys | None, tcp: bool, port: int = 0
) -> tuple[zmq.Socket[Any], str]:
    """A server's socket and its address. Its context needs a :class:`Gate`, without which no client gets in.

    It is for this host's processes alone, or with ``tcp`` for others, too. Without keys for CURVE it speaks PLAIN.

    Raises:
        zmq.ZMQError: the address is taken.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    _tune(socket)
    if keys is not None:
        socket.curve_server = True
        socket.curve_publickey = keys.server_public.encode()
        socket.curve_secretkey = keys.server_secret.encode()
    else:
        socket.plain_server = True
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


def dealer(context: zmq.Context[Any], keys: Keys | None, secret: bytes, largest: int = _LARGEST) -> zmq.Socket[Any]:
    """A client's socket, which is not connected yet. ``largest``: bytes of a frame of its server."""
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.IDENTITY, b"c" + secrets.token_bytes(15))
    _tune(socket, largest)
    if keys is not None:
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
    else:
        socket.plain_username = _USER
        socket.plain_password = password(secret)
    return socket


def pieces(frames: Iterable[Buffer]) -> list[Buffer]:
    """The frames of a message cut into small ones; what is below a piece stays what it is, and nothing is copied.

    A full piece is followed by the rest of its frame, which is empty where the frame ends with the piece.
    """
    cut: list[Buffer] = []
    for frame in frames:
        if (frame.nbytes if isinstance(frame, memoryview) else len(frame)) < _PIECE:
            cut.append(frame)
            continue
        view = memoryview(frame).cast("B")
        cut.extend(view[start : start + _PIECE] for start in range(0, len(view), _PIECE))
        if len(view) % _PIECE == 0:
            cut.append(b"")
    return cut


def whole(frames: Sequence[zmq.Frame]) -> list[Buffer]:
    """The frames that :func:`pieces` were made of; those of one piece lie where they came."""
    found: list[Buffer] = []
    parts: list[Buffer] = []
    for frame in frames:
        content = frame.buffer
        if len(content) < _PIECE and not parts:
            found.append(content)
            continue
        parts.append(content)
        if len(content) < _PIECE:
            found.append(bytearray().join(parts))
            parts = []
    return [*found, *parts]  # what is left over is of no message of ours; the reader refuses it


def password(secret: bytes) -> bytes:
    """Return what a client shows: it is made of the secret, which stays unknown."""
    return blake2b(_USER, digest_size=32, key=secret).hexdigest().encode()


def readable(socket: zmq.Socket[Any]) -> bool:
    """Return whether a message is there."""
    events: Any = socket.getsockopt(zmq.EVENTS)
    return bool(events & _POLLIN)


def _tune(socket: zmq.Socket[Any], largest: int = _LARGEST) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, largest)


class Gate:
    """Lets in who has the key of the clients, or the password (ZAP, RFC 27), and counts the others."""

    def __init__(self, context: zmq.Context[Any], keys: Keys | None, secret: bytes) -> None:
        self._mechanism = b"PLAIN" if keys is None else b"CURVE"
        self._known = [_USER, password(secret)] if keys is None else [z85.decode(keys.client_public.encode())]
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """One question of libzmq's."""
        version, number, _, _, _, mechanism, *shown = self.socket.recv_multipart()
        fits = len(shown) == len(self._known) and all(map(hmac.compare_digest, shown, self._known))
        known = fits and mechanism == self._mechanism
        self.refused += not known
        status = [b"200", b"OK", b"client", b""] if known else [b"400", b"refused", b"", b""]
        self.socket.send_multipart([version, number, *status])
