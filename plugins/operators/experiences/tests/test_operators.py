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
    "quality_llm",
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
        assert found == run(made("diversity", steps=5), rows, batch, steps=90).updates
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


@pytest.mark.parametrize(("unit", "beyond"), [("words", 0.2), ("characters", 0.8)])
def test_length_is_counted_in_other_units(unit: str, beyond: float) -> None:
    """Four words of 18 characters: one, or four, over the band, of a width of five."""
    operator = made("length_reward", unit=unit, high={"words": 3, "characters": 14}[unit], width=5, weight=1.0)
    found = run(operator, [experience("one  two three 444", 1.0)]).updates["r0"]
    assert (beyond, 1.0 - beyond) == pytest.approx((found["length_loss"], found["reward"]))


def test_tokens_that_are_not_counted_cost_nothing() -> None:
    found = run(made("length_reward", high=1, width=1), [experience(response_tokens=None)])
    assert ({}, {"reward": 1.0, "length_loss": 0.0}) == (found.set_aside, found.updates["r0"])


@pytest.mark.parametrize(
    ("response", "categories", "findings"),
    [
        ("a pipe\n bomb", 1, 1),
        ("PIPE BOMB, pipe bomb", 1, 2),
        ("a pipe bombardment", 0, 0),
        ("a gun and the guns", 1, 1),
        ("g\u00adun", 1, 1),
        ("\uff47\uff55\uff4e", 1, 1),
        ("maybe a gun, maybe", 2, 3),
    ],
)
@pytest.mark.parametrize("per", ["category", "finding"])
def test_unsafe_words_are_whole_ones(response: str, categories: int, findings: int, per: str) -> None:
    words = {"arms": ["gun", "pipe bomb"], "doubt": ["maybe"]}
    operator = made("safety_penalty", words=words, per=per, penalty=0.25, maximum=0.6)
    found = run(operator, [experience(response)]).updates["r0"]
    assert (categories, findings) == (found["unsafe_categories"], found["unsafe_findings"])
    lost = min(0.25 * (categories if per == "category" else findings), 0.6)
    assert 1.0 - lost == pytest.approx(found["reward"])


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


@pytest.mark.parametrize("size", [1, 2, 3])
def test_novelty_of_a_group_is_by_earlier_groups(size: int) -> None:
    """By all cosines, computed here; requests of one or more groups give the same, and siblings do not count."""
    texts = {"a": ["one two", "one two three"], "b": ["one two", "nothing like it"], "c": ["nothing like it!", "x"]}
    embedder = make_embedder(EmbedderConfig(dimensions=64), OperatorContext())
    expected, before = list[float](), list[Any]()
    for own in texts.values():
        vectors = asyncio.run(embedder.embed(own))
        for vector in vectors:
            nearest = sorted((float(vector @ other) for other in before), reverse=True)[:2]
            expected.append(1.0 - sum(nearest) / len(nearest) if nearest else 0.0)
        before = [*before, *vectors][-3:]
    operator, names, found = made("novelty", nearest=2, memory=3, embedder={"dimensions": 64}), list(texts), []
    for first in range(0, 3, size):
        rows = [experience(text, 1.0, name) for name in names[first : first + size] for text in texts[name]]
        found += [each["novelty"] for each in run(operator, rows).updates.values()]
    assert expected == pytest.approx(found, abs=3e-3)
    assert max(expected) > 0.3


def test_a_request_that_is_cancelled_is_not_remembered() -> None:
    operator = made("novelty")

    async def cancelled() -> None:
        request = OperatorRequest(rows=(Row(key="r0", values=experience("a text")),))
        task = asyncio.ensure_future(operator.process(request))
        task.cancel()
        await asyncio.wait([task], timeout=10.0)

    before = operator.state()
    asyncio.run(cancelled())
    assert before == operator.state()


PARTS = ("reward", "advantage", "uncertainty", "surprise", "novelty")


