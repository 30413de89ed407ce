"""Difficulty by a language model, against a server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.abc.operator import OperatorContext, OperatorResult
from jackfield.errors import ConfigError, JackfieldError
from jackfield_bad_service import BadService, DeadlineOfHanging, bad_service
from jackfield_model_requests import read_rating
from jackfield_reward_requests import AiohttpClient


@attrs.define
class ImpatientClock(DeadlineOfHanging):
    """Notes how long it is asked to sleep."""

    slept: list[float] = attrs.field(factory=list)

    async def sleep(self, seconds: float) -> None:
        """Return at once."""
        self.slept.append(seconds)


def says(text: str | None, **fields: Any) -> Callable[[Any], Any]:
    usage = {"prompt_tokens": 80, "completion_tokens": 20}
    message = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return lambda body: {"choices": [message], "usage": usage, **fields}


@attrs.frozen
class Outcome:
    result: OperatorResult
    service: BadService
    slept: list[float]
    counted: dict[str, float]


def asked(
    applied: Any,
    rows: Sequence[Any],
    script: Sequence[Any] = (),
    right: Callable[[Any], Any] = says('{"difficulty": 4}'),  # noqa: B008
    **settings: Any,
) -> Outcome:
    async def main() -> Outcome:
        counted, client = dict[str, float](), AiohttpClient()

        def count(name: str, number: float) -> None:
            counted[name] = counted.get(name, 0.0) + number

        async with bad_service(right) as service:
            service.script, clock = list(script), ImpatientClock(service)
            context = OperatorContext(clock=clock, http=client, count=count)
            given = {"url": f"{service.address}/v1", "model": "m", "concurrency": 1, **settings}
            try:
                result = await applied("difficulty_llm", rows, 100, context, **given)
            finally:
                await client.close()
            return Outcome(result, service, clock.slept, counted)

    return asyncio.run(main())


def test_ratings_become_numbers_from_0_to_1(applied: Any) -> None:
    rows = [{"prompt": "2 + 2", "answer": 4}, {"prompt": "x^2 = 2"}, {"prompt": "Fermat"}]
    got = asked(applied, rows, [says('{"difficulty": 1}'), says("Difficulty: 5.5/10"), says("10")])
    assert {"row:0": 0.0, "row:1": 0.5, "row:2": 1.0} == {
        key: row["difficulty"] for key, row in got.result.updates.items()
    }
    shown = [body["messages"][0]["content"] for body in got.service.bodies]
    assert "<problem>\n2 + 2\n</problem>" in shown[0]
    assert "<reference_answer>\n4\n" in shown[0]
    assert "<reference_answer>\n(not given)\n" in shown[1]
    assert "1 is the easiest and 10 the hardest" in shown[0]
    assert ["/v1/models"] == got.service.paths
    assert {"tokens": 300.0} == got.counted


def test_prices_make_costs(applied: Any) -> None:
    got = asked(applied, [{"prompt": "a"}], input_price=2.0, output_price=10.0)
    assert {"tokens": 100.0, "cost": pytest.approx((80 * 2.0 + 20 * 10.0) / 1e6)} == got.counted


def test_tokens_are_estimated_if_the_address_does_not_say(applied: Any) -> None:
    template = "Rate {prompt} "
    got = asked(applied, [{"prompt": "a" * 33}], [says("difficulty: 4 ---", usage=None)], template=template)
    assert {"tokens": 39 // 4 + 17 // 4} == got.counted


def test_a_template_and_a_scale_of_the_user(applied: Any) -> None:
    template = "Rate {prompt} of {subject} from {low} to {high} as {form}; {{prompt}} { }"
    rows = [{"prompt": "this", "subject": "algebra"}, {"prompt": "that"}]
    got = asked(applied, rows, template=template, low=0.0, high=5.0, writes="hard")
    assert {"row:0": {"hard": 0.8}} == got.result.updates
    assert "'subject'" in got.result.set_aside["row:1"]
    form = '{"difficulty": <number from 0 to 5>}'
    assert (
        f"Rate this of algebra from 0 to 5 as {form}; {{prompt}} {{ }}"
        == got.service.bodies[0]["messages"][0]["content"]
    )


def test_an_answer_without_a_rating_is_asked_for_again(applied: Any) -> None:
    """The model is shown what it said; after some attempts the task is set aside, and what it cost is counted."""
    got = asked(
        applied, [{"prompt": "a"}, {"prompt": "b"}], [says("Hm."), says('{"difficulty": 7}'), *[says("No.")] * 3]
    )
    assert {"row:0": {"difficulty": pytest.approx(6 / 9)}} == got.result.updates
    assert "a model gave no rating" in got.result.set_aside["row:1"]
    assert "No." in got.result.set_aside["row:1"]
    messages = got.service.bodies[1]["messages"]
    assert ["user", "assistant", "user"] == [message["role"] for message in messages]
    assert "Hm." == messages[1]["content"]
    assert (5, {"tokens": 500.0}) == (len(got.service.bodies), got.counted)
    assert 5 == len({body["seed"] for body in got.service.bodies})


@pytest.mark.parametrize(("fault", "slept"), [("busy", 7.0), ("unavailable", 2.5), ("broken", 1.0), ("garbage", 1.0)])
def test_a_failure_that_passes_is_tried_again(applied: Any, fault: str, slept: float) -> None:
    got = asked(applied, [{"prompt": "a"}], [fault])
    assert ({"row:0"}, [slept]) == (got.result.updates.keys(), got.slept)


@pytest.mark.parametrize(
    "wrong",
    [says(None), says("  "), lambda body: {"error": {}}, lambda body: []],
    ids=["null", "spaces", "an error", "a list"],
)
def test_an_answer_that_is_none_is_tried_again(applied: Any, wrong: Any) -> None:
    got = asked(applied, [{"prompt": "a"}], [wrong])
    assert ({"row:0"}, [1.0]) == (got.result.updates.keys(), got.slept)


@pytest.mark.parametrize(("fault", "requests"), [("refused", 1), ("wrong key", 1), ("broken", 3), ("never", 3)])
def test_a_failure_that_stays_costs_its_task_only(applied: Any, fault: str, requests: int) -> None:
    got = asked(applied, [{"prompt": "a"}, {"prompt": "b"}], [fault] * requests, retries=2)
    assert ({"row:1"}, {"row:0"}) == (got.result.updates.keys(), got.result.set_aside.keys())
    assert requests + 1 == len(got.service.bodies)


def test_the_key_is_sent_and_not_shown(applied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "a-secret-key")
    got = asked(applied, [{"prompt": "a"}], ["wrong key"], api_key_env="JUDGE_KEY")
    assert "Bearer a-secret-key" == got.service.headers[0]["Authorization"]
    assert "a-secret-key" not in got.result.set_aside["row:0"]


def test_a_missing_key_and_a_wrong_address_are_refused_at_the_start(
    applied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(JackfieldError) as caught:
        asked(applied, [{"prompt": "a"}], api_key_env="JUDGE_KEY")
    assert ("reward.secret", "JUDGE_KEY") == (caught.value.code, caught.value.where)
    with pytest.raises(JackfieldError) as caught:
        asked(applied, [{"prompt": "a"}], url="http://127.0.0.1:9/v1", start_seconds=0.5)
    assert "reward.http" == caught.value.code


@pytest.mark.parametrize(
    ("text", "rating"),
    [
        ('{"difficulty": 7}', 7.0),
        ('```json\n{"explanation": "3 steps", "difficulty": 6.5}\n```', 6.5),
        ("**Difficulty:** 3", 3.0),
        ("Difficulty: 8/10, as it has 12 steps", 8.0),
        ("The rating is 4 out of 10.", 4.0),
        ("7", 7.0),
        ("<think>difficulty: 9? no</think>difficulty: 2", 2.0),
        ('"difficulty": "5"', 5.0),
        ("difficulty: 5. Again, difficulty: 5.0", 5.0),
    ],
)
def test_ratings_are_read(text: str, rating: float) -> None:
    assert rating == read_rating(text, 1.0, 10.0)


@pytest.mark.parametrize(
    "text",
    ["", "I do not know", "difficulty: 2, or difficulty: 3", "difficulty: 11", "difficulty: 0", "difficulty: 3-5",
     "difficulty: 4 to 6", "difficulty: 7/100", "difficulty: 70%", "3 or 4", "<think>difficulty: 9", "difficulty: NaN"],
)  # fmt: skip
def test_what_is_no_rating_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"rating|not from"):
        read_rating(text, 1.0, 10.0)


@given(
    st.integers(0, 1000).map(lambda number: number / 10),
    st.sampled_from(['{"difficulty": %s}', "Difficulty: %s", "%s"]),
)
def test_each_number_of_the_scale_is_read(number: float, form: str) -> None:
    assert number == read_rating(form % number, 0.0, 100.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"url": None, "api_key_env": "KEY"},
        {"url": None, "input_price": 1.0},
        {"url": "host"},
        {"model": ""},
        {"sampling": {"seed": 3}},
        {"headers": {"Authorization": "Bearer key"}},
        {"low": 5.0, "high": 5.0},
        {"template": "no problem"},
        {"template": "{prompt} {answer.text}"},
    ],
    ids=str,
)
def test_settings_without_sense_are_refused(applied: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        asyncio.run(applied("difficulty_llm", [], **{"url": "http://host/v1", "model": "m", **settings}))
