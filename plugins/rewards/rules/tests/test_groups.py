"""The plugin ``function``: scores of whole groups, TRL's functions, rubrics, and ``post_process_scores``."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.abc.reward import ResponsePart, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import JackfieldError
from jackfield_reward_rules.function import FunctionReward, FunctionRewardConfig


def request(solution: str, number: int = 0, **fields: Any) -> ScoreRequest:
    given = {"data_source": "gsm8k", "ground_truth": "7", "extra_info": {"level": number}, "prompt_str": "3 + 4?"}
    given |= {"response_ids": (1,) * len(solution), "group_id": "g", "idempotency_key": f"g/{number}"}
    return ScoreRequest(solution_str=solution, **{**given, **fields})


def group(*solutions: str, **fields: Any) -> list[ScoreRequest]:
    return [request(solution, number, **fields) for number, solution in enumerate(solutions)]


def scored(
    folder: Path, code: str, name: str, requests: Sequence[ScoreRequest], compares: bool, **settings: Any
) -> list[ScoreResult]:
    """Score a group by a function of a file, which compares or does not."""
    (folder / "rewards.py").write_text(textwrap.dedent(code))

    async def main() -> list[ScoreResult]:
        config = FunctionRewardConfig(path=f"{folder}/rewards.py:{name}", **settings)
        agent = FunctionReward(config, RewardContext())
        try:
            await agent.start()
            assert compares == agent.compares
            return list(await agent.score_group(requests))
        finally:
            await agent.close()

    return asyncio.run(main())


def values(results: Sequence[ScoreResult]) -> list[tuple[str, float | None]]:
    return [(each.status, each.score) for each in results]


TRL = """
import asyncio

def texts(prompts, completions, ground_truth, **kwargs):
    assert all(isinstance(each, str) for each in prompts + completions)
    return [float(truth in completion) for truth, completion in zip(ground_truth, completions)]

def messages(completions, **kwargs):
    return [float(completion[0]["content"] == "7") for completion in completions]

def roles(prompts, completions, **_):
    return [{"score": len(prompts[0]), "tools": sum(each["role"] == "tool" for each in row)} for row in completions]

async def later(prompts, completions, level, weight=1.0):
    await asyncio.sleep(0)
    return [weight * each for each in level]

def ids(completion_ids, **kwargs):
    return [len(each) for each in completion_ids]

def some(completions, **kwargs):
    return [1.0, None, "x"]

def short(completions, **kwargs):
    return [1.0]

def scalar(completions, **kwargs):
    return 1.0

def column(completions, difficulty):
    return difficulty

class Called:
    def __call__(self, prompts, completions, **kwargs):
        return [float(len(completions))] * len(completions)
