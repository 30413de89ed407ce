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


@attrs.frozen
class _Rewards:
    """The rewards of a group, without rows that have none."""

    rewards: Mapping[str, float]
    without: Mapping[str, str]  #: by key, why a row has none

    @classmethod
    def of(cls, rows: Sequence[Row]) -> _Rewards:
        """Read the rewards of rows."""
        rewards, without = dict[str, float](), dict[str, str]()
        for row in rows:
            try:
                rewards[row.key] = number_of(row, "reward")
            except (KeyError, TypeError) as error:
                without[row.key] = f"{type(error).__name__}: {error}"
        return cls(rewards, without)

    @property
    def mean(self) -> float:
        """The mean of the rewards."""
        return sum(self.rewards.values()) / max(len(self.rewards), 1)

    @property
    def variance(self) -> float:
        """The variance of the rewards: p (1 - p), if they are 1 with the rate p, and 0."""
        mean = self.mean
        return sum((each - mean) ** 2 for each in self.rewards.values()) / max(len(self.rewards), 1)


@attrs.frozen(kw_only=True)
class UtilityConfig:
    """Settings of ``utility``."""

    reward: float = option(0.0, "weight of the reward", ge(0.0))
    advantage: float = option(1.0, "weight of the distance of a reward from its group's mean", ge(0.0))
    uncertainty: float = option(1.0, "weight of the variance of the group's rewards", ge(0.0))
    surprise: float = option(0.0, "weight of minus the mean log-prob of the response's tokens", ge(0.0))
    novelty: float = option(0.0, "weight of the column `novelty`, which the operator of this name writes", ge(0.0))


