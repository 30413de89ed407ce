"""Operators on experiences give the numbers that their formulas say, and keep their contract."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from math import cos, pi
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, Row
from jackfield.errors import ConfigError, JackfieldError
from jackfield.plugins.registry import load_plugin
from jackfield_conformance import certify
from jackfield_embeddings import EmbedderConfig, make_embedder

pytestmark = pytest.mark.timeout(180)
NAMES = (
    "diversity",
    "length_reward",
    "novelty",
    "quality_rules",
    "reward_filter",
    "safety_penalty",
    "salience",
    "utility",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_plugin_is_certified(name: str) -> None:
    """Every check of the base tier, and of what the manifest declares, passes."""
    assert "full" == certify(f"operator:{name}").level


def made(name: str, **settings: Any) -> Operator:
    operator: Operator = load_plugin("operator", name).build(settings, OperatorContext(target="experiences"), name)
    return operator


def run(operator: Operator, rows: Sequence[Mapping[str, Any]], batch: int = 0, steps: int = 5) -> OperatorResult:
    named = tuple(Row(key=f"r{number}", values=row) for number, row in enumerate(rows))
    return asyncio.run(operator.process(OperatorRequest(rows=named, batch=batch, steps=steps)))


def decided(operator: Operator, rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the numbers of the rows that a filter keeps."""
    updates = run(operator, rows).updates
    out = operator.decide([Row(key=key, values=values) for key, values in updates.items()])
    return {number for number in range(len(rows)) if f"r{number}" in updates.keys() - out.keys()}


def experience(response: str = "7.", reward: float = 1.0, group: str = "a", **more: Any) -> dict[str, Any]:
    return {"response": response, "reward": reward, "group": group, **more}


def test_diversity_is_the_distance_from_the_mean_of_the_group() -> None:
    """By an embedding that is computed again here, with a weight that changes evenly over the steps."""
    texts = {"a": ["one two three", "one two four", "quite another thing"], "b": ["alone"]}
    rows = [experience(text, 0.5, group) for group, own in texts.items() for text in own]
    embedder = make_embedder(EmbedderConfig(), OperatorContext())
    expected = list[float]()
    for own in texts.values():
        vectors = asyncio.run(embedder.embed(own))
        mean = np.mean(vectors, axis=0)
        expected += [1.0 - float(np.dot(vector, mean)) / float(np.linalg.norm(mean)) for vector in vectors]
    for batch, weight in ((0, 0.5), (2, 0.4), (4, 0.3), (9, 0.3)):
        found = run(made("diversity"), rows, batch, steps=5).updates
        assert expected == pytest.approx([each["diversity"] for each in found.values()], abs=1e-9)
        rewards = [0.5 + weight * each for each in expected]
        assert rewards == pytest.approx([each["reward"] for each in found.values()], abs=1e-9)
    assert expected[2] > expected[0] > 0.0
    wrong = run(made("diversity", only_correct=True), [experience("x", 0.0), experience("y", 1.0)]).updates
    assert (0.0, True) == (wrong["r0"]["reward"], wrong["r1"]["reward"] > 1.0)


@pytest.mark.parametrize(
    ("response", "quality"),
    [
        ("<a> The sum is 7.", 0.5),
        ("<a> The sum is 7", 0.5),
        ("The sum is 7.", 0.25),
        ("<a> I guess it is 7 or so", 0.0),
        ("<a> a b c d a b c d a b c d", 0.25 * (1 + 1 + 5 / 10 + 0) - 0.5),
    ],
)
def test_quality_is_the_mean_of_the_rules(response: str, quality: float) -> None:
    rules = {"matches": {"tag": "^<a>"}, "lacks": {"guess": "guess"}}
    found = run(made("quality_rules", weight=0.4, **rules), [experience(response, 1.0)]).updates["r0"]
    assert quality == pytest.approx(found["quality"])
    assert 1.0 + 0.4 * quality == pytest.approx(found["reward"])


@given(text=st.text(max_size=60), reward=st.floats(-3, 3))
def test_quality_is_between_minus_and_plus_a_half(text: str, reward: float) -> None:
    found = run(made("quality_rules", lacks={"digit": "[0-9]"}), [experience(text, reward)]).updates["r0"]
    assert -0.5 <= found["quality"] <= 0.5
    assert reward + found["quality"] == pytest.approx(found["reward"])


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize(("tokens", "beyond"), [(4, 0.6), (10, 0.0), (20, 0.0), (25, 0.5), (30, 1.0), (99, 1.0)])
def test_length_costs_what_the_formula_says(shape: str, tokens: int, beyond: float) -> None:
    operator = made("length_reward", low=10, high=20, width=10, weight=0.5, shape=shape)
    loss = 0.5 * (beyond if shape == "linear" else (1 - cos(pi * beyond)) / 2)
    found = run(operator, [experience(reward=0.25, response_tokens=tokens)]).updates["r0"]
    assert (loss, 0.25 - loss) == pytest.approx((found["length_loss"], found["reward"]))
    kept = made("length_reward", low=10, high=20, width=10, shape=shape, only_positive=True)
    assert -1.0 == run(kept, [experience(reward=-1.0, response_tokens=tokens)]).updates["r0"]["reward"]


