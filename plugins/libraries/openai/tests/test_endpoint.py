"""OpenAI's own client against the endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from jackfield.errors import ConfigError, RolloutError

from .conftest import ANSWER, Serve

QUESTION: Any = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]


def asyncio_test(function: Any) -> Any:
    """Run an asynchronous test."""

    def run(serve: Serve) -> None:
        asyncio.run(function(serve))

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return run


@asyncio_test
async def test_a_completion_of_a_text(serve: Serve) -> None:
    async with serve() as (client, script):
        answer = await client.completions.create(
            model="any", prompt="one two", max_tokens=8, temperature=0.5, top_p=0.9, seed=5, logprobs=0,
            extra_body={"top_k": 4, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [2]},
        )  # fmt: skip
    [choice] = answer.choices
    assert ("one two three", "stop") == (choice.text, choice.finish_reason)
    assert choice.logprobs is not None
    assert (["one", "two", "three"], [-0.5, -1.0, -1.5]) == (choice.logprobs.tokens, choice.logprobs.token_logprobs)
    assert answer.usage is not None
    assert (2, 3, 5) == (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    [asked] = script.asked
    assert (3, 4) == asked.prompt_ids
    drawn = asked.sampling
    assert (8, 0.5, 0.9, 4, 0.1) == (
        drawn.max_new_tokens, drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p,
    )  # fmt: skip
    assert (5, (2,), True) == (drawn.seed, drawn.stop_token_ids, drawn.ignore_eos)


@asyncio_test
async def test_token_ids_in_and_out(serve: Serve) -> None:
    async with serve() as (client, script):
        answer = await client.completions.create(
            model="any", prompt=[[3], [4, 5]], n=2, seed=0, max_tokens=2, extra_body={"return_token_ids": True}
        )
    assert [(3,), (3,), (4, 5), (4, 5)] == [asked.prompt_ids for asked in script.asked]
    assert [0, 1, 2, 3] == [asked.sampling.seed for asked in script.asked]
    assert [0, 1, 2, 3] == [choice.index for choice in answer.choices]
    for choice, prompt in zip(answer.choices, ([3], [3], [4, 5], [4, 5]), strict=True):
        extra = choice.model_extra or {}
        assert (list(ANSWER[:2]), [0, 1], prompt) == (
            extra["token_ids"], extra["weight_versions"], extra["prompt_token_ids"],
        )  # fmt: skip
        assert "length" == choice.finish_reason
    assert answer.usage is not None
    assert 3 == answer.usage.prompt_tokens


@asyncio_test
async def test_a_chat(serve: Serve) -> None:
    async with serve() as (client, script):
        answer = await client.chat.completions.create(model="any", messages=QUESTION, logprobs=True)
    [choice] = answer.choices
    assert ("assistant", "one two three") == (choice.message.role, choice.message.content)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [("one", -0.5), ("two", -1.0), ("three", -1.5)] == [
        (each.token, each.logprob) for each in choice.logprobs.content
    ]
    assert (1, 3, 4, 2) == script.asked[0].prompt_ids  # <user> one two <assistant>


@asyncio_test
async def test_a_streamed_chat(serve: Serve) -> None:
    async with serve() as (client, _):
        events = [
            event
            async for event in await client.chat.completions.create(
                model="any", messages=QUESTION, stream=True, stream_options={"include_usage": True}
            )
        ]
    pieces = [event.choices[0] for event in events if event.choices]
    assert ["one", " two", " three"] == [piece.delta.content for piece in pieces]
    assert [None, None, "stop"] == [piece.finish_reason for piece in pieces]
    assert events[-1].usage is not None
    assert (4, 3) == (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens)


@asyncio_test
async def test_a_streamed_completion_ends_before_its_stop_string(serve: Serve) -> None:
    async with serve() as (client, script):
        stream = await client.completions.create(model="any", prompt="one", stop=" three", stream=True)
        text = "".join([event.choices[0].text async for event in stream])
    assert "one two" == text
    assert (" three",) == script.asked[0].sampling.stop


@asyncio_test
async def test_a_client_that_leaves_ends_its_requests(serve: Serve) -> None:
    async with serve() as (client, script):
        script.hangs = True
        stream = await client.completions.create(model="any", prompt="one", n=2, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: len(script.ended) == 2)
        waiting = asyncio.create_task(client.completions.create(model="any", prompt="one"))
        await until(lambda: len(script.asked) == 3)
        waiting.cancel()
        await until(lambda: len(script.ended) == 3)


@asyncio_test
async def test_a_deadline_ends_a_request_and_names_the_replica(serve: Serve) -> None:
    async with serve(request_seconds=0.05) as (client, script):
        script.hangs = True
        with pytest.raises(openai.InternalServerError, match="replica 3") as caught:
            await client.completions.create(model="any", prompt="one")
        assert 504 == caught.value.status_code
        await until(lambda: len(script.ended) == 1)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a field of chats": ({"tools": [{"type": "function"}]}, "unknown key 'tools'"),
    "a field that is not served": ({"suffix": "end"}, "suffix cannot be served"),
    "a number beyond its range": ({"frequency_penalty": 3}, "value at frequency_penalty"),
    "a number as text": ({"presence_penalty": "1"}, "presence_penalty cannot be served"),
    "a bias of a word": ({"logit_bias": {"one": 1}}, "logit_bias cannot be served"),
    "what this server cannot do": ({"frequency_penalty": 1}, "frequency_penalty is not served by this server"),
    "a schema, too": (
        {"response_format": {"type": "json_object"}},
        "response_format is not served by this server: it cannot make answers match a grammar",
    ),
    "two grammars": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs cannot be served"),
    "an end before the beginning": ({"min_tokens": 20}, "min_tokens cannot be served"),
    "no tokens": ({"max_tokens": 0}, "max_tokens cannot be served"),
    "a misspelt field": ({"temprature": 1}, "unknown key 'temprature'"),
    "a wrong type": ({"temperature": "hot"}, "temperature cannot be served"),
    "no prompt": ({"prompt": None}, "prompt cannot be served"),
    "a prompt of something else": ({"prompt": [{"a": 1}]}, "prompt cannot be served"),
    "an empty stop string": ({"stop": ""}, "stop cannot be served"),
    "too many answers": ({"n": 1000}, "value at n"),
    "likelier tokens": ({"logprobs": 3}, "top_logprobs is not served"),
    "too many of them": ({"logprobs": 30}, "value at logprobs"),
}


@asyncio_test
async def test_bad_requests_are_refused_and_nothing_is_asked(serve: Serve) -> None:
    async with serve() as (client, script):
        for name, (fields, message) in BAD.items():
            with pytest.raises(openai.BadRequestError, match=message) as caught:
                await client.completions.create(model="any", prompt="one", extra_body=fields)
            assert caught.value.code, name
        with pytest.raises(openai.BadRequestError, match="messages cannot be served"):
            await client.chat.completions.create(model="any", messages=[])
        picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        with pytest.raises(openai.BadRequestError, match="expected text: nothing else is served"):
            await client.chat.completions.create(model="any", messages=picture)
        assert [] == script.asked


@asyncio_test
async def test_neutral_values_are_served(serve: Serve) -> None:
    async with serve() as (client, script):
        await client.completions.create(
            model="any", prompt="one", presence_penalty=0, best_of=1, echo=False, user="somebody", logit_bias={}
        )
        assert 1 == len(script.asked)


@asyncio_test
async def test_what_the_replica_refuses_is_told(serve: Serve) -> None:
    async with serve() as (client, script):
        script.failure = RolloutError("temperature is negative", code="rollout.request")
        with pytest.raises(openai.BadRequestError, match="temperature is negative"):
            await client.completions.create(model="any", prompt="one")
        script.failure = RolloutError("the weights are old", code="rollout.stale")
        with pytest.raises(openai.InternalServerError, match="the weights are old") as caught:
            await client.completions.create(model="any", prompt="one", stream=True)
        assert 503 == caught.value.status_code
        script.failure, script.fails_after = RolloutError("the server is gone", code="rollout.stopped"), 1
        with pytest.raises(openai.APIError, match="the server is gone"):
            async for _ in await client.completions.create(model="any", prompt="one", stream=True):
                pass


@asyncio_test
async def test_an_error_that_is_not_ours_tells_nothing_about_the_inside(serve: Serve) -> None:
    async with serve() as (client, script):
        script.failure = ValueError("secret")
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="any", prompt="one")
        assert "secret" not in str(caught.value)


@asyncio_test
async def test_a_key_is_asked_for(serve: Serve) -> None:
    async with serve(api_key="right", key="wrong") as (client, script):
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model="any", prompt="one")
        await client.with_options(api_key="right").completions.create(model="any", prompt="one")
        assert 1 == len(script.asked)


@asyncio_test
async def test_beyond_loopback_there_must_be_a_key(serve: Serve) -> None:
    with pytest.raises(ConfigError) as caught:
        async with serve(host="0.0.0.0"):
            pass
    assert "config.invalid-value" == caught.value.code


@asyncio_test
async def test_a_port_that_is_taken_is_named(serve: Serve) -> None:
    async with serve() as (client, _):
        port = client.base_url.port
        with pytest.raises(ConfigError) as caught:
            async with serve(port=port - 3):  # the replica's number counts on
                pass
        assert "config.invalid-value" == caught.value.code


@asyncio_test
async def test_a_model_of_another_name_is_refused(serve: Serve) -> None:
    async with serve(model_name="ours") as (client, _):
        assert ["ours"] == [model.id async for model in client.models.list()]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="theirs", prompt="one")
        assert "ours" == (await client.completions.create(model="ours", prompt="one")).model


@asyncio_test
async def test_health_and_metrics(serve: Serve) -> None:
    async with serve() as (client, script):
        await client.completions.create(model="any", prompt="one two", max_tokens=2)
        script.hangs = True
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.2).completions.create(model="any", prompt="one")
        await until(lambda: len(script.ended) == 2)
        script.hangs = False
        root = str(client.base_url).removesuffix("v1/")
        found = (await client.get(root + "metrics", cast_to=str)).splitlines()
        for line in (
            'jackfield_rollout_requests_total{finish_reason="length",replica="3"} 1.0',
            'jackfield_rollout_requests_total{finish_reason="error",replica="3"} 1.0',
            'jackfield_rollout_tokens_total{kind="prompt",replica="3"} 3.0',
            'jackfield_rollout_tokens_total{kind="generated",replica="3"} 2.0',
            'jackfield_rollout_running{replica="3"} 2.0',
            'jackfield_rollout_weight_version{replica="3"} 7.0',
            'jackfield_rollout_request_seconds_count{replica="3"} 2.0',
        ):
            assert line in found
        script.failure = RolloutError("dead", code="rollout.stopped")
        with pytest.raises(openai.InternalServerError) as caught:
            await client.get(root + "health", cast_to=str)
        assert 503 == caught.value.status_code


async def until(condition: Any) -> None:
    """Let the other tasks run until something holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)
