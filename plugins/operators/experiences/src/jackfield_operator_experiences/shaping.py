"""What operators that shape rewards share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jackfield.abc.operator import OperatorRequest, OperatorResult, Row
from jackfield.errors import ConfigError


def expression(pattern: str, where: str, flags: re.RegexFlag = re.DOTALL) -> re.Pattern[str]:
    """Return a compiled expression; raise a ``ConfigError`` with its place if it is none."""
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        details: Any = {"where": where, "expected": "a regular expression of Python", "found": pattern}
        fix = "correct the pattern; a backslash before a bracket or a sign has it stand for itself"
        raise ConfigError(f"a pattern cannot be read: {error}", fix=fix, **details) from error


def number_of(row: Row, column: str) -> float:
    """Return a number of a row; raise ``KeyError`` or ``TypeError`` if it has none."""
    value = row.values[column]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"column {column!r} has {value!r:.100}, not a number")
    return float(value)


def text_of(row: Row, column: str) -> str:
    """Return a text of a row; raise ``KeyError`` or ``TypeError`` if it has none."""
    value = row.values[column]
    if not isinstance(value, str):
        raise TypeError(f"column {column!r} has {type(value).__name__}, not a text")
    return value


def each_row(request: OperatorRequest, update: Callable[[Row], Mapping[str, Any]]) -> OperatorResult:
    """Return the updates of all rows; a row for which ``update`` raises is set aside with its reason."""
    updates, aside = dict[str, Mapping[str, Any]](), dict[str, str]()
    for row in request.rows:
        try:
            updates[row.key] = update(row)
        except KeyError as error:
            aside[row.key] = f"there is no column {error}"
        except Exception as error:
            aside[row.key] = f"{type(error).__name__}: {error}"
    return OperatorResult(updates=updates, set_aside=aside)


def groups_of(request: OperatorRequest, column: str = "group") -> dict[str, list[Row]]:
    """Return the rows of each group; rows without one are alone."""
    groups = dict[str, list[Row]]()
    for row in request.rows:
        groups.setdefault(str(row.values.get(column, row.key)), []).append(row)
    return groups
