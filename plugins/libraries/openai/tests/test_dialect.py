"""vLLM's dialect of OpenAI's API: tools, texts and bytes of tokens, tokenizing, responses, errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import GenerateChunk, RolloutContext
from jackfield_chat_model import END, byte_tokenizer
from jackfield_huggingface.shaping import FIELDS, ShapedChunk, ShapedRequest, ShapedResult
from jackfield_openai import EndpointConfig
from jackfield_openai.endpoint import OpenAIEndpoint
from jackfield_testing import in_loop

from .conftest import Script, ScriptedServer

ASK: Any = [{"role": "user", "content": "hot?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
Byte = Callable[..., contextlib.AbstractAsyncContextManager[tuple[openai.AsyncOpenAI, Script]]]


class ByteServer(ScriptedServer):
    """Answers with the bytes of a text, two at a time, and tells the likeliest tokens: the one drawn, and ``?``."""

    shaping = FIELDS
    max_model_len = 99
    text = b""

    async def generate(self, request: Any) -> Any:
        chunks = [chunk async for chunk in self.generate_stream(request)]
        joined: dict[str, Any] = {
            name: tuple(value for chunk in chunks for value in getattr(chunk, name, ()))
            for name in ("token_ids", "log_probs", "weight_versions", "likeliest")
        }
        prompt = chunks[0].prompt if isinstance(chunks[0], ShapedChunk) else ()
        return ShapedResult(request_id="", prompt=prompt, finish_reason=chunks[-1].finish_reason or "abort", **joined)

    async def generate_stream(self, request: Any) -> AsyncIterator[GenerateChunk]:  # type: ignore[override]
        self.script.asked.append(request)
        tokens = (*self.text, END)[: request.sampling.max_new_tokens]
        shaping = request.shaping if isinstance(request, ShapedRequest) else None
        for begin in range(0, len(tokens), 2):
            some = tokens[begin : begin + 2]
            last = begin + 2 >= len(tokens)
            top = tuple(((token, -0.5), (ord("?"), -1.0))[: shaping.top_log_probs] for token in some) if shaping else ()
            prompt: Any = ()
            if shaping and shaping.prompt_log_probs and not begin:
                prompt = tuple((-2.0, 3, ((token, -2.0),)) for token in request.prompt_ids[1:])
            yield ShapedChunk(
                request_id="",
                token_ids=some,
                log_probs=(-0.5,) * len(some),
                weight_versions=(0,) * len(some),
                likeliest=top,
                prompt=prompt,
                finish_reason=("stop" if tokens[-1] == END else "length") if last else None,
            )
            if self.script.hangs:
                await asyncio.Event().wait()


@pytest.fixture
def say(tmp_path: Path) -> Byte:
    """``async with say(text) as (client, script)``: an endpoint whose model answers with a text."""

    @contextlib.asynccontextmanager
    async def serving(
        text: str, shaping: frozenset[str] = FIELDS, end: str = "<|im_end|>", **settings: Any
    ) -> AsyncIterator[Any]:
        byte_tokenizer().save_pretrained(tmp_path)
        for file in tmp_path.glob("token*.json"):
            file.write_text(file.read_text().replace("<|im_end|>", end))
        server = ByteServer(None, RolloutContext(model=ModelSpec(path=str(tmp_path))))
        server.script, server.text, server.shaping = Script(), text.encode(), shaping
        endpoint = OpenAIEndpoint(server, EndpointConfig(**{"model_name": "policy", **settings}))
        client = openai.AsyncOpenAI(base_url=await endpoint.start(), api_key="none", max_retries=0)
        try:
            yield client, server.script
        finally:
            await client.close()
            await endpoint.close()

    return serving


async def raw(client: openai.AsyncOpenAI, path: str, body: Any) -> Any:
    """Post to a path beside ``/v1``."""
    return json.loads(await client.post(str(client.base_url).removesuffix("/v1/") + path, body=body, cast_to=str))


@in_loop
async def test_the_model_sees_tools_and_its_calls_come_back(say: Byte) -> None:
    """Whole and streamed; the conversation goes on with the call and its result; ``none`` looks for no calls."""
    async with say(f"Let me see. {CALL}{CALL}") as (client, script):
        answer = (await client.chat.completions.create(model="policy", messages=ASK, tools=[TOOL])).choices[0]
        calls: Any = answer.message.tool_calls
        assert ("tool_calls", "Let me see.", 2) == (answer.finish_reason, answer.message.content, len(calls))
        assert ("weather", {"city": "Rome"}) == (calls[0].function.name, json.loads(calls[0].function.arguments))
        assert calls[0].id != calls[1].id
        assert b'"name": "weather"' in bytes(token for token in script.asked[0].prompt_ids if token < 256)
        fields: Any = {"model": "policy", "messages": ASK, "tools": [TOOL], "parallel_tool_calls": False}
        events = [event.choices[0] async for event in await client.chat.completions.create(**fields, stream=True)]
        deltas = [call for event in events for call in event.delta.tool_calls or []]
        assert [(0, "weather")] == [(call.index, call.function.name) for call in deltas if call.function]
        assert "tool_calls" == events[-1].finish_reason
        back: Any = [*ASK, answer.message.model_dump(exclude_none=True)]
        back += [{"role": "tool", "tool_call_id": call.id, "content": "warm"} for call in calls]
        await client.chat.completions.create(model="policy", messages=back, tools=[TOOL])
        shown = bytes(token for token in script.asked[-1].prompt_ids if token < 256).decode()
        assert shown.count('{"name": "weather", "arguments": {"city": "Rome"}}') == 2
        none = await client.chat.completions.create(model="policy", messages=ASK, tools=[TOOL], tool_choice="none")
        assert ("stop", None) == (none.choices[0].finish_reason, none.choices[0].message.tool_calls)
        assert script.asked[0].prompt_ids == script.asked[3].prompt_ids


@pytest.mark.parametrize("end", ["<|im_end|>", "<end_of_utterance>", "[EOS]"])
@in_loop
async def test_the_token_that_ends_an_answer_is_no_text_beside_tools(say: Byte, end: str) -> None:
    """Special tokens are read as marks of calls, whatever the model's last token is called."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    async with say("It is warm.", end=end, tool_format="hermes") as (client, _):
        asked: Any = {"model": "policy", "messages": ASK, "tools": tools}
        answer = await client.chat.completions.create(**asked)
        assert "It is warm." == answer.choices[0].message.content
        pieces = [each async for each in await client.chat.completions.create(**asked, stream=True)]
        assert "It is warm." == "".join(each.choices[0].delta.content or "" for each in pieces if each.choices)


