"""Settings: plain values from YAML and overrides to frozen attrs classes, with errors that name the bad value's path.

Configurations, manifests, plugin settings and messages are read by it.
"""

from __future__ import annotations

import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import attrs
import yaml
from cattrs import ClassValidationError, Converter, IterableValidationError, cols
from cattrs.errors import ForbiddenExtraKeysError

from jackfield.errors import ConfigError, JackfieldError, RolloutError

T = TypeVar("T")


def option(default: Any = attrs.NOTHING, *, help: str, factory: Any = None, validator: Any = None) -> Any:
    """Declare a field of a settings class with a help text, which ``jackfield config explain`` prints."""
    default = attrs.Factory(factory) if factory is not None else default
    return attrs.field(default=default, validator=validator, metadata={"help": help})


def structure(
    cls: type[T], data: Any, where: str = "", error: type[JackfieldError] = ConfigError, *, finite: bool = True
) -> T:
    """Make an instance of the attrs class ``cls`` from plain values.

    Args:
        cls: an attrs class; nested attrs classes, lists, tuples, dicts, literals and unions with None are followed.
        data: what YAML, TOML or JSON yields.
        where: the path of ``data`` itself, the prefix of paths in errors.
        error: the class of the errors raised.
        finite: refuse numbers that a float32 or an int64 cannot hold, NaN and infinity among them.

    Raises:
        JackfieldError: of class ``error`` with ``config.unknown-key`` (with a suggestion), ``config.missing-key``,
            ``config.wrong-type`` or ``config.invalid-value``.
    """
    if not isinstance(data, Mapping):
        details = {"where": where or None, "expected": "keys and values", "found": f"{type(data).__name__} {data!r}"}
        raise error(f"expected settings for {where or cls.__name__}", code="config.wrong-type", **details)
    try:
        return (_CONVERTER if finite else _ANY_NUMBER).structure(data, cls)
    except Exception as caught:  # cattrs groups whatever a field's hook raised
        refusal = _explain(caught, cls, where, data, error)
        if refusal.fix is None and error is ConfigError:
            refusal.fix = "correct it; `jackfield config explain FILE` says what each setting is for"
        raise refusal from caught


def unstructure(value: Any) -> Any:
    """Return the plain values of an attrs instance, which ``structure`` reads back."""
    return _CONVERTER.unstructure(value)


def read_yaml(file: Path) -> Any:
    """Read the values of a YAML file; an empty one has none.

    Raises:
        ConfigError: ``config.unreadable``.
    """
    refused = functools.partial(ConfigError, code="config.unreadable", where=str(file))
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise refused("the configuration file does not exist", fix="check the path") from error
    except (yaml.YAMLError, RecursionError, ValueError, OSError) as error:  # UnicodeDecodeError is a ValueError
        raise refused("the configuration file cannot be read as YAML", found=error) from error
    return {} if values is None else values


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``a.b=c`` into the path ``["a", "b"]`` and the value ``c``, read as YAML.

    Raises:
        ConfigError: ``config.override``.
    """
    path, sign, value = text.partition("=")
    keys = path.strip().split(".")
    refused = functools.partial(ConfigError, code="config.override")
    if not sign or not all(keys):
        fix = "write for example schedule.steps=10"
        raise refused(f"cannot read the override {text!r}", expected="key.path=value", found=text, fix=fix)
    try:
        return keys, yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        shown = text if len(text) <= 200 else text[:200] + "…"
        raise refused(f"the value of the override {shown!r} is not YAML", where=path, found=error) from error


def apply_override(values: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the values with one ``a.b=c`` applied; what is given stays as it is.

    Raises:
        ConfigError: ``config.override``.
    """
    keys, value = parse_override(text)

    def replaced(inner: Any, depth: int) -> Any:
        if depth == len(keys):
            return value
        inner = {} if inner is None else inner
        if not isinstance(inner, Mapping):
            raise ConfigError(
                f"the override {text!r} goes through a value",
                code="config.override",
                where=".".join(keys[:depth]),
                expected="keys and values",
                found=repr(inner),
            )
        return {**inner, keys[depth]: replaced(inner.get(keys[depth]), depth + 1)}

    return typing.cast(dict[str, Any], replaced(values, 0))


