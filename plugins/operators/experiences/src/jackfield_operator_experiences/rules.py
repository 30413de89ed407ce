"""Parts of the reward by rules: quality, length and safety."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import cos, pi
from typing import Any, ClassVar, Literal

import attrs
from attrs.validators import ge, gt, in_, optional

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType, Row
from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_operator_experiences.shaping import each_row, number_of, text_of


def expression(pattern: str, where: str) -> re.Pattern[str]:
    """Return a compiled expression; raise a ``ConfigError`` with its place if it is none."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        details: Any = {"where": where, "expected": "a regular expression of Python", "found": pattern}
        raise ConfigError(f"a pattern cannot be read: {error}", **details) from error


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
            raise ConfigError("there are no rules", where="quality_rules", expected="one rule or more", found="none")

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


@attrs.frozen(kw_only=True)
class LengthRewardConfig:
    """Settings of ``length_reward``."""

    weight: float = option(0.5, "what a response loses that is far too long or too short", ge(0.0))
    low: int = option(0, "fewest tokens without a loss", ge(0))
    high: int = option(help="most tokens without a loss", validator=ge(0))
    width: int = option(help="tokens beyond the bounds at which the whole weight is lost", validator=gt(0))
    shape: Literal["linear", "cosine"] = option("linear", "how the loss grows in between", in_(("linear", "cosine")))
    only_positive: bool = option(False, "take it from positive rewards only")


class LengthReward(Operator):
    """Takes from the reward where a response is longer or shorter than a band of tokens.

    With x = tokens beyond the band / width, at most 1, the loss is weight * x, or weight * (1 - cos(pi x)) / 2.
    """

    type: ClassVar[OperatorType] = "scorer"
    reads = ("response_tokens", "reward")
    writes = ("reward", "length_loss")

    def __init__(self, config: LengthRewardConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        if config.high < config.low:
            details: Any = {"where": "high", "expected": f"at least low ({config.low})", "found": config.high}
            raise ConfigError("the band is empty", **details)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compare lengths with the band."""
        return each_row(request, self._shaped)

    def _shaped(self, row: Row) -> Mapping[str, float]:
        config, reward, tokens = self.config, number_of(row, "reward"), number_of(row, "response_tokens")
        beyond = min(max(tokens - config.high, config.low - tokens, 0.0) / config.width, 1.0)
        loss = beyond if config.shape == "linear" else (1.0 - cos(pi * beyond)) / 2.0
        loss *= config.weight if reward > 0.0 or not config.only_positive else 0.0
        return {"reward": reward - loss, "length_loss": loss}


@attrs.frozen(kw_only=True)
class SafetyPenaltyConfig:
    """Settings of ``safety_penalty``."""

    patterns: Mapping[str, str] = option(help="expressions by category, which are searched in the response")
    penalty: float = option(0.5, "what each category that is found takes from the reward", ge(0.0))
    maximum: float = option(1.0, "most that all of them take", ge(0.0))
    match_case: bool = option(False, "tell upper and lower case apart")


class SafetyPenalty(Operator):
    """Takes from the reward of responses in which expressions of unsafe categories are found."""

    type: ClassVar[OperatorType] = "scorer"
    reads = ("response", "reward")
    writes = ("reward", "unsafe_categories")

    def __init__(self, config: SafetyPenaltyConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        if not config.patterns:
            raise ConfigError("there are no patterns", where="patterns", expected="one or more", found="none")
        flags = re.NOFLAG if config.match_case else re.IGNORECASE
        named = {name: expression(text, f"patterns.{name}").pattern for name, text in config.patterns.items()}
        self._patterns = [re.compile(text, re.DOTALL | flags) for text in named.values()]

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Search all expressions."""
        return each_row(request, self._shaped)

    def _shaped(self, row: Row) -> Mapping[str, float]:
        reward, text = number_of(row, "reward"), text_of(row, "response")
        found = sum(each.search(text) is not None for each in self._patterns)
        return {
            "reward": reward - min(found * self.config.penalty, self.config.maximum),
            "unsafe_categories": float(found),
        }
