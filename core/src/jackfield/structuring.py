"""Plain values to frozen attrs classes, with errors that name the path of the bad value.

Used for configurations, manifests and plugin settings alike.
"""

from __future__ import annotations

import difflib
import functools
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

import attrs
from cattrs import ClassValidationError, Converter, IterableValidationError, cols
from cattrs.errors import ForbiddenExtraKeysError

from jackfield.errors import ConfigError, JackfieldError, RolloutError

__all__ = ["option", "range_of", "structure", "unstructure"]

T = TypeVar("T")


def option(default: Any = attrs.NOTHING, *, help: str, factory: Any = None, validator: Any = None) -> Any:
    """A field of a settings class with a help text, which ``jackfield config explain`` prints."""
    if factory is not None:
        return attrs.field(factory=factory, validator=validator, metadata={"help": help})
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
        raise error(
            f"expected settings for {where or cls.__name__}",
            code="config.wrong-type",
            where=where or None,
            expected="keys and values",
            found=f"{type(data).__name__} {data!r}",
        )
    try:
        return (_CONVERTER if finite else _ANY_NUMBER).structure(data, cls)
    except Exception as caught:  # cattrs groups whatever a field's hook raised
        refusal = _explain(caught, cls, where, data, error)
        if refusal.fix is None and error is ConfigError:
            refusal.fix = "correct it; `jackfield config explain FILE` says what each setting is for"
        raise refusal from caught


def unstructure(value: Any) -> Any:
    """The plain values of an attrs instance; ``structure`` reads them back."""
    return _CONVERTER.unstructure(value)


def _explain(
    caught: BaseException, cls: Any, path: str, data: Any, error: type[JackfieldError], bounds: str = ""
) -> JackfieldError:
    """The first leaf of cattrs' tree of errors, as one of ours."""
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
            what = f"a value of type {_type_name(note.type)}"
            return error(
                f"missing key '{name}' at {inner}",
                code="config.missing-key",
                where=inner,
                expected=what,
                found="nothing",
            )
        value = _lookup(data, name)
        field = attrs.fields_dict(cls).get(str(name)) if attrs.has(cls) else None
        return _explain(leaf, note.type, inner, value, error, range_of(field.validator) if field else "")
    expected = f"{_type_name(cls)} {bounds}".strip()
    if attrs.has(cls) and not isinstance(data, Mapping):
        expected, caught = "keys and values", _WrongType(f"{data!r} is {_article(type(data).__name__)}")
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
    """The first given field of the class whose validator refuses its value; None: it is none of them."""
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
    """What validators of attrs ask of a number: ``>= 0 and < 1``."""
    for inner in ("validator", "member_validator"):
        if hasattr(validator, inner):
            return range_of(getattr(validator, inner))
    if hasattr(validator, "_validators"):
        return " and ".join(filter(None, map(range_of, validator._validators)))
    return f"{validator.compare_op} {validator.bound:g}" if hasattr(validator, "compare_op") else ""


def _in_configuration(caught: JackfieldError, path: str, error: type[JackfieldError]) -> JackfieldError:
    """What a class of a contract refuses, said of the settings it was to be made from."""
    name = str(caught.where or "").rpartition(".")[2]
    where = f"{path}.{name}".strip(".")
    return error(
        f"wrong value at {where}: {caught.message}",
        code="config.invalid-value",
        where=where,
        expected=caught.expected,
        found=caught.found,
    )


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
    return error(
        f"unknown key '{key}' at {inner}{hint}",
        code="config.unknown-key",
        where=inner,
        expected="one of " + ", ".join(known) if known else "no keys",
        found=key,
    )


def _type_name(cls: Any) -> str:
    if typing.get_origin(cls) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(cls))
    if _is_union(cls):
        return " | ".join("None" if one is type(None) else _type_name(one) for one in typing.get_args(cls))
    return cls.__name__ if isinstance(cls, type) and not typing.get_args(cls) else re.sub(r"\w+\.(?=\w)", "", str(cls))


class _WrongType(TypeError):
    """A leaf of the wrong type."""


def _strictly(cls: type, *accepted: type) -> Any:
    def hook(value: Any, _: Any) -> Any:
        if (isinstance(value, bool) and cls is not bool) or not isinstance(value, (cls, *accepted)):
            raise _WrongType(f"{value!r} is {_article(type(value).__name__)}, not {_article(cls.__name__)}")
        return cls(value)

    return hook


def _float(value: Any, _: Any) -> float:
    if isinstance(value, str):  # YAML reads 1e-3 as a text
        try:
            return float(value)
        except ValueError:
            raise _WrongType(f"{value!r} is a str, not a float") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _WrongType(f"{value!r} is {_article(type(value).__name__)}, not a float")
    return float(value)


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


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


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
    for member in members:
        if member is type(None):
            continue
        try:
            return converter.structure(value, member)
        except Exception as caught:
            failures.append(caught)
    if len(failures) == 1:
        raise failures[0]
    raise _WrongType(f"{value!r} is not {_type_name(cls)}")


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
    """cattrs' own hook, behind a check: a text is a sequence of texts to Python, and never one to us."""
    plain = make_hook(cls, converter)

    def hook(value: Any, _: Any) -> Any:
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
            raise _WrongType(f"{value!r} is {_article(type(value).__name__)}, not a list")
        return plain(value, cls)

    return hook


_CONVERTER, _ANY_NUMBER = _make_converter(_int64, _finite), _make_converter(_strictly(int), _float)
