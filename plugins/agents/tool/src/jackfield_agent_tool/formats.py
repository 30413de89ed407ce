"""The format of tool calls that a chat template shows."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from jackfield.abc.agent import ChatTokenizer, ToolCall
from jackfield.errors import AgentError, JackfieldError
from jackfield_agent_tool.settings import Config
from jackfield_tool_calls import FORMATS, Format, format_of, parse, split_reasoning

_NAME, _VALUE = "jackfield_probe", "jackfield-value"
_CALL = {"id": "jackfield", "type": "function", "function": {"name": _NAME, "arguments": {"key": _VALUE}}}
_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
_SCHEMA = {"type": "function", "function": {"name": _NAME, "description": "probe", "parameters": _PARAMETERS}}
_ID = re.compile(r"[A-Za-z0-9]{9}")  #: what Mistral's template takes
_found: weakref.WeakKeyDictionary[Any, Format | None] = weakref.WeakKeyDictionary()


def detect(tokenizer: ChatTokenizer) -> Format:
    """Return the format in which the tokenizer's chat template shows calls; ``agent.tool-format`` if it shows none."""
    try:
        if tokenizer not in _found:
            _found[tokenizer] = _shown(tokenizer)
        name = _found[tokenizer]
    except TypeError:  # it cannot be a key
        name = _shown(tokenizer)
    if name is None:
        raise AgentError(
            "the chat template shows no known format of tool calls",
            code="agent.tool-format",
            expected=", ".join(FORMATS),
            fix="set agent.format; with a template that does not show tools, describe them in the messages",
        )
    return name


def _rendered(tokenizer: ChatTokenizer) -> str:
    question: dict[str, Any] = {"role": "user", "content": "q"}
    result = {"role": "tool", "name": _NAME, "tool_call_id": "jackfield", "content": "r"}
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    texts = []
    chats: list[list[dict[str, Any]]] = [[question], [question, said, result]]
    for messages in chats:
        try:
            texts.append(tokenizer.decode(tokenizer.encode_chat(messages, tools=[_SCHEMA]), False))
        except JackfieldError:  # the template refuses such messages
            continue
    plain = tokenizer.decode(tokenizer.encode_chat([question]), False)
    return "\n".join([*texts[::-1], plain])  # the call itself shows more than the system prompt


def _shown(tokenizer: ChatTokenizer) -> Format | None:
    text = _rendered(tokenizer)
    if found := format_of(text):
        return found
    if f'{{"name": "{_NAME}", "parameters"' in text:
        return "llama3"
    return "pythonic" if f"[{_NAME}(" in text else None


@attrs.frozen
class Malformed:
    """A call that cannot be read."""

    problem: str  #: a sentence for the model


Call: TypeAlias = ToolCall | Malformed


@attrs.frozen(kw_only=True)
class Said:
    """What the model said in one turn."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]
    text: str  #: all of it
    reasoning_key: str = "reasoning_content"  #: what the chat template calls reasoning

    @property
    def message(self) -> dict[str, Any]:
        """Return the answer as a message: with its calls apart, if all of them can be read."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if any(isinstance(call, Malformed) for call in self.calls):
            return self.plain_message
        if self.reasoning:
            message[self.reasoning_key] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.calls
                if isinstance(call, ToolCall)
            ]
        return message

    @property
    def plain_message(self) -> dict[str, Any]:
        """Return the answer as a message that has all of it as its content."""
        return {"role": "assistant", "content": self.text}


class Reader:
    """Reads the answers of one rollout."""

    def __init__(self, config: Config, tokenizer: ChatTokenizer, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer, self._schemas = tokenizer, schemas
        self._format: Format | None = next((each for each in FORMATS if each == config.format), None)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens, but without the one that ends the turn."""
        ends = self._tokenizer.end_token_ids
        return self._tokenizer.decode(token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids, False)

    def read(self, token_ids: Sequence[int], turn: int) -> Said:
        """Return what the model said; its calls have ids of nine characters, as Mistral's template wants them."""
        text = self.text(token_ids)
        if self._format is None:
            if not self._schemas:
                reasoning, content = split_reasoning(text)
                return Said(content=content.strip(), reasoning=reasoning, calls=(), text=text)
            self._format = detect(self._tokenizer)
        content, reasoning, calls, problems = parse(text, self._format, tools=self._schemas)
        found = [_with_id(call, turn, number) for number, call in enumerate(calls)]
        key = "thinking" if self._format == "gpt_oss" else "reasoning_content"
        every: tuple[Call, ...] = (*found, *(Malformed(problem) for problem in problems))
        return Said(content=content, reasoning=reasoning, calls=every, text=text, reasoning_key=key)


def _with_id(call: ToolCall, turn: int, number: int) -> ToolCall:
    if _ID.fullmatch(call.id):
        return call
    return attrs.evolve(call, id=f"call{turn % 100:02d}{number % 1000:03d}")


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as JSON values that share nothing with the given ones."""
    copied: dict[str, Any] = json.loads(json.dumps(dict(arguments)))
    return copied
