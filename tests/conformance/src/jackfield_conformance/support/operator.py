"""Helpers for the suite of operators: rows, calls, and requirements of results."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, Row
from jackfield_conformance.registry import NotApplicable, Subject
from jackfield_conformance.support.expecting import within

PAGE = "docs/plugins/operator.md#"
DEADLINE = 20.0  #: seconds for a request
ALL = "*"

_ROWS: tuple[Mapping[str, Any], ...] = (
    {"prompt": "Ida has 9 toys and loses 2. How many toys now?", "answer": "9 - 2 = 7\n#### 7"},
    {"prompt": "There were 7 cards. Dan buys 1. How many now?", "answer": "7 + 1 = 8\n#### 8"},
    {"prompt": "Sam sells 2 of 8 eggs, and then 3 more. How many are left?", "answer": "8 - 2 = 6\n6 - 3 = 3\n#### 3"},
    {"prompt": "Ida has 9 toys and loses 2. How many toys now?", "answer": "9 - 2 = 7\n#### 7"},
    {"prompt": "Say ok.", "answer": "ok"},
)
_EXPERIENCE = {"response": "7 toys are left\n#### 7", "reward": 1.0, "group": "0/0", "turns": 1, "response_tokens": 9}


class Recorded(Mapping[str, Any]):
    """The columns of a row, which remember what was read of them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self.read = values, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        self.read.add(ALL)
        return iter(self._values)

    def __len__(self) -> int:
        self.read.add(ALL)
        return len(self._values)


def rows_of(subject: Subject, key: str = "rows", needed: bool = False) -> list[dict[str, Any]]:
    """Return the fixture's rows under ``key``, by default problems with answers and a response."""
    given: Sequence[Mapping[str, Any]] | None = subject.fixture.get(key)
    if given is None and key == "rows":
        given = [{**_EXPERIENCE, **row, "response": f"{row['answer']} {at}"} for at, row in enumerate(_ROWS)]
    if not given and needed:
        raise NotApplicable(f"the fixture has no '{key}'")
    return [copy.deepcopy(dict(row)) for row in given or ()]


def request_of(
    rows: Sequence[Mapping[str, Any]], first: int = 0, batch: int = 0, prefix: str = "row"
) -> OperatorRequest:
    """Return a request with these rows."""
    named = tuple(Row(key=f"{prefix}:{number}", values=row) for number, row in enumerate(rows, first))
    return OperatorRequest(rows=named, batch=batch, steps=10, deadline_seconds=DEADLINE)


def context_of(subject: Subject, folder: Path | None = None, seed: int = 0) -> OperatorContext:
    """Return a context as a run gives it."""
    given: dict[str, Any] = dict(subject.fixture.get("context") or {})
    return OperatorContext(seed=seed, folder=folder or subject.folder, **given)


@contextlib.asynccontextmanager
async def opened(
    subject: Subject, settings: Mapping[str, Any] | None = None, *, folder: Path | None = None, state: Any = None
) -> AsyncIterator[Operator]:
    """Start an operator, which goes on from a state, and close it at the end."""
    operator: Operator = subject.make(context_of(subject, folder), **(settings or {}))
    if state is not None:
        operator.restore(state)
    try:
        await operator.start()
        yield operator
    finally:
        await operator.close()


async def processed(operator: Operator, request: OperatorRequest) -> OperatorResult:
    """Have a request processed, within its deadline."""
    return await within(DEADLINE, operator.process(request), f"a request of {len(request.rows)} rows")


async def in_cuts(subject: Subject, rows: Sequence[Mapping[str, Any]], size: int, folder: Path) -> OperatorResult:
    """Have rows processed by a fresh operator in requests of a size; return their results as one."""
    folder.mkdir()
    merged = OperatorResult()
    async with opened(subject, folder=folder) as operator:
        for number, first in enumerate(range(0, len(rows), size)):
            found = await processed(operator, request_of(rows[first : first + size], first, number))
            merged = joined(merged, found)
    return merged


def joined(one: OperatorResult, other: OperatorResult) -> OperatorResult:
    """Return two results as one."""
    return OperatorResult(
        updates={**one.updates, **other.updates},
        removed={**one.removed, **other.removed},
        set_aside={**one.set_aside, **other.set_aside},
        made=(*one.made, *other.made),
    )


def plain(result: OperatorResult) -> Any:
    """Return a result as JSON values; raise ``AssertionError`` if it has others, or a number that is not finite."""
    values = attrs.asdict(result)
    assert_finite(values, "the result")
    try:
        return json.loads(json.dumps(values, sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the result has values that JSON does not have: {error}") from error


def assert_finite(value: Any, where: str) -> None:
    """Require that no number in a value is infinite or NaN."""
    if isinstance(value, float):
        assert math.isfinite(value), f"{where} is {value}"
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            assert_finite(inner, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            assert_finite(inner, f"{where}[{at}]")


def assert_equal(one: OperatorResult, other: OperatorResult, first: str, second: str) -> None:
    """Require that two results are the same."""
    found = {name: (plain(one)[name], plain(other)[name]) for name in ("updates", "removed", "set_aside", "made")}
    for name, (before, after) in found.items():
        assert before == after, f"{name} differ: {first} {str(before)[:300]}, {second} {str(after)[:300]}"
