"""Contracts of the RPC: which methods of a class another process may call, read from the class's own signatures."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import xxhash

from jackfield.errors import RpcError

_SUBJECTS = ("request_id", "id", "version", "keys")  #: fields that say what an argument is about


class Method:
    """One method that can be called."""

    def __init__(self, cls: type, name: str) -> None:
        hints = typing.get_type_hints(getattr(cls, name))
        self.name, self.result = name, hints["return"]  #: the type of the result, or of an item
        self.streams = typing.get_origin(self.result) is AsyncIterator
        if self.streams:
            (self.result,) = typing.get_args(self.result)
        parameters = list(inspect.signature(getattr(cls, name)).parameters.values())[1:]
        self.signature = inspect.signature(getattr(cls, name)).replace(parameters=parameters)  #: without ``self``
        kinds = [str if hints[each.name] == str | Path else hints[each.name] for each in parameters]
        self.arguments = types.GenericAlias(tuple, tuple(kinds))  #: the type of the array of all arguments

    def bind(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name in the order of the signature, with defaults."""
        bound = self.signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        return bound.arguments

    def call(self, target: Any, values: Sequence[Any]) -> Any:
        """Call the method of an object with the arguments in the order of the signature."""
        named = dict(zip(self.signature.parameters, values, strict=True))
        bound = inspect.BoundArguments(self.signature, named)
        return getattr(target, self.name)(*bound.args, **bound.kwargs)


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
            cls: Its annotations are the types of what travels.
            methods: Names; None: all public methods that are coroutine functions or yield.
            without: Names of public methods that are not called from elsewhere.
            undo: By method: the one that gives back a result that came after its caller had left.
        """
        self.undo = dict(undo or {})
        names = {name for name in dir(cls) if _is_remote(cls, name)} - set(without) if methods is None else methods
        self._methods = {name: Method(cls, name) for name in sorted(names)}
        kinds = [kind for each in self for kind in (each.arguments, each.result)]
        described = [str(each.signature) for each in self] + sorted(_fields(kinds, set()))
        self.fingerprint = xxhash.xxh3_64_hexdigest(repr((list(self._methods), described)).encode())

    def __iter__(self) -> typing.Iterator[Method]:
        return iter(self._methods.values())

    def method(self, name: str) -> Method:
        """Return a method by its name.

        Raises:
            RpcError: ``rpc.method``.
        """
        return known(self._methods, name, "method")


T = typing.TypeVar("T")


def known(choices: Mapping[str, T], name: str, what: str) -> T:
    """Return what is served under a name.

    Raises:
        RpcError: ``rpc.method``.
    """
    if name not in choices:
        message = f"there is no such {what}"
        raise RpcError(message, code="rpc.method", where=name, expected=", ".join(choices))
    return choices[name]


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
