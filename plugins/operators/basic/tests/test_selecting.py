"""Samples of rows: the first, some by chance, and some of each category."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROWS = [{"kind": kind, "number": number} for number, kind in enumerate("aabacbabca")]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_first_rows_are_kept_in_their_order(apply: Any, size: int) -> None:
    assert [0, 1, 2, 3] == apply("select", ROWS, size, limit=4).order
    assert [*range(10)] == apply("select", ROWS, size).order


def test_a_sample_by_chance_depends_on_the_seed_alone(apply: Any) -> None:
    rows = [{}] * 400
    one = apply("select", rows, 7, {"seed": 1}, order="random", limit=100).order
    again = apply("select", rows, 100, {"seed": 1}, order="random", limit=100).order
    other = apply("select", rows, 7, {"seed": 2}, order="random", limit=100).order
    assert one == again
    assert one != other
    assert 100 == len({*one})
    assert [*one] != sorted(one)
    assert 10 < len({*one} & {*other}) < 50  # 25 are expected, with a deviation of 4


def test_each_row_has_the_same_chance(apply: Any) -> None:
    """Over 300 seeds, each of 20 rows is among the 5 first ones about 75 times, with a deviation of 7.5."""
    counts = Counter(
        row
        for seed in range(300)
        for row in apply("select", [{}] * 20, 20, {"seed": seed}, order="random", limit=5).order
    )
    assert 1500 == sum(counts.values())
    assert all(45 <= counts[row] <= 105 for row in range(20))


@given(st.lists(st.one_of(st.sampled_from("abc"), st.integers(0, 2), st.booleans(), st.none())), st.integers(1, 4))
def test_as_many_rows_of_each_category_are_kept(apply: Any, kinds: list[Any], limit: int) -> None:
    """Values of several types are categories of their own: 1 and true are not the same."""
    rows = [{"kind": kind} for kind in kinds]
    for order, size in (("first", 2), ("random", 1000)):
        got = apply("per_category", rows, size, category="kind", limit=limit, order=order)
        kept = Counter((type(kind), kind) for at, kind in enumerate(kinds) if at not in got.removed)
        wanted = Counter((type(kind), kind) for kind in kinds)
        assert {kind: min(number, limit) for kind, number in wanted.items()} == kept


def test_the_first_of_each_category_are_kept(apply: Any) -> None:
    got = apply("per_category", ROWS, 3, category="kind", limit=2)
    assert [0, 1, 2, 4, 5, 8] == [at for at in range(10) if at not in got.removed]
    assert not got.operator.compares
    assert [0, 1, 0, 2, 0, 1, 3, 2, 1, 4] == [row["rank_in_category"] for row in got.updates.values()]


def test_some_of_each_category_are_kept_by_chance(apply: Any) -> None:
    samples = {
        tuple(apply("per_category", ROWS, 100, {"seed": seed}, category="kind", limit=2, order="random").removed)
        for seed in range(8)
    }
    assert len(samples) > 4
    assert apply("per_category", ROWS, 100, category="kind", limit=2, order="random").operator.compares


def test_rows_without_the_category_are_set_aside(apply: Any) -> None:
    got = apply("per_category", [{"kind": "a"}, {}, {"kind": "a"}], category="kind", limit=1)
    assert ({1}, {2}) == (got.set_aside.keys(), got.removed.keys())


@pytest.mark.parametrize(
    ("name", "settings", "column"),
    [("select", {}, "select"), ("per_category", {"category": "kind", "limit": 2}, "rank_in_category")],
)
def test_numbers_go_on_from_a_state(apply: Any, name: str, settings: dict[str, Any], column: str) -> None:
    whole = [row[column] for row in apply(name, ROWS, **settings).updates.values()]
    first = apply(name, ROWS[:5], **settings)
    state = json.loads(json.dumps(first.operator.state()))
    rest = apply(name, ROWS[5:], state=state, **settings)
    assert whole == [row[column] for row in (*first.updates.values(), *rest.updates.values())]
