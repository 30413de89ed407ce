"""Messages of the RPC, and the protocol that cuts them out of a stream of bytes."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, TypeAlias

import msgspec

from jackfield.errors import JackfieldError, RpcError

_HEAD = struct.Struct(">4sI")  #: magic with the version, and the bytes of the message
_MAGIC = b"JKR1"
LIMIT = 1 << 26  #: bytes of a message
STRANGER_LIMIT = 1 << 12  #: the same before the other end has proved that it knows the secret


class _Message(msgspec.Struct, array_like=True):
    """A message: on the wire an array of a tag and the fields."""


class Hello(_Message, tag=1):
    """The first message of both ends of a socket: a challenge."""

    nonce: bytes


class Welcome(_Message, tag=2):
    """The answer to a challenge, and who answers."""

    proof: bytes  #: HMAC of both nonces
    name: str
    process: dict[str, Any]
    contracts: dict[str, str] = {}  #: fingerprint by service
    session: str = ""  #: the server's name for the connection; from a client: the session that sends heartbeats here


class Call(_Message, tag=3):
    """A call of ``service.method``. Id 0 asks for no reply."""

    id: int
    method: str  #: or ``next`` and ``leave``: of the iteration that the call with the id in the arguments has opened
    arguments: msgspec.Raw  #: an array, in the order of the signature
    seconds: float | None = None  #: the deadline, counted from the arrival


class Reply(_Message, tag=4):
    """The value that a call has returned, or the error that it has raised."""

    id: int
    value: msgspec.Raw
    error: dict[str, Any] | None = None


class Cancel(_Message, tag=5):
    """The caller has left. The call still gets its reply."""

    id: int


class Heartbeat(_Message, tag=6):
    """A sign that the process lives."""


class News(_Message, tag=7):
    """A report of what happened to another client, for the log."""

    text: str


class Goodbye(_Message, tag=8):
    """The connection ends on purpose."""

    reason: str = ""
    early: bool = False  #: work of this process is left to do


Message: TypeAlias = Hello | Welcome | Call | Reply | Cancel | Heartbeat | News | Goodbye


def frame(message: bytes) -> bytes:
    """Return a message as it is sent: magic, length, content."""
    return _HEAD.pack(_MAGIC, len(message)) + message


class Frames(asyncio.Protocol):
    """Cuts a stream into messages. Nothing is kept of a message that is longer than the limit."""

    limit: int  #: bytes of a message

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._needed = _HEAD.size

    def took(self, content: bytes) -> None:
        """Handle the content of a message."""
        raise NotImplementedError

    def refused(self, error: JackfieldError) -> None:
        """End the connection, which cannot be read on."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        """Cut the bytes that have come into messages."""
        self._bytes += data
        try:
            while len(self._bytes) >= self._needed:
                magic, size = _HEAD.unpack_from(self._bytes)
                if magic != _MAGIC or size > self.limit:
                    found = f"{size} bytes" if magic == _MAGIC else bytes(self._bytes[:8])
                    raise RpcError(
                        "a message is too long, or is not one of this protocol",
                        expected=f"{self.limit} bytes",
                        found=found,
                    )
                self._needed = _HEAD.size + size
                if len(self._bytes) >= self._needed:
                    content = bytes(self._bytes[_HEAD.size : self._needed])
                    del self._bytes[: self._needed]
                    self._needed = _HEAD.size
                    self.took(content)
        except JackfieldError as error:
            self._bytes.clear()
            self.refused(error)
