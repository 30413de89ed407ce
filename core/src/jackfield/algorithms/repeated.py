"""Metrics of repeated rollouts. Tasks are independent, rollouts of one are not (Miller, "Adding Error Bars", 2024)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev

#: Series of Student's 0.975 quantile in inverse degrees of freedom (Abramowitz and Stegun, 26.7.5; 0.03 % off for 4).
_T = (1.959963984540054, 2.3722712302985607, 2.8224986157396086, 2.555849679507719, 1.5895340533938196)


def best_of(scores: Sequence[float], k: int) -> float:
    """Return the expected maximum of ``k`` of ``n >= k`` scores, drawn without replacement.

    It estimates the maximum of ``k`` rollouts without bias. For ``c`` scores of 1 and others of 0 it is pass@k, ``1 -
    C(n - c, k) / C(n, k)`` (Chen et al., "Evaluating Large Language Models Trained on Code", 2021, eq. 1).
    """
    rising, draws = sorted(scores), math.comb(len(scores), k)
    steps = (math.comb(low, k) / draws * (rising[low] - rising[low - 1]) for low in range(k, len(rising)))
    return rising[-1] - math.fsum(steps)


def majority(rollouts: Sequence[tuple[float, str | None]]) -> float:
    """Return the mean score of the most frequent answer, or the mean over several of them.

    Rollouts without an answer (None) do not vote; if none has one, return the mean of all scores.
    """
    votes: Counter[str | None] = Counter(answer for _, answer in rollouts if answer is not None)
    chosen = {answer for _, answer in rollouts if votes[answer] == max(votes.values(), default=0)}
    return fmean(fmean(score for score, answer in rollouts if answer == each) for each in chosen)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean by Student's t; None for fewer than 5 values, or equal ones."""
    if len(values) < 5 or min(values) == max(values):
        return None
    t = math.fsum(term / (len(values) - 1) ** power for power, term in enumerate(_T))
    mean, half = fmean(values), t * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def metrics_of_tasks(
    tasks: Sequence[Sequence[tuple[float, str | None]]], most: int, success: float
) -> dict[str, float]:
    """Return metrics ``NAME@k`` with ``/low`` and ``/high`` of each task's rollouts (score and answer), at ``most`` k.

    ``mean`` and ``maj`` are of all rollouts; ``pass`` (one of ``k`` rollouts scores at least ``success``) is for 1, 2,
    4, … and all, ``best`` and ``worst`` from 2 on. Tasks with fewer than ``k`` scores are left out.
    """
    values: dict[str, list[float]] = {}
    for task in filter(None, tasks):
        scores, own = [score for score, _ in task], {f"maj@{most}": majority(task)}
        own[f"mean@{most}"], passed = fmean(scores), [float(score >= success) for score in scores]
        for k in (each for each in {1 << power for power in range(most.bit_length())} | {most} if each <= len(task)):
            own |= {f"best@{k}": best_of(scores, k), f"worst@{k}": -best_of([-score for score in scores], k)}
            own[f"pass@{k}"] = best_of(passed, k)
        for name in own.keys() - {"maj@1", "best@1", "worst@1"}:  # which are the mean
            values.setdefault(name, []).append(own[name])
    ends = {name: each for name in sorted(values) if (each := interval(values[name]))}
    bounds = {f"{name}/{end}": each[end == "high"] for name, each in ends.items() for end in ("low", "high")}
    return {name: fmean(values[name]) for name in sorted(values)} | bounds
