"""Difficulty by pass rate, with a model and a reward whose answers are known."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from jackfield.abc.operator import OperatorContext
from jackfield.abc.reward import GeneratedText
from jackfield.errors import RewardError, RunError, WorkerLost
from jackfield_bad_service import DeadlineOfHanging, bad_service


class Model:
    """Answers the n-th question about a task with ``right`` as often as the task says, and counts what is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[Any], dict[str, Any]]] = []
        self.running = self.most = 0
        self.failures: dict[str, list[Exception]] = {}

    async def generate(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        self.asked.append((model, [*messages], sampling))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        text = messages[-1]["content"]
        if waiting := self.failures.get(text):
            raise waiting.pop(0)
        before = sum(text == asked[-1]["content"] for _, asked, _ in self.asked[:-1])
        return GeneratedText(text="right" if before < int(text) else "wrong!!", tokens=30)


async def score(values: Mapping[str, Any], response: str) -> float:
    return float(values.get("points", 1.0)) if response == "right" else 0.0


class PatientClock(DeadlineOfHanging):
    """Sleeps at once."""

    async def sleep(self, seconds: float) -> None:
        """Return."""


def context(model: Model, **fields: Any) -> OperatorContext:
    return OperatorContext(**{"generate": model.generate, "score": score, **fields})


def applied_with(applied: Any, rows: Any, size: int = 100, seed: int = 0, **settings: Any) -> tuple[Any, Model]:
    model = Model()
    return asyncio.run(applied("difficulty_pass_rate", rows, size, context(model, seed=seed), **settings)), model


def test_the_difficulty_is_the_share_of_answers_that_fail(applied: Any) -> None:
    got, model = applied_with(applied, [{"prompt": str(right)} for right in (0, 1, 4)], samples=4, concurrency=1)
    assert [1.0, 0.75, 0.0] == [row["difficulty"] for row in got.updates.values()]
    assert [0.0, 0.25, 1.0] == [row["pass_rate"] for row in got.updates.values()]
    assert [7.0, 6.5, 5.0] == [row["mean_response_characters"] for row in got.updates.values()]
    assert 12 == len(model.asked)
    assert {"policy"} == {name for name, _, _ in model.asked}


def test_answers_pass_from_a_threshold(applied: Any) -> None:
    rows = [{"prompt": "2", "points": points} for points in (0.4, 0.7)]
    got, _ = applied_with(applied, rows[:1], samples=2, writes="hard")
    assert {"hard": 1.0, "pass_rate": 0.0, "mean_score": 0.4, "mean_response_characters": 5.0} == got.updates["row:0"]
    got, _ = applied_with(applied, rows[1:], samples=2, threshold=0.7)
    assert (1.0, 0.7) == (got.updates["row:0"]["pass_rate"], got.updates["row:0"]["mean_score"])


def test_each_answer_has_a_seed_of_its_own_that_stays(applied: Any) -> None:
    """Seeds do not depend on how rows are cut into requests, and on the stage's seed they do."""

    def seeds(size: int, seed: int) -> list[int]:
        _, model = applied_with(applied, [{"prompt": "1"}, {"prompt": "2"}], size, seed, samples=8)
        return sorted(sampling["seed"] for _, _, sampling in model.asked)

    one, other = seeds(2, 5), seeds(2, 6)
    assert (one, 16) == (seeds(1, 5), len({*one}))
    assert not {*one} & {*other}
    assert all(0 <= seed < 2**31 for seed in one)


def test_settings_reach_the_model(applied: Any) -> None:
    rows = [{"question": [{"role": "user", "content": "0"}]}]
    settings = {
        "system": "Be short.",
        "temperature": 0.5,
        "max_tokens": 9,
        "sampling": {"top_p": 0.9},
        "model": "other",
    }
    _, model = applied_with(applied, rows, samples=1, prompt="question", **settings)
    name, messages, sampling = model.asked[0]
    assert ("other", ["system", "user"]) == (name, [message["role"] for message in messages])
    assert {"temperature": 0.5, "max_new_tokens": 9, "top_p": 0.9} == {k: v for k, v in sampling.items() if k != "seed"}


def test_concurrency_is_bounded(applied: Any) -> None:
    _, model = applied_with(applied, [{"prompt": str(at)} for at in range(5)], samples=6, concurrency=4)
    assert (4, 30) == (model.most, len(model.asked))


def test_failures_are_tried_again_and_then_set_the_task_aside(applied: Any) -> None:
    async def main() -> Any:
        model, slow = Model(), RunError("a replica is busy")
        model.failures = {"1": [slow, slow], "0": [slow] * 4}
        async with bad_service(lambda body: {}) as service:
            given = context(model, clock=PatientClock(service))
            rows = [{"prompt": "1"}, {"prompt": "0"}, {"prompt": "2"}, {"prompt": 3}]
            return await applied("difficulty_pass_rate", rows, 100, given, samples=2, retries=2, concurrency=1)

    got = asyncio.run(main())
    assert {"row:0", "row:2"} == got.updates.keys()
    assert "a replica is busy" in got.set_aside["row:1"]
    assert "neither a text nor a conversation" in got.set_aside["row:3"]


def test_a_score_that_fails_sets_the_task_aside(applied: Any) -> None:
    async def failing(values: Mapping[str, Any], response: str) -> float:
        if values["prompt"] == "1":
            raise RewardError("there is no answer")
        return 1.0

    given = context(Model(), score=failing)
    got = asyncio.run(applied("difficulty_pass_rate", [{"prompt": "1"}, {"prompt": "2"}], 100, given, samples=2))
    assert ({"row:1"}, {"row:0"}) == (got.updates.keys(), got.set_aside.keys())
    assert "there is no answer" in got.set_aside["row:0"]


def test_a_lost_worker_is_no_fault_of_a_task(applied: Any) -> None:
    model = Model()
    model.failures = {"1": [WorkerLost("it died")]}
    with pytest.raises(WorkerLost):
        asyncio.run(applied("difficulty_pass_rate", [{"prompt": "1"}], 1, context(model), samples=1))


def test_a_host_without_a_model_or_a_reward_is_told(applied: Any) -> None:
    got = asyncio.run(applied("difficulty_pass_rate", [{"prompt": "1"}], samples=1))
    assert "no served model" in got.set_aside["row:0"]
