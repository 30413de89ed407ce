"""Tasks in arms, of which a curriculum chooses: each task is one, or tasks of one kind are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from jackfield.abc.curriculum import CurriculumTasks
from jackfield.errors import ConfigError

_FEW = 16  #: kinds that any number of tasks may have
_CHOSEN = 0.01  #: how much a choice counts beside a use: a task that was chosen for a retry may not have been used


def arms_of(tasks: CurriculumTasks, by: str | None, bins: int) -> tuple[NDArray[np.int64], list[str]]:
    """Return the arm of each task, and the names of arms.

    Without ``by``, each task is an arm. Numbers fall into ``bins`` of about equal size, equal numbers into one; any
    other values are kinds. ``config.invalid-value`` if most tasks are a kind of their own, as by a field with texts.
    """
    if by is None:
        return np.arange(len(tasks)), []
    values = tasks.values(by)
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        numbers = np.array(values, dtype=np.float64)
        edges = np.unique(np.quantile(numbers, np.linspace(0.0, 1.0, bins + 1)[1:-1], method="lower"))
        arms = np.searchsorted(edges, numbers, side="left")
        _, dense = np.unique(arms, return_inverse=True)
        names = [
            f"{numbers[dense == arm].min():g}_to_{numbers[dense == arm].max():g}" for arm in range(dense.max() + 1)
        ]
        return dense.astype(np.int64), names
    kinds = sorted({str(value) for value in values})
    if len(kinds) > max(_FEW, len(values) // 2):
        fix = "name a field with few values or with numbers; or leave `by` out, and each task is one of its own"
        details: Any = {"where": "data.curriculum.options.by", "expected": "at most half as many kinds as tasks"}
        details |= {"found": f"{len(kinds)} kinds of {len(values)} tasks, such as {kinds[0]!r:.60}"}
        raise ConfigError(f"the values of {by} are no kinds of tasks", fix=fix, **details)
    places = {kind: place for place, kind in enumerate(kinds)}
    return np.array([places[str(value)] for value in values], dtype=np.int64), kinds


@attrs.define(eq=False)
class Arms:
    """The tasks of each arm, and how often each was used and chosen, so that others of its arm come first."""

    arm: NDArray[np.int64]  #: of each task
    names: list[str]  #: of the arms; empty where each task is one
    used: NDArray[np.int32] = attrs.field(init=False)
    chosen: NDArray[np.int32] = attrs.field(init=False)
    sizes: NDArray[np.int64] = attrs.field(init=False)
    _order: NDArray[np.int64] = attrs.field(init=False)
    _starts: NDArray[np.int64] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Sort the tasks by arm."""
        self.used, self.chosen = np.zeros(len(self.arm), np.int32), np.zeros(len(self.arm), np.int32)
        self.sizes = np.bincount(self.arm)
        self._order = np.argsort(self.arm, kind="stable")
        self._starts = np.cumsum(self.sizes) - self.sizes

    def take(self, weights: NDArray[np.float64], count: int, random: np.random.Generator) -> list[int]:
        """Return ``count`` tasks in a random order, of each arm by its weight, those first that were used least.

        A task comes twice only if there are fewer than ``count``.
        """
        numbers = list[int]()
        while (left := count - len(numbers)) > 0:
            for arm, share in _shares(weights, self.sizes, min(left, len(self.arm)), random):
                members = self._order[self._starts[arm] : self._starts[arm] + self.sizes[arm]]
                ties = 0.5 * _CHOSEN * random.random(len(members))
                keys = self.used[members] + _CHOSEN * np.minimum(self.chosen[members], 50) + ties
                places = np.argpartition(keys, share - 1)[:share] if share < len(members) else np.arange(len(members))
                numbers += members[places].tolist()
        mixed: list[int] = random.permutation(np.array(numbers)).tolist()
        np.add.at(self.chosen, mixed, 1)
        return mixed

    def state(self) -> dict[str, list[int]]:
        """Return the counts of tasks that were used or chosen."""
        places = np.flatnonzero(self.used | self.chosen)
        return {"tasks": places.tolist(), "used": self.used[places].tolist(), "chosen": self.chosen[places].tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from counts."""
        self.used[:], self.chosen[:] = 0, 0
        self.used[state["tasks"]], self.chosen[state["tasks"]] = state["used"], state["chosen"]


def _shares(
    weights: NDArray[np.float64], sizes: NDArray[np.int64], count: int, random: np.random.Generator
) -> list[tuple[int, int]]:
    """Return how many tasks each arm gives, by systematic sampling, and no more than it has."""
    given = np.zeros(len(sizes), np.int64)
    while (left := count - int(given.sum())) > 0:
        room = sizes - given
        open_ = np.where(room > 0, np.maximum(weights, 1e-12), 0.0)
        ends = np.cumsum(open_ * (left / open_.sum()))
        ends[-1] = left
        drawn = np.diff(np.floor(ends + random.random()).astype(np.int64), prepend=0)
        given += np.minimum(drawn, room)
    return [(int(arm), int(given[arm])) for arm in np.flatnonzero(given)]


def entropy(weights: NDArray[np.float64]) -> float:
    """Return the entropy of weights, as a share of that of equal ones."""
    shares = weights / weights.sum()
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum() / np.log(len(weights))) if len(weights) > 1 else 1.0