@in_loop
async def test_a_tool_that_has_to_be_called_is_a_grammar(say: Byte) -> None:
    text = json.dumps([{"name": "weather", "parameters": {"city": "Rome"}}])
    async with say(text) as (client, script):
        fields: Any = {"model": "policy", "messages": ASK, "tools": [TOOL]}
        answer = (await client.chat.completions.create(**fields, tool_choice="required")).choices[0]
        call: Any = (answer.message.tool_calls or [None])[0]
        assert ("tool_calls", {"city": "Rome"}) == (answer.finish_reason, json.loads(call.function.arguments))
        asked: Any = script.asked[0]
        schema = json.loads(asked.shaping.grammar.text)
        assert {"const": "weather"} == schema["items"]["properties"]["name"]
        assert {**PARAMETERS, "additionalProperties": False} == schema["items"]["properties"]["parameters"]
        another: Any = {"type": "function", "function": {"name": "another"}}
        for choice, more in ((another, {}), ("sometimes", {}), ("required", {"tools": openai.omit})):
            with pytest.raises(openai.BadRequestError, match="tool_choice cannot be served"):
                await client.chat.completions.create(**{**fields, **more}, tool_choice=choice)
        form: Any = {"type": "json_object"}
        with pytest.raises(openai.BadRequestError, match="an answer cannot be both"):
            await client.chat.completions.create(**fields, response_format=form)
        cut = (await client.chat.completions.create(**fields, tool_choice="required", max_tokens=9)).choices[0]
        assert ("length", text[:9]) == (cut.finish_reason, cut.message.content)
    async with say(text, FIELDS - {"grammar"}) as (client, script):
        with pytest.raises(openai.BadRequestError, match="tool_choice is not served") as caught:
            await client.chat.completions.create(**fields, tool_choice="required")
        assert ("unsupported_parameter", "tool_choice") == (caught.value.code, caught.value.param)
        assert [] == script.asked


