"""A way to have operators process rows in requests of several sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, Row
from jackfield.plugins.registry import installed

Applied = Callable[..., Awaitable[OperatorResult]]


async def _applied(
    name: str, rows: Sequence[Mapping[str, Any]], size: int = 1000, context: Any = None, **settings: Any
) -> OperatorResult:
    record = installed().load("operator", name)
    operator: Operator = record.build(settings, context or OperatorContext(), name)
    keyed = [Row(key=f"row:{number}", values=values) for number, values in enumerate(rows)]
    merged = OperatorResult()
    await operator.start()
    try:
        for number, first in enumerate(range(0, len(keyed), size)):
            request = OperatorRequest(rows=tuple(keyed[first : first + size]), batch=number)
            found = await asyncio.wait_for(operator.process(request), 120.0)
            merged = OperatorResult(
                updates={**merged.updates, **found.updates},
                removed={**merged.removed, **found.removed},
                set_aside={**merged.set_aside, **found.set_aside},
            )
    finally:
        await operator.close()
    return merged


@pytest.fixture(scope="session")
def applied() -> Applied:
    """Have an operator process rows, in requests of a size, with a context and settings."""
    return _applied
