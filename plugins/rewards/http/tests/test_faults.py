"""A service that misbehaves: each fault has one outcome, which ``faults.json`` lists, and the next score is right."""

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
from jackfield_reward_http.reward import HttpReward
from jackfield_reward_http.settings import HttpRewardConfig
from jackfield_reward_requests import AiohttpClient

FILE = Path(__file__).with_name("faults.json")

#: Further answers, each with what it is.
ANSWERS: dict[str, tuple[str, Any]] = {
    "no score": ("JSON without the score", {"points": 1}),
    "not a number": ("NaN as the score", {"score": float("nan")}),
    "infinite": ("infinity as the score", {"score": float("inf")}),
    "a text": ("a text as the score", {"score": "very good"}),
    "an error": ("JSON with a reason in the place of a score", {"error": "no GPU left", "score": 0}),
}


def right(body: Any) -> Any:
    """The number that the response is."""
    return {"score": float(body["solution_str"])}


def ask(number: float) -> ScoreRequest:
    key = f"train/{number:g}"
    return ScoreRequest(
        data_source="t", solution_str=str(number), ground_truth="", idempotency_key=key, deadline_seconds=30.0
    )


def outcome(fault: str, what: str, result: ScoreResult, service: BadService, following: ScoreResult) -> dict[str, Any]:
    code = re.match(r"\[([a-z.-]+)\]", result.error or "")
    return {
        "fault": fault,
        "answer": what,
        "status": result.status,
        "code": code[1] if code else None,
        "retried": result.status != "ok" and not result.is_final,
        "retry_after": result.retry_after,
        "requests": len(service.bodies) - 1,
        "next": following.status if following.score == 3.0 else f"wrong: {following}",
    }


async def _row(fault: str) -> dict[str, Any]:
    """Score a sample while the service has a fault, and then another."""
    client = AiohttpClient()
    async with bad_service(right) as service:
        settings: dict[str, Any] = {
            "url": f"{service.address}/score",
            "answer_bytes": 2**20,
            "answer": {"error": "error"},
        }
        agent = HttpReward(
            structure(HttpRewardConfig, settings), RewardContext(http=client, clock=DeadlineOfHanging(service))
        )
        await agent.start()
        what, answer = ANSWERS.get(fault, (FAULTS.get(fault, ""), None))
        scripted: Callable[[Any], Any] = lambda body: answer  # noqa: E731
        service.script = [scripted if fault in ANSWERS else fault]
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
