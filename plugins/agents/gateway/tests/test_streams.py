"""Streams of OpenAI's own client: what comes while the model still generates, and what is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

USER = {"role": "user", "content": "first"}
TOOL = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
CALL = '<think>\nTwo and two.\n</think>\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def client(served: Any, rollout: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url, api_key=rollout.key, max_retries=0)


async def texts(api: openai.AsyncOpenAI, kind: str, **options: Any) -> AsyncIterator[str]:
    """Yield the pieces of a streamed answer's text."""
    if kind == "chat":
        chunks = await api.chat.completions.create(model="m", messages=[USER], stream=True, **options)  # type: ignore[list-item]
        async for chunk in chunks:
            if text := chunk.choices[0].delta.content:
                yield text
    elif kind == "completion":
        async for part in await api.completions.create(model="m", prompt="first", stream=True, **options):
            if part.choices[0].text:
                yield part.choices[0].text
    else:
        async for event in await api.responses.create(model="m", input="first", stream=True, **options):
            if event.type == "response.output_text.delta":
                yield event.delta


@pytest.mark.parametrize("kind", ["chat", "completion", "response"])
def test_text_comes_before_the_last_token_is_generated(serve: Any, exact: Any, kind: str) -> None:
    """The model's server holds the last token back until the client has got the first text."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            served.model.hold = asyncio.Event()
            found = []
            async for text in texts(api, kind):
                found.append(text)
                served.model.hold.set()
            assert len(found) > 1
            assert "answer 1" == "".join(found)
            exact(served.model, rollout.recording.sequences())

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["chat", "completion", "response"])
def test_a_client_that_leaves_and_comes_back_hears_all_of_the_same_answer(serve: Any, exact: Any, kind: str) -> None:
    """It is generated once, and goes on while nobody listens."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            served.model.hold = asyncio.Event()
            stream = texts(api, kind)
            first = await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            found = []
            async for text in texts(api, kind):
                found.append(text)
                served.model.hold.set()
            assert first == found[0][: len(first)]
            assert ["answer 1"] * 2 == ["".join(found), "".join([text async for text in texts(api, kind)])]
            assert (1, 2) == (len(served.model.asked), rollout.recording.repeats)
            exact(served.model, rollout.recording.sequences())

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["chat", "completion", "response"])
def test_a_server_that_does_not_stream_has_its_answer_sent_at_once(serve: Any, exact: Any, kind: str) -> None:
    async def run() -> None:
        async with serve() as served:
            served.streams = False
            async with served.rollout() as rollout, client(served, rollout) as api:
                assert ["answer 1"] == [text async for text in texts(api, kind)]
                exact(served.model, rollout.recording.sequences())

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["chat", "completion", "response"])
def test_a_server_that_fails_in_the_middle_is_an_error_and_a_repeat_is_recorded_once(
    serve: Any, exact: Any, kind: str
) -> None:
    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            served.model.breaks = True
            stream = texts(api, kind)
            assert "answer 1".startswith(await anext(stream))
            with pytest.raises(openai.APIError, match="it has broken"):
                _ = [text async for text in stream]
            assert () == rollout.recording.sequences()
            assert "answer 2" == "".join([text async for text in texts(api, kind)])
            exact(served.model, rollout.recording.sequences())

    asyncio.run(run())


def test_reasoning_and_text_come_as_they_are_and_calls_at_the_end(serve: Any, exact: Any) -> None:
    """The last token is held back until reasoning and text are there: the call, which is not complete, is not."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            served.model.answers, served.model.hold = {"first": CALL}, asyncio.Event()
            options: Any = {"messages": [USER], "tools": [{"type": "function", "function": TOOL}]}
            reasoning = content = ""
            calls, held = [], [True]
            async for chunk in await api.chat.completions.create(model="m", stream=True, **options):
                delta = chunk.choices[0].delta
                reasoning += getattr(delta, "reasoning_content", None) or ""
                content += delta.content or ""
                calls += [(call.function.name, served.model.hold.is_set()) for call in delta.tool_calls or ()]
                held.append(not served.model.hold.is_set())
                if (reasoning, content) == ("Two and two.", "I add."):
                    served.model.hold.set()
            whole = (await api.chat.completions.create(model="m", **options)).choices[0].message
            assert (reasoning, content) == (whole.reasoning_content, whole.content) == ("Two and two.", "I add.")
            assert [("add", True)] == calls
            assert sum(held) > 10
            exact(served.model, rollout.recording.sequences())
            asked: Any = {"input": "first", "tools": [{"type": "function", **TOOL}]}
            async with api.responses.stream(model="m", **asked) as stream:
                done = [event async for event in stream if event.type == "response.output_item.done"]
                items = [(event.output_index, event.item.type) for event in done]
                assert ["reasoning", "message", "function_call"] == [
                    item.type for item in (await stream.get_final_response()).output
                ]
            assert [(0, "reasoning"), (1, "message"), (2, "function_call")] == items
            exact(served.model, rollout.recording.sequences())

    asyncio.run(run())


def test_the_log_probs_of_a_stream_are_those_of_the_whole_answer(serve: Any) -> None:
    """Of chats and completions, several answers at a time, with the offsets of completions."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout, client(served, rollout) as api:
            options: Any = {"messages": [USER], "logprobs": True, "n": 2}
            found: dict[int, list[float]] = {0: [], 1: []}
            async for chunk in await api.chat.completions.create(model="m", stream=True, **options):
                for choice in chunk.choices:
                    tokens = choice.logprobs.content if choice.logprobs else None
                    found[choice.index] += [each.logprob for each in tokens or ()]
            whole = await api.chat.completions.create(model="m", **options)
            for choice in whole.choices:
                assert found[choice.index] == [each.logprob for each in choice.logprobs.content]
            parts: Any = {"tokens": [], "token_logprobs": [], "text_offset": []}
            options = {"prompt": "first", "logprobs": 0}
            async for part in await api.completions.create(model="m", stream=True, **options):
                told = part.choices[0].logprobs
                for name, values in parts.items():
                    values += getattr(told, name) if told else []
            once = (await api.completions.create(model="m", **options)).choices[0].logprobs
            assert parts == {name: getattr(once, name) for name in parts}

    asyncio.run(run())
