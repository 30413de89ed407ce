"""The agent: dimensions, failures, groups, and what it tells its host."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.plugins import discover
from jackfield.sdk import structure
from jackfield_reward_mix.reward import MixReward
from jackfield_reward_mix.settings import Config
from jackfield_testing import in_loop, refused
from jackfield_virtual_clock import VirtualClock


class Given(RewardAgent):
    """A part that gives the results of its settings, one per sample, which is named by its response."""

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        found = self.config["results"][request.solution_str]
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, ScoreResult) else ScoreResult(score=found)

    @property
    def version(self) -> str | None:
        version: str | None = self.config.get("version", "1")
        return version

    @property
    def concurrency(self) -> int | None:
        most: int | None = self.config.get("concurrency")
        return most


class Ranking(Given):
    """A part that compares a whole group: the score is the rank."""

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        if self.config.get("raises"):
            raise ValueError("no ranking")
        order = sorted(self.config["results"][each.solution_str] for each in requests)
        return [ScoreResult(score=order.index(self.config["results"][each.solution_str])) for each in requests]


class Centred(Given):
    """A part that adjusts the scores of whole groups, and fills in failed ones."""

    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        numbers = [each.score for each in scores if each.score is not None]
        middle = sum(numbers) / len(numbers)
        return [attrs.evolve(each, status="ok", error=None, score=(each.score or middle) - middle) for each in scores]


class Turning(Given):
    """A part that takes turns, and generates with the run's replicas."""

    takes_turns = True  # type: ignore[assignment]
    generates = True  # type: ignore[assignment]


_KINDS = {"given": Given, "ranking": Ranking, "centred": Centred, "turning": Turning}
_AB = {"a": {"name": "given", "results": {"x": 1.0, "y": 0.0}}, "b": {"name": "given", "results": {"x": 0.5, "y": 2.0}}}


def mix(parts: Mapping[str, Any] = _AB, weights: Mapping[str, Any] | None = None, **settings: Any) -> MixReward:
    def make(name: str, own: Mapping[str, Any]) -> RewardAgent:
        return _KINDS[name](own, context)

    context = RewardContext(agent=make)
    weights = weights or dict.fromkeys(parts, 1.0)
    return MixReward(structure(Config, {"parts": parts, "weights": weights, **settings}), context)


def ask(name: str = "x", **fields: Any) -> ScoreRequest:
    return ScoreRequest(data_source="test", solution_str=name, ground_truth="", **fields)


def scores(agent: MixReward, *names: str, **fields: Any) -> list[ScoreResult]:
    """Score samples as a run does: each, then their group, or the group alone."""

    async def main() -> list[ScoreResult]:
        requests = [ask(name, **fields) for name in names]
        if agent.compares:
            return list(await agent.score_group(requests))
        found = [await agent.compute_score(request) for request in requests]
        return list(await agent.finish_group(requests, found))

    return asyncio.run(main())


def score(agent: MixReward, name: str = "x", **fields: Any) -> float | None:
    [found] = scores(agent, name, **fields)
    assert found.status == "ok", found.error
    return found.score


def test_the_plugin_is_found_and_passes_its_gates() -> None:
    loaded = discover().load("reward", "mix")
    assert "jackfield_reward_mix.reward.MixReward" == f"{loaded.cls.__module__}.{loaded.cls.__name__}"