"""
CONVERSATION = {"messages": ({"role": "user", "content": "3 + 4?"},)}


@pytest.mark.parametrize(
    ("name", "fields", "settings", "expected"),
    [
        ("texts", {}, {}, [1.0, 0.0, 1.0]),
        ("texts", CONVERSATION, {"form": "text"}, [1.0, 0.0, 1.0]),
        ("messages", CONVERSATION, {}, [1.0, 0.0, 0.0]),
        ("messages", {}, {"form": "messages"}, [1.0, 0.0, 0.0]),
        ("later", {}, {}, [0.0, 1.0, 2.0]),
        ("later", {}, {"keywords": {"weight": 2}}, [0.0, 2.0, 4.0]),
        ("ids", {}, {}, [1.0, 1.0, 2.0]),
        ("Called", {}, {}, [3.0, 3.0, 3.0]),
    ],
)
def test_functions_of_trl_score_a_whole_group_in_one_call(
    tmp_path: Path, name: str, fields: dict[str, Any], settings: dict[str, Any], expected: list[float]
) -> None:
    results = scored(tmp_path, TRL, name, group("7", "8", "17", **fields), True, **settings)
    assert [("ok", each) for each in expected] == values(results), results[0].error


def test_output_of_tools_is_a_message_of_its_own(tmp_path: Path) -> None:
    parts = tuple(ResponsePart(author=author, text="7") for author in ("model", "tool", "model"))  # type: ignore[arg-type]
    [result] = scored(tmp_path, TRL, "roles", group("777", parts=parts, **CONVERSATION), True)
    assert (1.0, {"tools": 1.0}) == (result.score, result.metrics)


def test_what_is_no_list_of_scores_fails_the_group(tmp_path: Path) -> None:
    some = scored(tmp_path, TRL, "some", group("7", "8", "9"), True)
    assert [("ok", 1.0), ("ok", 0.0), ("failed", None)] == values(some)
    assert {"not_applicable": 1.0} == some[1].metrics  # None: TRL's sum leaves it out
    for name, words in (("short", "a group of 3 has 1 values"), ("scalar", "is not a list")):
        results = scored(tmp_path, TRL, name, group("7", "8", "9"), True)
        assert [("failed", None)] * 3 == values(results)
        assert all(str(each.error).startswith("[reward.output]") and words in str(each.error) for each in results)
    [missing] = scored(tmp_path, TRL, "column", group("7"), True)
    assert "needs the column 'difficulty'" in str(missing.error)


def test_a_single_sample_is_a_group_of_one(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(TRL)

    async def main() -> ScoreResult:
        agent = FunctionReward(FunctionRewardConfig(path=f"{tmp_path}/rewards.py:Called"), RewardContext())
        try:
            return await agent.compute_score(request("7"))
        finally:
            await agent.close()

    assert ScoreResult(score=1.0) == asyncio.run(main())


@pytest.mark.parametrize("word", ["", "async "])
def test_a_class_may_score_groups(tmp_path: Path, word: str) -> None:
    code = f"""
    class Ranks:
        {word}def score_group(self, requests):
            order = sorted(requests, key=lambda each: len(each["solution_str"]))
            told = {{each["idempotency_key"]: float(place) for place, each in enumerate(order)}}
            return [(told[each["idempotency_key"]], each["model_text"], "by length") for each in requests]
    """
    results = scored(tmp_path, code, "Ranks", group("333", "1", "22"), True)
    assert [("ok", 2.0), ("ok", 0.0), ("ok", 1.0)] == values(results)
    assert {"by length"} == {each.explanation for each in results}


POST = """
import math

def compute_score(solution_str):
    return {"score": float(solution_str), "length": len(solution_str)}

def post_process_scores(scores: list[float]) -> list[float]:
    good = [each for each in scores if not math.isnan(each)]
    return [each - sum(good) / len(good) for each in scores]
"""


def test_scores_of_a_group_are_processed_in_their_order(tmp_path: Path) -> None:
    """A failed one is NaN for a function of floats, and stays failed if it is NaN again."""
    results = scored(tmp_path, POST, "compute_score", group("1", "x", "5"), False)
    assert [("ok", -2.0), ("failed", None), ("ok", 2.0)] == values(results)
    assert "ValueError" in str(results[1].error)
    assert {"length": 1.0} == results[0].metrics


CLASS = """
class Agent:
    seen = 0
    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        self.seen += 1
        return float(solution_str), solution_str, "read"
    def post_process_scores(self, scores):
        good = [each for each in scores if each is not None]
        return [sum(good) / len(good) if each is None else each for each in scores]

class Shared(Agent):
    async def compute_score(self, solution_str):
        self.seen += 1
        return float(solution_str)
    def post_process_scores(self, scores):
        return [self.seen] * len(scores)