@in_loop
async def test_tokens_that_are_parts_of_characters_have_their_bytes(say: Byte) -> None:
    async with say("é!") as (client, _):
        fields: Any = {"model": "policy", "messages": ASK, "logprobs": True, "top_logprobs": 2}
        answer = (await client.chat.completions.create(**fields)).choices[0]
        assert answer.logprobs is not None
        told = answer.logprobs.content or []
        assert ["\\xc3", "\\xa9", "!", "<|im_end|>"] == [each.token for each in told]
        assert [[0xC3], [0xA9], [0x21]] == [each.bytes for each in told[:3]]
        assert [("!", -0.5), ("?", -1.0)] == [(each.token, each.logprob) for each in told[2].top_logprobs]
        events = [each.choices[0] async for each in await client.chat.completions.create(**fields, stream=True)]
        assert ["", "é", "!"] == ["", *[each.delta.content for each in events if each.delta.content or ""]]
        assert told == [each for event in events if event.logprobs for each in event.logprobs.content or []]
        ids = await client.chat.completions.create(**fields, extra_body={"return_tokens_as_token_ids": True})
        assert ids.choices[0].logprobs is not None
        assert "token_id:195" == (ids.choices[0].logprobs.content or [])[0].token


@in_loop
async def test_a_prompt_is_told_again_with_its_log_probs(say: Byte) -> None:
    async with say("é!") as (client, script):
        fields: Any = {"model": "policy", "prompt": "ñ:", "echo": True, "logprobs": 1}
        choice = (await client.completions.create(**fields)).choices[0]
        found: Any = choice.logprobs
        assert "ñ:é!" == choice.text
        assert ["bytes:\\xc3", "bytes:\\xb1", ":", "bytes:\\xc3", "bytes:\\xa9", "!", "<|im_end|>"] == found.tokens
        assert [None, -2.0, -2.0, -0.5, -0.5, -0.5, -0.5] == found.token_logprobs
        assert [0, 0, 1, 2, 2, 3, 4] == found.text_offset
        assert [None, {"bytes:\\xb1": -2.0}, {":": -2.0}] == found.top_logprobs[:3]
        events = [each.choices[0] async for each in await client.completions.create(**fields, stream=True)]
        assert "ñ:é!" == "".join(each.text for each in events)
        only = (await client.completions.create(**{**fields, "max_tokens": 0})).choices[0]
        assert ("ñ:", "length", 3) == (only.text, only.finish_reason, len(only.logprobs.tokens or []))  # type: ignore[union-attr]
        ranked = (
            await client.completions.create(model="policy", prompt="ñ:", extra_body={"prompt_logprobs": 1})
        ).choices
        listed: Any = (ranked[0].model_extra or {})["prompt_logprobs"]
        assert [None, {"177": {"logprob": -2.0, "rank": 3, "decoded_token": "\\xb1"}}] == listed[:2]
        assert all(each.shaping.prompt_log_probs for each in script.asked)  # type: ignore[attr-defined]


