"""The Responses API, with OpenAI's own client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def client(served: Any, rollout: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url, api_key=rollout.key, max_retries=0)


@pytest.mark.parametrize("by_id", [True, False])
def test_a_tool_loop_is_one_sequence(serve: Any, exact: Any, by_id: bool) -> None:
    """The next request names the response before it, or has all items."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            served.model.answers = {"first": CALL, "tool\n2": "<think>so</think>It is 2."}
            one = await api.responses.create(model="m", instructions="Be brief.", input="first", tools=[ADD])
            assert ["message", "function_call"] == [item.type for item in one.output]
            assert "I add." == one.output_text
            result = {"type": "function_call_output", "call_id": one.output[1].call_id, "output": "2"}
            options: Any = {"previous_response_id": one.id, "input": [result]}
            if not by_id:
                options = {"input": [{"role": "user", "content": "first"}, *one.output, result]}
            two = await api.responses.create(model="m", instructions="Be brief.", tools=[ADD], **options)
            assert ("It is 2.", "completed") == (two.output_text, two.status)
            assert ["reasoning", "message"] == [item.type for item in two.output]
            assert len(served.model.said[1]) == two.usage.output_tokens
            sequences = rollout.recording.sequences()
            assert [(None, None)] == [(sequence.parent, sequence.relation) for sequence in sequences]
            exact(served.model, sequences)

    asyncio.run(run())


def test_a_stream_has_the_events_that_the_client_adds_up(serve: Any) -> None:
    """The last event has the whole response; the deltas are its text and arguments."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            served.model.answers = {"first": CALL}
            async with api.responses.stream(model="m", input="first", tools=[ADD]) as stream:
                events = [event async for event in stream]
                whole = await stream.get_final_response()
            again = await api.responses.create(model="m", input="first", tools=[ADD])
            assert again.model_dump() == {
                **whole.model_dump(),
                "output": [
                    {name: value for name, value in item.items() if name not in ("parsed", "parsed_arguments")}
                    for item in again.model_dump()["output"]
                ],
            }
            texts = [event.delta for event in events if event.type == "response.output_text.delta"]
            arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            assert ("I add.", ['{"a": 1}']) == ("".join(texts), arguments)
            assert ("response.created", "response.completed") == (events[0].type, events[-1].type)
            assert 1 == len(served.model.asked)

    asyncio.run(run())


def test_an_answer_that_the_limit_cut_is_incomplete(serve: Any) -> None:
    """As OpenAI's: the status says it, and the reason."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            answer = await api.responses.create(model="m", input="first", max_output_tokens=3)
            assert ("incomplete", "max_output_tokens") == (answer.status, answer.incomplete_details.reason)
            assert "ans" == answer.output_text

    asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"input": "q", "previous_response_id": "resp_none"}, "previous_response_not_found"),
        ({"input": "q", "tools": [{"type": "web_search"}]}, "unsupported_parameter"),
        ({"input": "q", "background": True}, "unsupported_parameter"),
        ({"input": "q", "text": {"format": {"type": "json_object"}}}, "unsupported_parameter"),
        ({"input": [{"type": "image_generation_call"}]}, "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "invalid_value"),
        ({"input": "q", "unheard_of": 1}, "unknown_parameter"),
    ],
)
def test_what_is_not_served_is_refused(serve: Any, given: dict[str, Any], code: str) -> None:
    """Nothing is ignored in silence."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            with pytest.raises(openai.APIStatusError) as found:
                await api.post("/responses", body={"model": "m", **given}, cast_to=object)
            assert code == found.value.code
            assert not served.model.asked

    asyncio.run(run())
