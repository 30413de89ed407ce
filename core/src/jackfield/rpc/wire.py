"""Messages of the RPC, and how they and the values in them are encoded."""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from jackfield.clock import Clock
from jackfield.errors import JackfieldError, RpcError

HEAD = struct.Struct(">4sI")  #: magic with the version, and the bytes of the message
MAGIC = b"JKR1"
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


class Codec:
    """Encodes values as msgpack, or as JSON for a peer that has only the standard library."""

    def __init__(self, name: Literal["msgpack", "json"] = "msgpack") -> None:
        module: Any = msgspec.msgpack if name == "msgpack" else msgspec.json
        self._encoder = module.Encoder(enc_hook=_plain)
        self._decoder = functools.cache(lambda kind: module.Decoder(kind, dec_hook=_made))

    def encode(self, value: Any) -> bytes:
        """Encode a value.

        Raises:
            RpcError: ``rpc.value``: it is not made of plain values and attrs instances.
        """
        try:
            encoded: bytes = self._encoder.encode(value)
        except (TypeError, OverflowError, ValueError, RecursionError) as error:
            raise RpcError(f"a value cannot go to another process: {error}", code="rpc.value") from error
        return encoded

    def decode(self, content: Any, kind: Any, where: str) -> Any:
        """Decode a value of a type.

        Raises:
            RpcError: ``rpc.value``: it is of another type.
            JackfieldError: what a validator of an attrs class refuses.
        """
        try:
            return self._decoder(kind).decode(content)
        except JackfieldError:
            raise
        except Exception as error:  # msgspec's own, or a validator's
            raise RpcError(f"a value of another type came: {error}", code="rpc.value", where=where) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())  # the other process has a working folder of its own
    if isinstance(value, Clock):
        return None  # each process has its own
    raise TypeError(f"it contains a {type(value).__name__}")


def _made(kind: Any, value: Any) -> Any:
    return Clock() if issubclass(kind, Clock) else kind(value)
