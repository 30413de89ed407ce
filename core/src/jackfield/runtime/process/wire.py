"""What goes between a run and a process that holds a part of it: frames of a length and JSON, never pickle.

Fields of requests and results that have their defaults are left out, so that a side that does not know a newer field
is asked for it only when it matters; it then refuses, as it refuses every key that it does not know.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import struct
import typing
from collections.abc import AsyncIterator, Mapping, Set
from typing import Any

import attrs
from cattrs import Converter

from jackfield.clock import Clock
from jackfield.errors import JackfieldError

__all__ = ["decode", "frame", "read", "types_of"]

_LENGTH = struct.Struct(">Q")
_LARGEST = 1 << 30  #: bytes of a message
_BYTES = "$bytes"


def frame(message: Mapping[str, Any]) -> bytes:
    """A message as bytes. Values: JSON, attrs instances of these, ``bytes``.

    Raises:
        TypeError: it holds something else.
    """
    text = json.dumps(message, default=_plain, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


async def read(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message.

    Raises:
        EOFError: the other side has ended.
        ValueError: this is not a message.
    """
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > _LARGEST:
        raise ValueError(f"a message of {size} bytes")
    message = json.loads(await reader.readexactly(size), object_hook=_object)
    if not isinstance(message, dict):
        raise ValueError(f"a message that is {message!r}")
    return message


def decode(cls: Any, value: Any) -> Any:
    """An instance of an attrs class from what came of one.

    Raises:
        JackfieldError: what a class of the contract itself refuses.
        Exception: cattrs' error, when it does not fit.
    """
    try:
        return _CONVERTER.structure(value, cls)
    except ExceptionGroup as error:
        refused = _refusal(error)
        if refused is None:
            raise
        if isinstance(value, Mapping) and "request_id" in value:
            refused.where = f"request {value['request_id']!r}, {refused.where}"
        raise refused from None


def _refusal(error: BaseException) -> JackfieldError | None:
    """The first error of ours in what cattrs groups."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_refusal, error.exceptions)), None)
    return error if isinstance(error, JackfieldError) else None


@functools.cache
def types_of(contract: type, member: str) -> tuple[Any, Any]:
    """The types of a method's request and of its result, or of what it streams; None: there is none."""
    hints = typing.get_type_hints(getattr(contract, member))
    result = hints["return"]
    if typing.get_origin(result) is AsyncIterator:
        (result,) = typing.get_args(result)
    return hints.get("request"), None if result is type(None) else result


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return {
            field.name: inner
            for field in attrs.fields(type(value))
            if not (isinstance(inner := getattr(value, field.name), Clock) or _is_default(field, inner))
        }
    if isinstance(value, bytes | bytearray | memoryview):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} cannot go to another process")


def _is_default(field: Any, value: Any) -> bool:
    default = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        default = default.factory()
    return type(value) is type(default) and bool(value == default)


def _object(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES]) if value.keys() == {_BYTES} else value


def _make_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True)
    flat = (tuple[int, ...], tuple[float, ...])  # token by token takes too long, and JSON has told them apart
    converter.register_structure_hook(Clock, lambda *_: Clock())  # it never comes: each side has its own
    converter.register_structure_hook_func(lambda cls: cls in flat, lambda value, _: tuple(value))
    return converter


_CONVERTER = _make_converter()
