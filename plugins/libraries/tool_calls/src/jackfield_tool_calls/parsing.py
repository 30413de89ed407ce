"""What an answer of a model consists of: text, reasoning and tool calls."""

# ruff: noqa: RUF001 (the bars of DeepSeek's tokens)

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from jackfield.abc.agent import ToolCall
from jackfield_tool_calls import _json_calls, _marked_calls, _python_calls
from jackfield_tool_calls._certain import THOUGHTS
from jackfield_tool_calls._found import Found, Schemas, parameters_of

Format = Literal["hermes", "qwen", "llama3", "mistral", "deepseek", "glm", "gpt_oss", "phi", "xml", "pythonic"]
FORMATS: tuple[Format, ...] = get_args(Format)

_PARSERS: Mapping[str, Callable[[str, Schemas], Found]] = {
    "hermes": _json_calls.hermes,
    "qwen": _json_calls.hermes,
    "llama3": _json_calls.llama3,
    "mistral": _json_calls.mistral,
    "phi": _json_calls.phi,
    "deepseek": _marked_calls.deepseek,
    "glm": _marked_calls.glm,
    "xml": _marked_calls.xml,
    "gpt_oss": _marked_calls.gpt_oss,
    "pythonic": _python_calls.pythonic,
}

#: Tokens that end an answer or a turn; they are no part of its text.
_ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<｜end▁of▁sentence｜>",
    "<|user|>",
    "<|observation|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
)
_AT_END = re.compile(rf"(?:\s*(?:{'|'.join(map(re.escape, _ENDS))}))+\s*\Z")

#: What a chat template of each format contains, the most particular first.
_SIGNS: tuple[tuple[str, Format], ...] = (
    ("<|channel|>", "gpt_oss"),
    ("<｜tool▁call", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm"),
    ("<function=", "xml"),
    ("<tool_call>", "hermes"),
    ("<|tool_call|>", "phi"),
    ("functools[", "phi"),
    ("<|tool|>", "phi"),
    ("<|python_tag|>", "llama3"),
    ("<|start_header_id|>", "llama3"),
)


class Parsed(NamedTuple):
    """The parts of an answer."""

    content: str  #: the text beside reasoning and calls, without white space around it
    reasoning: str  #: what the model thought; empty: none
    calls: list[ToolCall]
    problems: list[str]  #: calls that cannot be read, as sentences for the model


def parse(text: str, format: Format, *, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """Return the parts of an answer that a model has generated in the format of its family.

    ``text`` has its special tokens, and may end anywhere. Reasoning is also found if the prompt began it. A call has an
    empty id if the format has none. ``tools`` are schemas in OpenAI's form: formats whose arguments are plain text
    convert them to the schemas' types, or else read JSON where it is valid.
    """
    if format != "gpt_oss":  # its end tokens say what a part is
        text = _AT_END.sub("", text)
    reasoning, rest = ("", text) if format == "gpt_oss" else split_reasoning(text)
    found = _PARSERS[format](rest, parameters_of(tools))
    reasoning = "\n".join(filter(None, (reasoning, found.reasoning.strip())))
    return Parsed(found.content.strip(), reasoning, found.calls, found.problems)


def format_of(template: str) -> Format | None:
    """Return the format that a chat template uses for tool calls; None: none that is known."""
    return next((format for sign, format in _SIGNS if sign in template), None)


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning at the beginning of a text, and what follows it; the text itself if there is none."""
    for opening, closing in THOUGHTS:
        if (begun := text.lstrip()).startswith(opening):
            inside, _, rest = begun.removeprefix(opening).partition(closing)
            return inside.strip(), rest.lstrip()
    for opening, closing in THOUGHTS:
        begin, end = text.find(opening), text.find(closing)
        if end >= 0 and (begin < 0 or begin > end):  # the prompt has begun it
            return text[:end].strip(), text[end + len(closing) :].lstrip()
    return "", text