def test_a_sum_of_weighted_dimensions() -> None:
    parts = {
        "math": {"name": "given", "results": {"x": ScoreResult(
            score=1.0, dimensions={"format": 0.5}, metrics={"steps": 3.0}, explanation="right", tokens=5, seconds=0.5,
        )}},
        "style": {"name": "given", "results": {"x": ScoreResult(score=0.8, explanation="dull", raw="8/10", tokens=7)}},
    }  # fmt: skip
    agent = mix(parts, {"math": 1.0, "math.format": 0.2, "style": 0.5})
    assert [
        ScoreResult(
            score=pytest.approx(1.0 + 0.1 + 0.4),
            dimensions={"math": 1.0, "math.format": 0.5, "style": 0.8},
            metrics={"math.steps": 3.0},
            explanation="math: right\nstyle: dull",
            raw="style: 8/10",
            tokens=12,
            seconds=0.5,
        )
    ] == scores(agent, "x")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1.5),
        ({"weights": {"a": 1, "b": -2}}, 0.0),
        ({"combine": "product"}, 0.5),
        ({"combine": "minimum"}, 0.5),
        ({"combine": "product", "weights": {"a": 1, "b": 2}}, 0.25),
        ({"clip": {"a": [0, 0.25]}}, 0.75),
        ({"gates": {"b": {"needs": "a", "at_least": 1.0}}}, 1.5),
        ({"gates": {"b": {"needs": "a", "at_least": 1.1}}}, 1.0),
        ({"clip": {"a": [0, 0.25]}, "gates": {"b": {"needs": "a", "at_least": 1.0}}}, 0.75),
        ({"weights": {"a": 0, "b": 1}}, 0.5),
    ],
)
def test_values_are_combined(settings: dict[str, Any], expected: float) -> None:
    assert pytest.approx(expected) == score(mix(**settings))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"kind": "linear", "start": 1, "end": 0, "first": 2, "last": 4}, [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]),
        ({"kind": "cosine", "start": 0, "end": 1, "last": 4}, [0.0, 0.146447, 0.5, 0.853553, 1.0, 1.0]),
        ({"kind": "piecewise", "points": [[1, 0], [2, 1], [4, 0.5]]}, [0.0, 0.0, 1.0, 0.75, 0.5, 0.5]),
    ],
)
def test_weights_change_with_the_batch(schedule: dict[str, Any], expected: list[float]) -> None:
    """A score is of its batch's weights, which no cache knows: it has no version."""
    agent = mix(weights={"a": schedule, "b": 0.0})
    found = [scores(agent, "x", priority=batch)[0] for batch in range(6)]
    assert pytest.approx(expected, abs=1e-6) == [each.score for each in found]
    assert pytest.approx(expected, abs=1e-6) == [each.metrics["weight.a"] for each in found]
    assert agent.version is None


def test_groups_are_normalised() -> None:
    results = {"x": 1.0, "y": 3.0, "z": 5.0}
    parts = {"a": {"name": "given", "results": results}, "b": {"name": "given", "results": dict.fromkeys(results, 7.0)}}
    agent = mix(parts, {"a": 1.0, "b": 1.0}, normalise={"a": "min_max", "b": "z_score"})
    found = scores(agent, "x", "y", "z")
    assert [0.0, 0.5, 1.0] == [each.score for each in found]
    assert [1.0, 3.0, 5.0] == [each.dimensions["a"] for each in found], "dimensions are as they came"
    spread = mix(parts, {"a": 1.0, "b": 1.0}, normalise={"a": "z_score", "b": "min_max"})
    assert pytest.approx([-(1.5**0.5), 0.0, 1.5**0.5]) == [each.score for each in scores(spread, "x", "y", "z")]
    assert [0.0] == [each.score for each in scores(spread, "x")], "one sample alone"


def test_clipping_comes_before_normalisation_and_failures_are_left_out() -> None:
    results = {"x": 1.0, "y": 3.0, "z": 500.0, "failed": ScoreResult(status="failed", error="no")}
    agent = mix({"a": {"name": "given", "results": results}}, clip={"a": [0, 5]}, normalise={"a": "min_max"})
    assert [0.0, 0.5, None, 1.0] == [each.score for each in scores(agent, "x", "y", "failed", "z")]


