"""Contracts of the RPC: which methods of a class another process may call, read from the class's own signatures."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import msgspec
import xxhash

from jackfield.clock import Clock
from jackfield.errors import JackfieldError, RpcError

_SUBJECTS = ("request_id", "id", "version", "keys")  #: fields that say what an argument is about


class Codec:
    """Encodes values as msgpack, or as JSON for a peer that has only the standard library."""

    def __init__(self, name: Literal["msgpack", "json"] = "msgpack") -> None:
        self._module: Any = msgspec.msgpack if name == "msgpack" else msgspec.json
        self._encoder = self._module.Encoder(enc_hook=_plain)
        self._decoder = functools.cache(lambda kind: self._module.Decoder(kind, dec_hook=_made))

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


@attrs.frozen(eq=False)
class Method:
    """One method that can be called."""

    name: str
    signature: inspect.Signature  #: without ``self``
    arguments: Any  #: the type of the array of all arguments
    result: Any  #: of the result, or of an item
    streams: bool

    def bind(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Any]:
        """Return the arguments in the order of the signature, with defaults."""
        bound = self.signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        return list(bound.arguments.values())

    def call(self, target: Any, values: Sequence[Any]) -> Any:
        """Call the method of an object with the arguments in the order of the signature."""
        split = sum(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in self.signature.parameters.values())
        keywords = dict(zip(list(self.signature.parameters)[split:], values[split:], strict=True))
        return getattr(target, self.name)(*values[:split], **keywords)

    @functools.cached_property
    def deadline(self) -> int | None:
        """The position of the parameter ``deadline_seconds``, if there is one."""
        names = list(self.signature.parameters)
        return names.index("deadline_seconds") if "deadline_seconds" in names else None


class Contract:
    """The methods of a class that may be called from another process."""

    def __init__(
        self,
        cls: type,
        methods: Iterable[str] | None = None,
        *,
        without: Iterable[str] = (),
        undo: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            cls: the class; its annotations are the types of what travels.
            methods: names; None: all public ones that are coroutine functions or yield.
            without: names of public methods that are not called from elsewhere.
            undo: by method: the one that gives back a result that came after its caller had left.
        """
        self.undo = dict(undo or {})
        names = {name for name in dir(cls) if _is_remote(cls, name)} - set(without) if methods is None else methods
        self._methods = {name: _method(cls, name) for name in sorted(names)}
        kinds = [kind for each in self._methods.values() for kind in (each.arguments, each.result)]
        described = [str(each.signature) for each in self._methods.values()] + sorted(_fields(kinds, set()))
        self.fingerprint = xxhash.xxh3_64_hexdigest(repr((list(self._methods), described)).encode())

    def __iter__(self) -> typing.Iterator[Method]:
        return iter(self._methods.values())

    def method(self, name: str) -> Method:
        """Return a method by its name.

        Raises:
            RpcError: ``rpc.method``.
        """
        if name not in self._methods:
            known = ", ".join(self._methods)
            raise RpcError("there is no such method", code="rpc.method", where=name, expected=known)
        return self._methods[name]


def subject(arguments: Iterable[Any]) -> str:
    """Name what a call is about, for messages: ``train/3/0/1``."""
    for argument in arguments:
        found = next((getattr(argument, name) for name in _SUBJECTS if hasattr(argument, name)), argument)
        if isinstance(found, tuple | list) and found and isinstance(found[0], str):
            return found[0] + (f" and {len(found) - 1} more" if len(found) > 1 else "")
        if isinstance(found, str | int):
            return str(found)
    return ""


def _is_remote(cls: type, name: str) -> bool:
    function = inspect.getattr_static(cls, name)
    if name.startswith("_") or not inspect.isfunction(function):
        return False
    yields = str(function.__annotations__.get("return", "")).startswith("AsyncIterator")
    return yields or inspect.iscoroutinefunction(function)


def _method(cls: type, name: str) -> Method:
    function = getattr(cls, name)
    hints = {
        parameter: str if hint == str | Path else hint for parameter, hint in typing.get_type_hints(function).items()
    }
    result = hints.pop("return")
    streams = typing.get_origin(result) is AsyncIterator
    if streams:
        (result,) = typing.get_args(result)
    signature = inspect.signature(function)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    kinds = tuple(hints[parameter] for parameter in signature.parameters)
    return Method(name, signature, tuple[kinds], result, streams)  # type: ignore[valid-type]


def _fields(kinds: Iterable[Any], seen: set[Any]) -> set[str]:
    """Describe the fields of all attrs classes that values of some types may hold."""
    found: set[str] = set()
    for kind in kinds:
        found |= _fields(typing.get_args(kind), seen)
        if isinstance(kind, type) and attrs.has(kind) and kind not in seen:
            seen.add(kind)
            fields = attrs.fields(attrs.resolve_types(kind))
            found |= {f"{kind.__qualname__}.{each.name}" for each in fields}
            found |= _fields((each.type for each in fields), seen)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())  # the other process has a working folder of its own
    if isinstance(value, Clock):
        return None  # each process has its own
    raise TypeError(f"it contains a {type(value).__name__}")


def _made(kind: Any, value: Any) -> Any:
    return Clock() if issubclass(kind, Clock) else kind(value)
