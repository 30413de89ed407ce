"""Operators that call a user's function for each row, in processes that are killed at a deadline."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
from attrs.validators import gt, le, optional

from jackfield.abc.operator import (
    NewRow,
    Operator,
    OperatorContext,
    OperatorRequest,
    OperatorResult,
    OperatorType,
    Row,
)
from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_user_code import UserCodePool, WorkerLimits, WorkerResult, digest_file

_ALL = "*"


@attrs.frozen(kw_only=True)
class FunctionConfig:
    """Settings that the operators with a function have in common."""

    path: str = option(help="folder/file.py:function; it is called with the keyword argument row, and may be async")
    keywords: Mapping[str, Any] = option(factory=dict, help="further keyword arguments of the function")
    reads: tuple[str, ...] = option((_ALL,), "columns that the function gets, by their names in the data; *: all")
    workers: int = option(1, "processes that call it", [gt(0), le(4096)])
    seconds: float = option(60.0, "longest time of one call; then its process is killed", gt(0.0))
    start_seconds: float = option(60.0, "longest time to import the file", gt(0.0))
    memory_bytes: int | None = option(4 * 2**30, "address space of one process; null: unlimited", optional(gt(0)))


@attrs.frozen(kw_only=True)
class FunctionMapperConfig(FunctionConfig):
    """Settings of ``function_mapper``."""

    writes: tuple[str, ...] = option((_ALL,), "columns that the function may change; *: all")


@attrs.frozen(kw_only=True)
class FunctionFilterConfig(FunctionConfig):
    """Settings of ``function_filter``."""

    writes: str = option("function", "column that gets the number of the function")
    minimum: float = option(1.0, "least number of a row that is kept; true is 1")
    maximum: float | None = option(None, "largest number of a row that is kept; null: any")


@attrs.frozen(kw_only=True)
class FunctionSynthesizerConfig(FunctionConfig):
    """Settings of ``function_synthesizer``."""

    writes: tuple[str, ...] = option((_ALL,), "columns that new rows have of their own; *: any")


class _Wrong(Exception):
    """A function returned something else than it may."""


class _Function(Operator):
    """What the three operators have in common: the processes, and a call for each row."""

    def __init__(self, config: Any, context: OperatorContext) -> None:
        super().__init__(config, context)
        place, separator, name = config.path.rpartition(":")
        if not separator or not place.endswith(".py") or not name.isidentifier():
            details: Any = {"where": "path", "expected": "folder/file.py:function", "found": config.path}
            raise ConfigError("a path does not name a function of a file", **details)
        self._file = Path(place).expanduser()
        if not self._file.is_file():
            raise ConfigError("there is no such file", where="path", expected="a Python file", found=place)
        limits = WorkerLimits(memory_bytes=config.memory_bytes, start_seconds=config.start_seconds)
        options: dict[str, Any] = {"workers": config.workers, "clock": context.clock, "limits": limits}
        self._pool = UserCodePool(config.path, keywords=config.keywords, **options)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that settings name."""
        return tuple(self.config.reads)

    @property
    def writes(self) -> tuple[str, ...]:
        """The columns that settings name."""
        return tuple(self.config.writes)

    @property
    def version(self) -> str:
        """A digest of the file, and of the modules that it imports from its folder."""
        return digest_file(self._file)

    async def start(self) -> None:
        """Start a process; ``worker.start`` if the file cannot be imported."""
        await self._pool.start()

    async def close(self) -> None:
        """Kill the processes."""
        await self._pool.close()

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Call the function with each row; a row with which it fails is set aside, with the line of the code."""
        given = [self._given(row) for row in request.rows]
        called = await asyncio.gather(*map(self._call, given))
        results, aside = dict[str, Any](), dict[str, str]()
        for row, result in zip(given, called, strict=True):
            try:
                if result.status != "ok":
                    raise _Wrong(result.error or result.status)
                results[row.key] = self._checked(row, result.value)
            except _Wrong as error:
                aside[row.key] = str(error)
        return attrs.evolve(self._result(results), set_aside=aside)

    def _given(self, row: Row) -> Row:
        """Return a row with the columns that the function gets."""
        names = row.values if _ALL in self.reads else [name for name in self.reads if name in row.values]
        return Row(key=row.key, values={name: row.values[name] for name in names})

    async def _call(self, row: Row) -> WorkerResult:
        return await self._pool.call({"row": row.values}, self.config.seconds, f"row {row.key}")

    def _checked(self, row: Row, value: Any) -> Any:
        """Return what the function gave for a row; raise ``_Wrong`` if it is not of the right form."""
        raise NotImplementedError

    def _result(self, results: Mapping[str, Any]) -> OperatorResult:
        """Return the result of values by key."""
        raise NotImplementedError

    def _columns(self, value: Any) -> dict[str, Any]:
        """Return columns that the function gave."""
        if not isinstance(value, dict):
            raise _Wrong(f"the function {self.config.path} returned {type(value).__name__}, not columns by name")
        if _ALL not in self.writes and (extra := sorted(value.keys() - {*self.writes})):
            raise _Wrong(f"the function {self.config.path} returned {extra}, which `writes` does not name")
        _refuse_infinite(value, self.config.path)
        return value


def _refuse_infinite(value: Any, where: str) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise _Wrong(f"the function {where} returned a number that JSON does not have: {error}") from None


class FunctionMapper(_Function):
    """Changes the columns of rows by a function, which returns the changed ones; None changes nothing."""

    type: ClassVar[OperatorType] = "mapper"

    def _checked(self, row: Row, value: Any) -> dict[str, Any]:
        found = {} if value is None else self._columns(value)
        old = row.values
        return {name: new for name, new in found.items() if name not in old or _differs(new, old[name])}

    def _result(self, results: Mapping[str, Any]) -> OperatorResult:
        return OperatorResult(updates={key: columns for key, columns in results.items() if columns})


def _differs(new: Any, old: Any) -> bool:
    """Return whether two values have another JSON: 1, 1.0 and true are three values."""
    return json.dumps(new, sort_keys=True) != json.dumps(old, sort_keys=True)


class FunctionFilter(_Function):
    """Keeps rows for which a function returns a number within bounds, or true; with None, a row is not kept."""

    type: ClassVar[OperatorType] = "filter"
    decides_by: ClassVar[tuple[str, ...]] = ("minimum", "maximum")

    @property
    def writes(self) -> tuple[str, ...]:
        """Return the column with the number."""
        return (self.config.writes,)

    def _checked(self, row: Row, value: Any) -> float | None:
        if value is None:
            return None
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise _Wrong(f"the function {self.config.path} returned {value!r:.200}, neither a number nor true or false")
        return float(value)

    def _result(self, results: Mapping[str, Any]) -> OperatorResult:
        return OperatorResult(updates={key: {self.config.writes: number} for key, number in results.items()})

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """Refuse numbers that are out of bounds."""
        least, most, refused = self.config.minimum, self.config.maximum, dict[str, str]()
        for row in rows:
            number = row.values[self.config.writes]
            if number is None or number < least or (most is not None and number > most):
                refused[row.key] = f"{self.config.writes} is {'null' if number is None else f'{number:g}'}"
        return refused


class FunctionSynthesizer(_Function):
    """Makes new rows by a function, which returns the columns of one, a list of these, or None."""

    type: ClassVar[OperatorType] = "synthesizer"

    def _checked(self, row: Row, value: Any) -> list[NewRow]:
        rows = value if isinstance(value, list) else [] if value is None else [value]
        return [NewRow(parents=(row.key,), values=self._columns(each)) for each in rows]

    def _result(self, results: Mapping[str, Any]) -> OperatorResult:
        return OperatorResult(made=tuple(row for rows in results.values() for row in rows))
