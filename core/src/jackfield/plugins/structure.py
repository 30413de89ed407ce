"""Check a plugin's class against its contract, after the import and before any use."""

from __future__ import annotations

import contextlib
import functools
import inspect
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, Generic, Protocol

import attrs

from jackfield.abc import CONTRACTS
from jackfield.errors import PluginError

#: The flavour of a plain function, by the name of its return annotation.
_RETURNS: dict[str, str] = {
    "Awaitable": "async",
    "Coroutine": "async",
    **dict.fromkeys(("AsyncGenerator", "AsyncIterator", "AsyncIterable"), "async generator"),
    **dict.fromkeys(("Generator", "Iterator", "Iterable"), "generator"),
    **dict.fromkeys(("AbstractContextManager", "ContextManager"), "context manager"),
    **dict.fromkeys(("AbstractAsyncContextManager", "AsyncContextManager"), "async context manager"),
}
#: How a method of a flavour is written.
_WRITTEN: dict[str, str] = {
    "sync": "def",
    "async": "async def",
    "generator": "def with yield",
    "async generator": "async def with yield",
    "context manager": "@contextlib.contextmanager",
    "async context manager": "@contextlib.asynccontextmanager",
    "property": "@property",
}


def check_structure(kind: str, cls: object, where: str) -> None:
    """Refuse a class that does not fit.

    Raises:
        PluginError: The first of :func:`structure_problems`.
    """
    for problem in structure_problems(kind, cls, where):
        raise problem


def check_settings_class(cls: Any, where: str) -> type:
    """Return a class of settings.

    Raises:
        PluginError: ``plugin.config-class``: it is not a frozen attrs class.
    """
    if inspect.isclass(cls) and attrs.has(cls) and is_frozen(cls):
        return cls
    raise PluginError(
        "the plugin's config is not a frozen attrs class",
        code="plugin.config-class",
        where=where,
        expected="a class made by @attrs.frozen",
        found=repr(cls),
        fix="decorate the class with @attrs.frozen(kw_only=True), or correct 'config' in the manifest",
    )


def structure_problems(kind: str, cls: Any, where: str) -> Iterator[PluginError]:
    """Find everything in which a class does not fit the contract of its kind; nothing of the class is run.

    Args:
        kind: The kind of plugin.
        cls: The object that the manifest names.
        where: The plugin, for messages.

    Yields:
        ``plugin.not-a-subclass``, ``plugin.abstract-method``, ``plugin.sync-async`` or ``plugin.signature``.
    """
    contract = CONTRACTS[kind]
    if not (inspect.isclass(cls) and issubclass(cls, contract)):
        yield PluginError(
            f"the object of the {kind} plugin does not derive from {contract.__name__}",
            code="plugin.not-a-subclass",
            where=where,
            expected=f"a subclass of {contract.__module__}.{contract.__name__}",
            found=repr(cls),
            fix=f"derive the class from {contract.__name__}, or correct 'object' in the manifest",
        )
        return
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        yield PluginError(
            f"{cls.__name__} does not define {', '.join(missing)}",
            code="plugin.abstract-method",
            where=where,
            expected=f"every abstract method of {contract.__name__}",
            found="abstract: " + ", ".join(missing),
            fix="define " + "; ".join(f"{name}{_bare(contract, name)}" for name in missing),
        )
    for name in public_members(contract):
        if name not in missing and (problem := _problem(contract, cls, name)):
            code, expected, found, fix = problem
            yield PluginError(
                f"{cls.__name__}.{name} does not fit the contract",
                code=code,
                where=f"{where}, {cls.__name__}.{name}",
                expected=expected,
                found=found,
                fix=fix,
            )


def _problem(contract: type, cls: type, name: str) -> tuple[str, str, str, str] | None:
    """Compare one member: code, expected, found and fix; None where it fits."""
    wanted = flavour(contract, name)
    try:
        found = flavour(cls, name)
    except (ValueError, TypeError):  # a builtin without a signature: nothing can be said
        return None
    if wanted != found and "property" in (wanted, found):
        return "plugin.signature", wanted, found, "define it as the contract does"
    returnable = found == "sync" and wanted not in ("sync", "async")  # a plain function may return such an object
    if wanted != found and not returnable:
        fix = f"write {name}{_bare(contract, name)} with {_WRITTEN[wanted]}"
        return "plugin.sync-async", f"{wanted} ({_WRITTEN[wanted]})", f"{found} ({_WRITTEN[found]})", fix
    if wanted == "property" or (refusal := _refusal(contract, cls, name)) is None:
        return None
    expected = "(config, context)" if name == "__init__" else _bare(contract, name)
    return "plugin.signature", f"{name}{expected}", refusal, "take the contract's parameters; others need a default"


def _refusal(contract: type, cls: type, name: str) -> str | None:
    """Say why a class does not accept a call that the contract allows; None: it accepts them all."""
    if name == "__init__":
        return _unbound(inspect.signature(cls), name, ("config", "context"), {})
    on_class = isinstance(inspect.getattr_static(contract, name), classmethod)
    if on_class and not isinstance(inspect.getattr_static(cls, name), classmethod | staticmethod):
        return f"{name} needs an instance, and is called on the class"
    accepted, wanted = _bare(cls, name), _bare(contract, name).parameters.values()
    refusals = (_unbound(accepted, name, *call) for call in _calls(list(wanted)))
    return next(filter(None, refusals), None)


