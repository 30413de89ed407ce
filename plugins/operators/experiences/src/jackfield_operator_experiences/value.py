"""What experiences are worth: for replay that takes the best first, and for keeping only salient ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, ClassVar, Literal

import attrs
from attrs.validators import ge, gt, in_, le, optional

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType, Row
from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_operator_experiences.shaping import groups_of, number_of


def _means(rows: Sequence[Row], column: str) -> tuple[dict[str, float], dict[str, str], float, float]:
    """Return the numbers of a column, why rows have none, and mean and variance of the numbers."""
    numbers, aside = dict[str, float](), dict[str, str]()
    for row in rows:
        try:
            numbers[row.key] = number_of(row, column)
        except (KeyError, TypeError) as error:
            aside[row.key] = f"{type(error).__name__}: {error}"
    mean = sum(numbers.values()) / max(len(numbers), 1)
    variance = sum((each - mean) ** 2 for each in numbers.values()) / max(len(numbers), 1)
    return numbers, aside, mean, variance


@attrs.frozen(kw_only=True)
class UtilityConfig:
    """Settings of ``utility``."""

    advantage: float = option(1.0, "weight of the distance of a reward from its group's mean", ge(0.0))
    uncertainty: float = option(1.0, "weight of the variance of the group's rewards", ge(0.0))
    surprise: float = option(0.0, "weight of minus the mean log-prob of the response's tokens", ge(0.0))


class Utility(Operator):
    """Writes how much is to be learnt from an experience, which samplers of replay see as the tag ``reward/utility``.

    utility = advantage * abs(r - mean of the group) + uncertainty * variance of the group - surprise * mean log-prob.
    Late labels may change it (``jackfield queue label``).
    """

    type: ClassVar[OperatorType] = "scorer"
    compares = True
    writes = ("utility",)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return rewards and groups, and log-probs where they count."""
        return ("reward", "group", *(("log_prob_mean",) if self.config.surprise else ()))

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compare the rewards of each group."""
        config, updates, aside = self.config, dict[str, Mapping[str, Any]](), dict[str, str]()
        for rows in groups_of(request).values():
            rewards, without, mean, variance = _means(rows, "reward")
            surprises = dict.fromkeys(rewards, 0.0)
            if config.surprise:
                found, more, _, _ = _means([row for row in rows if row.key in rewards], "log_prob_mean")
                surprises, without = {key: -each for key, each in found.items()}, {**without, **more}
            aside |= without
            for key in surprises:
                utility = config.advantage * abs(rewards[key] - mean) + config.uncertainty * variance
                updates[key] = {"utility": utility + config.surprise * surprises[key]}
        return OperatorResult(updates=updates, set_aside=aside)


@attrs.frozen(kw_only=True)
class SalienceConfig:
    """Settings of ``salience``."""

    by: Literal["surprise", "uncertainty", "information"] = option(
        "information",
        "surprise: minus the mean log-prob of a response; uncertainty: variance of its group's rewards; information: "
        "surprise times the distance from the group's mean reward",
        in_(("surprise", "uncertainty", "information")),
    )
    minimum: float | None = option(None, "keep what has at least so much; null: any")
    share: float | None = option(
        None, "keep this share of each group, those with most, one at least; null: all", optional([gt(0.0), le(1.0)])
    )


class Salience(Operator):
    """Keeps salient experiences only: those that surprise, are uncertain, or tell most.

    A group of which nothing is salient is made again with another task, as far as ``schedule.max_retries`` allows.
    """

    type: ClassVar[OperatorType] = "filter"
    decides_by: ClassVar[tuple[str, ...]] = ("by", "minimum", "share")
    compares = True
    reads = ("reward", "group", "log_prob_mean")
    _NAMES: ClassVar[tuple[str, ...]] = ("surprise", "uncertainty", "information")
    writes = (*_NAMES, *(f"{name}_rank" for name in _NAMES))

    def __init__(self, config: SalienceConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        if config.minimum is None and config.share is None:
            raise ConfigError(
                "nothing would be left out", where="salience", expected="minimum or share", found="neither"
            )

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compute all three, and each one's rank within its group: 0 for the largest, below 1."""
        updates, aside = dict[str, dict[str, float]](), dict[str, str]()
        for rows in groups_of(request).values():
            rewards, without, mean, variance = _means(rows, "reward")
            found, more, _, _ = _means([row for row in rows if row.key in rewards], "log_prob_mean")
            aside |= {**without, **more}
            for key, log_prob in found.items():
                surprise = -log_prob
                told = {"surprise": surprise, "uncertainty": variance}
                updates[key] = {**told, "information": surprise * abs(rewards[key] - mean)}
            for name in self._NAMES:
                ordered = sorted(found, key=lambda key: (-updates[key][name], key))
                for place, key in enumerate(ordered):
                    updates[key][f"{name}_rank"] = place / len(ordered)
        return OperatorResult(updates=updates, set_aside=aside)

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """Leave out what has too little, or comes too late in its group."""
        by, minimum, share, out = self.config.by, self.config.minimum, self.config.share, dict[str, str]()
        for row in rows:
            value, rank = float(row.values[by]), float(row.values[f"{by}_rank"])
            if minimum is not None and value < minimum:
                out[row.key] = f"{by} is {value:.3g}"
            elif share is not None and rank >= share and rank > 0.0:
                out[row.key] = f"{by} is {value:.3g}, and {share:.0%} of its group come before"
        return out


@attrs.frozen(kw_only=True)
class RewardFilterConfig:
    """Settings of ``reward_filter``."""

    minimum: float | None = option(None, "keep rewards of at least so much; null: any")
    maximum: float | None = option(None, "keep rewards of at most so much; null: any")


class RewardFilter(Operator):
    """Keeps experiences whose reward is within bounds."""

    type: ClassVar[OperatorType] = "filter"
    decides_by: ClassVar[tuple[str, ...]] = ("minimum", "maximum")
    reads = ("reward",)
    writes = ("filtered_reward",)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Copy the reward, by which it is decided."""
        updates, aside = dict[str, Mapping[str, Any]](), dict[str, str]()
        for row in request.rows:
            try:
                updates[row.key] = {"filtered_reward": number_of(row, "reward")}
            except (KeyError, TypeError) as error:
                aside[row.key] = f"{type(error).__name__}: {error}"
        return OperatorResult(updates=updates, set_aside=aside)

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """Compare with the bounds."""
        low = -inf if self.config.minimum is None else self.config.minimum
        high = inf if self.config.maximum is None else self.config.maximum
        numbers = {row.key: float(row.values["filtered_reward"]) for row in rows}
        return {key: f"the reward is {each:g}" for key, each in numbers.items() if not low <= each <= high}
