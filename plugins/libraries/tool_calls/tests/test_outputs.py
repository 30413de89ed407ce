"""Calls in the formats of the families: as models write them, and as they break them."""

# ruff: noqa: E501, outputs of models are shown whole

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from jackfield_tool_calls import FORMATS, Format, begins_thought, certain, parse, split_reasoning

BAR, BLANK = "\uff5c", "\u2581"
SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (
        ("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}),
        ("run", {"code": {"type": "string"}}),
    )
]
Pair = tuple[str, dict[str, Any]]


def token(name: str) -> str:
    """A special token of DeepSeek."""
    return f"<{BAR}{name.replace(' ', BLANK)}{BAR}>"


def read(format: Format, text: str) -> tuple[str, list[Pair]]:
    """What is said, and the calls as pairs; nothing is wrong with them."""
    found = parse(text, format, tools=SCHEMAS)
    assert [] == found.problems
    return found.content, [(call.name, dict(call.arguments)) for call in found.calls]


WEATHER: Pair = ("get_weather", {"city": "Paris", "days": 3})
RUN: Pair = ("run", {"code": 'print({"a": [1, {"b": "}"}]})\n'})

GOOD: list[tuple[str, str, str, list[Pair]]] = [
    (
        "hermes",
        'I look it up.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        "I look it up.",
        [WEATHER],
    ),
    (
        "qwen",
        f'<tool_call>{{"name": "run", "arguments": {json.dumps(RUN[1])}}}</tool_call>\n<tool_call>\n'
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}\n</tool_call>',
        "",
        [RUN, WEATHER],
    ),
    ("hermes", '<tool_call>{"name": "run", "arguments": {"code": "</tool_call>"}}', "", [("run", {"code": "</tool_call>"})]),
    ("hermes", "No call at all: {} [] <tool>", "No call at all: {} [] <tool>", []),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', "", [WEATHER]),
    ("llama3", f'<|python_tag|>{{"name": "run", "parameters": {json.dumps(RUN[1])}}}; {{"name": "run"}}', "", [RUN, ("run", {})]),
    ("llama3", '{"type": "function", "name": "run", "parameters": {}}', "", [("run", {})]),
    ("llama3", '<function=get_weather>{"city": "Paris", "days": 3}</function>', "", [WEATHER]),
    ("llama3", '<|python_tag|>brave_search.call(query="x(y)")', "", [("brave_search", {"query": "x(y)"})]),
    ("llama3", 'The answer is {"a": 1}', 'The answer is {"a": 1}', []),
    ("llama3", '{"result": 4}', '{"result": 4}', []),
    ("pythonic", '[get_weather(city="Paris", days=3), run(code="a")]', "", [WEATHER, ("run", {"code": "a"})]),
    ("pythonic", "Here: [1, 2] is a list", "Here: [1, 2] is a list", []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}, "id": "D681PevKs"}]',
        "",
        [WEATHER],
    ),
    ("mistral", 'Hm. [TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]run{}', "Hm.", [WEATHER, ("run", {})]),
    ("mistral", '[TOOL_CALLS]run[CALL_ID]abcdefghi[ARGS]{"code": "x"}', "", [("run", {"code": "x"})]),
    (
        "deepseek",
        f'So.{token("tool calls begin")}{token("tool call begin")}function{token("tool sep")}get_weather\n```json\n'
        f'{{"city": "Paris", "days": 3}}\n```{token("tool call end")}\n{token("tool call begin")}function'
        f'{token("tool sep")}run\n```json\n{{}}\n```{token("tool call end")}{token("tool calls end")}',
        "So.",
        [WEATHER, ("run", {})],
    ),
    (
        "deepseek",
        f'{token("tool calls begin")}{token("tool call begin")}run{token("tool sep")}{{"code": "```\\nx\\n```"}}'
        f'{token("tool call end")}{token("tool calls end")}',
        "",
        [("run", {"code": "```\nx\n```"})],
    ),
    (
        "glm",
        "Yes.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>run</tool_call>",
        "Yes.",
        [WEATHER, ("run", {})],
    ),
    ("glm", "<tool_call>run<arg_key>code</arg_key><arg_value>12</arg_value></tool_call>", "", [("run", {"code": "12"})]),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
        ' <|constrain|>json<|message|>{"city": "Paris", "days": 3}',
        "",
        [WEATHER],
    ),
    (
        "gpt_oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.run<|channel|>commentary json"
        "<|message|>{}<|call|>",
        "I look.",
        [("run", {})],
    ),
    ("gpt_oss", "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>Hi <b>", "Hi <b>", []),
    ("phi", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]<|/tool_call|>', "", [WEATHER]),
    ("phi", 'functools[{"name": "run", "arguments": {}}]', "", [("run", {})]),
    (
        "xml",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=run>\n<parameter=code>\n\n  a\n\n</parameter>\n</function>\n</tool_call>",
        "",
        [WEATHER, ("run", {"code": "\n  a\n"})],
    ),
    (
        "xml",
        '<function_calls><invoke name="get_weather"><parameter name="city">Paris</parameter>'
        '<parameter name="days">3</parameter></invoke></function_calls>',
        "",
        [WEATHER],
    ),
]  # fmt: skip

