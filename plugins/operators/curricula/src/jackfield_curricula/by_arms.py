"""Curricula that learn a pass rate for each task, or for each kind of task."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np
from attrs.validators import ge, gt, in_, le, lt
from numpy.typing import NDArray

from jackfield.abc.curriculum import Curriculum, CurriculumTasks
from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_curricula.arms import Arms, arms_of, entropy

_DRAWN = 4096  #: most arms of which each pick has draws of its own


@attrs.define(kw_only=True, eq=False)
class ByArms(Curriculum):
    """The base: it counts rollouts that passed by arm, and leaves the weights of arms to its subclasses."""

    by: str | None = option(
        None, "field of the records, or data_source, whose values are kinds; null: each task is one"
    )
    bins: int = option(8, "kinds into which numbers of the field fall, of about equal size", ge(2))
    above: float = option(0.5, "a rollout has passed if its reward is above")
    _arms: Arms = attrs.field(init=False)

    def begin(self, tasks: CurriculumTasks) -> None:
        """Sort the tasks by kind."""
        self._arms = Arms(*arms_of(tasks, self.by, self.bins))
        self.reset(len(self._arms.sizes))

    @abstractmethod
    def reset(self, arms: int) -> None:
        """Forget everything that was learnt."""

    @abstractmethod
    def count(self, arm: int, passed: int, rollouts: int) -> None:
        """Take the rollouts of a group."""

    @abstractmethod
    def rates(self) -> NDArray[np.float64]:
        """Return the pass rate of each arm; NaN: unknown."""

    def learn(self, rewards: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Count the rollouts of each group for its arm."""
        for number, own in rewards:
            self._arms.used[number] += 1
            self.count(int(self._arms.arm[number]), sum(reward > self.above for reward in own), len(own))

    def metrics(self) -> Mapping[str, float]:
        """Return the mean pass rate of what was tried, the share of arms that were, and each kind's pass rate."""
        rates = self.rates()
        known = ~np.isnan(rates)
        found = {"tried": float(known.mean())}
        if known.any():
            found["pass_rate"] = float(rates[known].mean())
        named = zip(self._arms.names, rates.tolist(), strict=False)
        return {**found, **{f"pass_rate/{name}": rate for name, rate in named if rate == rate}}


