"""Ranges of parts' options, as annotations in their signatures: ``beta: Positive = 0.1``.

A validator of attrs in ``Annotated`` is what a configuration's value is checked by. A plugin's part may use these, or
``Annotated`` with validators of its own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

import attrs
from attrs.validators import and_, ge, gt, le, optional

from jackfield.algorithms.registry import Part, signature
from jackfield.settings import range_of, structure, unstructure

__all__ = ["ClipDual", "Epsilon", "NotNegative", "Positive", "Share", "above", "ascending", "check_values", "ranges"]

Positive: TypeAlias = Annotated[float, gt(0.0)]
NotNegative: TypeAlias = Annotated[float, ge(0.0)]
Share: TypeAlias = Annotated[float, ge(0.0), le(1.0)]
Epsilon: TypeAlias = Annotated[float, gt(0.0), le(1.0)]
ClipDual: TypeAlias = Annotated[float, gt(1.0)]


def above(lower: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """A validator: more than another option of the same part, or field of the same class."""

    def check(made: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not value > getattr(made, lower):
            raise ValueError(f"'{attribute.name}' must be more than {lower}, {getattr(made, lower)!r}: {value!r}")

    return check


def ascending(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A validator: a lower bound, then an upper one."""
    if not value[0] < value[1]:
        raise ValueError(f"'{attribute.name}' must be a lower and a higher number: {value!r}")


def check_values(chosen: Part, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options that a configuration gives a part, checked and converted.

    Raises:
        ConfigError: ``config.unknown-key``, ``config.wrong-type`` or ``config.invalid-value``, with the option's path.
    """
    if signature(chosen.function).open:
        return dict(given)
    made = unstructure(structure(_settings(chosen.kind, chosen.function), given, where))
    return {name: made[name] for name in given}


def ranges(chosen: Part) -> dict[str, str]:
    """The range of each option that has one, as text."""
    fields = attrs.fields_dict(_settings(chosen.kind, chosen.function))
    found = {name: range_of(fields[name].validator) for name in chosen.options}
    return {name: text for name, text in found.items() if text}


@functools.cache
def _settings(kind: str, function: Callable[..., Any]) -> type:
    """A part's options as a settings class; every loss has a ``length_norm``, which its aggregation reads."""
    parameters, options = inspect.signature(function).parameters, signature(function).options
    fields = {name: _field(parameters[name], function) for name in options}
    if kind == "loss":
        number: Any = float | None
        fields["length_norm"] = attrs.field(default=None, type=number, validator=optional(gt(0.0)))
    return attrs.make_class(function.__name__, fields, frozen=True, kw_only=True)


def _field(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    try:
        declared = eval(str(parameter.annotation), vars(inspect.getmodule(function)))  # of installed code
    except Exception:  # imported for type checkers alone, or no annotation: the default says what it is
        declared = type(parameter.default) if isinstance(parameter.default, bool | int | float | str) else Any
    members = get_args(declared) if get_origin(declared) in (Union, types.UnionType) else (declared,)
    checks = [check for member in members if get_origin(member) is Annotated for check in member.__metadata__]
    plain = [get_args(member)[0] if get_origin(member) is Annotated else member for member in members]
    validator = and_(*checks) if checks else None
    if validator is not None and type(None) in members:
        validator = optional(validator)
    kind: Any = Union[tuple(plain)]  # noqa: UP007
    return attrs.field(default=parameter.default, type=kind, validator=validator)
