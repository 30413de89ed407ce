"""Scores of difficulty, and the order of rows by weighted scores."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from attrs.validators import ge

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
        """The score."""
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
    limit: int | None = option(None, "how many rows are kept, those of the highest priority; null: all", ge(1))
    writes: str = option("priority", "column that gets the priority")


class Priority(Operator):
    """Orders rows by a weighted sum of their scores, the highest first."""

    type: ClassVar[OperatorType] = "selector"

    def __init__(self, config: PriorityConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        if not config.weights:
            raise ConfigError("nothing says what comes first", where="weights", expected="a weight or more", found="{}")

    @property
    def reads(self) -> tuple[str, ...]:
        """The scores."""
        return tuple(self.config.weights)

    @property
    def writes(self) -> tuple[str, ...]:
        """The priority."""
        return (self.config.writes,)

    @property
    def selection(self) -> Selection:
        """By priority."""
        return Selection(by=self.config.writes, limit=self.config.limit)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compute the priority of each row."""
        return each_row(request, lambda row: {self.config.writes: self._priority(row.values)})

    def _priority(self, values: Mapping[str, Any]) -> float:
        total = 0.0
        for name, weight in self.config.weights.items():
            value = values[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise TypeError(f"column {name!r} has {value!r}, not a number")
            total += weight * value
        return total
