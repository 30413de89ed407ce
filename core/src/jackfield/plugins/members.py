"""What kind of thing a class's public member is: how it is called and what calling it yields.

The structure gate compares a plugin's members with its contract's; the ABI snapshots record the contract's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from abc import ABC
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, Protocol

import attrs

__all__ = ["Flavour", "Member", "annotation_text", "describe_member", "is_frozen", "public_members"]

Flavour = Literal[
    "sync", "async", "generator", "async generator", "context manager", "async context manager", "property"
]

#: What a plain function yields, by the name of its return annotation.
_RETURNS: dict[str, Flavour] = {
    "Awaitable": "async",
    "Coroutine": "async",
    "AsyncGenerator": "async generator",
    "AsyncIterator": "async generator",
    "AsyncIterable": "async generator",
    "Generator": "generator",
    "Iterator": "generator",
    "Iterable": "generator",
    "AbstractContextManager": "context manager",
    "ContextManager": "context manager",
    "AbstractAsyncContextManager": "async context manager",
    "AsyncContextManager": "async context manager",
}


@attrs.frozen(kw_only=True)
class Member:
    """A method, property or value of a class."""

    name: str
    flavour: Flavour  #: what a call yields, seen in the code or, for a plain function, in its return annotation
    binding: Literal["instance", "class", "static"]
    abstract: bool
    parameters: tuple[inspect.Parameter, ...]  #: without ``self`` or ``cls``
    returns: str  #: the return annotation's text; empty: none

    @property
    def signature(self) -> str:
        """Name and parameters without annotations, for messages."""
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in self.parameters]
        return f"{self.name}{inspect.Signature(bare)}"


def public_members(cls: type) -> Iterator[str]:
    """Names of the public methods and properties of ``cls`` and its bases, and ``__init__``; in order of definition."""
    seen: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        if base in (object, ABC, Generic, Protocol):
            continue
        for name, value in vars(base).items():
            is_member = callable(value) or isinstance(value, property | classmethod | staticmethod)
            if is_member and not inspect.isclass(value) and (not name.startswith("_") or name == "__init__"):
                seen.setdefault(name)
    return iter(seen)


def describe_member(cls: type, name: str) -> Member:
    """Look at one member, without running any of the class's code.

    Raises:
        AttributeError: when there is none of that name.
    """
    raw = inspect.getattr_static(cls, name)
    abstract = bool(getattr(raw, "__isabstractmethod__", False))
    if isinstance(raw, property | functools.cached_property):
        getter = raw.fget if isinstance(raw, property) else raw.func
        returns = annotation_text(inspect.signature(getter).return_annotation) if getter else ""
        return _value(name, abstract, returns)
    binding: Literal["instance", "class", "static"] = "instance"
    if isinstance(raw, classmethod | staticmethod):
        binding = "class" if isinstance(raw, classmethod) else "static"
        raw = raw.__func__
    if not callable(raw):
        return _value(name, abstract, "")
    signature = inspect.signature(raw)
    parameters = tuple(signature.parameters.values())
    if binding != "static" and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]
    returns = annotation_text(signature.return_annotation)
    flavour = _flavour(raw)
    if flavour == "sync":
        flavour = _RETURNS.get(returns.partition("[")[0].rpartition(".")[2], "sync")
    return Member(
        name=name, flavour=flavour, binding=binding, abstract=abstract, parameters=parameters, returns=returns
    )


def is_frozen(cls: type) -> bool:
    """Whether instances of an attrs class refuse assignment; found by trying, for attrs has no older way to ask."""
    try:
        setattr(object.__new__(cls), "x", None)  # noqa: B010
    except attrs.exceptions.FrozenInstanceError:
        return True
    except Exception:
        return False
    return False


def annotation_text(annotation: Any) -> str:
    """An annotation as it is written; empty when there is none."""
    if annotation is inspect.Parameter.empty or annotation is None:
        return "" if annotation is inspect.Parameter.empty else "None"
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _value(name: str, abstract: bool, returns: str) -> Member:
    return Member(name=name, flavour="property", binding="instance", abstract=abstract, parameters=(), returns=returns)


@contextlib.contextmanager
def _sample() -> Iterator[None]:
    yield


@contextlib.asynccontextmanager
async def _async_sample() -> Any:
    yield


_CONTEXT_MANAGER_CODES = {_sample.__code__, _async_sample.__code__}


def _flavour(function: Callable[..., Any]) -> Flavour:
    """What calling ``function`` yields, as far as the code tells; decorators are looked through."""
    code = getattr(function, "__code__", None)
    if code in _CONTEXT_MANAGER_CODES:
        inner = inspect.unwrap(function)
        return "async context manager" if inspect.isasyncgenfunction(inner) else "context manager"
    for candidate in (function, inspect.unwrap(function, stop=_is_context_manager)):
        if inspect.iscoroutinefunction(candidate):
            return "async"
        if inspect.isasyncgenfunction(candidate):
            return "async generator"
        if inspect.isgeneratorfunction(candidate):
            return "generator"
        if _is_context_manager(candidate) and candidate is not function:
            return _flavour(candidate)
    return "sync"


def _is_context_manager(function: Callable[..., Any]) -> bool:
    return getattr(function, "__code__", None) in _CONTEXT_MANAGER_CODES
