"""A way to have operators process rows in requests of several sizes, and to decide as a pipeline does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import pytest

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, Row
from jackfield.plugins.registry import installed

Records = Sequence[Mapping[str, Any]]


@attrs.frozen
class Outcome:
    """What became of rows, by number."""

    operator: Operator
    updates: dict[int, dict[str, Any]]
    removed: dict[int, str]  #: also what a filter does not keep
    set_aside: dict[int, str]
    made: list[tuple[tuple[int, ...], dict[str, Any]]]

    @property
    def order(self) -> list[int]:
        """The rows in the order of a selector."""
        selection = self.operator.selection
        assert selection is not None
        sign = -1 if selection.largest_first else 1
        ordered = sorted(self.updates, key=lambda row: sign * self.updates[row][selection.by])
        return ordered[: selection.limit]


def _number(key: str) -> int:
    return int(key.removeprefix("row:"))


async def _applied(operator: Operator, rows: Records, size: int) -> Outcome:
    keyed = [Row(key=f"row:{number}", values=values) for number, values in enumerate(rows)]
    results = list[OperatorResult]()
    await operator.start()
    try:
        for number, first in enumerate(range(0, len(keyed), size)):
            request = OperatorRequest(rows=tuple(keyed[first : first + size]), batch=number)
            results.append(await asyncio.wait_for(operator.process(request), 60.0))
    finally:
        await operator.close()
    updates = {key: dict(values) for result in results for key, values in result.updates.items()}
    removed = {key: why for result in results for key, why in result.removed.items()}
    removed |= operator.decide([Row(key=key, values=values) for key, values in updates.items()])
    return Outcome(
        operator,
        {_number(key): values for key, values in updates.items()},
        {_number(key): why for key, why in removed.items()},
        {_number(key): why for result in results for key, why in result.set_aside.items()},
        [(tuple(map(_number, row.parents)), dict(row.values)) for result in results for row in result.made],
    )


Apply = Callable[..., Outcome]


@pytest.fixture(scope="session")
def apply() -> Apply:
    """Have an operator process rows, in requests of a size, from a state, with fields of its context and settings."""

    def run(
        name: str,
        rows: Records,
        size: int = 1000,
        context: Mapping[str, Any] | None = None,
        state: Any = None,
        **settings: Any,
    ) -> Outcome:
        record = installed().load("operator", name)
        operator: Operator = record.build(settings, OperatorContext(**(context or {})), name)
        if state is not None:
            operator.restore(state)
        return asyncio.run(_applied(operator, rows, size))

    return run
