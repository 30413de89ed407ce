"""Metrics of several rollouts per task, against brute force and an independent reference in higher precision."""

from __future__ import annotations

import itertools
import math
import random

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.algorithms.repeated import best_of, interval, majority, metrics_of_tasks

SCORES = st.lists(st.floats(-5, 5), min_size=1, max_size=9)
ROLLOUTS = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["a", "b", None])), max_size=6)


@given(SCORES, st.data())
def test_the_best_of_k_is_the_mean_over_all_choices_of_k(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    choices = [max(choice) for choice in itertools.combinations(scores, k)]
    assert math.fsum(choices) / len(choices) == pytest.approx(best_of(scores, k), abs=1e-12)
    worst = [min(choice) for choice in itertools.combinations(scores, k)]
    assert math.fsum(worst) / len(worst) == pytest.approx(-best_of([-each for each in scores], k), abs=1e-12)


@given(st.integers(1, 3000), st.data())
def test_of_right_and_wrong_scores_it_is_the_published_estimator(n: int, data: st.DataObject) -> None:
    """Of many rollouts, too, whose numbers of choices no float holds."""
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    with mpmath.workdps(50):
        expected = float(1 - mpmath.binomial(n - c, k) / mpmath.binomial(n, k))
    assert expected == pytest.approx(best_of([1.0] * c + [0.0] * (n - c), k), abs=1e-12)


def test_it_is_unbiased_over_the_rollouts_that_a_model_could_have_given() -> None:
    """The estimate from 5 rollouts, averaged over all outcomes of a task of known difficulty, is 1 - (1 - p)^3."""
    p, n, k = 0.3, 5, 3
    mean = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=n):
        mean += best_of(outcome, k) * math.prod(p if each else 1 - p for each in outcome)
    assert 1 - (1 - p) ** k == pytest.approx(mean, abs=1e-12)


@given(ROLLOUTS.filter(bool))
def test_the_majority_has_the_score_of_the_most_frequent_answer(rollouts: list[tuple[float, str | None]]) -> None:
    votes = [answer for _, answer in rollouts if answer is not None]
    most = max((votes.count(answer) for answer in votes), default=0)
    winners = {answer for answer in votes if votes.count(answer) == most} or {None}
    means = []
    for winner in winners:
        own = [score for score, answer in rollouts if answer == winner]
        means.append(sum(own) / len(own))
    assert sum(means) / len(means) == pytest.approx(majority(rollouts), abs=1e-12)


@pytest.mark.parametrize("count", [5, 6, 10, 30, 1000])
def test_the_interval_is_students(count: int) -> None:
    """The reference integrates the density and solves for the quantile; the series is off by 0.03 % at most."""
    draw = random.Random(count)
    values = [draw.gauss(0.4, 2.0) for _ in range(count)]
    with mpmath.workdps(30):
        v = mpmath.mpf(count - 1)
        scale = mpmath.gamma((v + 1) / 2) / (mpmath.sqrt(v * mpmath.pi) * mpmath.gamma(v / 2))
        below = lambda t: 0.5 + scale * mpmath.quad(lambda x: (1 + x * x / v) ** (-(v + 1) / 2), [0, t])  # noqa: E731
        t = mpmath.findroot(lambda each: below(each) - mpmath.mpf("0.975"), 2.2)
        mean = mpmath.fsum(values) / count
        variance = mpmath.fsum((each - mean) ** 2 for each in values) / (count - 1)
        half = t * mpmath.sqrt(variance / count)
    found = interval(values)
    assert found is not None
    assert (float(mean - half), float(mean + half)) == pytest.approx(found, abs=float(half) * 4e-4)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Of 2,000 benches of 40 tasks whose difficulties and rollouts are drawn, 95 % within the noise of so many."""
    draw, covered = random.Random(7), 0
    for _ in range(2000):
        tasks = [[(float(draw.random() < p), None) for _ in range(4)] for p in (draw.random() for _ in range(40))]
        found = metrics_of_tasks(tasks, 4, 1.0)
        covered += found["mean@4/low"] <= 0.5 <= found["mean@4/high"]
    assert 0.935 <= covered / 2000 <= 0.965


@pytest.mark.parametrize("values", [[], [0.3], [0.1, 0.2, 0.3, 0.9], [1.0] * 50])
def test_what_does_not_show_how_much_it_varies_has_no_interval(values: list[float]) -> None:
    assert interval(values) is None


@given(st.lists(ROLLOUTS, min_size=1, max_size=8), st.integers(6, 9))
def test_tasks_count_where_they_have_enough_scores(tasks: list[list[tuple[float, str | None]]], most: int) -> None:
    found = metrics_of_tasks(tasks, most, 0.5)
    for k in {1, 2, 4, 8, most}:
        own = [[score >= 0.5 for score, _ in task] for task in tasks if len(task) >= k]
        passes = [1 - math.comb(len(each) - sum(each), k) / math.comb(len(each), k) for each in own]
        if passes and k <= most:
            assert math.fsum(passes) / len(passes) == pytest.approx(found[f"pass@{k}"], abs=1e-12)
        else:
            assert f"pass@{k}" not in found
    scored = [[score for score, _ in task] for task in tasks if task]
    if scored:
        means = [math.fsum(each) / len(each) for each in scored]
        assert math.fsum(means) / len(means) == pytest.approx(found[f"mean@{most}"], abs=1e-12)
    assert all(found[f"worst@{k}"] <= found[f"best@{k}"] + 1e-12 for k in (2, 4) if f"best@{k}" in found)


def test_one_rollout_has_only_what_one_rollout_can_say() -> None:
    tasks = [[(float(number % 3 == 0), None)] for number in range(9)]
    found = metrics_of_tasks(tasks, 1, 1.0)
    assert {"mean@1", "pass@1"} == {name for name in found if "/" not in name}
    assert found["mean@1"] == found["pass@1"] == pytest.approx(1 / 3)
    assert found["mean@1/low"] < found["mean@1"] < found["mean@1/high"]
