"""Messages between processes: a typed header in msgpack, and raw buffers beside it that are not copied.

A message is a list of frames, as ZeroMQ sends them. The first is the *head*::

    b"JKF" | version, 1 byte | keyed BLAKE2b over the rest, 16 bytes | msgpack [kind, fields, sizes of the buffers]

The other frames are buffers: bytes that the fields speak of. Nothing in a message is executed or looked up by name,
there is no pickle, and msgpack's extension types are refused. A reader says beforehand
which kinds of message it takes and of which types their fields are; everything else is refused with a
:class:`~jackfield.errors.RpcError`, and counted.

The key makes sure that the head was written by a process that knows the secret. It does not hide anything, and covers
of the buffers only their number and sizes: beyond one host, an encrypted channel has to carry the frames.
"""

from __future__ import annotations

import hmac
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import attrs
import msgpack

from jackfield.errors import RpcError

VERSION = 1

Buffer: TypeAlias = bytes | bytearray | memoryview

#: Of a field: ``str``, ``int``, ``bytes``, ``bool`` or ``float``; ``[schema]`` is a list of any length, ``(a, b, …)``
#: a list of just these, ``{schema}`` a map from text; ``object`` is any of them, null included: who reads it looks on.
Schema: TypeAlias = "type | list[Any] | tuple[Any, ...] | set[Any]"

_MAGIC = b"JKF"
_MAC_BYTES = 16
_PREFIX_BYTES = len(_MAGIC) + 1 + _MAC_BYTES
_SCALARS = (str, int, bytes, bool, float)


@attrs.frozen(kw_only=True)
class Limits:
    """What a message may take; both ends have the same."""

    head_bytes: int = 1 << 26
    buffers: int = 1 << 16  #: how many
    buffer_bytes: int = 1 << 33  #: of one buffer
    total_bytes: int = 1 << 36  #: of all buffers together


@attrs.frozen(eq=False)
class Message:
    """One message that was checked."""

    kind: str
    fields: Mapping[str, Any]  #: just those of its kind
    buffers: Sequence[Buffer] = ()  #: where they lay in the frames

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


