"""Messages between processes: a typed header in msgpack, and raw buffers beside it that are not copied.

A message is a list of frames, as ZeroMQ sends them. The first is the *head*::

    b"JKF" | version, 1 byte | keyed BLAKE2b over the rest, 16 bytes | msgpack [kind, fields, sizes of the buffers]

The other frames are buffers: bytes that the fields speak of. Nothing in a message is executed or looked up by name,
there is no pickle, and msgpack's extension types are refused. A reader says beforehand which kinds of message it takes
and of which types their fields are; msgspec compares types exactly (True is no int). Everything else is refused with a
:class:`~jackfield.errors.RpcError`, and counted.

The key makes sure that the head was written by a process that knows the secret. It does not hide anything, and covers
of the buffers only their number and sizes: beyond one host, an encrypted channel has to carry the frames.
"""

from __future__ import annotations

import hmac
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from operator import add
from typing import Any, TypeAlias, TypeVar

import attrs
import msgspec

from jackfield.errors import RpcError

_T = TypeVar("_T")

VERSION = 2

Buffer: TypeAlias = bytes | bytearray | memoryview

#: The types of a message's fields, by name, as annotations.
Schema: TypeAlias = "Mapping[str, Any]"

_MAGIC = b"JKF"
_MAC_BYTES = 16
_PREFIX_BYTES = len(_MAGIC) + 1 + _MAC_BYTES


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


