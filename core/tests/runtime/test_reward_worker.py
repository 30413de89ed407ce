"""Tests of the reward worker: the scores of a group, and failed scores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.clock import Clock
from jackfield.config import make_config
from jackfield.queue import Values
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.runtime.rewards import RewardJob, RewardWorker
from jackfield.sdk.cells import column_from_rows, json_column, rows_of
from jackfield_virtual_clock import VirtualClock


class Letters:
    """A tokenizer with one token per letter."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in token_ids)


class Judge(RewardAgent):
    """Scores the number of letters and fails on ``x``. Post-processing records its input."""

    def __init__(self) -> None:
        super().__init__(None, RewardContext())
        self.seen: list[float | None] = []
        self.asked: list[tuple[str, int]] = []

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        self.asked.append((request.idempotency_key, request.retry))
        if request.solution_str == "again" and request.retry == 0:
            raise ConnectionResetError("try again")
        if "x" in request.solution_str:
            raise ValueError("an x")
        length = float(len(request.solution_str))
        return ScoreResult(score=length, metrics={"vowels": float(request.solution_str.count("a")), "length": length})

    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        self.seen = [score.score for score in scores]
        return scores


def reward(
    answers: Sequence[str],
    uncompared: Sequence[int] = (),
    retries: int = 0,
    on_failure: str = "refill",
    **settings: Any,
) -> tuple[Judge, Any, dict[str, Any]]:
    """Score a group; return each sample's outcome, and the columns of the samples with a score."""

    async def main() -> tuple[tuple[ScoreResult, ...], dict[str, Any]]:
        backend = MemoryBackend(MemoryConfig(), TransferQueueContext())
        await backend.start()
        rows, keys = Values(backend), [f"train/0/0/0/{run}/0" for run in range(len(answers))]
        tokens = column_from_rows([torch.tensor([ord(letter) for letter in answer]) for answer in answers])
        task = {"data_source": "", "ground_truth": "", "extra_info": {}, "reward": None}
        mask = column_from_rows([torch.ones(len(answer), dtype=torch.bool) for answer in answers])
        columns = {"prompt_ids": tokens, "response_ids": tokens, "response_mask": mask}
        columns["task"] = json_column([task] * len(keys))
        await rows.put("train", keys, columns)
        config = make_config(
            {
                "model": {"path": "none"},
                "reward_service": {"retries": retries, "backoff_seconds": 0.0, "on_failure": on_failure},
                "algorithm": settings,
            },
            (),
        )
        worker = RewardWorker(rows, judge, Letters(), Clock(), config)  # type: ignore[arg-type]
        job = RewardJob(tuple(keys), tuple(keys[index] for index in uncompared))
        (report,) = [each async for each in worker.reward("train", [job])]
        scored = tuple(report.results[key] for key in keys)
        good = [key for key, one in report.results.items() if one.status == "ok"]
        found = await rows.get("train", good, report.written.columns) if good else {}
        return scored, {name: [row.tolist() for row in rows_of(column)] for name, column in found.items()}

    judge = Judge()
    return judge, *asyncio.run(main())


def test_a_failed_score_fails_its_row_and_no_other() -> None:
    _, scored, columns = reward(["a", "x", "abc"])
    assert [1.0, None, 3.0] == [one.score for one in scored]
    assert "an x" in scored[1].error
    assert {"reward": [[1.0], [3.0]]} == columns


def test_a_sample_is_tried_again_under_its_own_key() -> None:
    """The key lets a service that the agent calls recognise the repetition."""
    judge, scored, columns = reward(["again", "x", "a"], retries=1)
    again, never, once = (f"train/0/0/0/{run}/0" for run in range(3))
    assert sorted([(again, 0), (again, 1), (never, 0), (never, 1), (once, 0)]) == sorted(judge.asked)
    assert [5.0, None, 1.0] == [one.score for one in scored]
    assert {"reward": [[5.0], [1.0]]} == columns


def test_a_failed_score_becomes_the_mean_of_its_group_where_asked() -> None:
    _, scored, columns = reward(["a", "x", "abc"], on_failure="group_mean", reward_dimensions=["score", "vowels"])
    assert [1.0, 2.0, 3.0] == [one.score for one in scored]
    assert {"reward": [[1.0], [2.0], [3.0]], "reward_dimensions": [[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]]} == columns


def test_a_group_without_any_score_stays_failed() -> None:
    _, scored, columns = reward(["x", "x"], on_failure="group_mean")
    assert ([None, None], {}) == ([one.score for one in scored], columns)


def test_rows_that_stand_apart_are_scored_and_not_compared() -> None:
    judge, scored, columns = reward(["a", "ab", "abcd"], uncompared=[2], on_failure="group_mean")
    assert [1.0, 2.0] == judge.seen
    assert ([1.0, 2.0, 4.0], [[1.0], [2.0], [4.0]]) == ([one.score for one in scored], columns["reward"])


@pytest.mark.parametrize("dimension", ["colour", "Length"])
def test_a_score_without_one_of_the_rewards_has_failed_by_name(dimension: str) -> None:
    _, scored, _ = reward(["a"], reward_dimensions=["score", dimension])
    assert f"no metric {dimension}" in scored[0].error
    assert "length, vowels" in scored[0].error or "vowels, length" in scored[0].error


class Slow(Judge):
    """Scores on virtual time, letter by letter."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        await self.clock.sleep(10.0 * len(request.solution_str))
        return await super().compute_score(request)


def test_a_group_that_is_retried_meanwhile_takes_no_other_one_with_it() -> None:
    """Its scores are dropped when those of the retry begin; it gets no report, and its list goes on."""
    clock, group, dropped, again = VirtualClock(), "train/0/0/0/0/0", "train/0/1/0/0/0", "train/0/1/1/0/0"

    async def main() -> list[set[str]]:
        backend = MemoryBackend(MemoryConfig(), TransferQueueContext())
        await backend.start()
        rows, keys, texts = Values(backend), [group, dropped, again], ["long", "a", "longer"]
        tokens = column_from_rows([torch.tensor([ord(letter) for letter in text]) for text in texts])
        task = {"data_source": "", "ground_truth": "", "extra_info": {}, "reward": None}
        columns = {"prompt_ids": tokens, "response_ids": tokens, "task": json_column([task] * 3)}
        columns["response_mask"] = column_from_rows([torch.ones(len(text), dtype=torch.bool) for text in texts])
        await rows.put("train", keys, columns)
        config = make_config({"model": {"path": "none"}}, ())
        worker = RewardWorker(rows, Slow(clock), Letters(), clock, config)  # type: ignore[arg-type]

        async def rewarded() -> list[set[str]]:
            jobs = [RewardJob((key,), ()) for key in (group, dropped)]
            return [{*report.results} async for report in worker.reward("train", jobs)]

        reports = asyncio.ensure_future(rewarded())
        await clock.sleep(5.0)
        await worker.begin("train", [again])
        return await reports

    assert {group} == set().union(*clock.run(main()))