class Wire:
    """Writes and reads the messages of one protocol."""

    def __init__(
        self, messages: Mapping[str, Mapping[str, Schema]], secret: bytes, limits: Limits | None = None
    ) -> None:
        """
        Args:
            messages: fields of each kind of message that is read, with their types.
            secret: up to 64 bytes, known to both ends.
            limits: of each message.
        """
        self._checks = {
            kind: {name: _check(schema) for name, schema in fields.items()} for kind, fields in messages.items()
        }
        self._secret = secret
        self._limits = limits or Limits()
        self.refused: Counter[str] = Counter()  #: by code of error

    def encode(self, kind: str, fields: Mapping[str, Any], buffers: Sequence[Buffer] = ()) -> list[Buffer]:
        """The frames of a message; buffers stay where they are.

        Raises:
            RpcError: ``rpc.size`` for a message above the limits.
        """
        sizes = [buffer.nbytes if isinstance(buffer, memoryview) else len(buffer) for buffer in buffers]
        body: bytes = msgpack.packb([kind, fields, sizes])
        self._check_sizes(len(body), sizes)
        return [b"".join((_MAGIC, bytes((VERSION,)), self._mac(body), body)), *buffers]

    def decode(self, frames: Sequence[Buffer]) -> Message:
        """The message of these frames, whose buffers are not copied.

        Raises:
            RpcError: ``rpc.malformed``, ``rpc.version``, ``rpc.size`` or ``rpc.authentication``; counted in
                :attr:`refused`. No other error, whatever the frames.
        """
        try:
            return self._decode(frames)
        except RpcError as error:
            self.refused[error.code] += 1
            raise

    def _decode(self, frames: Sequence[Buffer]) -> Message:
        if not frames:
            raise RpcError("a message without frames", expected="a head")
        head, buffers = memoryview(frames[0]), frames[1:]
        if len(head) < _PREFIX_BYTES or head[: len(_MAGIC)] != _MAGIC:
            raise RpcError("a message that is not one of ours", expected=_MAGIC, found=bytes(head[: len(_MAGIC)]))
        if head[len(_MAGIC)] != VERSION:
            raise RpcError(
                "a message of another version",
                code="rpc.version",
                expected=VERSION,
                found=head[len(_MAGIC)],
                fix="use the same version of jackfield on both sides",
            )
        body = head[_PREFIX_BYTES:]
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        self._check_sizes(len(body), sizes)
        if not hmac.compare_digest(bytes(head[len(_MAGIC) + 1 : _PREFIX_BYTES]), self._mac(body)):
            raise RpcError("a message from a process that does not know the secret", code="rpc.authentication")
        kind, fields, announced = _unpacked(body)
        if announced != sizes:
            raise RpcError(
                "buffers are missing or of other sizes", expected=reprlib.repr(announced), found=reprlib.repr(sizes)
            )
        self._check_fields(kind, fields)
        return Message(kind, fields, buffers)

    def _mac(self, body: Buffer) -> bytes:
        return blake2b(body, digest_size=_MAC_BYTES, key=self._secret).digest()

    def _check_sizes(self, head: int, sizes: Sequence[int]) -> None:
        limits = self._limits
        fine = head <= limits.head_bytes and len(sizes) <= limits.buffers and sum(sizes) <= limits.total_bytes
        if not fine or max(sizes, default=0) > limits.buffer_bytes:
            raise RpcError(
                "a message is too large",
                code="rpc.size",
                expected=f"{limits.head_bytes} bytes of head, {limits.buffers} buffers of {limits.buffer_bytes} bytes, "
                f"{limits.total_bytes} bytes together",
                found=f"{head} bytes of head, {len(sizes)} buffers of up to {max(sizes, default=0)} bytes, "
                f"{sum(sizes)} bytes together",
            )

    def _check_fields(self, kind: Any, fields: Any) -> None:
        checks = self._checks.get(kind) if isinstance(kind, str) else None
        if checks is None:
            raise RpcError(
                f"a message of a kind that is not known: {reprlib.repr(kind)}", expected=", ".join(self._checks)
            )
        if not isinstance(fields, dict) or fields.keys() != checks.keys():
            raise RpcError(f"a message {kind!r} with other fields", expected=sorted(checks), found=reprlib.repr(fields))
        for name, check in checks.items():
            if not check(fields[name]):
                raise RpcError(
                    f"a message {kind!r} whose field is of another type", where=name, found=reprlib.repr(fields[name])
                )


def _unpacked(body: memoryview) -> tuple[Any, Any, Any]:
    try:
        # msgpack bounds every length by the bytes that are there
        found = msgpack.unpackb(body, ext_hook=_refuse_extension, strict_map_key=True)
        if type(found) is not list:
            raise TypeError("not a list")
        kind, fields, sizes = found
    except Exception as error:  # msgpack raises many sorts, and what it read comes from outside
        raise RpcError(f"a head that cannot be read: {type(error).__name__}") from error
    return kind, fields, sizes