def test_a_failure_is_the_samples() -> None:
    results: dict[str, Any] = {
        "final": ScoreResult(status="failed", error="broken", is_final=True),
        "busy": ScoreResult(status="failed", error="429", retry_after=3.0, is_unavailable=True, tokens=4),
        "late": ScoreResult(status="timeout", error="late"),
        "raised": ValueError("oops"),
        "slow": TimeoutError("slow"),
    }
    agent = mix(
        {"a": {"name": "given", "results": dict.fromkeys(results, 1.0)}, "b": {"name": "given", "results": results}}
    )
    final, busy, late, raised, slow = scores(agent, *results)
    assert ("failed", None, True) == (final.status, final.score, final.is_final)
    assert ("failed", 3.0, True, False, 4) == (
        busy.status, busy.retry_after, busy.is_unavailable, busy.is_final, busy.tokens
    )  # fmt: skip
    assert ["timeout", "failed", "timeout"] == [late.status, raised.status, slow.status]
    assert "the part b: ValueError: oops" == raised.error


def test_parts_that_may_fail_are_skipped_and_counted() -> None:
    """The weights of the others grow, so that the scale stays."""
    failed = ScoreResult(status="failed", error="no")
    parts = {
        "a": {"name": "given", "results": {"x": 0.5, "y": 0.5}},
        "b": {"name": "given", "results": {"x": failed, "y": 1.0}},
    }
    agent = mix(parts, {"a": 1.0, "b": 3.0}, skip=["b"])
    skipped, whole = scores(agent, "x", "y")
    assert (2.0, 1.0, {"a": 0.5}) == (skipped.score, skipped.metrics["skipped.b"], skipped.dimensions)
    assert (3.5, 0.0) == (whole.score, whole.metrics["skipped.b"])
    patient = mix(parts, {"a": 1.0, "b": 3.0}, skip=["b"], skip_after=1)
    assert ["failed", "ok"] == [scores(patient, "x", retry=retry)[0].status for retry in (0, 1)]
    weightless = mix(parts, {"a": 0.0, "b": 3.0}, skip=["b"])
    assert "failed" == scores(weightless, "x")[0].status, "no score of nothing"


def test_a_part_that_was_skipped_after_retries_is_skipped_when_its_group_ends() -> None:
    """The requests of the group do not say how often a sample was tried."""
    parts = {
        "a": {"name": "centred", "results": {"x": 1.0, "y": 3.0}},
        "b": {"name": "given", "results": {"x": ValueError("gone"), "y": 2.0}},
    }
    agent = mix(parts, skip=["b"], skip_after=1)

    async def main() -> list[ScoreResult]:
        found = [await agent.compute_score(ask("x", retry=1)), await agent.compute_score(ask("y"))]
        return list(await agent.finish_group([ask("x"), ask("y")], found))

    found = asyncio.run(main())
    assert [("ok", -1.0 * 2), ("ok", 1.0 + 2.0)] == [(each.status, each.score) for each in found]


def test_a_dimension_that_no_part_has_is_a_final_failure() -> None:
    [found] = scores(mix(weights={"a": 1.0, "b": 1.0, "a.style": 1.0}), "x")
    assert ("failed", True) == (found.status, found.is_final)
    assert "[reward.mix]" in str(found.error)
    [negative] = scores(mix({"a": {"name": "given", "results": {"x": -1.0}}}, combine="product"), "x")
    assert ("failed", None) == (negative.status, negative.score)


def test_parts_that_compare_make_the_mixture_compare() -> None:
    parts = {
        "rank": {"name": "ranking", "results": {"x": 7.0, "y": 9.0, "z": 8.0}},
        "b": {"name": "given", "results": {"x": 0.5, "y": 0.0, "z": 0.0}},
    }
    agent = mix(parts, normalise={"rank": "min_max"})
    assert agent.compares
    assert not mix().compares
    assert [0.5, 1.0, 0.5] == [each.score for each in scores(agent, "x", "y", "z")]
    parts["rank"]["raises"] = True
    assert ["failed"] * 2 == [each.status for each in scores(mix(parts), "x", "y")]
    assert [0.5 * 2, 0.0] == [each.score for each in scores(mix(parts, skip=["rank"]), "x", "y")]