"""


def test_a_class_fills_in_failed_scores_in_the_form_of_a_recipe(tmp_path: Path) -> None:
    """Without an annotation a failed score is None."""
    results = scored(tmp_path, CLASS, "Agent", group("1", "x", "5"), False)
    assert [("ok", 1.0), ("ok", 3.0), ("ok", 5.0)] == values(results)
    assert (None, None) == (results[1].error, results[1].explanation)
    assert "read" == results[0].explanation
    shared = scored(tmp_path, CLASS, "Shared", group("1", "2"), False)
    assert [("ok", 2.0)] * 2 == values(shared), "the instance is the same"


@pytest.mark.parametrize(
    ("value", "words"),
    [("scores[1:]", "has 2 values"), ("None", "is not a list"), ("1 / 0", "ZeroDivisionError")],
)
def test_a_group_whose_processing_is_wrong_is_an_error(tmp_path: Path, value: str, words: str) -> None:
    code = f"def score(solution_str): return 1\ndef post_process_scores(scores): return {value}\n"
    with pytest.raises(JackfieldError) as caught:
        scored(tmp_path, code, "score", group("1", "2", "3"), False)
    assert caught.value.code in ("reward.output", "reward.failed")
    assert words in str(caught.value)


def test_a_processed_score_that_is_no_number_fails_its_sample(tmp_path: Path) -> None:
    code = "def score(solution_str): return 1\ndef post_process_scores(scores): return [2, None, float('inf'), 'x']\n"
    results = scored(tmp_path, code, "score", group("1", "2", "3", "4"), False)
    assert [("ok", 2.0)] + [("failed", None)] * 3 == values(results)
    assert all(str(each.error).startswith("[reward.output]") for each in results[1:])


RUBRIC = """
import asyncio

class Rubric:
    '''What a rubric of verifiers 0.1 has.'''
    def __init__(self, funcs, weights):
        self.funcs, self.weights, self.class_objects = funcs, weights, {"parser": "a parser"}
    async def score_rollout(self, state): ...

async def correct(completion, answer, parser):
    assert parser == "a parser"
    return float(completion[-1]["content"] == answer)

def brief(completion, info, **kwargs):
    return info["level"] / 10

def different(completions):
    return [float(len(set(map(str, completions))))] * len(completions)

def broken(completion):
    raise ValueError("no verdict")

single = Rubric([correct, brief], [1.0, 0.5])
plural = Rubric([correct, different], [1.0, 0.1])
failing = Rubric([correct, broken], [1.0, 1.0])
"""


def test_rubrics_of_verifiers_are_weighted_sums_with_metrics(tmp_path: Path) -> None:
    """An error in one of their functions is a failure, and not 0 as in their own methods."""
    requests = group("7", "8", **CONVERSATION)
    single = scored(tmp_path, RUBRIC, "single", requests, False)
    assert [("ok", 1.0), ("ok", 0.05)] == values(single), single[0].error
    assert {"correct": 1.0, "brief": 0.0} == single[0].metrics
    plural = scored(tmp_path, RUBRIC, "plural", requests, True)
    assert [("ok", 1.2), ("ok", 0.2)] == values(plural)
    failing = scored(tmp_path, RUBRIC, "failing", requests, False)
    assert [("failed", None)] * 2 == values(failing)
    assert "no verdict" in str(failing[0].error)


def test_groups_do_not_wait_for_each_other(tmp_path: Path) -> None:
    code = """
    import asyncio
    here, both = 0, asyncio.Event()
    async def rewards(completions, **kwargs):
        global here
        here += 1
        if here == 2:
            both.set()
        await both.wait()
        return [1.0] * len(completions)
    """
    (tmp_path / "rewards.py").write_text(textwrap.dedent(code))

    async def main() -> list[Sequence[ScoreResult]]:
        agent = FunctionReward(FunctionRewardConfig(path=f"{tmp_path}/rewards.py:rewards"), RewardContext())
        try:
            other = [attrs.evolve(each, group_id="h") for each in group("3", "4")]
            return list(await asyncio.gather(agent.score_group(group("1", "2")), agent.score_group(other)))
        finally:
            await agent.close()

    assert [[("ok", 1.0)] * 2] * 2 == [values(each) for each in asyncio.run(main())]
