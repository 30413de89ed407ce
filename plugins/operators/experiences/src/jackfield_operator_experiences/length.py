"""A part of the reward by the length of a response."""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi
from typing import Any, ClassVar, Literal

import attrs
from attrs.validators import ge, gt, in_

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType, Row
from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_operator_experiences.shaping import each_row, number_of, text_of

_UNITS = ("tokens", "words", "characters")


@attrs.frozen(kw_only=True)
class LengthRewardConfig:
    """Settings of ``length_reward``."""

    weight: float = option(0.5, "what a response loses that is far too long or too short", ge(0.0))
    unit: Literal["tokens", "words", "characters"] = option("tokens", "what is counted", in_(_UNITS))
    low: int = option(0, "shortest response without a loss", ge(0))
    high: int = option(help="longest response without a loss", validator=ge(0))
    width: int = option(help="units beyond the bounds at which the whole weight is lost", validator=gt(0))
    shape: Literal["linear", "cosine"] = option("linear", "how the loss grows in between", in_(("linear", "cosine")))
    only_positive: bool = option(False, "take it from positive rewards only")


class LengthReward(Operator):
    """Takes from the reward where a response is longer or shorter than a band.

    With x = units beyond the band / width, at most 1, the loss is weight * x, or weight * (1 - cos(pi x)) / 2. The soft
    overlong punishment of DAPO (arXiv:2503.14476) alone is ``algorithm.shaping.overlong_length``, without an operator.
    """

    type: ClassVar[OperatorType] = "scorer"
    writes = ("reward", "length_loss")

    def __init__(self, config: LengthRewardConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._column = "response_tokens" if config.unit == "tokens" else "response"
        if config.high < config.low:
            details: Any = {"where": "high", "expected": f"at least low ({config.low})", "found": config.high}
            raise ConfigError("the band is empty", fix="swap low and high, or widen the band", **details)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the reward and what is counted."""
        return (self._column, "reward")

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compare lengths with the band."""
        return each_row(request, self._shaped)

    def _shaped(self, row: Row) -> Mapping[str, float]:
        config, reward, length = self.config, number_of(row, "reward"), self._length(row)
        if length is None:
            return {"reward": reward, "length_loss": 0.0}
        beyond = min(max(length - config.high, config.low - length, 0.0) / config.width, 1.0)
        loss = beyond if config.shape == "linear" else (1.0 - cos(pi * beyond)) / 2.0
        loss *= config.weight if reward > 0.0 or not config.only_positive else 0.0
        return {"reward": reward - loss, "length_loss": loss}

    def _length(self, row: Row) -> float | None:
        """Return a length; None: the tokens of a response that an operator has made are not counted yet."""
        if self.config.unit == "tokens":
            return None if row.values["response_tokens"] is None else number_of(row, "response_tokens")
        text = text_of(row, "response")
        return float(len(text.split()) if self.config.unit == "words" else len(text))
