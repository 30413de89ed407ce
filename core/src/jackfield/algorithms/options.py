"""Ranges of parts' options, as annotations in their signatures: ``beta: Positive = 0.1``.

A validator of attrs in ``Annotated`` is what a given value is checked by, in a configuration and in a call. A plugin's
part may use these, or ``Annotated`` with validators of its own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

import attrs
from attrs.validators import and_, ge, gt, le, optional

from jackfield.algorithms.registry import INPUTS, Part
from jackfield.errors import ConfigError
from jackfield.settings import range_of, structure

Positive: TypeAlias = Annotated[float, gt(0.0)]
NotNegative: TypeAlias = Annotated[float, ge(0.0)]
Share: TypeAlias = Annotated[float, ge(0.0), le(1.0)]
Epsilon: TypeAlias = Annotated[float, gt(0.0), le(1.0)]
ClipDual: TypeAlias = Annotated[float, gt(1.0)]


def above(lower: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return a validator: more than another option of the same part, or field of the same class."""

    def check(made: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not value > getattr(made, lower):
            raise ValueError(f"'{attribute.name}' must be more than {lower}, {getattr(made, lower)!r}: {value!r}")

    return check


def ascending(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a lower bound, then an upper one."""
    if not value[0] < value[1]:
        raise ValueError(f"'{attribute.name}' must be a lower and a higher number: {value!r}")


def check_values(chosen: Part, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check and convert the options that a configuration gives a part.

    Raises:
        ConfigError: ``config.unknown-key``, ``config.wrong-type`` or ``config.invalid-value``, with the option's path.
    """
    if chosen.signature.open or not given:
        return dict(given)
    made = attrs.asdict(structure(_settings(chosen.kind, chosen.function), given, where), recurse=False)
    return {name: made[name] for name in given}


def check_options(chosen: Part, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell what a caller gives a part apart, and check the options.

    Returns:
        ``(inputs, options)``. Every part may be offered every known input.

    Raises:
        ConfigError: ``algorithm.input``: the part has no such option, or not with this value.
    """
    taken = INPUTS.union(chosen.signature.inputs)
    inputs = {name: value for name, value in given.items() if name in taken}
    options = {name: value for name, value in given.items() if name not in taken}
    try:
        return inputs, check_values(chosen, options, f"{chosen.kind} {chosen.name}")
    except ConfigError as error:
        error.code, error.fix = "algorithm.input", None
        raise


def ranges(chosen: Part) -> dict[str, str]:
    """Return the range of each option that has one, as text."""
    fields = attrs.fields_dict(_settings(chosen.kind, chosen.function))
    found = {name: range_of(fields[name].validator) for name in chosen.options}
    return {name: text for name, text in found.items() if text}


@functools.cache
def _settings(kind: str, function: Callable[..., Any]) -> type:
    """Return a part's options as a settings class; every loss has a ``length_norm``, which its aggregation reads."""
    if isinstance(function, type):
        return function
    parameters = inspect.signature(function).parameters
    options = Part(kind=kind, name="", function=function, scope="batch").options
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
