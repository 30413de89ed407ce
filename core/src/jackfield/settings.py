"""Conversion of plain values to frozen attrs classes, with errors that name the path of a bad value.

It reads configurations, manifests, plugin settings and messages.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union

import attrs

from jackfield.errors import ConfigError, JackfieldError, did_you_mean

T = TypeVar("T")

_LARGEST_FLOAT, _LARGEST_INT = 3.4028234663852886e38, 2**63 - 1


def option(default: Any = attrs.NOTHING, help: str = "", validator: Any = None, *, factory: Any = None) -> Any:
    """Declare a field of a settings class with a help text, which ``jackfield config explain`` prints.

    The validator of a field with the default None accepts None.
    """
    default = attrs.Factory(factory) if factory is not None else default
    validator = attrs.validators.optional(validator) if default is None and validator is not None else validator
    return attrs.field(default=default, validator=validator, metadata={"help": help})


def structure(cls: type[T], data: Any, where: str = "", error: type[JackfieldError] = ConfigError) -> T:
    """Create an instance of the attrs class ``cls`` from plain values of YAML, TOML or JSON.

    Nested attrs classes, lists, tuples, mappings, literals and unions are supported. Numbers that a float32 or an int64
    cannot represent are refused, as are NaN and infinity. ``where`` is the path of ``data``, the prefix in errors,
    which have the class ``error`` and the code ``config.unknown-key``, ``config.missing-key``, ``config.wrong-type`` or
    ``config.invalid-value``.
    """
    try:
        return typing.cast(T, _Reader(error).read(cls, data, where))
    except JackfieldError as refusal:
        if refusal.fix is None and error is ConfigError:
            refusal.fix = "correct it; `jackfield config explain FILE` says what each setting is for"
        raise


def flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Return plain values by path; an empty mapping gives none."""
    if not isinstance(values, Mapping):
        return {path: values}
    found = (flatten(inner, f"{path}.{key}".lstrip(".")) for key, inner in values.items())
    return {place: value for inner in found for place, value in inner.items()}


def range_of(validator: Any) -> str:
    """Return the range of a number that attrs validators allow: ``>= 0 and < 1``."""
    if inner := getattr(validator, "validator", None) or getattr(validator, "member_validator", None):
        return range_of(inner)
    if hasattr(validator, "_validators"):
        return " and ".join(filter(None, map(range_of, validator._validators)))
    return f"{validator.compare_op} {validator.bound:g}" if hasattr(validator, "compare_op") else ""


#: What to write in the place of keys that had another path.
_MOVED = {"cluster.ray.placement": "cluster.placement: shared (it was colocated) or separate (disaggregated)"}
_MOVED["cluster.ray.gpus_per_place"] = (
    "cluster.device: cuda, with which each rank has a GPU, a replica its parallel sizes"
)
_MOVED["observe.tensorboard"] = "observe.report_to: [tensorboard], which is the default, or [] for none"
_MOVED["stages"] = "leave out --role; other commands take a file without stages, or a stage's config.yaml"