class Utility(Operator):
    """Writes how much is to be learnt from an experience, which samplers of replay see as the tag ``reward/utility``.

    utility = reward * r + advantage * abs(r - mean of the group) + uncertainty * variance of the group
    - surprise * mean log-prob + novelty * n, each with its weight. Late labels may change it (``jackfield queue
    label``).
    """

    type: ClassVar[OperatorType] = "scorer"
    compares = True
    writes = ("utility",)

    def __init__(self, config: UtilityConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        weights = {"log_prob_mean": -config.surprise, "novelty": config.novelty}
        self._columns = {name: weight for name, weight in weights.items() if weight}

    @property
    def reads(self) -> tuple[str, ...]:
        """Return rewards and groups, and further columns that count."""
        return ("reward", "group", *self._columns)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compare the rewards of each group."""
        config, updates, aside = self.config, dict[str, Mapping[str, Any]](), dict[str, str]()
        for rows in groups_of(request).values():
            group = _Rewards.of(rows)
            aside |= group.without
            for row in rows:
                if (reward := group.rewards.get(row.key)) is None:
                    continue
                own = config.reward * reward + config.advantage * abs(reward - group.mean)
                try:
                    more = sum(weight * _optional(row, name) for name, weight in self._columns.items())
                except (KeyError, TypeError) as error:
                    aside[row.key] = f"{type(error).__name__}: {error}"
                else:
                    updates[row.key] = {"utility": own + config.uncertainty * group.variance + more}
        return OperatorResult(updates=updates, set_aside=aside)


def _optional(row: Row, column: str) -> float:
    """Return a number; 0 for null, as a response that an operator has made has no log-probs."""
    return 0.0 if row.values[column] is None else number_of(row, column)


@attrs.frozen(kw_only=True)
class SalienceConfig:
    """Settings of ``salience``."""

    by: Literal["surprise", "uncertainty", "information"] = option(
        "information",
        "surprise: minus the log-prob of a response; uncertainty: variance of its group's rewards; information: "
        "surprise times the distance from the group's mean reward",
        in_(("surprise", "uncertainty", "information")),
    )
    minimum: float | None = option(None, "keep what has at least so much; null: any")
    share: float | None = option(
        None, "keep this share, those with most, one at least; null: all", optional([gt(0.0), le(1.0)])
    )
    of: Literal["samples", "groups"] = option(
        "samples",
        "samples: the samples of each group are compared with each other; groups: whole groups are compared by the "
        "means of their samples, and go or stay together",
        in_(("samples", "groups")),
    )
    log_prob: Literal["mean", "min"] = option(
        "mean", "which log-prob of a response's tokens surprise is of", in_(("mean", "min"))
    )


class Salience(Operator):
    """Keeps salient experiences only: those that surprise, are uncertain, or tell most.

    A group of which nothing is salient is made again with another task, as far as ``schedule.max_retries`` allows.
    """

    type: ClassVar[OperatorType] = "filter"
    decides_by: ClassVar[tuple[str, ...]] = ("by", "minimum", "share")
    compares = True
    _NAMES: ClassVar[tuple[str, ...]] = ("surprise", "uncertainty", "information")
    writes = (*_NAMES, *(f"{name}_rank" for name in _NAMES))

    def __init__(self, config: SalienceConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        self._column = f"log_prob_{config.log_prob}"
        if config.minimum is None and config.share is None:
            details: Any = {"where": "share", "expected": "minimum or share", "found": "neither"}
            raise ConfigError("nothing would be left out", fix="give share, for example 0.5, or minimum", **details)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return rewards, groups and log-probs."""
        return ("reward", "group", self._column)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compute all three, and each one's rank in its group or among the groups: 0 for the largest, below 1."""
        groups, aside = list[dict[str, dict[str, Any]]](), dict[str, str]()
        for rows in groups_of(request).values():
            group, told = _Rewards.of(rows), dict[str, dict[str, Any]]()
            aside |= group.without
            for row in rows:
                if (reward := group.rewards.get(row.key)) is None:
                    continue
                try:
                    told[row.key] = self._told(row, abs(reward - group.mean), group.variance)
                except TypeError as error:
                    aside[row.key] = str(error)
            groups.append(told)
        for name in self._NAMES:
            if self.config.of == "groups":
                _rank_groups(groups, name)
            for told in groups if self.config.of == "samples" else ():
                _rank({key: [values] for key, values in told.items()}, name)
        return OperatorResult(updates={key: each for told in groups for key, each in told.items()}, set_aside=aside)

    def _told(self, row: Row, distance: float, variance: float) -> dict[str, Any]:
        """Return the statistics of a row; those that need a log-prob are null without one."""
        surprise = None if row.values.get(self._column) is None else -number_of(row, self._column)
        information = None if surprise is None else surprise * distance
        return {"surprise": surprise, "uncertainty": variance, "information": information}

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """Leave out what has too little, or comes too late."""
        by, minimum, share, out = self.config.by, self.config.minimum, self.config.share, dict[str, str]()
        for row in rows:
            value, rank = row.values[by], float(row.values[f"{by}_rank"])
            if value is None:
                out[row.key] = f"{by} is not known: there is no {self._column}"
            elif minimum is not None and value < minimum:
                out[row.key] = f"{by} is {value:.3g}"
            elif share is not None and rank >= share and rank > 0.0:
                out[row.key] = f"{by} is {value:.3g}, and {rank:.0%} of {self._others} come before"
        return out

    @property
    def _others(self) -> str:
        return "its group" if self.config.of == "samples" else "the groups"


def _rank_groups(groups: Sequence[dict[str, dict[str, Any]]], name: str) -> None:
    """Give all samples of a group the mean of a statistic, and the rank of the group by it."""
    for told in groups:
        known = [values[name] for values in told.values() if values[name] is not None]
        mean = sum(known) / len(known) if known else None
        for values in told.values():
            values[name] = mean
    _rank({min(told): list(told.values()) for told in groups if told}, name)


def _rank(several: Mapping[str, Sequence[dict[str, Any]]], name: str) -> None:
    """Write the ranks of values, each that of one or more rows; equal ones are ranked by their keys, null is last."""

    def order(key: str) -> tuple[float, str]:
        value = several[key][0][name]
        return (inf if value is None else -value, key)

    for place, key in enumerate(sorted(several, key=order)):
        for values in several[key]:
            values[f"{name}_rank"] = place / len(several)


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