class _Head(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: str
    fields: msgspec.Raw
    sizes: list[int]


class Wire:
    """Writes and reads the messages of one protocol."""

    def __init__(self, messages: Mapping[str, Schema], secret: bytes, limits: Limits | None = None) -> None:
        """``messages`` has the fields of each kind that is read; both ends know the secret, up to 64 bytes."""
        self._decoders = {
            kind: msgspec.msgpack.Decoder(msgspec.defstruct("Fields", [*fields.items()], forbid_unknown_fields=True))
            for kind, fields in messages.items()
        }
        self._secret = secret
        self._limits = limits or Limits()
        self.refused: Counter[str] = Counter()  #: by code of error

    def encode(self, kind: str, fields: Mapping[str, Any], buffers: Sequence[Buffer] = ()) -> list[Buffer]:
        """The frames of a message; buffers stay where they are. Raises ``rpc.size`` for one above the limits."""
        sizes = [buffer.nbytes if isinstance(buffer, memoryview) else len(buffer) for buffer in buffers]
        body = msgspec.msgpack.encode([kind, fields, sizes])
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
        kind, fields, announced = self._unpacked(body)
        if announced != sizes:
            raise RpcError(
                "buffers are missing or of other sizes", expected=reprlib.repr(announced), found=reprlib.repr(sizes)
            )
        return Message(kind, fields, buffers)

    def _unpacked(self, body: memoryview) -> tuple[str, dict[str, Any], list[int]]:
        kind = None
        try:
            head = msgspec.msgpack.decode(body, type=_Head)
            kind = reprlib.repr(head.kind)
            decoder = self._decoders[head.kind]
            return head.kind, msgspec.structs.asdict(decoder.decode(head.fields)), head.sizes
        except KeyError:
            message = f"a message of a kind that is not known: {kind}"
            raise RpcError(message, expected=", ".join(self._decoders)) from None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            place = re.search(r"`\$\.(\w+)", str(error))
            message = f"a message {kind} with other fields" if kind else "a head that cannot be read"
            raise RpcError(message, where=place and place[1], found=str(error)) from error

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


#: Several values, *cells* as :mod:`jackfield.sdk.cells` has them: their types, sources, offsets and sizes. The bytes of
#: one are in the message's buffer ``source``, or, where that is negative, in shared memory: in block ``-1 - source`` of
#: the message. What all have in common is there once; a single offset says that they lie back to back.
Cells: TypeAlias = tuple[list[str], list[int], list[int], list[int]]
#: A block is a piece of an arena, a ``memfd`` that its maker keeps open: pid, descriptor, bytes, device, inode, start.
#: Offsets are those in the arena. ``inode`` and ``start`` are the block's name.
Blocks: TypeAlias = list[tuple[int, int, int, int, int, int]]
Units: TypeAlias = list[tuple[int, int, str, str]]  #: number, pid, address, where it runs
Samples: TypeAlias = list[tuple[str, str, list[str]]]  #: partition, key, columns

_VALUES = {"cells": list[Cells], "blocks": Blocks}  # cells by column
_MARK = {"id": int, "mark": str}
_ROWS = {"id": int, "units": int, "partition": str, "keys": list[str]}

REQUESTS: dict[str, Schema] = {
    "hello": {"pid": int, "place": str},
    "put": {**_ROWS, "columns": list[str], **_VALUES},
    "get": {**_ROWS, "columns": list[str]},
    "has": _ROWS,
    "keys": {"id": int},
    "delete": _ROWS,
    "stats": {"id": int},
    "hold": _MARK,  # puts and deletions wait, until begin, swap or end of the same mark
    "begin": _MARK,  # a checkpoint: what is there now
    "take": _MARK,  # some rows of it
    "stage": {**_MARK, "partition": str, "keys": list[str], "columns": list[str], **_VALUES},
    "swap": _MARK,  # what was staged, in the place of everything
    "end": _MARK,
    "release": {"leases": list[int]},
    "add": {"id": int, "units": Units},
    "lose": {"units": list[int]},
    "bye": {},
}

_REPLY = {"id": int, "lost": list[int]}

REPLIES: dict[str, Schema] = {
    "counted": {**_REPLY, "rows": int, "bytes": int},
    "cells": {**_REPLY, "unknown": list[int], "lacking": list[tuple[int, str, list[str]]], **_VALUES, "lease": int},
    "known": {**_REPLY, "known": list[int]},
    "samples": {**_REPLY, "samples": Samples},
    "state": {**_REPLY, "rows": int, "bytes": int, "details": dict[str, int]},
    "batch": {**_REPLY, "rows": Samples, **_VALUES, "lease": int},  # cells of all rows and columns together
    "stale": {**_REPLY, "units": Units},
    "refused": {**_REPLY, "code": str, "message": str},
    "freed": {"blocks": list[tuple[int, int]]},  # of the client that is told; no reply
}

_SMALL = 1 << 16  #: bytes; smaller cells share a buffer


class Packer:
    """Puts cells into a message's buffers: small ones copied together, large ones as they lie."""

    def __init__(self) -> None:
        self._small = bytearray()
        self._large: list[Buffer] = []

    def add(self, contents: Sequence[Buffer]) -> tuple[list[int], list[int]]:
        """Source and offset of each of these bytes."""
        sources, sizes = [0] * len(contents), list(map(len, contents))
        small = [size if size < _SMALL else 0 for size in sizes]
        offsets = back_to_back(len(self._small), small)
        if small != sizes:
            for number, content in enumerate(contents):
                if len(content) >= _SMALL:
                    self._large.append(content)
                    sources[number], offsets[number] = len(self._large), 0
            contents = [content for content in contents if len(content) < _SMALL]
        self._small += b"".join(contents)
        return sources, offsets

    def cells(self, types: list[str], contents: Sequence[Buffer]) -> Cells:
        """The entry of these cells."""
        return packed(types, *self.add(contents), list(map(len, contents)))

    def buffers(self) -> list[Buffer]:
        """Return the buffers of the message."""
        return [bytes(self._small), *self._large]


def packed(types: list[str], sources: list[int], offsets: list[int], sizes: list[int]) -> Cells:
    """The entry of cells: one item of each list for each cell, or for all."""
    if not sizes:
        return [], [], [], []
    together = offsets == back_to_back(offsets[0], sizes)
    return _once(types), _once(sources), offsets[:1] if together else offsets, _once(sizes)


def unpacked(entry: Cells, count: int, room: Callable[[int], tuple[int, int]]) -> Cells:
    """Types, sources, offsets and sizes of ``count`` cells, one item for each; ``room`` returns the bounds of a source.

    Raises ``ValueError`` for a cell beyond these, and for another number of cells.
    """
    if not count:
        return [], [], [], []
    types, sources, sizes = _each(entry[0], count), _each(entry[1], count), _each(entry[3], count)
    offsets = back_to_back(entry[2][0], sizes) if len(entry[2]) == 1 else entry[2]
    if {count} != {len(types), len(sources), len(offsets), len(sizes)}:
        raise ValueError(f"other cells than those of {count} rows")
    ends, rooms = list(map(add, offsets, sizes)), {source: room(source) for source in set(sources)}
    if len(rooms) == 1:
        start, end = rooms[sources[0]]
        fits = start <= min(offsets) and max(ends) <= end
    else:
        places = zip(map(rooms.__getitem__, sources), offsets, ends, strict=True)
        fits = all(start <= first and last <= end for (start, end), first, last in places)
    if not fits or min(sizes) < 0:
        raise ValueError("a cell lies outside of its message or block")
    return types, sources, offsets, sizes


def _once(items: list[_T]) -> list[_T]:
    return items[:1] if items.count(items[0]) == len(items) else items


def _each(items: list[_T], count: int) -> list[_T]:
    return items * count if len(items) == 1 else items


def back_to_back(start: int, sizes: Sequence[int]) -> list[int]:
    """The offsets of cells of these sizes that lie back to back."""
    return list(accumulate(sizes[:-1], initial=start))[: len(sizes)]