@in_loop
async def test_texts_and_tokens_are_converted(say: Byte) -> None:
    async with say("x") as (client, script):
        found = await raw(client, "/tokenize", {"model": "policy", "prompt": "aé", "return_token_strs": True})
        assert {
            "count": 3,
            "tokens": [97, 195, 169],
            "token_strs": ["a", "\\xc3", "\\xa9"],
            "max_model_len": 99,
        } == found
        assert {"prompt": "aé<|im_end|>"} == await raw(client, "/detokenize", {"tokens": [97, 195, 169, END]})
        settings: Any = {"enable_thinking": False}
        chat = {"messages": ASK, "tools": [TOOL], "chat_template_kwargs": settings}
        shown = await raw(client, "/tokenize", chat)
        await client.chat.completions.create(
            model="policy", messages=ASK, tools=[TOOL], extra_body={"chat_template_kwargs": settings}
        )
        assert tuple(shown["tokens"]) == script.asked[0].prompt_ids
        assert b"<think></think>" == bytes(script.asked[0].prompt_ids[-15:])
        begun: Any = [*ASK, {"role": "assistant", "content": "Yes"}]
        await client.chat.completions.create(
            model="policy", messages=begun, extra_body={"continue_final_message": True}
        )
        assert b"Yes" == bytes(script.asked[-1].prompt_ids[-3:])
        with pytest.raises(openai.BadRequestError, match=r"chat_template_kwargs\.tokenize"):
            await raw(client, "/tokenize", {"messages": ASK, "chat_template_kwargs": {"tokenize": False}})


@in_loop
async def test_models_and_errors_have_openais_codes(say: Byte) -> None:
    """And nulls, and values that change nothing, are served."""
    async with say("x") as (client, script):
        assert 99 == ((await client.models.retrieve("policy")).model_extra or {})["max_model_len"]
        for call in (client.models.retrieve("other"), client.completions.create(model="other", prompt="x")):
            with pytest.raises(openai.NotFoundError) as caught:
                await call
            assert ("model_not_found", "model") == (caught.value.code, caught.value.param)
        neutral: Any = {"frequency_penalty": 0, "presence_penalty": None, "logit_bias": {}, "stop": None, "tools": []}
        neutral |= {"top_logprobs": None, "tool_choice": "none", "response_format": {"type": "text"}, "seed": None}
        neutral |= {"min_tokens": 0, "repetition_penalty": 1.0, "use_beam_search": False, "unheard_of": None}
        neutral |= {"chat_template_kwargs": {}, "echo": None, "stream_options": None, "reasoning_effort": None}
        await raw(client, "/v1/chat/completions", {"model": "policy", "messages": ASK, **neutral})
        assert not isinstance(script.asked[-1], ShapedRequest)
        with pytest.raises(openai.BadRequestError, match="top_logprobs cannot be served"):
            await raw(client, "/v1/chat/completions", {"messages": ASK, "top_logprobs": 3})


@in_loop
async def test_responses(say: Byte) -> None:
    async with say("fine") as (client, script):
        first = await client.responses.create(model="policy", input="Hello", instructions="Be kind.")
        assert ("fine", "completed") == (first.output_text, first.status)
        second = await client.responses.create(model="policy", input="And?", previous_response_id=first.id)
        shown = bytes(token for token in script.asked[-1].prompt_ids if token < 256).decode()
        assert ["Hello", "fine", "And?"] == [each for each in shown.split("\n") if each in ("Hello", "fine", "And?")]
        events = [each async for each in await client.responses.create(model="policy", input="x", stream=True)]
        assert "fine" == "".join(each.delta for each in events if each.type == "response.output_text.delta")
        assert second.id != first.id
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model="policy", input="x", previous_response_id="resp_x")
        assert "previous_response_not_found" == caught.value.code
    async with say(CALL) as (client, _):
        tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
        item: Any = (await client.responses.create(model="policy", input="x", tools=[tool])).output[0]
        assert ("function_call", "weather") == (item.type, item.name)
        with pytest.raises(openai.BadRequestError, match="nothing else is served"):
            await client.responses.create(model="policy", input="x", tools=[{"type": "web_search"}])


