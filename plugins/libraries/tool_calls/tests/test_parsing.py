"""Answers of each family, whole, broken and cut."""

# ruff: noqa: RUF001 (the bars of DeepSeek's tokens)

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jackfield.abc.agent import ToolCall
from jackfield_tool_calls import FORMATS, Format, format_of, parse

ARGUMENTS: dict[str, Any] = {"city": 'Paris {and} </tool_call> "more"', "days": [1, 2], "deep": {"a": {"b": None}}}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "array"},
                "deep": {"type": "object"},
                "zip": {"type": "string"},
                "either": {"type": ["string", "number"]},
            },
        },
    },
}


def write(format: Format, name: str, arguments: dict[str, Any]) -> str:
    """Return a call as a model of the family writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    call = f'"name": "{name}", "arguments": {text}'
    plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return {
        "hermes": f"<tool_call>\n{{{call}}}\n</tool_call>",
        "qwen": f"<tool_call>\n{{{call}}}\n</tool_call>",
        "llama3": f'<|python_tag|>{{"name": "{name}", "parameters": {text}}}',
        "mistral": f"[TOOL_CALLS]{name}[ARGS]{text}",
        "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "glm": f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in plain.items())
        + "</tool_call>",
        "gpt_oss": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>",
        "phi": f"<|tool_call|>[{{{call}}}]<|/tool_call|>",
        "xml": f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in plain.items())
        + "</function>\n</tool_call>",
        "pythonic": f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]",
    }[format]


ENDS = {"hermes": "<|im_end|>", "llama3": "<|eom_id|>", "mistral": "</s>", "deepseek": "<｜end▁of▁sentence｜>"}


@pytest.mark.parametrize("format", FORMATS)
def test_a_call_with_nested_arguments_is_found_with_its_text(format: Format) -> None:
    """Each family's call is read with text before it, and its end token is removed."""
    arguments = {**ARGUMENTS}
    if format == "glm":
        arguments["city"] = 'Paris {and} "more"'  # the family has no way to write its own end tag
    before = "<|channel|>final<|message|>I look.<|end|><|start|>assistant" if format == "gpt_oss" else "I look.\n"
    text = before + write(format, "weather", arguments) + ENDS.get(format, "")
    content, reasoning, calls, problems = parse(text, format, tools=[SCHEMA])
    assert (content, reasoning, problems) == ("I look.", "", [])
    assert [ToolCall(name="weather", arguments=arguments)] == calls


@pytest.mark.parametrize("format", FORMATS)
def test_two_calls_are_found_in_their_order(format: Format) -> None:
    """Parallel calls are separate."""
    one, two = write(format, "first", {"x": 1}), write(format, "second", {})
    joined = {"llama3": f"{one}; {two.removeprefix('<|python_tag|>')}", "gpt_oss": f"{one}<|start|>assistant{two}"}
    joined["pythonic"] = "[first(x=1), second()]"
    found = parse(joined.get(format, one + "\n" + two), format)
    assert [("first", {"x": 1}), ("second", {})] == [(call.name, call.arguments) for call in found.calls]
    assert not found.problems
    assert not found.content


@pytest.mark.parametrize("format", FORMATS)
def test_an_answer_without_calls_is_its_text(format: Format) -> None:
    """Braces, angle brackets and code in a plain answer are text."""
    text = 'The set {1, 2} is <b>small</b>; use f({"a": 1}).'
    shown = f"<|channel|>final<|message|>{text}<|return|>" if format == "gpt_oss" else text
    assert (text, "", [], []) == tuple(parse(shown, format))


@pytest.mark.parametrize("format", FORMATS)
def test_a_call_that_the_budget_cut_is_a_problem(format: Format) -> None:
    """No place at which an answer is cut raises, and none makes a call with other arguments."""
    text = write(format, "weather", {"city": "Paris", "days": [1, 2]})
    whole = parse(text, format, tools=[SCHEMA]).calls
    seen = []
    for end in range(len(text)):
        found = parse(text[:end], format, tools=[SCHEMA])
        seen += found.problems
        assert found.calls in ([], whole)
    assert any("not finished" in problem for problem in seen)


@pytest.mark.parametrize("format", [each for each in FORMATS if each not in ("glm", "xml", "pythonic")])
def test_broken_json_is_a_problem_that_names_the_call(format: Format) -> None:
    """A missing quote is reported to the model; the next call is still read."""
    good, bad = write(format, "weather", {"x": 1}), write(format, "weather", {"x": 1}).replace('{"x": 1}', '{"x: 1, }')
    found = parse(bad, format)
    assert not found.calls
    assert found.problems
    assert all(problem.startswith("a tool call cannot be read: ") for problem in found.problems)
    if format in ("hermes", "mistral", "deepseek"):
        assert [{"x": 1}] == [call.arguments for call in parse(f"{bad}\n{good}", format).calls]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"arguments": {}}</tool_call>', "it has no name"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "no object"),
        ('<tool_call>["f"]</tool_call>', "it is no object"),
        ("<tool_call></tool_call>", "it is not"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "nested too deeply"),
    ],
)
def test_a_value_that_is_no_call_is_a_problem(text: str, problem: str) -> None:
    """JSON of another form is reported, not raised."""
    found = parse(text, "hermes")
    assert not found.calls
    assert problem in found.problems[0]


