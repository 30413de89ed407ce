"""Results of operators that treat each row alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jackfield.abc.operator import OperatorRequest, OperatorResult, Row


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
