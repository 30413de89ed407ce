"""Scores of difficulty, and the order of rows by weighted scores."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs
import numpy as np
from attrs.validators import ge, optional
from numpy.typing import NDArray

from jackfield.abc.operator import (
    Operator,
    OperatorContext,
    OperatorRequest,
    OperatorResult,
    OperatorType,
    Row,
    Selection,
)
from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_operator_basic.rows import each_row
from jackfield_operator_basic.texts import text_of

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_STEP = re.compile(r"<<|[=→]|\n")


@attrs.frozen(kw_only=True)
class DifficultyConfig:
    """Settings of ``difficulty_rules``."""

    prompt: str = option("prompt", "column with the problem")
    answer: str | None = option("answer", "column with the worked answer; null: only the problem is looked at")
    writes: str = option("difficulty", "column that gets the score, from 0 to 1")


class DifficultyRules(Operator):
    """Scores how hard a problem is by what can be counted: words, numbers, and steps of the worked answer.

    The score is the mean of three saturating terms, n / (n + half): half of a term's range is reached at 60 words, at
    6 numbers and at 4 steps.
    """

    type: ClassVar[OperatorType] = "scorer"

    def __init__(self, config: DifficultyConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._prompt = context.column(config.prompt)
        self._answer = None if config.answer is None else context.column(config.answer)

    @property
    def reads(self) -> tuple[str, ...]:
        """Problem and answer."""
        return (self._prompt,) if self._answer is None else (self._prompt, self._answer)

    @property
    def writes(self) -> tuple[str, ...]:
        """Return the column with the score."""
        return (self.config.writes,)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Score each row."""
        return each_row(request, lambda row: {self.config.writes: self._score(row)})

    def _score(self, row: Row) -> float:
        problem = text_of(row.values, self._prompt)
        terms = [_share(len(problem.split()), 60), _share(len(_NUMBER.findall(problem)), 6)]
        if self._answer is not None and row.values.get(self._answer) is not None:
            answer = row.values[self._answer]
            text = str(answer) if isinstance(answer, int | float) else text_of(row.values, self._answer)
            terms.append(_share(len(_STEP.findall(text)), 4))
        return round(sum(terms) / len(terms), 6)


def _share(count: int, half: int) -> float:
    return count / (count + half)


@attrs.frozen(kw_only=True)
class PriorityConfig:
    """Settings of ``priority``."""

    weights: Mapping[str, float] = option(
        help="weight of each column with numbers; the sum of weight times value is the priority: difficulty: -1.0 "
        "puts easy rows first"
    )
    scale: Literal["none", "range", "rank"] = option(
        "none",
        "bring columns to 0 to 1 before they are weighted, which needs all rows. range: the smallest value is 0, the "
        "largest 1; rank: the share of the other rows with smaller values, equal ones counting half",
    )
    missing: float | None = option(
        None,
        "value, before it is weighted, of a row without a column or with null in it; null: such rows are set aside",
    )
    limit: int | None = option(
        None, "how many rows are kept, those of the highest priority; null: all", optional(ge(1))
    )
    writes: str = option("priority", "column that gets the priority")


class Priority(Operator):
    """Orders rows by a weighted sum of their scores, the highest first; equal ones stay in their order."""

    type: ClassVar[OperatorType] = "selector"

    def __init__(self, config: PriorityConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        if not config.weights:
            raise ConfigError("nothing says what comes first", where="weights", expected="a weight or more", found="{}")

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the columns with scores."""
        return tuple(self.config.weights)

    @property
    def writes(self) -> tuple[str, ...]:
        """Return the column with the priority."""
        return (self.config.writes,)

    @property
    def compares(self) -> bool:
        """Scaled columns depend on all rows."""
        return bool(self.config.scale != "none")

    @property
    def selection(self) -> Selection:
        """Order rows by their priority."""
        return Selection(by=self.config.writes, limit=self.config.limit)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compute the priority of each row."""
        read = each_row(request, self._values)
        columns = {name: np.array([row[name] for row in read.updates.values()]) for name in self.config.weights}
        totals = np.zeros(len(read.updates))
        with np.errstate(over="ignore", invalid="ignore"):
            for name, weight in self.config.weights.items():
                totals += weight * _scaled(columns[name], self.config.scale)
        aside, updates = dict(read.set_aside), dict[str, dict[str, float]]()
        for key, total in zip(read.updates, totals.tolist(), strict=True):
            if math.isfinite(total):
                updates[key] = {self.config.writes: total}
            else:
                aside[key] = "its priority is not finite: the values or the weights are too large"
        return OperatorResult(updates=updates, set_aside=aside)

    def _values(self, row: Row) -> dict[str, float]:
        return {name: self._value(row.values, name) for name in self.config.weights}

    def _value(self, values: Mapping[str, Any], name: str) -> float:
        value = values[name] if self.config.missing is None else values.get(name)
        if value is None and self.config.missing is not None:
            return float(self.config.missing)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise TypeError(f"column {name!r} has {value!r}, not a finite number")
        return float(value)


def _scaled(column: NDArray[np.float64], scale: str) -> NDArray[np.float64]:
    """Return a column, from 0 to 1 if it is to be scaled; a column with one value only is 0, or 0.5 by rank."""
    if scale == "none" or not len(column):
        return column
    if scale == "rank":
        ordered = np.sort(column)
        less, not_more = np.searchsorted(ordered, column), np.searchsorted(ordered, column, side="right")
        ranks: NDArray[np.float64] = (
            (less + not_more - 1) / 2 / (len(column) - 1) if len(column) > 1 else 0.5 + 0 * column
        )
        return ranks
    halves = column / 2  # the difference of two numbers can be larger than any number
    width = halves.max() - halves.min()
    scaled: NDArray[np.float64] = (halves - halves.min()) / width if width > 0.0 else 0 * column
    return scaled