#: Outputs that are broken.
BAD: list[tuple[str, str]] = [
    ("hermes", '<tool_call>{"name": "run", "arguments": {"code": "x}</tool_call>'),
    ("hermes", '<tool_call>{"name": "run", "arguments": {"a": 1}'),
    ("hermes", "<tool_call>run(1)</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "run", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "run", "arguments": "{"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "run", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", "<tool_call>" + '{"a":' * 100 + "1" + "}" * 100 + "</tool_call>"),
    ("hermes", "<tool_call>" + "[" * 100_000),
    ("llama3", '<|python_tag|>{"name": "run", "parameters": {'),
    ("pythonic", "[run(1)]"),
    ("pythonic", "[run(code=open('x'))]"),
    ("pythonic", "[run(code={1, 2})]"),
    ("mistral", '[TOOL_CALLS][{"name": "run"'),
    ("mistral", "[TOOL_CALLS]run[ARGS]code"),
    ("deepseek", f"{token('tool call begin')}run {{}}{token('tool call end')}"),
    ("deepseek", f"{token('tool call begin')}run{token('tool sep')}{{"),
    ("glm", "<tool_call>\n<arg_key>a</arg_key></tool_call>"),
    ("gpt_oss", "<|channel|>commentary to=functions.run<|message|>{"),
    ("phi", "<|tool_call|>[{]<|/tool_call|>"),
    ("xml", '<tool_call>{"name": "run"}</tool_call>'),
]


@pytest.mark.parametrize(("format", "text", "said", "calls"), GOOD)
def test_calls_are_read(format: Format, text: str, said: str, calls: list[Pair]) -> None:
    assert (said, calls) == read(format, text)


@pytest.mark.parametrize(("format", "text"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_read_is_a_problem(format: Format, text: str) -> None:
    found = parse(text, format, tools=SCHEMAS)
    assert [] == found.calls
    assert 1 == len(found.problems)


def test_a_second_call_between_two_marks_is_a_problem() -> None:
    found = parse('<tool_call>{"name": "run"}{"name": "stop"}</tool_call>', "hermes")
    assert ["run"] == [call.name for call in found.calls]
    assert 1 == len(found.problems)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FORMATS), st.text(max_size=60), st.sampled_from([each[1] for each in GOOD]))
def test_calls_in_any_text_are_json(format: Format, text: str, other: str) -> None:
    for mixed in (text, other + text, text + other, other[: len(text)] + text + other[len(text) :]):
        for call in parse(mixed, format).calls:
            json.dumps(dict(call.arguments), allow_nan=False)


# -- round trips: as chat templates write calls


def _json(name: str, arguments: Mapping[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


def write(name: str, calls: Sequence[Pair]) -> str:
    """Write calls as the family's chat template does."""
    if name in ("hermes", "qwen"):
        return "\n".join(f"<tool_call>\n{_json(*call)}\n</tool_call>" for call in calls)
    if name == "llama3":
        return "<|python_tag|>" + "; ".join(_json(*call, key="parameters") for call in calls)
    if name == "pythonic":
        return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"
    if name == "mistral":
        return "[TOOL_CALLS][" + ", ".join(_json(*call) for call in calls) + "]"
    if name == "deepseek":
        blocks = (
            f"{token('tool call begin')}function{token('tool sep')}{n}\n```json\n{json.dumps(a)}\n```{token('tool call end')}"
            for n, a in calls
        )
        return token("tool calls begin") + "\n".join(blocks) + token("tool calls end")
    if name == "gpt_oss":
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>"
            for n, a in calls
        )
    if name == "phi":
        return "<|tool_call|>[" + ", ".join(_json(*call) for call in calls) + "]<|/tool_call|>"
    if name == "glm":
        pairs = [
            (
                n,
                "".join(
                    f"\n<arg_key>{k}</arg_key>\n<arg_value>{v if isinstance(v, str) else json.dumps(v)}</arg_value>"
                    for k, v in a.items()
                ),
            )
            for n, a in calls
        ]
        return "\n".join(f"<tool_call>{n}{inner}\n</tool_call>" for n, inner in pairs)
    pairs = [
        (
            n,
            "".join(
                f"\n<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>" for k, v in a.items()
            ),
        )
        for n, a in calls
    ]
    return "\n".join(f"<tool_call>\n<function={n}>{inner}\n</function>\n</tool_call>" for n, inner in pairs)


_NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name != "function" and not keyword.iskeyword(name)
)
_KEYS = st.from_regex(r"k[a-z0-9_]{0,5}", fullmatch=True)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_CALLS = st.lists(st.tuples(_NAMES, st.dictionaries(_KEYS, _VALUES, max_size=3)), min_size=1, max_size=3)
_PLAIN = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=12)
_PLAIN_CALLS = st.lists(
    st.tuples(_NAMES, st.dictionaries(_KEYS, st.integers() | st.lists(st.integers(), max_size=3) | _PLAIN, max_size=3)),
    min_size=1, max_size=3,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(calls=_CALLS)
@pytest.mark.parametrize("name", ["hermes", "llama3", "pythonic", "mistral", "deepseek", "gpt_oss", "phi"])
def test_what_a_template_writes_is_read_again(name: Format, calls: list[Pair]) -> None:
    assert ("", calls) == read(name, write(name, calls))


@settings(max_examples=60, deadline=None)
@given(calls=_PLAIN_CALLS)
@pytest.mark.parametrize("name", ["glm", "xml"])
def test_plain_values_are_read_again_with_their_types(name: Format, calls: list[Pair]) -> None:
    """Texts are texts where the schema says so, and other values are JSON."""
    kinds: dict[str, dict[str, Any]] = {}
    for tool, arguments in calls:
        for key, value in arguments.items():
            kind = {"type": "string"} if isinstance(value, str) else {}
            assume(kind == kinds.setdefault(tool, {}).setdefault(key, kind))
    tools = [
        {"type": "function", "function": {"name": tool, "parameters": {"type": "object", "properties": properties}}}
        for tool, properties in kinds.items()
    ]
    found = parse(write(name, calls), name, tools=tools)
    assert calls == [(call.name, dict(call.arguments)) for call in found.calls]


#: Pieces of which answers are put together: calls, reasoning, ends of turns, and text that begins like them.
PIECES = [
    *("Well, ", "a < b", " \n", "[1]", "{", "func", "functools[", "<", "<|", "<tool_call>", "</tool_call>", "[TOOL"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<|im_end|>", "</s>", "<function=f>", "</function>", "no [x"),
    *(text for _, text, _, _ in GOOD[:8]),
]


@pytest.mark.parametrize("format", [*FORMATS, None])
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=6))
@example(pieces=["[THINK]", "</think>"])
@example(pieces=["<think>", "<|im_end|>"])
def test_what_is_certain_of_an_answer_stays_true(format: Format | None, pieces: list[str]) -> None:
    """For each beginning of an answer; but for reasoning that has an end and no beginning."""
    text = "".join(pieces)
    begun = text.lstrip().startswith(("<think>", "[THINK]"))
    assume(begun or not ("</think>" in text or "[/THINK]" in text))
    assume(not (begun and "</think>" in text and "[/THINK]" in text))
    if format is None:
        reasoning, content = split_reasoning(text)
    else:
        content, reasoning, _, _ = parse(text, format, tools=SCHEMAS)
    before = "", ""
    for end in range(len(text) + 1):
        now = certain(text[:end], format)
        assert all(one.startswith(other) for one, other in zip(now, before, strict=True))
        assert content.startswith(now[0])
        assert reasoning.startswith(now[1])
        before = now


def test_all_but_a_tail_of_plain_text_is_certain() -> None:
    for format in (each for each in FORMATS if each != "gpt_oss"):
        assert ("It is 4 < 5", "") == certain("It is 4 < 5 <to", format)
        assert ("It is 4.", "so it is") == certain("<think>\nso it is\n</think>\n\nIt is 4. ", format)
        assert ("", "so it") == certain("so it </thi", format, thinks=True)
        assert ("4", "so it is") == certain("so it is</think>4<tool_call>{", format, thinks=True)
    assert begins_thought("<|im_start|>assistant\n<think>\n")
    assert not begins_thought("<|im_start|>assistant\n<think>\n\n</think>\n")
