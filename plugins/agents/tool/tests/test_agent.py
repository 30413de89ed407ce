"""The loop: what the model is shown, what is called, and why a rollout ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import pytest

from jackfield.abc.agent import AgentContext, AgentLoopOutput, ToolCall, ToolResult
from jackfield.errors import ConfigError, DataError
from jackfield.sdk import structure
from jackfield_agent_tool.agent import ToolAgent, ToolImagesAgent
from jackfield_agent_tool.formats import detect
from jackfield_agent_tool.settings import Config
from jackfield_conformance.support.agent_model import Letters, Model
from jackfield_testing import refused
from jackfield_tool_calls import FORMATS

Call = Callable[[ToolCall], Awaitable[ToolResult]]
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ADD = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
LONG: Mapping[str, Any] = {"max_new_tokens": 2000}


@attrs.define(eq=False)
class Tools:
    """Tools of one rollout; by default each call adds."""

    function: Call | None = None
    schemas: tuple[Mapping[str, Any], ...] = (SCHEMA,)
    asked: list[ToolCall] = attrs.field(factory=list)

    async def call(self, call: ToolCall) -> ToolResult:
        self.asked.append(call)
        if self.function is not None:
            return await self.function(call)
        return ToolResult(text=str(sum(call.arguments.values())))


def play(
    answers: Sequence[str],
    tools: Tools | None = None,
    sampling: Mapping[str, Any] = LONG,
    context: Any = None,
    cls: type[ToolAgent] = ToolAgent,
    **config: Any,
) -> tuple[AgentLoopOutput, Model, list[str]]:
    """Run a rollout; return its output, the model, and the prompts as texts."""
    model = Model(answers, tokenizer=Letters())
    given = AgentContext(generate=model, tokenizer=model.tokenizer, tools=tools or Tools(), **(context or {}))
    agent = cls(structure(Config, {"format": "hermes", **config}), given)
    output = asyncio.run(agent.run(sampling, messages=[{"role": "user", "content": "2+3?"}], task_id="t"))
    return output, model, [model.tokenizer.decode(request.prompt_ids) for request in model.requests]


def test_the_model_reads_the_result_and_answers() -> None:
    output, _, prompts = play([f"<think>Sum.</think>{ADD}", "5"])
    [sequence] = output.sequences
    assert ("answered", 2) == (output.end_reason, output.num_turns)
    assert (
        {"name": "add", "arguments": {"a": 2, "b": 3}, "id": "call01000", "turn": 1, "is_error": False},
    ) == output.tool_calls
    assert {"tool_calls": 1.0, "tool_errors": 0.0, "malformed_calls": 0.0} == output.metrics
    assert prompts[0].startswith('[{"type": "function"'), "the template shows the tools"
    assert prompts[1].endswith("5")
    assert prompts[1].startswith(prompts[0] + f"<think>Sum.</think>{ADD}")
    assert 0 in sequence.response_mask
    assert sequence.token_rewards is None


def test_parallel_calls_are_made_at_the_same_time_and_answered_in_order() -> None:
    running, most = 0, 0

    async def slow(call: ToolCall) -> ToolResult:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        for _ in range(10 - 2 * call.arguments["a"]):
            await asyncio.sleep(0)
        running -= 1
        return ToolResult(text=f"<{call.arguments['a']}>", reward=0.25)

    turn = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {n}}}}}</tool_call>' for n in range(4))
    output, model, prompts = play([turn, "done"], Tools(slow), max_parallel=3)
    assert 3 == most
    assert "<0>" in prompts[1]
    assert sorted(prompts[1].index(f"<{n}>") for n in range(4)) == [prompts[1].index(f"<{n}>") for n in range(4)]
    [sequence] = output.sequences
    assert sequence.token_rewards is not None
    last = len(model.calls[0][1].token_ids) - 1
    assert {last: 1.0} == {place: value for place, value in enumerate(sequence.token_rewards) if value}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "a tool call cannot be read"),
        ('<tool_call>{"name": "boom", "arguments": {}}</tool_call>', "boom failed: RuntimeError: no"),
        ('<tool_call>{"name": "wrong", "arguments": {}}</tool_call>', "there is no such tool"),
    ],
)
def test_errors_go_back_to_the_model(answer: str, says: str) -> None:
    async def function(call: ToolCall) -> ToolResult:
        if call.name == "boom":
            raise RuntimeError("no")
        return ToolResult(text="there is no such tool", is_error=True)

    output, _, prompts = play([answer, "sorry"], Tools(function))
    assert says in prompts[1]
    assert ("answered", 1.0) == (output.end_reason, output.metrics["tool_errors"])
    assert output.metrics["malformed_calls"] == float("cannot" in says)
    assert 1 - int(output.metrics["malformed_calls"]) == len(output.tool_calls)


def test_why_a_rollout_ends() -> None:
    async def ends(call: ToolCall) -> ToolResult:
        return ToolResult(text="won", ends=True, reward=1.0)

    tools = Tools()
    output, model, _ = play([ADD], tools, max_turns=3)
    assert ("turns", 3, 2) == (output.end_reason, len(model.requests), len(tools.asked))
    output, model, _ = play([ADD], Tools(ends))
    assert ("ended", 1) == (output.end_reason, len(model.requests))
    assert output.sequences[0].token_rewards is not None
    assert 1.0 == output.sequences[0].token_rewards[-1]
    tools = Tools()
    output, model, _ = play([ADD], tools, {"max_new_tokens": len(ADD) - 3})
    assert ("budget", 1, 0) == (output.end_reason, len(model.requests), len(tools.asked)), "a cut answer calls nothing"
    output, model, _ = play([ADD], sampling={"max_new_tokens": len(ADD) + 1})
    assert ("budget", 1) == (output.end_reason, len(model.requests))


def test_an_aborted_answer_ends_the_rollout() -> None:
    model = Model([ADD], tokenizer=Letters(), abort_at=1, abort_tokens=2)
    context = AgentContext(generate=model, tokenizer=model.tokenizer, tools=Tools())
    agent = ToolAgent(Config(format="hermes"), context)
    output = asyncio.run(agent.run(LONG, messages=[{"role": "user", "content": "?"}]))
    assert ("aborted", 2) == (output.end_reason, len(model.requests))


def test_a_result_for_which_there_is_no_room_is_cut_or_ends_the_rollout() -> None:
    async def long(call: ToolCall) -> ToolResult:
        return ToolResult(text="x" * 500)

    metrics: dict[str, float] = {}
    context = {"max_model_len": 450, "metric": lambda name, number: metrics.update({name: number})}
    output, _, prompts = play([ADD, ""], Tools(long), context=context)  # there is room for the end token
    assert "answered" == output.end_reason
    assert "(cut)" in prompts[1]
    assert metrics["cut_tokens"] > 0
    output, _, prompts = play([ADD, "5"], Tools(long), context=context, on_overflow="end")
    assert ("budget", 1) == (output.end_reason, len(prompts))


def test_a_cancelled_rollout_cancels_its_calls() -> None:
    async def main() -> None:
        started, ended = asyncio.Event(), 0

        async def hang(call: ToolCall) -> ToolResult:
            nonlocal ended
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended += 1
            raise AssertionError

        model = Model([ADD * 2], tokenizer=Letters())
        context = AgentContext(generate=model, tokenizer=model.tokenizer, tools=Tools(hang))
        agent = ToolAgent(Config(format="hermes"), context)
        run = asyncio.create_task(agent.run(LONG, messages=[{"role": "user", "content": "?"}]))
        await started.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert 2 == ended
        assert {asyncio.current_task()} == asyncio.all_tasks()

    asyncio.run(main())


# -- within an answer


def inline(*pieces: str, tools: Tools | None = None, **config: Any) -> tuple[AgentLoopOutput, Model, str]:
    model = Model(pieces, tokenizer=Letters())  # it ends answers at stop texts, as servers do
    context = AgentContext(generate=model, tokenizer=model.tokenizer, tools=tools or Tools())
    agent = ToolAgent(structure(Config, {"format": "inline", **config}), context)
    output = asyncio.run(agent.run(LONG, messages=[{"role": "user", "content": "?"}]))
    [sequence] = output.sequences
    return output, model, model.tokenizer.decode(sequence.response_ids)


def test_a_result_is_put_behind_the_call() -> None:
    """As GSM8K writes its calculations; the result has mask 0, and the sign that ends calls may be elsewhere."""

    async def calculate(call: ToolCall) -> ToolResult:
        return ToolResult(text=str(eval(call.arguments["expression"], {})))

    mark = {"begin": "<<", "end": "=", "tool": "calculate", "argument": "expression", "result": "{text}>>"}
    tools = Tools(calculate)
    output, model, text = inline("x =", " 2: <<48/2=", "24.0 and <<1+1=", "2", inline=[mark], tools=tools)
    assert "x = 2: <<48/2=24.0>>24.0 and <<1+1=2>>2" == text
    assert [("calculate", {"expression": "48/2"}), ("calculate", {"expression": "1+1"})] == [
        (call.name, dict(call.arguments)) for call in tools.asked
    ]
    [sequence] = output.sequences
    inserted = [t for t, mask in zip(sequence.response_ids, sequence.response_mask, strict=True) if not mask]
    assert "24.0>>2>>" == model.tokenizer.decode(inserted)
    assert ("answered", 4) == (output.end_reason, output.num_turns)
    assert ("=",) == model.requests[0].sampling.stop
    assert model.requests[1].prompt_ids == (*sequence.prompt_ids, *sequence.response_ids[:3])


def test_calls_within_an_answer_are_json_by_default_and_may_fail() -> None:
    output, model, text = inline('<tool>{"name": "add", "arguments": {"a": 4}}</tool>', "<tool>{</tool>", "4")
    assert "</tool><result>4</result><tool>{</tool><result>a tool call cannot be read" in text
    assert 1.0 == output.metrics["malformed_calls"]
    assert 1 == len(output.tool_calls)
    assert not model.tokenizer.decode(model.requests[0].prompt_ids).startswith("["), "no schemas are shown"


def test_inline_rollouts_end_after_their_turns() -> None:
    call = '<tool>{"name": "add", "arguments": {"a": 4}}</tool>'
    output, _, _ = inline(call, call, call, call, max_turns=3)
    assert ("turns", 3, 2) == (output.end_reason, output.num_turns, len(output.tool_calls))


@pytest.mark.parametrize(
    "settings",
    [{"format": "hermes", "inline": [{}]}, {"format": "inline", "inline": [{"result": "x"}]}, {"max_turns": 0}],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        structure(Config, settings)


# -- the format of a chat template


class Template(Letters):
    """A tokenizer whose template shows calls by a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.shown = text

    def encode_chat(self, messages: Any, *, tools: Any = ()) -> tuple[int, ...]:
        return self.encode_text(self.shown if tools else "")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ('<tool_call>\n{"name": "jackfield_probe"}</tool_call>', "hermes"),
        ("<tool_call>jackfield_probe\n<arg_key>key</arg_key>", "glm"),
        ("<tool_call>\n<function=jackfield_probe>", "xml"),
        ('{"name": "jackfield_probe", "parameters": {}}', "llama3"),
        ("[TOOL_CALLS] [", "mistral"),
        ("<\uff5ctool\u2581call\u2581begin\uff5c>", "deepseek"),
        ("<|start|>assistant<|channel|>commentary", "gpt_oss"),
        ("<|tool_call|>", "phi"),
        ("[jackfield_probe(key='x')]", "pythonic"),
    ],
)
def test_the_format_is_found_in_the_chat_template(shown: str, expected: str) -> None:
    assert expected == detect(Template(shown))
    assert expected in FORMATS


