"""Plain values as JSON, between a process that runs model-written code and one that judges its results.

It needs only the standard library. What cannot be sent is kept by its process, and a handle is sent in its place.
"""

from __future__ import annotations

import decimal
import fractions
from collections.abc import Callable
from typing import Any

_LARGEST = 2**63
_DEEPEST = 100  #: levels of nested containers
_GROUPS: tuple[tuple[str, Any], ...] = (("tuple", tuple), ("set", set), ("frozenset", frozenset))


class CannotSend(TypeError):
    """A value is no plain value."""


def encode(value: Any, keep: Callable[[Any], int] | None = None, depth: int = 0) -> Any:
    """Return a value as JSON; ``keep`` gives the handle of a value that is not plain."""
    if value is None or isinstance(value, bool | float | str):
        return value if type(value) in (type(None), bool, float, str) else _base(value)
    if depth > _DEEPEST:
        raise CannotSend(f"more than {_DEEPEST} levels")
    if isinstance(value, int):
        value = int(value)
        return value if abs(value) < _LARGEST else {"int": hex(value)}
    if isinstance(value, list):
        return [encode(each, keep, depth + 1) for each in value]
    for name, kind in _GROUPS:
        if isinstance(value, kind):
            return {name: [encode(each, keep, depth + 1) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(each, keep, depth + 1) for each in item] for item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, decimal.Decimal | fractions.Fraction):
        return {type(value).__name__: str(value)}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if hasattr(type(value), "dtype") and hasattr(type(value), "tolist"):  # of NumPy or torch
        return encode(value.tolist(), keep, depth + 1)
    if keep is None:
        raise CannotSend(f"a {type(value).__name__} is no plain value")
    return {"handle": keep(value)}


def _base(value: Any) -> Any:
    """Return a value of a subclass as one of its built-in type."""
    return str.__str__(value) if isinstance(value, str) else float(value)


def decode(value: Any, remote: Callable[[int], Any] | None = None) -> Any:
    """Return the value of JSON that :func:`encode` made, perhaps in a process that is not trusted.

    ``remote`` makes an object of a handle; a malformed text raises a ``ValueError``.
    """
    if isinstance(value, list):
        return [decode(each, remote) for each in value]
    if not isinstance(value, dict):
        return value
    try:
        [(name, content)] = value.items()
        return _decoded(name, content, remote)
    except (TypeError, ArithmeticError, KeyError) as error:
        raise ValueError(f"no value: {error}") from error


def _decoded(name: str, content: Any, remote: Callable[[int], Any] | None) -> Any:
    if name == "handle" and remote is not None:
        return remote(int(content))
    if name == "int":
        return int(content, 16)
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "dict":
        return {decode(key, remote): decode(each, remote) for key, each in content}
    if name in ("complex", "range"):
        return complex(*map(float, content)) if name == "complex" else range(*map(int, content))
    if name in ("Decimal", "Fraction"):
        return decimal.Decimal(content) if name == "Decimal" else fractions.Fraction(content)
    return dict(_GROUPS)[name](decode(each, remote) for each in content)
