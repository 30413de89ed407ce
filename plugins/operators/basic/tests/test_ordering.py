"""Difficulty by rules, and the order by weighted priorities, against their formulas."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.errors import ConfigError

NUMBERS = st.floats(-1e6, 1e6)


def test_easy_rows_come_first(apply: Any) -> None:
    """The order of the seed's example: `priority_weights: {difficulty: -1.0}`; equal rows stay in their order."""
    rows = [{"difficulty": value} for value in (0.5, 0.25, 0.9, 0.25, 0.0, 0.5)]
    assert [4, 1, 3, 0, 5, 2] == apply("priority", rows, 2, weights={"difficulty": -1.0}).order
    assert [2, 0, 5, 1, 3, 4] == apply("priority", rows, weights={"difficulty": 1.0}).order
    assert [4, 1] == apply("priority", rows, weights={"difficulty": -1.0}, limit=2).order


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS), max_size=8),
    st.tuples(st.floats(-10, 10), st.floats(-10, 10)),
    st.integers(1, 9),
)
def test_the_priority_is_the_weighted_sum(
    apply: Any, values: list[tuple[float, float]], weights: tuple[float, float], size: int
) -> None:
    rows = [{"a": a, "b": b} for a, b in values]
    got = apply("priority", rows, size, weights=dict(zip("ab", weights, strict=True)))
    for at, (a, b) in enumerate(values):
        exact = Fraction(weights[0]) * Fraction(a) + Fraction(weights[1]) * Fraction(b)
        assert math.isclose(float(exact), got.updates[at]["priority"], rel_tol=1e-9, abs_tol=1e-6)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_ranks_are_the_shares_of_smaller_values(apply: Any, values: list[float]) -> None:
    """The rank is counted here by comparing each row with each other one."""
    got = apply("priority", [{"a": value} for value in values], weights={"a": 1.0}, scale="rank")
    for at, value in enumerate(values):
        others = values[:at] + values[at + 1 :]
        counted = sum(1.0 if other < value else 0.5 if other == value else 0.0 for other in others)
        assert math.isclose(counted / len(others) if others else 0.5, got.updates[at]["priority"], abs_tol=1e-12)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_ranges_go_from_0_to_1(apply: Any, values: list[float]) -> None:
    got = apply("priority", [{"a": value} for value in values], weights={"a": 1.0}, scale="range")
    least, most = Fraction(min(values)), Fraction(max(values))
    for at, value in enumerate(values):
        exact = float((Fraction(value) - least) / (most - least)) if most > least else 0.0
        found = got.updates[at]["priority"]
        assert 0.0 <= found <= 1.0
        if most - least > Fraction(1, 10**290):  # the smallest numbers have fewer digits
            assert math.isclose(exact, found, abs_tol=1e-9)


def test_scaling_lets_columns_of_other_sizes_count(apply: Any) -> None:
    """Length, in hundreds, would outweigh difficulty; scaled, both count."""
    rows = [{"difficulty": d, "length": n} for d, n in ((0.9, 100), (0.1, 300), (0.5, 200))]
    weights = {"difficulty": -1.0, "length": -0.5}
    assert [0, 2, 1] == apply("priority", rows, weights=weights).order
    for scale in ("range", "rank"):
        got = apply("priority", rows, weights=weights, scale=scale)
        assert [1, 2, 0] == got.order
        assert [-1.0, -0.5, -0.75] == [got.updates[at]["priority"] for at in range(3)]
        assert got.operator.compares


@pytest.mark.parametrize("scale", ["none", "range", "rank"])
def test_rows_without_a_usable_number_are_set_aside(apply: Any, scale: str) -> None:
    values: list[Any] = [1.0, None, "2", True, float("nan"), float("inf"), 10**400, 3]
    rows = [{"a": value} for value in values] + [{}]
    got = apply("priority", rows, weights={"a": 1.0}, scale=scale)
    assert ([7, 0], {1, 2, 3, 4, 5, 6, 8}) == (got.order, got.set_aside.keys())
    assert all("'a'" in why for why in got.set_aside.values())


def test_missing_values_can_be_given(apply: Any) -> None:
    got = apply("priority", [{"a": 1.0}, {}, {"a": None}, {"a": "x"}], weights={"a": 2.0}, missing=0.5)
    assert {0: 2.0, 1: 1.0, 2: 1.0} == {at: row["priority"] for at, row in got.updates.items()}
    assert {3} == got.set_aside.keys()


def test_a_sum_that_is_too_large_is_set_aside(apply: Any) -> None:
    got = apply("priority", [{"a": 1e300}, {"a": 1.0}], weights={"a": 1e10})
    assert ({0}, [1]) == (got.set_aside.keys(), got.order)


@pytest.mark.parametrize(
    "settings",
    [{"weights": {}}, {"weights": {"a": float("nan")}}, {"weights": {"a": 1.0}, "missing": float("inf")}],
)
def test_settings_without_sense_are_refused(apply: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        apply("priority", [], **settings)


def test_difficulty_by_rules_is_the_mean_of_its_terms(apply: Any) -> None:
    """Counted by hand: 6 words, 2 numbers, and 2 signs of steps."""
    rows = [{"prompt": "Ida has 9 toys, loses 2.", "answer": "9 - 2 = 7\n#### 7"}, {"prompt": "Say ok."}]
    got = apply("difficulty_rules", rows)
    assert pytest.approx((6 / 66 + 2 / 8 + 2 / 6) / 3, abs=1e-6) == got.updates[0]["difficulty"]
    assert pytest.approx((2 / 62 + 0) / 2, abs=1e-6) == got.updates[1]["difficulty"]