def test_safety_takes_a_penalty_for_each_category() -> None:
    operator = made("safety_penalty", patterns={"arms": r"\bbombs?\b", "doubt": "maybe"}, penalty=0.4, maximum=0.6)
    rows = [experience(text) for text in ("A BOMB", "bombastic", "maybe a bomb, maybe two bombs")]
    found = run(operator, rows).updates
    assert [0.6, 1.0, 0.4] == pytest.approx([each["reward"] for each in found.values()])
    assert [1.0, 0.0, 2.0] == [each["unsafe_categories"] for each in found.values()]


def test_novelty_is_the_distance_from_the_nearest_that_came_before() -> None:
    """The first request has nothing to compare with; a known text has no novelty; the oldest are forgotten."""
    operator = made("novelty", weight=1.0, nearest=1, memory=2, embedder={"dimensions": 64})
    novelties = lambda *texts: [each["novelty"] for each in run(operator, [*map(experience, texts)]).updates.values()]  # noqa: E731
    assert [0.0] == novelties("the first text")
    known, new = novelties("the first text", "another thing")
    assert 0.0 == pytest.approx(known, abs=2e-3)
    assert new > 0.5
    state = json.loads(json.dumps(operator.state()))
    again = made("novelty", weight=1.0, nearest=1, memory=2, embedder={"dimensions": 64})
    again.restore(state)
    rows = [experience("the first text"), experience("something else entirely", -1.0)]
    first, second = (run(each, rows).updates for each in (operator, again))
    assert first == second
    assert -1.0 == first["r1"]["reward"], "only positive rewards get it"


def test_utility_is_the_sum_of_its_parts() -> None:
    rewards, log_probs = [1.0, 0.0, 0.0, 1.0], [-0.5, -1.0, -2.0, -0.25]
    rows = [experience(reward=r, log_prob_mean=p) for r, p in zip(rewards, log_probs, strict=True)]
    found = run(made("utility", advantage=2.0, uncertainty=3.0, surprise=0.1), rows).updates.values()
    expected = [2.0 * abs(r - 0.5) + 3.0 * 0.25 - 0.1 * p for r, p in zip(rewards, log_probs, strict=True)]
    assert expected == pytest.approx([each["utility"] for each in found])
    assert [0.0] == [each["utility"] for each in run(made("utility"), [experience()]).updates.values()]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"by": "surprise", "minimum": 1.0}, {1, 2, 5}),
        ({"by": "uncertainty", "minimum": 0.1}, {0, 1, 2, 3}),
        ({"by": "information", "minimum": 0.3}, {1, 2}),
        ({"by": "surprise", "share": 0.5}, {1, 2, 5}),
        ({"by": "surprise", "share": 0.01}, {2, 5}),
        ({"by": "information", "share": 0.75, "minimum": 0.2}, {0, 1, 2}),
    ],
)
def test_salience_keeps_what_tells_most(settings: dict[str, Any], kept: set[int]) -> None:
    """Two groups: rewards 1, 0, 0, 1 with surprises 0.5, 1, 2, 0.25, and twice 1 with surprises 0.1 and 3."""
    rows = [experience(reward=r, log_prob_mean=-s) for r, s in ((1.0, 0.5), (0.0, 1.0), (0.0, 2.0), (1.0, 0.25))]
    rows += [experience(reward=1.0, group="b", log_prob_mean=-s) for s in (0.1, 3.0)]
    assert kept == decided(made("salience", **settings), rows)


def test_a_filter_by_reward_keeps_its_bounds() -> None:
    rows = [experience(reward=reward) for reward in (-1.0, 0.0, 0.5, 1.0)]
    assert {1, 2} == decided(made("reward_filter", minimum=0.0, maximum=0.5), rows)
    assert {0, 1, 2, 3} == decided(made("reward_filter"), rows)


@pytest.mark.parametrize(
    ("name", "settings", "where"),
    [
        ("length_reward", {"low": 9, "high": 3, "width": 1}, "high"),
        ("quality_rules", {"matches": {"broken": "("}}, "matches.broken"),
        ("quality_rules", {"repetition": None, "ends": False}, "quality_rules"),
        ("safety_penalty", {"patterns": {}}, "patterns"),
        ("salience", {}, "salience"),
    ],
)
def test_settings_that_mean_nothing_are_refused(name: str, settings: dict[str, Any], where: str) -> None:
    with pytest.raises(JackfieldError) as caught:
        made(name, **settings)
    assert isinstance(caught.value, ConfigError)
    assert where == caught.value.where