@in_loop
async def test_a_response_goes_on_with_system_items_but_without_instructions(say: Byte) -> None:
    """As OpenAI's: ``instructions`` count for one request alone, items are the conversation."""
    async with say("fine") as (client, script):
        items: Any = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "Hello"}]
        first = await client.responses.create(model="policy", input=items, store=True)
        await client.responses.create(model="policy", input="And?", previous_response_id=first.id)
        shown = bytes(token for token in script.asked[-1].prompt_ids if token < 256).decode()
        lines = ("Rhyme.", "Hello", "fine", "And?")
        assert list(lines) == [each for each in shown.split("\n") if each in lines]
        first = await client.responses.create(model="policy", input="Hello", instructions="Be kind.")
        await client.responses.create(model="policy", input="And?", previous_response_id=first.id)
        shown = bytes(token for token in script.asked[-1].prompt_ids if token < 256).decode()
        assert "Be kind." not in shown
        assert "Hello" in shown


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"n": 2, "stream": True}, "unsupported_parameter", "n"),
        ({"include": ["message.output_text.logprobs"]}, "unsupported_parameter", "include"),
        ({"return_token_ids": True}, "unsupported_parameter", "return_token_ids"),
        ({"prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"text": {"format": "json"}}, "invalid_type", "text.format"),
        ({"text": {"form": {}}}, "unknown_parameter", "text.form"),
        ({"text": {"verbosity": "high"}}, "unsupported_parameter", "text.verbosity"),
        ({"reasoning": {"effort": 3}}, "invalid_type", "reasoning.effort"),
        ({"max_output_tokens": 2**31}, "invalid_value", "max_output_tokens"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "invalid_value", "input"),
        ({"input": [{"content": "x"}]}, "missing_required_parameter", "input[0].role"),
        ({"input": [{"role": "king", "content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "user", "content": []}]}, "invalid_value", "input[0].content"),
        (
            {"input": [{"type": "function_call_output", "output": "7"}]},
            "missing_required_parameter",
            "input[0].call_id",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]},
            "invalid_type",
            "input[0].arguments",
        ),
    ],
)  # fmt: skip
def test_what_a_response_cannot_have_is_refused_by_the_name_that_the_client_sent(
    say: Byte, fields: dict[str, Any], code: str, param: str
) -> None:
    async def run() -> None:
        async with say("fine") as (client, script):
            with pytest.raises(openai.BadRequestError) as caught:
                await raw(client, "/v1/responses", {"model": "policy", "input": "x", **fields})
            assert (code, param) == (caught.value.code, caught.value.param)
            assert not script.asked

    asyncio.run(run())


@pytest.mark.parametrize(("name", "value"), [("name", 3), ("parameters", "x"), ("parameters", [])])
@in_loop
async def test_a_tool_of_wrong_types_is_refused(say: Byte, name: str, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", name: value}}
    async with say("fine") as (client, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await raw(client, "/v1/chat/completions", {"messages": ASK, "tools": [tool], "tool_choice": "required"})
        assert ("invalid_type", f"tools[0].function.{name}") == (caught.value.code, caught.value.param)


@in_loop
async def test_responses_are_streamed_while_the_model_generates(say: Byte) -> None:
    """The first text comes from a model that never says the rest; one that has called a tool gets the same items."""
    async with say("fine") as (client, script):
        script.hangs = True
        async with await client.responses.create(model="policy", input="x", stream=True) as events:
            kinds = []
            async for event in events:
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    break
        assert "fi" == event.delta
        assert ["response.created", "response.in_progress", "response.output_item.added"] == kinds[:3]
    async with say(f"Let me see. {CALL}") as (client, _):
        tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
        whole = await client.responses.create(model="policy", input="x", tools=[tool])
        streamed = await client.responses.create(model="policy", input="x", tools=[tool], stream=True)
        *_, last = [event async for event in streamed]
        assert "response.completed" == last.type
        assert [(item.type, item.status) for item in whole.output] == [
            (item.type, item.status) for item in last.response.output
        ]
        assert whole.output_text == last.response.output_text == "Let me see."


def test_settings_import_no_web_server() -> None:
    """Most replicas have none."""
    code = "import jackfield_openai, sys; assert 'aiohttp' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