def test_parts_adjust_their_groups() -> None:
    """Also with a part of a sample that was skipped, which the part fills in."""
    failed = ScoreResult(status="failed", error="no")
    parts = {
        "a": {"name": "centred", "results": {"x": 1.0, "y": 3.0, "z": failed}},
        "b": {"name": "given", "results": {"x": 0.0, "y": 0.0, "z": 10.0}},
    }
    found = scores(mix(parts, skip=["a"]), "x", "y", "z")
    assert [-1.0, 1.0, 10.0] == [each.score for each in found]
    assert [0.0, 0.0, 0.0] == [each.metrics["skipped.a"] for each in found]
    assert [-1.0, 1.0, 0.0] == [each.dimensions["a"] for each in found]


def test_groups_give_the_same_whether_scored_whole_or_one_by_one() -> None:
    agent = mix(normalise={"a": "z_score", "b": "min_max"}, clip={"b": [0, 1]})

    async def whole() -> Sequence[ScoreResult]:
        return await agent.score_group([ask("x"), ask("y")])

    assert scores(agent, "x", "y") == asyncio.run(whole())


def test_what_the_host_is_told() -> None:
    def part(**more: Any) -> dict[str, Any]:
        return {"name": "given", "results": {}, **more}

    one = mix({"a": part(), "b": part()})
    assert one.version == mix({"a": part(), "b": part()}).version
    assert one.version != mix({"a": part(), "b": part(version="2")}).version
    assert mix({"a": part(), "b": part(version=None)}).version is None
    turning = mix({"a": part(), "b": {**part(), "name": "turning"}})
    assert (False, False, True) == (one.takes_turns, one.generates, one.keeps_deadlines)
    assert (True, True, False) == (turning.takes_turns, turning.generates, turning.keeps_deadlines)


@in_loop
async def test_parts_work_at_the_same_time_and_end_with_the_call() -> None:
    """Both wait for each other: one after the other would not end."""
    ended: list[str] = []

    class Waiting(RewardAgent):
        async def compute_score(self, request: ScoreRequest) -> ScoreResult:
            mine, other = self.config["mine"], self.config["other"]
            mine.set()
            try:
                await other.wait()
                if request.solution_str == "for ever":
                    await asyncio.Event().wait()
                return ScoreResult(score=1.0)
            except asyncio.CancelledError:
                ended.append("ended")
                raise

    left, right = asyncio.Event(), asyncio.Event()
    events = {"a": {"mine": left, "other": right}, "b": {"mine": right, "other": left}}
    context = RewardContext(agent=lambda name, settings: Waiting(events[name], RewardContext()))
    config = structure(Config, {"parts": {"a": {"name": "a"}, "b": {"name": "b"}}, "weights": {"a": 1, "b": 1}})
    agent = MixReward(config, context)
    assert 2.0 == (await agent.compute_score(ask())).score
    left.clear()
    right.clear()
    call = asyncio.create_task(agent.compute_score(ask("for ever")))
    await asyncio.gather(left.wait(), right.wait())
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert ["ended", "ended"] == ended


def test_a_deadline_begins_when_a_part_has_room() -> None:
    """Three samples of 3 s, one after another, within deadlines of 5 s; what takes longer is a timeout."""
    clock = VirtualClock()

    class Slow(Given):
        async def compute_score(self, request: ScoreRequest) -> ScoreResult:
            await clock.sleep(self.config["seconds"])
            return ScoreResult(score=1.0)

    async def main() -> list[ScoreResult]:
        parts = {"a": {"name": "slow", "seconds": 3.0, "concurrency": 1}, "b": {"name": "slow", "seconds": 1.0}}
        context = RewardContext(clock=clock, agent=lambda name, settings: Slow(settings, RewardContext()))
        agent = MixReward(structure(Config, {"parts": parts, "weights": {"a": 1, "b": 1}}), context)
        requests = [ask("x", deadline_seconds=seconds) for seconds in (5.0, 5.0, 2.0, 5.0)]
        return list(await asyncio.gather(*map(agent.compute_score, requests)))

    *found, late, last = clock.run(main())
    assert [2.0] * 3 == [each.score for each in (*found, last)]
    assert "timeout" == late.status
    assert "the part a" in str(late.error)
    assert 11.0 == clock.time()