def test_a_template_without_calls_needs_a_format() -> None:
    tokenizer = Template("nothing")
    with refused("agent.tool-format", "agent.format"):
        detect(tokenizer)
    model = Model(["5"], tokenizer=tokenizer)
    context = AgentContext(generate=model, tokenizer=tokenizer)
    output = asyncio.run(ToolAgent(Config(), context).run(LONG, messages=[{"role": "user", "content": "?"}]))
    assert "answered" == output.end_reason, "without tools no format is needed"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


async def drawn(call: ToolCall) -> ToolResult:
    return ToolResult(text="Look:", images=(IMAGE,))


def test_a_model_that_sees_gets_the_images_of_tools() -> None:
    """They are in the turn of the result, and their arrays in the request after it and in the sequence."""
    output, model, prompts = play([ADD, "5"], Tools(drawn), cls=ToolImagesAgent)
    shown = [{"role": "tool", "content": [{"type": "text", "text": "Look:"}, IMAGE]}]
    expected = model.tokenizer.encode_multi_modal(shown)[1]["pixel_values"].tolist()
    first, second = model.requests
    assert {} == first.multi_modal_data
    assert expected == second.multi_modal_data["pixel_values"].tolist()
    assert expected == output.sequences[0].multi_modal_inputs["pixel_values"].tolist()
    assert "Look:" in prompts[1]


def test_a_model_that_does_not_see_reads_that_there_are_images() -> None:
    output, _, prompts = play([ADD, "5"], Tools(drawn))
    assert "[1 images cannot be shown]" in prompts[1]
    assert {} == output.sequences[0].multi_modal_inputs


def test_an_image_of_a_tool_that_cannot_be_read_is_told_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Letters, messages: Any, **how: Any) -> Any:
        raise DataError("a picture cannot be read", code="data.image")

    monkeypatch.setattr(Letters, "encode_multi_modal_turn", refuse)
    output, _, prompts = play([ADD, "5"], Tools(drawn), cls=ToolImagesAgent)
    assert "Look:\n[the images cannot be shown: a picture cannot be read]" in prompts[1]
    assert "answered" == output.end_reason
