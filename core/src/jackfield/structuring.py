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

__all__ = ["option", "structure", "unstructure"]

T = TypeVar("T")


def option(default: Any = attrs.NOTHING, *, help: str, factory: Any = None, validator: Any = None) -> Any:
    """A field of a settings class with a help text, which ``jackfield config explain`` prints."""
    if factory is not None:
        return attrs.field(factory=factory, validator=validator, metadata={"help": help})
    return attrs.field(default=default, validator=validator, metadata={"help": help})


def structure(cls: type[T], data: Any, where: str = "", error: type[JackfieldError] = ConfigError) -> T:
    """Make an instance of the attrs class ``cls`` from plain values.

    Args:
        cls: an attrs class; nested attrs classes, lists, tuples, dicts, literals and unions with None are followed.
        data: what YAML, TOML or JSON yields.
        where: the path of ``data`` itself, the prefix of paths in errors.
        error: the class of the errors raised.

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
        return _CONVERTER.structure(data, cls)
    except Exception as caught:  # cattrs groups whatever a field's hook raised
        refusal = _explain(caught, cls, where, data, error)
        if refusal.fix is None and error is ConfigError:
            refusal.fix = "correct it; `jackfield config explain FILE` says what each setting is for"
        raise refusal from caught


def unstructure(value: Any) -> Any:
    """The plain values of an attrs instance; ``structure`` reads them back."""
    return _CONVERTER.unstructure(value)


def _explain(caught: BaseException, cls: Any, path: str, data: Any, error: type[JackfieldError]) -> JackfieldError:
    """The first leaf of cattrs' tree of errors, as one of ours."""
    if isinstance(caught, JackfieldError):
        return _in_configuration(caught, path, error) if isinstance(caught, RolloutError) else caught
    if isinstance(caught, ClassValidationError | IterableValidationError):
        noted, others = caught.group_exceptions()
        extra = [other for other in others if isinstance(other, ForbiddenExtraKeysError)]
        if extra:
            return _unknown_key(extra[0], path, error)
        if not noted:  # a validator of the class refused
            return _explain(others[0], cls, path, data, error)
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
        return _explain(leaf, note.type, inner, value, error)
    expected = _type_name(cls)
    if attrs.has(cls) and not isinstance(data, Mapping):
        expected, caught = "keys and values", _WrongType(f"{data!r} is {_article(type(data).__name__)}")
    code = "config.wrong-type" if isinstance(caught, _WrongType) else "config.invalid-value"
    detail = caught.args[0] if caught.args else caught
    bound = re.match(r"'(\w+)' must be ([^:]*)", str(detail))  # attrs' own validators name the field in words alone
    if bound and isinstance(data, Mapping) and bound[1] in data:
        path, expected, data = f"{path}.{bound[1]}".lstrip("."), bound[2], data[bound[1]]
    return error(f"wrong value at {path}: {detail}", code=code, where=path, expected=expected, found=repr(data))


def _in_configuration(caught: RolloutError, path: str, error: type[JackfieldError]) -> JackfieldError:
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


def _union(value: Any, cls: Any) -> Any:
    members = typing.get_args(cls)
    if value is None and type(None) in members:
        return None
    failures: list[BaseException] = []
    for member in members:
        if member is type(None):
            continue
        try:
            return _CONVERTER.structure(value, member)
        except Exception as caught:
            failures.append(caught)
    if len(failures) == 1:
        raise failures[0]
    raise _WrongType(f"{value!r} is not {_type_name(cls)}")


def _make_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    converter.register_structure_hook(bool, _strictly(bool))
    converter.register_structure_hook(int, _strictly(int))
    converter.register_structure_hook(str, _strictly(str))
    converter.register_structure_hook(float, _float)
    converter.register_structure_hook_func(_is_literal, _literal)
    converter.register_structure_hook_func(_is_union, _union)
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


_CONVERTER = _make_converter()
