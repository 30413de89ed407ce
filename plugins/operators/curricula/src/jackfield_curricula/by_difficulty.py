"""A curriculum whose difficulty follows the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import tanh
from typing import Any

import attrs
import numpy as np
from attrs.validators import ge, gt, le
from numpy.typing import NDArray

from jackfield.abc.curriculum import Curriculum, CurriculumTasks
from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_curricula.arms import Arms


@attrs.define(kw_only=True, eq=False)
class AdaptiveDifficulty(Curriculum):
    """Chooses tasks near a difficulty that moves with the pass rate.

    Difficulties are ranks between 0 and 1. After each step with pass rate r, the target moves by rate * tanh(gain * (r
    - wanted)), within 0 and 1 (AdaRFT, arXiv:2504.05520). A batch is drawn from the ``breadth`` of all tasks that are
    nearest to the target, those first that were used least.
    """

    by: str = option("difficulty", "field of the records with the difficulty, a number")
    start: float = option(0.0, "rank at which it begins", [ge(0.0), le(1.0)])
    wanted: float = option(0.5, "pass rate that is wanted", [gt(0.0), le(1.0)])
    rate: float = option(0.05, "most by which the rank moves after a step", gt(0.0))
    gain: float = option(2.0, "how fast that is reached", gt(0.0))
    breadth: float = option(0.1, "share of the tasks from which a batch is drawn", [gt(0.0), le(1.0)])
    above: float = option(0.5, "a rollout has passed if its reward is above")
    _ranks: NDArray[np.float64] = attrs.field(init=False)
    _arms: Arms = attrs.field(init=False)
    _target: float = attrs.field(init=False)
    _rate: float = attrs.field(default=0.0, init=False)  #: pass rate of the last step

    def begin(self, tasks: CurriculumTasks) -> None:
        """Rank the tasks by their difficulty; equal ones have the same rank."""
        values = tasks.values(self.by)
        if wrong := next(
            (each for each in values if isinstance(each, bool) or not isinstance(each, int | float)), None
        ):
            details: Any = {"where": "data.curriculum.options.by", "expected": "numbers", "found": repr(wrong)[:100]}
            fix = "name a field with numbers; operators of data.pipeline.tasks, such as difficulty_rules, write one"
            raise ConfigError(f"a difficulty ({self.by}) is no number", fix=fix, **details)
        _, inverse = np.unique(np.array(values, dtype=np.float64), return_inverse=True)
        sizes = np.bincount(inverse)
        middle = np.cumsum(sizes) - (sizes + 1) / 2  # mean place of equal ones
        self._ranks = middle[inverse] / max(len(values) - 1, 1)
        self._arms = Arms(np.zeros(len(values), np.int64), [])
        self._target = self.start

    def choose(self, batch: int, count: int, random: np.random.Generator) -> Sequence[int]:
        """Draw from the tasks that are nearest to the target."""
        most = min(max(round(self.breadth * len(self._ranks)), count), len(self._ranks))
        ties = random.random(len(self._ranks)) * 1e-6
        near = np.argpartition(np.abs(self._ranks - self._target) + ties, most - 1)[:most]
        arms = np.zeros(len(self._ranks), np.int64)
        arms[near] = 1
        drawn = attrs.evolve(self._arms, arm=arms) if most < len(self._ranks) else self._arms
        drawn.used, drawn.chosen = self._arms.used, self._arms.chosen
        weights = np.array([0.0, 1.0]) if most < len(self._ranks) else np.array([1.0])
        return drawn.take(weights, count, random)

    def learn(self, rewards: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Move the target."""
        passed = [reward > self.above for _, own in rewards for reward in own]
        for number, _ in rewards:
            self._arms.used[number] += 1
        if passed:
            self._rate = sum(passed) / len(passed)
            moved = self._target + self.rate * tanh(self.gain * (self._rate - self.wanted))
            self._target = min(max(moved, 0.0), 1.0)

    def metrics(self) -> Mapping[str, float]:
        """Return the target, and the pass rate of the last step that was learnt."""
        return {"difficulty": self._target, "pass_rate": self._rate}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the target and the uses."""
        return {"target": self._target, "rate": self._rate, "uses": self._arms.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a target."""
        self._target, self._rate = state["target"], state["rate"]
        self._arms.restore(state["uses"])
