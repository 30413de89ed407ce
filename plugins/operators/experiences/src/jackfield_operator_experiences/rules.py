"""A part of the reward by rules on the quality of a response."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from attrs.validators import ge, optional

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType, Row
from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_operator_experiences.shaping import each_row, expression, number_of, text_of


@attrs.frozen(kw_only=True)
class QualityRulesConfig:
    """Settings of ``quality_rules``."""

    weight: float = option(1.0, "weight of the quality, which is between -0.5 and 0.5, in the reward", ge(0.0))
    matches: Mapping[str, str] = option(factory=dict, help="expressions by name, each found in a good response")
    lacks: Mapping[str, str] = option(factory=dict, help="expressions by name, none found in a good response")
    repetition: int | None = option(
        4, "words of a sequence that a good response does not repeat; null: any", optional(ge(1))
    )
    ends: bool = option(True, "a good response ends with a sentence's end, a bracket, a quotation mark or a number")


class QualityRules(Operator):
    """Adds weight * (mean of all rules - 0.5) to the reward: a rule is 1 where it holds, and 0 where it does not.

    The rule of repetition is the share of sequences of words that come once.
    """

    type: ClassVar[OperatorType] = "scorer"
    reads = ("response", "reward")
    writes = ("reward", "quality")
    _END = re.compile(r"[.!?。！？\])}\"'”’»0-9]\s*$")  # noqa: RUF001

    def __init__(self, config: QualityRulesConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._matches = [expression(text, f"matches.{name}") for name, text in config.matches.items()]
        self._lacks = [expression(text, f"lacks.{name}") for name, text in config.lacks.items()]
        if not (self._matches or self._lacks or config.repetition or config.ends):
            fix = "give matches or lacks, or do not turn off repetition and ends"
            details: Any = {"where": "matches", "expected": "one rule or more", "found": "none", "fix": fix}
            raise ConfigError("there are no rules", **details)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Apply the rules."""
        return each_row(request, self._shaped)

    def _shaped(self, row: Row) -> Mapping[str, float]:
        reward, text = number_of(row, "reward"), text_of(row, "response")
        held = [float(each.search(text) is not None) for each in self._matches]
        held += [float(each.search(text) is None) for each in self._lacks]
        held += [] if self.config.repetition is None else [_once(text.split(), self.config.repetition)]
        held += [float(self._END.search(text) is not None)] if self.config.ends else []
        quality = sum(held) / len(held) - 0.5
        return {"reward": reward + self.config.weight * quality, "quality": quality}


def _once(words: list[str], size: int) -> float:
    """Return the share of sequences of words that are not repetitions of earlier ones."""
    sequences = [tuple(words[at : at + size]) for at in range(len(words) - size + 1)]
    return len(set(sequences)) / len(sequences) if sequences else 1.0
