"""A judge that misbehaves: each fault has one outcome, which ``faults.json`` lists, and the next score is right."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield.sdk import structure
from jackfield_bad_service import FAULTS, BadService, DeadlineOfHanging, bad_service
from jackfield_fake_judge import completion, says, scores
from jackfield_reward_judge.reward import JudgeReward
from jackfield_reward_judge.settings import JudgeRewardConfig
from jackfield_reward_requests import AiohttpClient

FILE = Path(__file__).with_name("faults.json")

Answers = list[str | Callable[[Any], Any]]

_LENGTH = {"index": 0, "message": {"role": "assistant", "content": None}, "finish_reason": "length"}
_HALF = {**_LENGTH, "message": {"role": "assistant", "content": '{"explanation": "good", "score": 1'}}
_REFUSAL = {"index": 0, "message": {"role": "assistant", "content": None, "refusal": "I cannot"}}

#: Faults that only a judge has, each with its answers, to its one or two requests.
ANSWERS: dict[str, tuple[str, Answers]] = {
    "no verdict": ("a text without a verdict, then the right form", [says("A fine answer.")]),
    "no verdict twice": ("a text without a verdict, twice", [says("A fine answer.")] * 2),
    "no score": ("JSON without a score, twice", [says('{"explanation": "fine"}')] * 2),
    "NaN": ("NaN as the score, then 3", [says('{"score": NaN}'), says('{"score": 3}')]),
    "out of range": ("a score of 11 on a scale to 10, twice", [says('{"score": 11}')] * 2),
    "cut off": ("JSON whose end is missing", [says('{"explanation": "good", "score": 2')]),
    "cut in a number": (
        "JSON that ends in the middle of a number, as max_tokens are used up",
        [lambda body: completion("", choices=[_HALF])],
    ),
    "two verdicts": ("a score in JSON and another one after it, twice", [says('{"score": 9}\nScore: 2')] * 2),
    "busy at the repair": ("a text without a verdict, then 429", [says("Fine."), "busy"]),
    "refusal": ("a refusal", [lambda body: completion("", choices=[_REFUSAL])]),
    "no text": ("no text, as max_tokens are used up", [lambda body: completion("", choices=[_LENGTH])]),
    "no choices": ("200 with an error in its JSON", [lambda body: {"error": {"message": "overloaded"}}]),
    "no usage": ("an answer without the number of tokens", [lambda body: {"choices": scores(body)["choices"]}]),
}


def ask(number: float) -> ScoreRequest:
    key = f"train/{number:g}"
    return ScoreRequest(
        data_source="t", solution_str=str(number), ground_truth="", idempotency_key=key, deadline_seconds=30.0
    )


def outcome(fault: str, what: str, result: ScoreResult, service: BadService, following: ScoreResult) -> dict[str, Any]:
    code = re.search(r"\[([a-z.-]+)\]", result.error or "")
    return {
        "fault": fault,
        "answer": what,
        "status": result.status,
        "score": result.score,
        "code": code[1] if code else None,
        "retried": result.status != "ok" and not result.is_final,
        "retry_after": result.retry_after,
        "requests": len(service.bodies) - 1,
        "tokens": result.tokens,
        "next": following.status if following.score == 0.3 else f"wrong: {following}",
    }


async def _row(fault: str) -> dict[str, Any]:
    """Judge a response of 2 points of 10 while the API has a fault, and then one of 3."""
    client = AiohttpClient()
    async with bad_service(scores) as service:
        settings = {"url": f"{service.address}/v1", "model": "m", "rubric": {"name": "helpfulness"}}
        agent = JudgeReward(
            structure(JudgeRewardConfig, settings), RewardContext(http=client, clock=DeadlineOfHanging(service))
        )
        await agent.start()
        what, script = ANSWERS.get(fault) or (FAULTS[fault], [fault])
        service.script = list(script)
        try:
            result = await agent.compute_score(ask(2.0))
            service.answer_late()
            return outcome(fault, what, result, service, await agent.compute_score(ask(3.0)))
        finally:
            await agent.close()
            await client.close()


ROWS = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []


@pytest.mark.parametrize("fault", [*FAULTS, *ANSWERS])
def test_the_outcome_of_a_fault(fault: str) -> None:
    expected = [row for row in ROWS if row["fault"] == fault]
    assert expected == [asyncio.run(_row(fault))]


def test_every_row_is_tested() -> None:
    assert [*FAULTS, *ANSWERS] == [row["fault"] for row in ROWS]


if __name__ == "__main__":  # writes the table
    rows = [asyncio.run(_row(fault)) for fault in (*FAULTS, *ANSWERS)]
    FILE.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