def _unbound(accepted: Signature, name: str, positional: Sequence[str], named: Mapping[str, str]) -> str | None:
    try:
        bound = accepted.bind(*positional, **named)
    except TypeError as error:
        return f"{name}{accepted.replace(return_annotation=Signature.empty)}: {error}"
    if name == "__init__":
        return None  # whose parameters may have other names
    moved = ((own, value) for own, value in bound.arguments.items() if isinstance(value, str) and own != value)
    return next((f"{name}{accepted}: '{own}' is in the place of '{value}'" for own, value in moved), None)


def _calls(wanted: Sequence[Parameter]) -> Iterator[tuple[Sequence[str], Mapping[str, str]]]:
    """List the calls that a signature allows: all by position, all by name, the required.

    Each argument is its parameter's name, so that it shows where it arrives.
    """
    by_name = {each.name: each.name for each in wanted if each.kind is Parameter.KEYWORD_ONLY}
    if any(each.kind is Parameter.VAR_KEYWORD for each in wanted):
        by_name["another"] = "another"
    plain = {each.name: each.name for each in wanted if each.kind is Parameter.POSITIONAL_OR_KEYWORD}
    yield [*plain], by_name
    yield [], plain | by_name
    required = [each.name for each in wanted if each.default is Parameter.empty and each.name in plain | by_name]
    yield [], dict(zip(required, required, strict=True))


def public_members(cls: type) -> Iterator[str]:
    """Name the public members of a class and its bases, and ``__init__``, as defined."""
    seen: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        if base in (object, ABC, Generic, Protocol):
            continue
        for name, value in vars(base).items():
            is_member = callable(value) or isinstance(value, property | classmethod | staticmethod)
            if is_member and not inspect.isclass(value) and (not name.startswith("_") or name == "__init__"):
                seen.setdefault(name)
    return iter(seen)


def flavour(cls: type, name: str) -> str:
    """Say how a member is called and what a call yields, without running any of the class's code.

    The code tells it or, for a plain function, the return annotation.
    """
    raw = inspect.getattr_static(cls, name)
    function = _function(raw)
    if isinstance(raw, property | functools.cached_property) or not callable(function):
        return "property"
    seen = _flavour(function)
    if seen != "sync":
        return seen
    returns = annotation_text(inspect.signature(function).return_annotation)
    return _RETURNS.get(returns.partition("[")[0].rpartition(".")[2], "sync")


def signature_of(cls: type, name: str) -> Signature:
    """Return the signature of a member as its callers see it, without ``self`` or ``cls``.

    That of a property is its getter's, and that of a plain value is empty.
    """
    raw = inspect.getattr_static(cls, name)
    function = _function(raw)
    if not callable(function):
        return Signature()
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not isinstance(raw, staticmethod) and parameters and parameters[0].kind is not Parameter.VAR_POSITIONAL:
        del parameters[0]
    return signature.replace(parameters=parameters)


def _function(raw: Any) -> Any:
    if isinstance(raw, property | functools.cached_property):
        return raw.fget if isinstance(raw, property) else raw.func
    return raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw


def is_frozen(cls: type) -> bool:
    """Say whether instances of an attrs class refuse assignment, by trying it."""
    try:
        setattr(object.__new__(cls), "x", None)  # noqa: B010
    except attrs.exceptions.FrozenInstanceError:
        return True
    except Exception:
        return False
    return False


def annotation_text(annotation: Any) -> str:
    """Return an annotation as it is written; empty when there is none."""
    if annotation is Parameter.empty or annotation is None:
        return "" if annotation is Parameter.empty else "None"
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _bare(cls: type, name: str) -> Signature:
    """The signature without annotations, for messages and calls."""
    signature = signature_of(cls, name)
    bare = [parameter.replace(annotation=Parameter.empty) for parameter in signature.parameters.values()]
    return Signature(bare)


@contextlib.contextmanager
def _sample() -> Iterator[None]:
    yield


@contextlib.asynccontextmanager
async def _async_sample() -> Any:
    yield


_CONTEXT_MANAGER_CODES = {_sample.__code__, _async_sample.__code__}


def _flavour(function: Callable[..., Any]) -> str:
    """Say what calling a function yields, as far as the code tells; decorators are looked through."""
    if _is_context_manager(function):
        return "async context manager" if inspect.isasyncgenfunction(inspect.unwrap(function)) else "context manager"
    for candidate in (function, inspect.unwrap(function, stop=_is_context_manager)):
        if inspect.iscoroutinefunction(candidate):
            return "async"
        if inspect.isasyncgenfunction(candidate):
            return "async generator"
        if inspect.isgeneratorfunction(candidate):
            return "generator"
        if _is_context_manager(candidate):
            return _flavour(candidate)
    return "sync"


def _is_context_manager(function: Callable[..., Any]) -> bool:
    return getattr(function, "__code__", None) in _CONTEXT_MANAGER_CODES
