"""Embeddings of an address, against a server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from jackfield.abc.operator import OperatorContext
from jackfield.errors import DeadlineExceeded, JackfieldError
from jackfield.sdk import structure
from jackfield_bad_service import BadService, DeadlineOfHanging, bad_service
from jackfield_embeddings import EmbedderConfig, make_embedder
from jackfield_reward_requests import AiohttpClient

Found = tuple[Any, BadService, "ImpatientClock", dict[str, float]]


@attrs.define
class ImpatientClock(DeadlineOfHanging):
    """Notes how long it is asked to sleep."""

    slept: list[float] = attrs.field(factory=list)

    async def sleep(self, seconds: float) -> None:
        """Return at once."""
        self.slept.append(seconds)


def lengths(body: Any) -> Any:
    """Embed a text as its length and 1, and list the last text first."""
    data = [{"index": at, "embedding": [len(text), 1.0]} for at, text in enumerate(body["input"])]
    return {"data": data[::-1], "usage": {"total_tokens": 10 * len(data)}}


def asked(
    texts: Sequence[str],
    script: Sequence[str | Callable[[Any], Any]] = (),
    right: Callable[[Any], Any] = lengths,
    **settings: Any,
) -> Found:
    async def main() -> Found:
        client, counted = AiohttpClient(), dict[str, float]()
        async with bad_service(right) as service:
            service.script = list(script)
            clock = ImpatientClock(service)

            def count(name: str, number: float) -> None:
                counted[name] = counted.get(name, 0.0) + number

            context = OperatorContext(clock=clock, http=client, count=count)
            given = {"name": "address", "url": f"{service.address}/v1", "model": "m", **settings}
            embedder = make_embedder(structure(EmbedderConfig, given), context)
            try:
                await embedder.start()
                return await embedder.embed(texts), service, clock, counted
            except JackfieldError as error:
                return error, service, clock, counted
            finally:
                await embedder.close()
                await client.close()

    return asyncio.run(main())


def test_vectors_come_in_the_order_of_the_texts_and_have_length_1() -> None:
    texts = ["a", "abc", "ab", "", "abcd"]
    found, service, _, counted = asked(texts, batch=2)
    wanted = np.array([[len(text), 1.0] for text in texts])
    np.testing.assert_allclose(wanted / np.sqrt((wanted**2).sum(axis=1))[:, None], found)
    assert [["a", "abc"], ["ab", ""], ["abcd"]] == [body["input"] for body in service.bodies]
    assert {"m"} == {body["model"] for body in service.bodies}
    assert {"tokens": 50.0} == counted


def test_the_key_is_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBEDDINGS_KEY", "a-secret-key")
    _, service, _, _ = asked(["a"], api_key_env="EMBEDDINGS_KEY")
    assert "Bearer a-secret-key" == service.headers[0]["Authorization"]
    found, service, _, _ = asked(["a"], ["wrong key"], api_key_env="EMBEDDINGS_KEY")
    assert isinstance(found, JackfieldError)
    assert "a-secret-key" not in str(found)
    assert 1 == len(service.bodies)


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBEDDINGS_KEY", raising=False)
    found, service, _, _ = asked(["a"], api_key_env="EMBEDDINGS_KEY")
    assert "reward.secret" == found.code
    assert [] == service.bodies


@pytest.mark.parametrize(
    ("fault", "slept"),
    [("busy", 7.0), ("unavailable", 2.5), ("broken", 1.0), ("nothing", 1.0), ("garbage", 1.0), ("list", 1.0)],
)
def test_a_failure_that_passes_is_tried_again(fault: str, slept: float) -> None:
    found, service, clock, _ = asked(["abc"], [fault])
    np.testing.assert_allclose([[3 / 10**0.5, 1 / 10**0.5]], found)
    assert ([slept], 2) == (clock.slept, len(service.bodies))


@pytest.mark.parametrize("fault", ["refused", "wrong key", "redirect"])
def test_a_final_failure_is_not_tried_again(fault: str) -> None:
    found, service, clock, _ = asked(["abc"], [fault])
    assert "reward.http" == found.code
    assert ([], 1) == (clock.slept, len(service.bodies))


def test_attempts_end() -> None:
    found, service, clock, _ = asked(["abc"], ["broken"] * 3, retries=2)
    assert ("reward.http", 3, [1.0, 2.0]) == (found.code, len(service.bodies), clock.slept)


def test_a_request_without_an_answer_ends_at_its_deadline() -> None:
    found, _, _, _ = asked(["abc"], ["never"], retries=0, seconds=5.0)
    assert isinstance(found, DeadlineExceeded)
    assert "/v1/embeddings" in str(found)


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": []},
        {"data": [{"index": 0, "embedding": [0.0, 0.0]}]},
        {"data": [{"index": 0, "embedding": [1.0, None]}]},
        {"data": [{"index": 1, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": "text"}]},
        {"error": {"message": "overloaded"}},
    ],
    ids=["none", "zeros", "null", "another index", "a text", "an error"],
)
def test_an_answer_without_usable_vectors_is_refused(wrong: Any) -> None:
    found, _, _, _ = asked(["abc"], [lambda body: wrong], retries=0)
    assert "operator.embedding" == found.code


def test_vectors_of_several_lengths_are_refused() -> None:
    """Each request has vectors of one length, and they are not the same."""
    found, _, _, _ = asked(
        ["a", "b"], right=lambda body: {"data": [{"index": 0, "embedding": [1.0] * ord(body["input"][0])}]}, batch=1
    )
    assert "operator.embedding" == found.code