def _refuse_extension(code: int, _: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _check(schema: Schema) -> Callable[[Any], bool]:
    """Whether a value is of a type. Types are compared exactly: True is no int."""
    if isinstance(schema, list):
        (inner,) = schema
        if inner in _SCALARS:
            kinds = {inner}
            return lambda value: type(value) is list and kinds.issuperset(map(type, value))
        check = _check(inner)
        return lambda value: type(value) is list and all(map(check, value))
    if isinstance(schema, tuple):
        return _check_tuple(schema)
    if isinstance(schema, set):
        (inner,) = schema
        check = _check(inner)
        return lambda value: (
            type(value) is dict and all(type(name) is str and check(item) for name, item in value.items())
        )
    if schema is object:
        return lambda value: True
    assert schema in _SCALARS, f"{schema!r} is no type of a field"
    return lambda value: type(value) is schema


def _check_tuple(schema: tuple[Any, ...]) -> Callable[[Any], bool]:
    """Types all at once, then what lies in lists and maps: messages have thousands of such entries."""
    kinds = [dict if isinstance(item, set) else list if isinstance(item, list | tuple) else item for item in schema]
    assert object not in kinds, "an entry of a list has a type"
    inner = [(index, _check(item)) for index, item in enumerate(schema) if item not in _SCALARS]
    return lambda value: (
        type(value) is list and kinds == list(map(type, value)) and all(check(value[index]) for index, check in inner)
    )


CellEntry: TypeAlias = "Sequence[Any]"

CELL = (str, int, int, int)
BLOCK = (int, int, int, int, int, int)
UNIT = (int, int, str, str)  #: number, pid, address, where it runs

_VALUES: dict[str, Schema] = {"cells": [CELL], "blocks": [BLOCK]}
_MARK: dict[str, Schema] = {"id": int, "mark": str}
_ROWS: dict[str, Schema] = {"id": int, "units": int, "partition": str, "keys": [str]}

REQUESTS: dict[str, dict[str, Schema]] = {
    "hello": {"pid": int, "place": str},
    "put": {**_ROWS, "columns": [str], **_VALUES},
    "get": {**_ROWS, "columns": [str]},
    "has": _ROWS,
    "keys": {"id": int},
    "delete": _ROWS,
    "stats": {"id": int},
    "hold": _MARK,  # puts and deletions wait, until begin, swap or end of the same mark
    "begin": _MARK,  # a checkpoint: what is there now
    "take": _MARK,  # some rows of it
    "stage": {**_MARK, "partition": str, "keys": [str], "columns": [str], **_VALUES},
    "swap": _MARK,  # what was staged, in the place of everything
    "end": _MARK,
    "release": {"leases": [int]},
    "add": {"id": int, "units": [UNIT]},
    "lose": {"units": [int]},
    "bye": {},
}

_REPLY: dict[str, Schema] = {"id": int, "lost": [int]}

REPLIES: dict[str, dict[str, Schema]] = {
    "counted": {**_REPLY, "rows": int, "bytes": int},
    "cells": {**_REPLY, "unknown": [int], "lacking": [(int, str, [str])], **_VALUES, "lease": int},
    "known": {**_REPLY, "known": [int]},
    "samples": {**_REPLY, "samples": [(str, str, [str])]},
    "state": {**_REPLY, "rows": int, "bytes": int, "details": {int}},
    "batch": {**_REPLY, "rows": [(str, str, [str])], **_VALUES, "lease": int},
    "stale": {**_REPLY, "units": [UNIT]},
    "refused": {**_REPLY, "code": str, "message": str},
    "freed": {"blocks": [(int, int)]},  # of the client that is told; no reply
}

_SMALL = 1 << 16  #: bytes; smaller cells share a buffer


class Packer:
    """Puts cells into a message's buffers: small ones copied together, large ones as they lie."""

    def __init__(self) -> None:
        self._small = bytearray()
        self._large: list[Buffer] = []

    def add(self, content: Buffer) -> tuple[int, int]:
        """Source and offset of these bytes."""
        if len(content) < _SMALL:
            start = len(self._small)
            self._small += content
            return 0, start
        self._large.append(content)
        return len(self._large), 0

    def buffers(self) -> list[Buffer]:
        """Return the buffers of the message."""
        return [bytes(self._small), *self._large]


def bytes_of(entry: CellEntry, buffers: Sequence[Buffer]) -> memoryview:
    """The bytes of a cell that is not in shared memory.

    Raises:
        ValueError: it points beyond its message.
    """
    _, source, offset, size = entry
    buffer = memoryview(buffers[source]) if 0 <= source < len(buffers) else memoryview(b"")
    if offset < 0 or size < 0 or offset + size > len(buffer):
        raise ValueError("a cell lies outside of its message")
    return buffer[offset : offset + size]