def explain(settings: Any, path: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """List every setting of an attrs instance, nested ones too, as (path, value, default, help)."""
    for field in attrs.fields(type(settings)):
        value, inner = getattr(settings, field.name), f"{path}.{field.name}".lstrip(".")
        if attrs.has(type(value)):
            yield from explain(value, inner)
        else:
            yield inner, value, default_of(field), field.metadata.get("help", "")


def default_of(field: Any) -> Any:
    """Return the default of a field as ``jackfield config explain`` shows it."""
    if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        return field.default.factory()
    return "(required)" if field.default is attrs.NOTHING else field.default


def flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Return plain values by their path; an empty mapping has none."""
    if not isinstance(values, Mapping):
        return {path: values}
    found: dict[str, Any] = {}
    for key, inner in values.items():
        found |= flatten(inner, f"{path}.{key}".lstrip("."))
    return found


def _explain(
    caught: BaseException, cls: Any, path: str, data: Any, error: type[JackfieldError], bounds: str = ""
) -> JackfieldError:
    """Turn the first leaf of cattrs' tree of errors into an error of Jackfield."""
    if isinstance(caught, JackfieldError):
        return _in_configuration(caught, path, error) if isinstance(caught, RolloutError) else caught
    if _is_union(cls) and len(members := [one for one in typing.get_args(cls) if one is not type(None)]) == 1:
        (cls,) = members  # whose own path follows
    if isinstance(caught, ClassValidationError | IterableValidationError):
        noted, others = caught.group_exceptions()
        extra = [other for other in others if isinstance(other, ForbiddenExtraKeysError)]
        if extra:
            return _unknown_key(extra[0], path, error)
        if not noted:  # a validator of the class refused
            field = _out_of_range(cls, data)
            if field is None:
                return _explain(others[0], cls, path, data, error)
            cls, path, data, caught = field.type, f"{path}.{field.name}".lstrip("."), data[field.name], others[0]
            expected = f"{_type_name(cls)} {range_of(field.validator)}".strip()
            return _wrong_value(caught, path, expected, data, error)
        leaf, note = noted[0]
        name: Any = getattr(note, "name", getattr(note, "index", None))
        inner = f"{path}[{name}]" if isinstance(caught, IterableValidationError) else f"{path}.{name}".lstrip(".")
        if isinstance(leaf, KeyError) and isinstance(caught, ClassValidationError) and leaf.args == (name,):
            details = {"where": inner, "expected": f"a value of type {_type_name(note.type)}", "found": "nothing"}
            return error(f"missing key '{name}' at {inner}", code="config.missing-key", **details)
        value = _lookup(data, name)
        field = attrs.fields_dict(cls).get(str(name)) if attrs.has(cls) else None
        return _explain(leaf, note.type, inner, value, error, range_of(field.validator) if field else "")
    expected = f"{_type_name(cls)} {bounds}".strip()
    if attrs.has(cls) and not isinstance(data, Mapping):
        expected, caught = "keys and values", _WrongType(data, "mapping")
    return _wrong_value(caught, path, expected, data, error)


def _wrong_value(
    caught: BaseException, path: str, expected: str, data: Any, error: type[JackfieldError]
) -> JackfieldError:
    if isinstance(caught, JackfieldError):
        parent = path.rpartition(".")[0]
        whole = isinstance(caught, ConfigError) and parent and str(caught.where).startswith(f"{parent}.")
        return caught if whole else _in_configuration(caught, parent, error)
    code = "config.wrong-type" if isinstance(caught, _WrongType) else "config.invalid-value"
    detail = caught.args[0] if caught.args else caught
    return error(f"wrong value at {path}: {detail}", code=code, where=path, expected=expected, found=repr(data)[:200])


def _out_of_range(cls: Any, data: Any) -> Any:
    """Find the first given field of the class whose validator refuses its value."""
    fields = [field for field in attrs.fields(attrs.resolve_types(cls)) if field.init]
    given = {field.name: _CONVERTER.structure(data[field.name], field.type) for field in fields if field.name in data}
    made = types.SimpleNamespace(**{field.name: field.default for field in fields} | given)
    for field in fields:
        if field.validator is not None and field.name in given:
            try:
                field.validator(made, field, given[field.name])
            except Exception:
                return field
    return None


def range_of(validator: Any) -> str:
    """Say what validators of attrs ask of a number: ``>= 0 and < 1``."""
    for inner in ("validator", "member_validator"):
        if hasattr(validator, inner):
            return range_of(getattr(validator, inner))
    if hasattr(validator, "_validators"):
        return " and ".join(filter(None, map(range_of, validator._validators)))
    return f"{validator.compare_op} {validator.bound:g}" if hasattr(validator, "compare_op") else ""


def _in_configuration(caught: JackfieldError, path: str, error: type[JackfieldError]) -> JackfieldError:
    """Say of the settings what the class that they were to make has refused."""
    name = str(caught.where or "").rpartition(".")[2]
    where = f"{path}.{name}".strip(".")
    details: dict[str, Any] = {"where": where, "expected": caught.expected, "found": caught.found}
    return error(f"wrong value at {where}: {caught.message}", code="config.invalid-value", **details)


def _lookup(data: Any, name: Any) -> Any:
    try:
        return data[name]
    except (LookupError, TypeError):
        return None


def _unknown_key(caught: ForbiddenExtraKeysError, path: str, error: type[JackfieldError]) -> JackfieldError:
    known = sorted(field.name for field in attrs.fields(typing.cast(Any, caught.cl)))
    key = sorted(caught.extra_fields, key=str)[0]
    inner = f"{path}.{key}".lstrip(".")
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    expected = "one of " + ", ".join(known) if known else "no keys"
    details = {"where": inner, "expected": expected, "found": key}
    return error(f"unknown key '{key}' at {inner}{hint}", code="config.unknown-key", **details)


def _type_name(cls: Any) -> str:
    if typing.get_origin(cls) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(cls))
    if _is_union(cls):
        return " | ".join("None" if one is type(None) else _type_name(one) for one in typing.get_args(cls))
    return cls.__name__ if isinstance(cls, type) and not typing.get_args(cls) else re.sub(r"\w+\.(?=\w)", "", str(cls))


