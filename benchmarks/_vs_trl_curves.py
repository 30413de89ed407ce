"""Whether two groups of learning curves differ by more than their seeds do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import attrs

LEVEL = 0.01  #: of the test: how often equal learners would be called different
STRETCHES = 5


@attrs.frozen(kw_only=True)
class Comparison:
    """The result of an exact permutation test."""

    largest_difference: float  #: between the mean curves, over all stretches
    p: float  #: how often a random division of the curves into two groups differs at least as much
    tested: bool  #: whether there are enough curves for a ``p`` below the level
    differ: bool


def stretches(curve: Sequence[float]) -> list[float]:
    """The means of :data:`STRETCHES` equal parts of a curve; of a shorter one, its steps."""
    parts = min(STRETCHES, len(curve))
    bounds = [round(index * len(curve) / parts) for index in range(parts + 1)]
    return [sum(curve[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]


def compare(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> Comparison:
    """Compare curves of equal length, one per seed.

    The statistic is the largest absolute difference between the two groups' mean curves over the stretches; its
    distribution comes from all ways to divide the curves into groups of these sizes.
    """
    curves = [stretches(curve) for curve in (*one, *other)]
    everybody = range(len(curves))

    def difference(group: tuple[int, ...]) -> float:
        rest = [index for index in everybody if index not in group]
        return max(
            abs(sum(curves[i][s] for i in group) / len(group) - sum(curves[i][s] for i in rest) / len(rest))
            for s in range(len(curves[0]))
        )

    found = difference(tuple(range(len(one))))
    divisions = [difference(group) for group in itertools.combinations(everybody, len(one))]
    p = sum(each >= found - 1e-12 for each in divisions) / len(divisions)
    smallest = (2 if len(one) == len(other) else 1) / math.comb(len(curves), len(one))
    tested = smallest <= LEVEL
    return Comparison(largest_difference=found, p=p, tested=tested, differ=tested and p <= LEVEL)
