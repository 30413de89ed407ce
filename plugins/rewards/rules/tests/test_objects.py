"""Rewards that are objects of this process: how they are described, called and refused."""

from __future__ import annotations

import asyncio
import functools
import string
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield_reward_rules.callables import CallableReward, CallableRewardConfig, registered
from jackfield_reward_rules.describing import section
from jackfield_testing import refused

REQUEST = ScoreRequest(
    data_source="t", solution_str="seven", ground_truth="7", extra_info={"prompt": "3 + 4?", "level": 3},
    messages=({"role": "user", "content": "3 + 4?"},), prompt_str="<user>3 + 4?", response_ids=(5, 6), group_id="g",
)  # fmt: skip


def scores(target: Any, *requests: ScoreRequest, group: bool = False, **settings: Any) -> list[ScoreResult]:
    """Score requests by an object of this process."""

    async def main() -> list[ScoreResult]:
        agent = CallableReward(CallableRewardConfig(path="it", **settings), RewardContext())
        try:
            await agent.start()
            asked = requests or (REQUEST,)
            if group:
                return list(await agent.score_group(asked))
            return list(await asyncio.gather(*map(agent.compute_score, asked)))
        finally:
            await agent.close()

    with registered({"it": target}):
        return asyncio.run(main())


class Scorer:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, solution_str: str) -> float:
        return self.factor * len(solution_str)

    def compute_score(self, solution_str: str) -> dict[str, float]:
        return {"score": self.factor, "letters": len(solution_str)}

    async def wait(self, solution_str: str, ground_truth: str) -> float:
        await asyncio.sleep(0)
        return self.factor


def named(factor: float, solution_str: str) -> float:
    return factor * len(solution_str)


async def asynchronous(solution_str: str) -> float:
    return float(len(solution_str))


async def of_a_group(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(each)) for each in completions]


for function in (named, asynchronous, of_a_group):
    function.__module__ = "__main__"  # as the functions of a script


@pytest.mark.parametrize(
    ("target", "score"),
    [
        (lambda solution_str: 2, 2.0),
        (Scorer(3.0), 3.0),
        (Scorer(3.0).__call__, 15.0),
        (Scorer(4.0).wait, 4.0),
        (functools.partial(named, 2.0), 10.0),
        (asynchronous, 5.0),
        (lambda *, extra_info, **rest: extra_info["level"], 3.0),
    ],
)
def test_objects_of_all_sorts_score(target: Any, score: float) -> None:
    described, objects = section(target)
    assert ("callable", [target]) == (described["name"], list(objects.values()))
    assert [score] == [each.score for each in scores(target)]


@pytest.mark.parametrize("wrap", [lambda function: function, functools.partial])
def test_trl_gets_texts_where_the_column_prompt_is_a_text(wrap: Callable[[Any], Any]) -> None:
    seen = []

    def reward(prompts: list[str], completions: list[str], level: list[int], **columns: Any) -> list[float]:
        seen.append((prompts, completions, level, columns["completion_ids"]))
        return [1.0, 2.0]

    assert [1.0, 2.0] == [each.score for each in scores(wrap(reward), REQUEST, REQUEST, group=True)]
    assert [(["3 + 4?"] * 2, ["seven"] * 2, [3, 3], [[5, 6]] * 2)] == seen
    assert [5.0] == [each.score for each in scores(of_a_group, group=True)]


def test_a_late_call_is_a_timeout_and_does_not_stop_the_others() -> None:
    forever, late = threading.Event(), attrs.evolve(REQUEST, solution_str="slow", deadline_seconds=0.1)

    def sync(solution_str: str) -> float:
        if solution_str == "slow":
            forever.wait(30)
        return 1.0

    async def waits(solution_str: str) -> float:
        if solution_str == "slow":
            await asyncio.sleep(30)
        return 1.0

    for target in (sync, waits):
        found = scores(target, late, REQUEST)
        assert ["timeout", "ok"] == [each.status for each in found]
        assert "nothing can end it" in str(found[0].error)
    forever.set()


def test_an_exception_fails_the_sample_and_names_the_line() -> None:
    (found,) = scores(lambda solution_str: 1 / 0)
    assert "failed" == found.status
    assert f"ZeroDivisionError: division by zero ({__file__}:" in str(found.error)
    (found,) = scores(lambda solution_str: "much")
    assert "not a finite number" in str(found.error)
    (found,) = scores(lambda solution_str: exit(3))
    assert ("failed", True) == (found.status, "SystemExit" in str(found.error))


def test_what_cannot_be_called_or_is_not_there_is_refused() -> None:
    with refused("reward.function", "answer_text"):
        scores(lambda answer_text: 1.0)
    with refused("config.invalid-value", "reward.path", "FILE.py:it"):
        CallableReward(CallableRewardConfig(path="it"), RewardContext())
    with registered({"it": named}), refused("run.failed", "another run"), registered({"it": asynchronous}):
        pass
    with registered({"it": named}):
        pass
    for wrong in (3, [], [(named, "much")], {"method": "exact"}, object()):
        with refused("config.wrong-type", "reward"):
            section(wrong)


def test_what_a_worker_process_can_import_is_named_by_its_path() -> None:
    assert ({"name": "function", "path": "string:capwords"}, {}) == section(string.capwords)
    assert ({"name": "function", "path": "rewards.py:score"}, {}) == section("rewards.py:score")
    assert ({"name": "rules"}, {}) == section("rules")
    assert ({"name": "rules", "method": "exact"}, {}) == section({"name": "rules", "method": "exact"})
    described, objects = section([named, (lambda solution_str: 1.0, 0.5), (lambda solution_str: 2.0, 0.25)])
    assert {"named": 1.0, "lambda": 0.5, "lambda_2": 0.25} == described["weights"]
    assert ["named", "lambda", "lambda_2"] == list(objects)
