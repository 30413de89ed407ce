"""Services: secrets, statuses, numbers, and how a start waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from jackfield.abc.reward import HttpAnswer, RewardContext
from jackfield.clock import Clock
from jackfield.errors import RewardError
from jackfield_reward_requests import RequestFailed, Service, failed, finite, idempotency, read_json, shown_url
from jackfield_testing import refused


@attrs.define
class Client:
    """A client with the answers that it gives, one after the other."""

    answers: list[HttpAnswer | Exception]
    asked: list[Mapping[str, Any]] = attrs.field(factory=list)

    async def request(self, method: str, url: str, **options: Any) -> HttpAnswer:
        self.asked.append({"method": method, "url": url, **options})
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Steps(Clock):
    """A clock whose sleeps take no time and move it."""

    now = 0.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def service(*answers: HttpAnswer | Exception, **options: Any) -> tuple[Service, Client]:
    client = Client(list(answers))
    context = RewardContext(http=client, clock=Steps())
    return Service(context=context, url="https://me:word@host/score?key=1", **options), client


def test_secrets_are_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "swordfish\n")
    asked, client = service(HttpAnswer(status=401, text="no swordfish"), headers={"Authorization": "Bearer ${A_KEY}"})
    with refused("reward.http", "401", "***") as caught:
        asyncio.run(asked.ask("POST", {}, seconds=5))
    assert "Bearer swordfish" == client.asked[0]["headers"]["Authorization"]
    shown = str(caught.value) + repr(asked) + shown_url(asked.url)
    assert [] == [secret for secret in ("swordfish", "word@", "key=1") if secret in shown]


def test_a_secret_that_is_missing_or_no_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, _ = service(headers={"X": "${ABSENT_KEY}"})
    with refused("reward.secret", "ABSENT_KEY"):
        asked.start()
    monkeypatch.setenv("ABSENT_KEY", "one\ntwo")
    with refused("reward.secret", "ABSENT_KEY") as caught:
        asked.start()
    assert "two" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "is_final"),
    [(301, True), (400, True), (404, True), (408, False), (422, True), (429, False), (500, False), (599, False)],
)
def test_which_statuses_are_tried_again(status: int, is_final: bool) -> None:
    asked, _ = service(HttpAnswer(status=status, text="", retry_after=3.0))
    with pytest.raises(RequestFailed) as caught:
        asyncio.run(asked.ask("POST", {}, seconds=5))
    result = failed(caught.value, tokens=2)
    assert ("failed", is_final, 3.0, 2) == (result.status, result.is_final, result.retry_after, result.tokens)


def test_statuses_can_be_set() -> None:
    asked, _ = service(
        HttpAnswer(status=404, text=""), HttpAnswer(status=201, text=""), success=(404,), retryable=("2xx",)
    )
    assert 404 == asyncio.run(asked.ask("POST", {}, seconds=5)).status
    with pytest.raises(RequestFailed) as caught:
        asyncio.run(asked.ask("POST", {}, seconds=5))
    assert not caught.value.is_final


def test_a_start_waits_for_a_service() -> None:
    absent = RewardError("no connection", code="reward.http")
    up = HttpAnswer(status=200, text="")
    asked, client = service(absent, HttpAnswer(status=503, text=""), up)
    asyncio.run(asked.wait_until_up("https://host/health", 30.0))
    assert ["https://host/health"] * 3 == [each["url"] for each in client.asked]
    asked, client = service(*[absent] * 40)
    with refused("reward.http"):
        asyncio.run(asked.wait_until_up("https://host/health", 30.0))
    assert 30 == len(client.asked)
    asked, client = service(HttpAnswer(status=403, text=""), up)
    with refused("reward.http", "403"):
        asyncio.run(asked.wait_until_up("https://host/health", 30.0))
    asked, client = service(HttpAnswer(status=404, text=""))
    asyncio.run(asked.wait_until_up("https://host/health", 30.0, tolerated=(404,)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "1", None, [1], {}])
def test_what_is_no_number(value: Any) -> None:
    with refused("reward.output", "the score"):
        finite(value, "the score", "there")


def test_numbers_and_truth_values() -> None:
    assert [1.0, 0.0, 2.5, -3.0] == [finite(value, "the score", "there") for value in (True, False, 2.5, -3)]


@pytest.mark.parametrize("text", ["", "x", "{", "[" * 100_000, '{"a": 1}{"a": 1}', "9" * 5000])
def test_what_is_no_json(text: str) -> None:
    with refused("reward.output") as caught:
        read_json(text, "there")
    assert len(str(caught.value)) < 1500


def test_keys_become_headers() -> None:
    assert "train/0/a%20%0A%C3%A9" == idempotency("train/0/a \né")
    assert json.dumps(idempotency("x:1|y")) == '"x:1|y"'
    first = idempotency("a", "run", {"text": "x"})
    assert first == idempotency("a", "run", {"text": "x"})
    assert first.startswith("a@")
    assert 3 == len({first, idempotency("a", "run", {"text": "y"}), idempotency("a", "other", {"text": "x"})})