@attrs.frozen
class _Reader:
    """A converter of plain values to typed values; ``path`` is the path of a value, for errors."""

    error: type[JackfieldError]

    def read(self, cls: Any, value: Any, path: str, bounds: str = "") -> Any:
        """Return a value as the type ``cls``; ``bounds`` describes the range that is accepted."""
        kind, members = typing.get_origin(cls) or cls, typing.get_args(cls)
        if kind is Any or (value is None and type(None) in members):
            return value
        if kind in (Union, types.UnionType):
            accepted = [one for one in members if one is not type(None)]
            if isinstance(value, list):  # it is meant for the type of a sequence, whose errors say more
                accepted = [one for one in accepted if typing.get_origin(one) in (tuple, list, Sequence)] or accepted
            elif isinstance(value, Mapping):  # and this for that of keys and values
                accepted = [one for one in accepted if attrs.has(typing.get_origin(one) or one)] or accepted
            if len(accepted) == 1:
                return self.read(accepted[0], value, path, bounds)
            for one in accepted:  # the first that accepts the value
                try:
                    return self.read(one, value, path, bounds)
                except JackfieldError as error:
                    if isinstance(value, Mapping) and error.code in ("config.unknown-key", "config.missing-key"):
                        raise
        try:
            if attrs.has(kind) or (isinstance(kind, type) and issubclass(kind, Mapping)):
                if not isinstance(value, Mapping):
                    raise TypeError
                if attrs.has(kind):
                    return self.instance(kind, value, path)
                of_key, of_value = members or (Any, Any)
                items = value.items()
                return {self.read(of_key, key, path): self.read(of_value, one, f"{path}.{key}") for key, one in items}
            if isinstance(kind, type) and issubclass(kind, Sequence) and kind is not str:
                return self.sequence(kind, members or (Any, ...), value, path)
            if kind is Literal and value not in members:
                raise ValueError(f"{value!r} is not {_type_name(cls)}")
            return value if kind is Literal else _scalar(kind, value)
        except (TypeError, ValueError) as caught:
            raise self.wrong(value, path, f"{_type_name(cls)} {bounds}".strip(), caught) from caught

    def instance(self, cls: Any, data: Mapping[Any, Any], path: str) -> Any:
        """Return an instance of an attrs class; its keys and the ranges of its fields are checked."""
        fields = {field.name: field for field in attrs.fields(attrs.resolve_types(cls)) if field.init}
        values = {}
        for key in sorted(data.keys() - fields.keys(), key=str):
            inner, known = f"{path}.{key}".lstrip("."), "one of " + ", ".join(sorted(fields)) if fields else "no keys"
            message = f"unknown key '{key}' at {inner}{did_you_mean(key, fields)}"
            details = {"where": inner, "expected": known, "found": key, "fix": _MOVED.get(inner)}
            raise self.error(message, code="config.unknown-key", **details)
        for name, field in fields.items():
            inner = f"{path}.{name}".lstrip(".")
            if name in data:
                values[name] = self.read(field.type, data[name], inner, range_of(field.validator))
            elif field.default is attrs.NOTHING:
                details = {"where": inner, "expected": _type_name(field.type), "found": "nothing"}
                raise self.error(f"missing key '{name}' at {inner}", code="config.missing-key", **details)
        made = types.SimpleNamespace(**{name: values.get(name, field.default) for name, field in fields.items()})
        for name, value in values.items():
            field = fields[name]
            try:
                if field.validator is not None:
                    field.validator(made, field, value)  # it may read other fields of the instance
            except ConfigError:
                raise  # it already names the place within the value and the fix
            except Exception as caught:
                allowed = f"{_type_name(field.type)} {range_of(field.validator)}".strip()
                expected = caught.expected if isinstance(caught, JackfieldError) else allowed
                raise self.wrong(value, f"{path}.{name}".lstrip("."), expected, caught) from caught
        try:
            return cls(**{fields[name].alias: value for name, value in values.items()})
        except ConfigError as error:
            if path and error.where and not str(error.where).startswith(path):  # it is a place within the instance
                error.where = f"{path}.{error.where}"
            raise

    def sequence(self, kind: Any, members: Sequence[Any], value: Any, path: str) -> Any:
        if isinstance(value, str | bytes | Mapping):  # unlike in Python, a text is not a sequence of texts here
            raise TypeError
        values = list(value)
        if kind is not tuple or members[-1] is Ellipsis:
            members = [members[0]] * len(values)
        if len(members) != len(values):
            raise ValueError(f"{len(values)} values in the place of {len(members)}")
        read = [self.read(one, each, f"{path}[{n}]") for n, (one, each) in enumerate(zip(members, values, strict=True))]
        return tuple(read) if kind is tuple else read

    def wrong(self, value: Any, path: str, expected: object, caught: Exception) -> JackfieldError:
        """Return the error of a value of a wrong type (after a ``TypeError``) or out of range."""
        found, problem = repr(value)[:200], caught.args[0] if caught.args else caught
        code = "config.invalid-value"
        if isinstance(caught, TypeError):
            code, problem = "config.wrong-type", f"{found} is of type {type(value).__name__}"
        message = f"wrong value at {path}: {problem}" if path else f"wrong values: {problem}"
        return self.error(message, code=code, where=path or None, expected=expected, found=found)


def _scalar(kind: Any, value: Any) -> Any:
    taken = int | float | str if kind is float else kind
    if not isinstance(value, taken) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    if kind is int and abs(value) > _LARGEST_INT:
        raise ValueError(f"{str(value)[:40]} is not a number of 64 bits")
    if kind is not float:
        return value
    try:
        number = float(value)  # YAML parses 1e-3 as a text
    except ValueError:
        raise TypeError from None
    except OverflowError:
        number = math.inf
    if not abs(number) <= _LARGEST_FLOAT:
        raise ValueError(f"{str(value)[:40]} is not a number that a float32 holds")
    return number


def _type_name(cls: Any) -> str:
    if attrs.has(cls):
        return "keys and values"
    if typing.get_origin(cls) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(cls))
    if typing.get_origin(cls) in (Union, types.UnionType):
        return " | ".join("None" if one is type(None) else _type_name(one) for one in typing.get_args(cls))
    if typing.get_origin(cls) is tuple and typing.get_args(cls)[-1] is Ellipsis:
        return f"a list of {_type_name(typing.get_args(cls)[0])}"
    return cls.__name__ if isinstance(cls, type) and not typing.get_args(cls) else re.sub(r"\w+\.(?=\w)", "", str(cls))
