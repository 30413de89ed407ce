"""Metrics of evaluations with several rollouts per task, from their scores.

A metric has a value for each task. Its mean has a 95 % confidence interval over tasks, which are independent of each
other, unlike rollouts of one task (Miller, "Adding Error Bars to Evals", 2024, sections 2.1 and 2.2).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev

#: Series of the 0.975 quantile of Student's t in the inverse degrees of freedom, from 4 on 0.03 % off (Abramowitz and
#: Stegun, "Handbook of Mathematical Functions", 26.7.5).
_T = (1.959963984540054, 2.3722712302985607, 2.8224986157396086, 2.555849679507719, 1.5895340533938196)


def best_of(scores: Sequence[float], k: int) -> float:
    """Return the expected maximum of ``k`` of ``n >= k`` scores, drawn without replacement.

    It estimates the maximum of ``k`` rollouts without bias. For ``c`` scores of 1 and others of 0 it is pass@k, ``1 -
    C(n - c, k) / C(n, k)`` (Chen et al., "Evaluating Large Language Models Trained on Code", 2021, eq. 1).
    """
    rising, draws = sorted(scores), math.comb(len(scores), k)
    steps = (math.comb(low, k) / draws * (rising[low] - rising[low - 1]) for low in range(k, len(rising)))
    return rising[-1] - math.fsum(steps)


def majority(scores: Sequence[float], answers: Sequence[str | None]) -> float:
    """Return the mean score of the most frequent answer, or the mean over several of them.

    Rollouts without an answer (None) do not vote. If no rollout has one, return the mean of all scores.
    """
    votes, pairs = Counter(filter(None.__ne__, answers)), list(zip(scores, answers, strict=True))
    chosen = [answer for answer, count in votes.items() if count == max(votes.values())] or [None]
    return fmean(fmean(score for score, answer in pairs if answer == each) for each in chosen)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean of 5 or more values by Student's t.

    Return None for fewer values, and for equal ones, which do not show how much values vary.
    """
    if len(values) < 5 or min(values) == max(values):
        return None
    t = math.fsum(term / (len(values) - 1) ** power for power, term in enumerate(_T))
    mean, half = fmean(values), t * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def metrics_of_tasks(
    tasks: Sequence[Sequence[tuple[float, str | None]]], rollouts: int, success: float
) -> dict[str, float]:
    """Return metrics ``NAME@k``, with intervals ``NAME@k/low`` and ``/high``, of tasks' rollouts (score and answer).

    ``mean`` and ``maj`` are of all rollouts; ``best``, ``worst`` and ``pass`` (that one of ``k`` rollouts scores at
    least ``success``) of 1, 2, 4, … and all. Tasks with fewer than ``k`` scores are left out.
    """
    values: dict[str, list[float]] = {}
    for scores, answers in (zip(*task, strict=True) for task in tasks if task):
        own = {f"mean@{rollouts}": fmean(scores), f"maj@{rollouts}": majority(scores, answers)}
        for k in sorted({1 << power for power in range(rollouts.bit_length())} | {rollouts}):
            if k <= len(scores):
                own |= {f"best@{k}": best_of(scores, k), f"worst@{k}": -best_of([-each for each in scores], k)}
                own[f"pass@{k}"] = best_of([float(each >= success) for each in scores], k)
        for name, value in own.items():
            values.setdefault(name, []).append(value)
    found = {name: fmean(each) for name, each in values.items()}
    for name, (low, high) in ((name, ends) for name, each in values.items() if (ends := interval(each))):
        ends = (max(low, 0.0), min(high, 1.0)) if name.startswith("pass@") else (low, high)
        found |= dict(zip((f"{name}/low", f"{name}/high"), ends, strict=True))
    return found