@in_loop
async def test_parts_are_started_and_closed() -> None:
    happened: list[str] = []

    class Part(Given):
        async def start(self) -> None:
            happened.append("start")

        async def close(self) -> None:
            happened.append("close")

    make = functools.partial(Part, context=RewardContext())
    config = structure(Config, {"parts": {"a": {"name": "a"}, "b": {"name": "b"}}, "weights": {"a": 1, "b": 1}})
    agent = MixReward(config, RewardContext(agent=lambda name, settings: make(settings)))
    await agent.close()
    assert [] == happened
    await agent.start()
    await agent.close()
    assert ["start", "start", "close", "close"] == happened


def test_a_host_without_other_rewards_is_refused() -> None:
    with refused("reward.context"):
        asyncio.run(MixReward(structure(Config, {"parts": _AB, "weights": {"a": 1, "b": 1}}), RewardContext()).start())


_ONE: dict[str, Any] = {"parts": {"a": {"name": "given"}, "b": {"name": "given"}}, "weights": {"a": 1.0, "b": 1.0}}


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"parts": {"a": {}}}, "parts"),
        ({"parts": {"a.b": {"name": "x"}}}, "parts"),
        ({"weights": {}}, "weights"),
        ({"weights": {"a": 1, "c": 1}}, "weights"),
        ({"weights": {"a": 1}}, "parts"),
        ({"clip": {"a.x": [0, 1]}}, "clip"),
        ({"clip": {"a": [1, 0]}}, "clip.a"),
        ({"normalise": {"c": "z_score"}}, "normalise"),
        ({"normalise": {"a": "running"}}, "normalise.a"),
        ({"gates": {"a": {"needs": "a", "at_least": 1}}}, "gates.a"),
        ({"gates": {"a": {"needs": "c", "at_least": 1}}}, "gates.a"),
        ({"skip": ["c"]}, "skip"),
        ({"skip": ["a", "b"]}, "skip"),
        ({"skip_after": 1}, "skip_after"),
        ({"gates": {"a": {"needs": "b", "at_least": 1}}, "combine": "minimum"}, "gates"),
        ({"gates": {"a": {"needs": "b", "at_least": 1}}, "skip": ["b"]}, "gates.a"),
        ({"combine": "product", "normalise": {"a": "z_score"}}, "normalise"),
        ({"combine": "mean"}, "combine"),
        ({"weights": {"a": {"kind": "linear", "start": 1}, "b": 1}}, "weights"),
        ({"weights": {"a": {"kind": "piecewise", "points": [[0, 1]]}, "b": 1}}, "weights"),
    ],
)
def test_settings_that_are_wrong_or_do_nothing_are_refused(settings: dict[str, Any], where: str) -> None:
    with refused(("config.invalid-value", "config.wrong-type"), where):
        structure(Config, {**_ONE, **settings})


def test_a_list_of_parts_has_weights_and_names_of_its_own() -> None:
    parts = [{"name": "function", "path": "a.py:f", "weight": 0.7}, {"name": "function", "path": "b/a.py:f"}, "rules"]
    config = structure(Config, {"parts": parts})
    named = {"f": {"name": "function", "path": "a.py:f"}, "f_2": {"name": "function", "path": "b/a.py:f"}}
    assert {**named, "rules": {"name": "rules"}} == config.by_name
    assert {"f": 0.7, "f_2": 1.0, "rules": 1.0} == config.weights
    with refused("config.invalid-value", "weights"):
        structure(Config, {"parts": parts, "weights": {"f": 1}})
    with refused("config.invalid-value", "parts"):
        structure(Config, {"parts": [{"name": "rules", "weight": "half"}]})
    with refused("config.invalid-value", "parts"):
        structure(Config, {"parts": [{"path": "a.py:f"}]})