def test_arguments_may_be_a_text_of_json_and_a_call_may_lack_its_closing_tag() -> None:
    """What models often do is accepted."""
    text = '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}\n<tool_call>{"name": "g"}'
    assert [("f", {"x": 1}), ("g", {})] == [(call.name, call.arguments) for call in parse(text, "hermes").calls]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nwhy\n</think>\n\nyes<|im_end|>", ("yes", "why")),
        ("why\n</think>\n\nyes", ("yes", "why")),
        ("<think>never ends", ("", "never ends")),
        ("yes <think> is a word", ("yes <think> is a word", "")),
    ],
)
def test_reasoning_is_split_off(text: str, expected: tuple[str, str]) -> None:
    """Reasoning that the prompt began, and reasoning that does not end, are found."""
    assert expected == parse(text, "hermes")[:2]


def test_the_channels_of_gpt_oss_are_reasoning_text_and_calls() -> None:
    """Analysis is reasoning; a recipient in the role is one, too; text without a channel is text."""
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"x": 1}<|call|>'
    )
    assert ("Wait.", "hm", [ToolCall(name="f", arguments={"x": 1})], []) == tuple(parse(text, "gpt_oss"))
    assert "plain" == parse("plain<|return|>", "gpt_oss").content
    first = parse(' to=functions.f<|channel|>commentary<|message|>{"x": 1}<|call|>', "gpt_oss")
    assert ("", "", [ToolCall(name="f", arguments={"x": 1})], []) == tuple(first)


def test_other_forms_of_a_family_are_read() -> None:
    """Older and newer models of a family write calls in different ways."""
    one = ToolCall(name="f", arguments={"x": 1})
    listed = '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abc"}, {"name": "f", "arguments": {"x": 1}}]'
    assert [ToolCall(name="f", arguments={"x": 1}, id="abc"), one] == parse(listed, "mistral").calls
    assert "abc" == parse('[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"x": 1}', "mistral").calls[0].id
    newer = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
    assert [one] == parse(newer, "deepseek").calls
    assert [one] == parse('{"type": "function", "name": "f", "parameters": {"x": 1}}', "llama3").calls
    assert [one] == parse('functools[{"name": "f", "arguments": {"x": 1}}]', "phi").calls
    assert [one] == parse('<function=f>{"x": 1}</function>', "xml").calls
    code = parse("<|python_tag|>print(1)", "llama3").calls
    assert [ToolCall(name="code_interpreter", arguments={"code": "print(1)"})] == code
    assert '{"answer": 1}' == parse('{"answer": 1}', "llama3").content


def test_plain_text_arguments_get_the_types_of_the_schema() -> None:
    """A text that looks like a number stays a text where the schema wants one."""
    for format in ("glm", "xml"):
        text = write(format, "weather", {"zip": "01234", "days": [1], "either": 3, "other": "x"})
        arguments = {"zip": "01234", "days": [1], "either": 3, "other": "x"}
        assert arguments == parse(text, format, tools=[SCHEMA]).calls[0].arguments
        assert 7 == parse(write(format, "weather", {"zip": "7"}), format).calls[0].arguments["zip"]


def test_the_format_is_found_in_a_chat_template() -> None:
    """Each family's template has its mark; one without tools has none."""
    for format in FORMATS:
        if format not in ("qwen", "llama3", "pythonic"):
            assert format == format_of("{{ x }}" + write(format, "f", {"a": 1}) + "{{ y }}")
    assert "llama3" == format_of("<|start_header_id|>{{ role }}<|end_header_id|>")
    assert format_of("<user> {{ content }}") is None


scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=12)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
JSON_FORMATS = [each for each in FORMATS if each not in ("glm", "xml", "pythonic")]
#: marks of the families whose parsers look for them before they read JSON
MARKS = ("<|", "<｜", "[TOOL_CALLS]", "[ARGS]", "functools", "```", "<think>", "</think>", "THINK]")
PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
    ),
    *("<｜tool▁call▁end｜>", "<arg_key>", "</arg_key>", "<arg_value>", "<function=f>", "<parameter=x>", "</function>"),
    *(
        "<|channel|>",
        "analysis",
        " to=functions.f",
        "<|message|>",
        "<|call|>",
        "<|start|>",
        "<|tool_call|>",
        "functools",
    ),
    *("<think>", "</think>", '{"name": "f"', ', "arguments": ', "{", "}", "[", "]", '"', "text", "\n", "<|im_end|>"),
)


@settings(max_examples=60)
@given(st.sampled_from(JSON_FORMATS), st.dictionaries(st.text(max_size=8), values, max_size=4))
def test_arguments_survive_a_round_trip(format: Format, arguments: dict[str, Any]) -> None:
    """What a model writes as JSON is what the tool gets, whatever is inside, except marks of its own format."""
    assume(not any(mark in json.dumps(arguments, ensure_ascii=False) for mark in MARKS))
    assert [arguments] == [call.arguments for call in parse(write(format, "f", arguments), format).calls]


@settings(max_examples=200)
@given(st.sampled_from(FORMATS), st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_no_text_raises(format: Format, text: str) -> None:
    """Any text has parts: no text, however broken, raises."""
    parse(text, format)
