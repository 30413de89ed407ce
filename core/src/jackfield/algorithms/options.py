"""Ranges of the options of parts, as annotations in signatures: ``beta: Positive = 0.1``.

An attrs validator in ``Annotated`` checks the value in a configuration and in a call. A plugin's part may use these
annotations, or ``Annotated`` with its own validators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import attrs
from attrs.validators import ge, gt, le

Positive: TypeAlias = Annotated[float, gt(0.0)]
NotNegative: TypeAlias = Annotated[float, ge(0.0)]
Share: TypeAlias = Annotated[float, ge(0.0), le(1.0)]
Epsilon: TypeAlias = Annotated[float, gt(0.0), le(1.0)]
ClipDual: TypeAlias = Annotated[float, gt(1.0)]


def above(lower: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return a validator for values above another option of the same part or field of the same class."""

    def check(made: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not value > getattr(made, lower):
            raise ValueError(f"'{attribute.name}' must be more than {lower}, {getattr(made, lower)!r}: {value!r}")

    return check


def ascending(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Check that a lower bound is below the upper bound."""
    if not value[0] < value[1]:
        raise ValueError(f"'{attribute.name}' must be a lower and a higher number: {value!r}")