class _WrongType(TypeError):
    """A value of the wrong type."""

    def __init__(self, value: Any, wanted: str) -> None:
        found, wanted = (f"an {noun}" if noun[0] in "aeiou" else f"a {noun}" for noun in (type(value).__name__, wanted))
        super().__init__(f"{value!r} is {found}, not {wanted}")


def _strictly(cls: type) -> Any:
    def hook(value: Any, _: Any) -> Any:
        if (isinstance(value, bool) and cls is not bool) or not isinstance(value, cls):
            raise _WrongType(value, cls.__name__)
        return cls(value)

    return hook


def _float(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _WrongType(value, "float")
    try:
        return float(value)  # YAML reads 1e-3 as a text
    except ValueError:
        raise _WrongType(value, "float") from None


_LARGEST_FLOAT, _LARGEST_INT = 3.4028234663852886e38, 2**63 - 1


def _finite(value: Any, cls: Any) -> float:
    number = _float(value, cls) if not isinstance(value, int) or isinstance(value, bool) or abs(value) < 2**63 else None
    if number is None or not abs(number) <= _LARGEST_FLOAT:
        raise ValueError(f"{str(value)[:40]} is not a number that a float32 holds")
    return number


def _int64(value: Any, cls: Any) -> int:
    number: int = _strictly(int)(value, cls)
    if not -_LARGEST_INT - 1 <= number <= _LARGEST_INT:
        raise ValueError(f"{str(number)[:40]} is not a number of 64 bits")
    return number


def _is_literal(cls: Any) -> bool:
    return typing.get_origin(cls) is Literal


def _literal(value: Any, cls: Any) -> Any:
    if value not in typing.get_args(cls):
        raise ValueError(f"{value!r} is not {_type_name(cls)}")
    return value


def _is_union(cls: Any) -> bool:
    return typing.get_origin(cls) in (Union, types.UnionType)


def _union(converter: Converter, value: Any, cls: Any) -> Any:
    members = typing.get_args(cls)
    if value is None and type(None) in members:
        return None
    failures: list[BaseException] = []
    for member in (one for one in members if one is not type(None)):
        try:
            return converter.structure(value, member)
        except Exception as caught:
            failures.append(caught)
    if len(failures) == 1:
        raise failures[0]
    raise _WrongType(value, f"value of {_type_name(cls)}")


def _make_converter(integer: Any, number: Any) -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    converter.register_structure_hook(bool, _strictly(bool))
    converter.register_structure_hook(int, integer)
    converter.register_structure_hook(str, _strictly(str))
    converter.register_structure_hook(float, number)
    converter.register_structure_hook_func(_is_literal, _literal)
    converter.register_structure_hook_func(_is_union, functools.partial(_union, converter))
    for predicate, make_hook in (
        (cols.is_sequence, cols.list_structure_factory),
        (_is_homogeneous_tuple, cols.homogenous_tuple_structure_factory),
    ):
        converter.register_structure_hook_factory(predicate, functools.partial(_sequence, make_hook))
    return converter


def _is_homogeneous_tuple(cls: Any) -> bool:
    return typing.get_origin(cls) is tuple and typing.get_args(cls)[-1] is Ellipsis


def _sequence(make_hook: Any, cls: Any, converter: Converter) -> Any:
    """Put a check before the hook of cattrs: a text is a sequence of texts to Python, and never one of settings."""
    plain = make_hook(cls, converter)

    def hook(value: Any, _: Any) -> Any:
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
            raise _WrongType(value, "list")
        return plain(value, cls)

    return hook


_CONVERTER, _ANY_NUMBER = _make_converter(_int64, _finite), _make_converter(_strictly(int), _float)
