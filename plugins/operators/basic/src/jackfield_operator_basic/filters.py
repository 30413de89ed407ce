"""A filter by the length of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
from attrs.validators import ge

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType, Row
from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_operator_basic.rows import each_row
from jackfield_operator_basic.texts import text_of


@attrs.frozen(kw_only=True)
class LengthConfig:
    """Settings of ``length``."""

    column: str = option("prompt", "column with the text")
    unit: Literal["characters", "words"] = option("characters", "what is counted")
    minimum: int = option(1, "shortest text that is kept", ge(0))
    maximum: int | None = option(None, "longest text that is kept; null: any", ge(0))


class Length(Operator):
    """Keeps rows whose text has a length within bounds."""

    type: ClassVar[OperatorType] = "filter"
    decides_by: ClassVar[tuple[str, ...]] = ("minimum", "maximum")

    def __init__(self, config: LengthConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._column = context.column(config.column)
        self._statistic = f"{config.column}_{config.unit}"
        if config.maximum is not None and config.maximum < config.minimum:
            details: Any = {
                "where": "maximum",
                "expected": f"at least minimum ({config.minimum})",
                "found": config.maximum,
            }
            raise ConfigError("no text can be kept", **details)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the column with the text."""
        return (self._column,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Return the column with its length."""
        return (self._statistic,)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Count characters or words."""
        words = self.config.unit == "words"

        def measured(row: Row) -> dict[str, int]:
            text = text_of(row.values, self._column)
            return {self._statistic: len(text.split()) if words else len(text)}

        return each_row(request, measured)

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """Refuse what is too short or too long."""
        least, most, found = self.config.minimum, self.config.maximum, dict[str, str]()
        for row in rows:
            length = row.values[self._statistic]
            if length < least or (most is not None and length > most):
                found[row.key] = f"{length} {self.config.unit}"
        return found