@given(
    rewards=st.lists(st.floats(-2, 2), min_size=1, max_size=6),
    weights=st.fixed_dictionaries({name: st.floats(0, 2) for name in PARTS}),
)
def test_utility_weighs_each_part(rewards: list[float], weights: dict[str, float]) -> None:
    rows = [experience(reward=r, log_prob_mean=-r * r, novelty=r / 2) for r in rewards]
    found = [each["utility"] for each in run(made("utility", **weights), rows).updates.values()]
    mean, variance = float(np.mean(rewards)), float(np.var(rewards))
    columns = [[r, abs(r - mean), variance, r * r, r / 2] for r in rewards]
    assert np.dot(np.array(columns), [weights[name] for name in PARTS]).tolist() == pytest.approx(found, abs=1e-9)


def test_utility_of_what_an_operator_made_is_known_without_log_probs() -> None:
    """Null is no surprise; a column that is missing is a mistake in the settings, which the reason names."""
    rows = [experience(log_prob_mean=None), experience(reward=0.0)]
    found = run(made("utility", surprise=1.0), rows)
    assert 0.75 == found.updates["r0"]["utility"]
    assert "log_prob_mean" in found.set_aside["r1"]


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


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"by": "uncertainty", "share": 0.3}, {2, 3}),
        ({"by": "uncertainty", "share": 0.6}, {0, 1, 2, 3}),
        ({"by": "surprise", "share": 0.3}, {4, 5}),
        ({"by": "surprise", "minimum": 0.6}, {2, 3, 4, 5}),
        ({"by": "surprise", "log_prob": "min", "minimum": 5.0}, {0, 1}),
        ({"by": "information", "share": 0.01}, {2, 3}),
    ],
)
def test_salience_can_keep_whole_groups(settings: dict[str, Any], kept: set[int]) -> None:
    """Means of the groups: surprise 0.5, 0.75 and 2, variance 0.04, 0.25 and 0, information 0.1, 0.375 and 0."""
    told = {"a": ((0.6, 0.25), (1.0, 0.75)), "b": ((1.0, 0.5), (0.0, 1.0)), "c": ((1.0, 3.0), (1.0, 1.0))}
    least = {"a": -6.0, "b": -4.0, "c": -4.0}
    rows = [
        experience(reward=r, group=name, log_prob_mean=-s, log_prob_min=least[name])
        for name, own in told.items()
        for r, s in own
    ]
    assert kept == decided(made("salience", of="groups", **settings), rows)


def test_uncertainty_needs_no_log_probs() -> None:
    rows = [experience(reward=reward) for reward in (0.0, 1.0)]
    assert {0, 1} == decided(made("salience", by="uncertainty", minimum=0.2), rows)
    operator = made("salience", by="surprise", minimum=0.0)
    assert set() == decided(operator, rows)
    rows = [Row(key="r0", values=run(operator, rows).updates["r0"])]
    assert "there is no log_prob_mean" in operator.decide(rows)["r0"]


def test_a_filter_by_reward_keeps_its_bounds() -> None:
    rows = [experience(reward=reward) for reward in (-1.0, 0.0, 0.5, 1.0)]
    assert {1, 2} == decided(made("reward_filter", minimum=0.0, maximum=0.5), rows)
    assert {0, 1, 2, 3} == decided(made("reward_filter"), rows)


@pytest.mark.parametrize(
    ("name", "settings", "where"),
    [
        ("length_reward", {"low": 9, "high": 3, "width": 1}, "high"),
        ("quality_rules", {"matches": {"broken": "("}}, "matches.broken"),
        ("quality_rules", {"repetition": None, "ends": False}, "matches"),
        ("safety_penalty", {"patterns": {}}, "patterns"),
        ("safety_penalty", {"words": {"arms": [" "]}}, "words.arms"),
        ("salience", {}, "share"),
        ("quality_llm", {"low": 3.0, "high": 3.0}, "high"),
        ("quality_llm", {"template": "no response"}, "template"),
        ("quality_llm", {"template": "{response} {messages.text}"}, "template"),
    ],
)
def test_settings_that_mean_nothing_are_refused(name: str, settings: dict[str, Any], where: str) -> None:
    with pytest.raises(JackfieldError) as caught:
        made(name, **settings)
    assert isinstance(caught.value, ConfigError)
    assert str(caught.value.where).endswith(where)
    assert all((caught.value.expected, caught.value.found, caught.value.fix)), str(caught.value)
