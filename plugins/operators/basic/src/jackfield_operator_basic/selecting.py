"""Samples of the rows: the first ones, some by chance, or some of each category."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
import xxhash
from attrs.validators import ge, optional

from jackfield.abc.operator import (
    Operator,
    OperatorContext,
    OperatorRequest,
    OperatorResult,
    OperatorType,
    Row,
    Selection,
)
from jackfield.sdk import option

_Order = Literal["first", "random"]


@attrs.frozen(kw_only=True)
class SelectConfig:
    """Settings of ``select``."""

    order: _Order = option("first", "first: in the order in which rows come; random: in one by chance, of the seed")
    limit: int | None = option(None, "how many rows are kept; null: all", optional(ge(1)))
    writes: str = option("select", "column that gets the number by which rows are ordered, the smallest first")


class Select(Operator):
    """Keeps the first rows, or as many by chance, which then come in an order by chance.

    A row's chance depends on the seed and on its key alone: more rows, or other ones, do not change it.
    """

    type: ClassVar[OperatorType] = "selector"

    def __init__(self, config: SelectConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._read = 0

    @property
    def reads(self) -> tuple[str, ...]:
        """Return no column."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Return the column with the number."""
        return (self.config.writes,)

    @property
    def selection(self) -> Selection:
        """Order rows by the number."""
        return Selection(by=self.config.writes, largest_first=False, limit=self.config.limit)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Number the rows."""
        numbers = enumerate(request.rows, self._read)
        random, seed = self.config.order == "random", self.context.seed
        found = {row.key: _chance(seed, row.key) if random else number for number, row in numbers}
        self._read += len(request.rows)
        return OperatorResult(updates={key: {self.config.writes: number} for key, number in found.items()})

    def state(self) -> int:
        """Return how many rows came."""
        return self._read

    def restore(self, state: Any) -> None:
        """Number the next row after so many."""
        self._read = int(state)


@attrs.frozen(kw_only=True)
class PerCategoryConfig:
    """Settings of ``per_category``."""

    category: str = option(help="column with the category: a text, a number, or any other value")
    order: _Order = option("first", "first: the first ones of a category; random: some by chance, which needs all rows")
    writes: str = option("rank_in_category", "column that gets the place of a row in its category, from 0")
    limit: int = option(help="how many rows of each category are kept", validator=ge(1))


class PerCategory(Operator):
    """Keeps some rows of each category, in their order (a stratified sample)."""

    type: ClassVar[OperatorType] = "filter"
    decides_by: ClassVar[tuple[str, ...]] = ("limit",)

    def __init__(self, config: PerCategoryConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._column = context.column(config.category)
        self._counts = dict[str, int]()

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the column with the category."""
        return (self._column,)

    @property
    def writes(self) -> tuple[str, ...]:
        """The place in the category."""
        return (self.config.writes,)

    @property
    def compares(self) -> bool:
        """By chance, all rows are compared."""
        return bool(self.config.order == "random")

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Number the rows of each category."""
        categories = {row.key: _category(row, self._column) for row in request.rows}
        keys, counts = list(categories), {} if self.compares else self._counts
        if self.compares:
            keys.sort(key=lambda key: (_chance(self.context.seed, key), key))
        places = dict[str, int]()
        for key in keys:
            if (category := categories[key]) is not None:
                places[key] = counts.get(category, 0)
                counts[category] = places[key] + 1
        aside = {key: f"there is no column {self._column!r}" for key in keys if categories[key] is None}
        updates = {key: {self.config.writes: places[key]} for key in categories if key in places}
        return OperatorResult(updates=updates, set_aside=aside)

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """Refuse what comes after enough others."""
        limit, name = self.config.limit, self.config.writes
        return {row.key: f"{limit} rows of its category come before" for row in rows if row.values[name] >= limit}

    def state(self) -> dict[str, int]:
        """Return how many rows of each category came."""
        return dict(self._counts)

    def restore(self, state: Any) -> None:
        """Go on from these numbers."""
        self._counts = {str(category): int(count) for category, count in state.items()}


def _category(row: Row, column: str) -> str | None:
    """Return a text that is the same for the same category."""
    return json.dumps(row.values[column], sort_keys=True) if column in row.values else None


def _chance(seed: int, key: str) -> float:
    """Return a number from 0 to 1, excluding 1, which looks random."""
    return (xxhash.xxh3_64_intdigest(f"{seed} {key}".encode(errors="surrogatepass")) >> 11) / float(1 << 53)