@attrs.define(kw_only=True, eq=False)
class PassRateWindow(ByArms):
    """Prefers tasks whose pass rate over their last groups lies within bounds.

    An arm within the bounds has weight 1, another one that was tried ``outside``, and those that were not tried have a
    share ``untried`` of the batch together, as long as there are some of both. Groups without any signal, which all
    pass or all fail, are avoided in this way before they are generated, as in online difficulty filtering
    (arXiv:2504.03380).
    """

    low: float = option(0.2, "lowest pass rate", [ge(0.0), le(1.0)])
    high: float = option(0.8, "highest pass rate", [ge(0.0), le(1.0)])
    window: int = option(4, "groups over which a pass rate is taken", ge(1))
    untried: float = option(0.25, "share of each batch for what was not tried", [ge(0.0), le(1.0)])
    outside: float = option(0.05, "weight of what is outside of the bounds", [ge(0.0), le(1.0)])
    _last: NDArray[np.float32] = attrs.field(init=False)  #: pass rates of the last groups, NaN where there are none
    _place: NDArray[np.int32] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Refuse bounds that no pass rate is within."""
        if self.low > self.high:
            details: Any = {"where": "data.curriculum.options.low", "expected": f"at most high ({self.high:g})"}
            raise ConfigError("no pass rate lies within the bounds", found=f"{self.low:g}", fix="swap them", **details)

    def reset(self, arms: int) -> None:
        """Forget all groups."""
        self._last, self._place = np.full((arms, self.window), np.nan, np.float32), np.zeros(arms, np.int32)

    def count(self, arm: int, passed: int, rollouts: int) -> None:
        """Put the group's pass rate in the place of the oldest one."""
        self._last[arm, self._place[arm] % self.window] = passed / rollouts
        self._place[arm] += 1

    def rates(self) -> NDArray[np.float64]:
        """Return the means of the windows."""
        known = ~np.isnan(self._last)
        sums = np.where(known, self._last, 0.0).sum(axis=1, dtype=np.float64)
        with np.errstate(invalid="ignore"):
            found: NDArray[np.float64] = sums / known.sum(axis=1)
        return found

    def choose(self, batch: int, count: int, random: np.random.Generator) -> Sequence[int]:
        """Choose by weights."""
        return self._arms.take(self._weights(), count, random)

    def _weights(self) -> NDArray[np.float64]:
        rates, sizes = self.rates(), self._arms.sizes.astype(np.float64)
        new = np.isnan(rates)
        inside = (rates >= self.low) & (rates <= self.high)
        weights = np.where(inside, 1.0, self.outside) * sizes
        for mine, share in ((new, self.untried), (~new, 1.0 - self.untried)):
            if mine.any() and not mine.all():
                weights[mine] *= share / max(weights[mine].sum(), 1e-12)
        return weights

    def state_dict(self) -> Mapping[str, Any]:
        """Return the windows of arms that were tried."""
        tried = np.flatnonzero(self._place)
        last = [[None if each != each else each for each in row] for row in self._last[tried].tolist()]
        return {"arms": tried.tolist(), "last": last, "place": self._place[tried].tolist(), "uses": self._arms.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from windows."""
        self.reset(len(self._arms.sizes))
        for arm, row, place in zip(state["arms"], state["last"], state["place"], strict=True):
            self._last[arm] = [np.nan if each is None else each for each in row]
            self._place[arm] = place
        self._arms.restore(state["uses"])


@attrs.define(kw_only=True, eq=False)
class _Counted(ByArms):
    """The base of curricula that count what passed and failed, of which older groups count less."""

    keeps: float = option(0.9, "factor by which what an arm has counted is multiplied at each step", [gt(0.0), le(1.0)])
    _passed: NDArray[np.float64] = attrs.field(init=False)
    _failed: NDArray[np.float64] = attrs.field(init=False)

    def reset(self, arms: int) -> None:
        """Forget all groups."""
        self._passed, self._failed = np.zeros(arms), np.zeros(arms)

    def learn(self, rewards: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Count a step."""
        self._passed *= self.keeps
        self._failed *= self.keeps
        super().learn(rewards)

    def count(self, arm: int, passed: int, rollouts: int) -> None:
        """Add a group."""
        self._passed[arm] += passed
        self._failed[arm] += rollouts - passed

    def rates(self) -> NDArray[np.float64]:
        """Return the shares that passed."""
        with np.errstate(invalid="ignore"):
            found: NDArray[np.float64] = self._passed / (self._passed + self._failed)
        return found

    def state_dict(self) -> Mapping[str, Any]:
        """Return the counts of arms that were tried."""
        tried = np.flatnonzero(self._passed + self._failed)
        counts = {"passed": self._passed[tried].tolist(), "failed": self._failed[tried].tolist()}
        return {"arms": tried.tolist(), **counts, "uses": self._arms.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from counts."""
        self.reset(len(self._arms.sizes))
        self._passed[state["arms"]], self._failed[state["arms"]] = state["passed"], state["failed"]
        self._arms.restore(state["uses"])


@attrs.define(kw_only=True, eq=False)
class Thompson(_Counted):
    """Thompson sampling: each pick draws a pass rate p of every arm, and takes the arm that is worth most by it.

    p has the posterior Beta(1 + passed, 1 + failed), of which older groups count less, because the policy changes. An
    arm is worth p (1 - p), the variance of a reward of 0 or 1, which is the expected squared advantage of a group; or
    with ``aim: target`` -abs(p - ``target``). With more than 4,096 arms, all picks of a batch share one draw.
    """

    aim: Literal["signal", "target"] = option("signal", "what an arm is worth", in_(("signal", "target")))
    target: float = option(0.5, "pass rate that is wanted, with aim: target", [ge(0.0), le(1.0)])

    def choose(self, batch: int, count: int, random: np.random.Generator) -> Sequence[int]:
        """Draw pass rates, and take what is worth most."""
        arms = len(self._arms.sizes)
        if arms > _DRAWN:
            worth = self._worth(random.beta(1.0 + self._passed, 1.0 + self._failed))
            weights = np.zeros(arms)
            weights[np.argpartition(-worth, min(count, arms) - 1)[:count]] = 1.0
            return self._arms.take(weights, count, random)
        drawn = random.beta(1.0 + self._passed, 1.0 + self._failed, size=(count, arms))
        best = self._worth(drawn).argmax(axis=1)
        return self._arms.take(np.bincount(best, minlength=arms).astype(np.float64), count, random)

    def _worth(self, rates: NDArray[np.float64]) -> NDArray[np.float64]:
        worth: NDArray[np.float64] = rates * (1.0 - rates) if self.aim == "signal" else -np.abs(rates - self.target)
        return worth


@attrs.define(kw_only=True, eq=False)
class AbilityMixing(_Counted):
    """Mixes kinds of tasks by ability: of each, a floor, and more where pass rates are neither 0 nor 1.

    The weight of a kind with pass rate p is floor / kinds + (1 - floor) s / sum of s, with s = p (1 - p) + 0.01, and p
    = (passed + 1) / (passed + failed + 2).
    """

    by: str | None = option("data_source", "field of the records, or data_source, whose values are kinds")
    floor: float = option(0.2, "share of each batch that all kinds share equally", [ge(0.0), lt(1.0)])

    def choose(self, batch: int, count: int, random: np.random.Generator) -> Sequence[int]:
        """Choose by the weights of kinds."""
        return self._arms.take(self._weights(), count, random)

    def _weights(self) -> NDArray[np.float64]:
        rates = (self._passed + 1.0) / (self._passed + self._failed + 2.0)
        signal = rates * (1.0 - rates) + 0.01
        weights: NDArray[np.float64] = self.floor / len(signal) + (1.0 - self.floor) * signal / signal.sum()
        return weights

    def metrics(self) -> Mapping[str, float]:
        """Return also the weights, and their entropy as a share of the largest."""
        weights = self._weights()
        named = dict(zip((f"weight/{name}" for name in self._arms.names), weights.tolist(), strict=False))
        return {**super().metrics(), **named, "entropy": entropy(weights)}
