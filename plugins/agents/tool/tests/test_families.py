"""Tool loops over chat templates in the style of the model families: what a model writes is called, and goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jackfield.abc.agent import AgentContext, AgentLoopOutput, ToolCall, ToolResult
from jackfield_agent_tool.agent import ToolAgent
from jackfield_agent_tool.formats import detect
from jackfield_agent_tool.settings import Config
from jackfield_chats import FAMILIES, QUESTION, TOOLS, Family, ScriptedModel, make_tokenizer, said, spoken
from jackfield_testing import refused

FORMATS = {
    "qwen2_5": "hermes", "qwen3": "hermes", "llama3": "llama3", "glm4": "glm", "deepseek": "deepseek",
    "mistral": "mistral", "phi4": "phi", "gpt_oss": "gpt_oss",
}  # fmt: skip
SEVERAL = [name for name in FORMATS if name not in ("gpt_oss", "llama3")]  #: whose templates show several calls


class Adding:
    """A tool session that adds one."""

    schemas = TOOLS

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def call(self, call: ToolCall) -> ToolResult:
        self.asked.append(dict(call.arguments))
        return ToolResult(text=f"result {call.arguments['a'] + 1}")


def play(family: Family, *answers: str, **config: Any) -> tuple[AgentLoopOutput, Adding, ScriptedModel]:
    tokenizer = make_tokenizer(family)
    model, tools = ScriptedModel(tokenizer, *answers), Adding()
    context = AgentContext(generate=model.generate, tokenizer=tokenizer, tools=tools)
    output = asyncio.run(ToolAgent(Config(**config), context).run({"max_new_tokens": 900}, messages=[QUESTION]))
    assert not model.answers, output.end_reason
    return output, tools, model


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_of_a_family_is_found(name: str) -> None:
    assert FORMATS[name] == detect(make_tokenizer(FAMILIES[name]))


@pytest.mark.parametrize("name", ["gemma", "plain"])
def test_a_family_whose_template_knows_no_tools_needs_a_format(name: str) -> None:
    with refused("agent.tool-format"):
        detect(make_tokenizer(FAMILIES[name]))


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_in_the_style_of_a_family_is_made(name: str) -> None:
    """The model's tokens stay as they are, the result is in its next prompt, and only its own tokens have mask 1."""
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family)
    answers = [spoken(tokenizer, family, said(family, calls=[{"a": 4}])), spoken(tokenizer, family, said(family, "5"))]
    output, tools, model = play(family, *answers)
    assert [{"a": 4}] == tools.asked
    assert ("answered", 2, 0.0) == (output.end_reason, output.num_turns, output.metrics["malformed_calls"])
    [sequence] = output.sequences
    assert "result 5" in tokenizer.decode(model.requests[1].prompt_ids)
    own = tuple(id for id, mask in zip(sequence.response_ids, sequence.response_mask, strict=True) if mask)
    assert (*model.given[0], *model.given[1]) == own
    assert model.requests[1].prompt_ids == (*sequence.prompt_ids, *sequence.response_ids[: -len(model.given[1])])


@pytest.mark.parametrize("name", SEVERAL)
def test_several_calls_in_the_style_of_a_family_are_made(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family)
    calls = spoken(tokenizer, family, said(family, calls=[{"a": 4}, {"a": 7}]))
    _, tools, model = play(family, calls, spoken(tokenizer, family, said(family, "5")))
    assert [{"a": 4}, {"a": 7}] == tools.asked
    text = tokenizer.decode(model.requests[1].prompt_ids)
    assert 0 < text.index("result 5") < text.index("result 8")


def test_calls_that_a_template_refuses_are_shown_as_text() -> None:
    """Llama 3's template knows one call in a turn; its models may write several."""
    calls = '<|python_tag|>{"name": "add", "parameters": {"a": 4}}; {"name": "add", "parameters": {"a": 7}}<|eom_id|>'
    output, tools, _ = play(FAMILIES["llama3"], calls, "done<|eot_id|>")
    assert [{"a": 4}, {"a": 7}] == tools.asked
    assert "answered" == output.end_reason


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "glm4"])
def test_reasoning_stays_within_a_tool_loop(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family)
    first = spoken(tokenizer, family, said(family, thought="is it so", calls=[{"a": 4}]))
    output, tools, model = play(family, first, spoken(tokenizer, family, said(family, "5")), on_template_change="fork")
    assert [{"a": 4}] == tools.asked
    assert "is it so" in tokenizer.decode(model.requests[1].prompt_ids)
    assert 1 == len(output.sequences), "nothing was rendered otherwise"


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_cannot_be_read_goes_back_in_every_style(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family)
    good = spoken(tokenizer, family, said(family, calls=[{"a": 4}]))
    broken = good.replace('"a"', '"a') if name != "glm4" else good.replace("add", "", 1)
    output, tools, model = play(family, broken, spoken(tokenizer, family, said(family, "no")))
    assert [] == tools.asked
    assert 1.0 == output.metrics["malformed_calls"]
    assert "cannot be read" in tokenizer.decode(model.requests[1].prompt_ids)
