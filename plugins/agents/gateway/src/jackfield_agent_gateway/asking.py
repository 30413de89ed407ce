"""What a request asks of the model, and what the model said, whatever the form of the API."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.agent import ToolCall
from jackfield_agent_gateway.history import digest_of, digests


@attrs.frozen(kw_only=True, eq=False)
class Ask:
    """A request in the form that all kinds of requests have in common."""

    messages: list[dict[str, Any]] = attrs.field(factory=list)  #: for the chat template
    text: str | tuple[int, ...] | None = None  #: of a completion, instead of messages
    tools: tuple[Mapping[str, Any], ...] = ()
    calls_tools: bool = True  #: whether tool calls are looked for, if there are tools
    choices: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = attrs.field(factory=dict)  #: of the client
    is_retry: bool = False  #: the client says that it has sent this before
    streams: bool = False  #: the client hears the answer as it comes
    keys: list[str] = attrs.field(init=False)  #: digests of the conversation after each message
    key: str = attrs.field(init=False)  #: digest of the whole request

    @keys.default
    def _keys(self) -> list[str]:
        begin = digest_of(["chat", [dict(tool) for tool in self.tools]] if self.text is None else ["text"])
        return digests(begin, self.messages) if self.text is None else [digest_of([begin, self.text])]

    @key.default
    def _key(self) -> str:
        asked = (self.choices, self.max_tokens, self.stop, self.stop_token_ids, dict(self.sampling), self.calls_tools)
        return digest_of([self.keys[-1], *asked])


@attrs.frozen(kw_only=True, eq=False)
class Said:
    """One answer of the model."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish_reason: str  #: stop or length
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message for the chat template."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.calls
            ]
        return message


@attrs.frozen
class Head:
    """What all forms of an answer begin with."""

    id: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    created: int = attrs.field(factory=lambda: int(time.time()))


@attrs.frozen(kw_only=True, eq=False)
class Answers:
    """The recorded answers to one request, which its repeats get, too."""

    said: Sequence[Said]
    head: Head

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt, which counts once for all answers."""
        return len(self.said[0].prompt_ids)

    @property
    def completion_tokens(self) -> int:
        """The number of tokens of all answers."""
        return sum(len(each.token_ids) for each in self.said)


def arguments_text(call: ToolCall) -> str:
    """Return the arguments of a call as clients get them."""
    return json.dumps(call.arguments, ensure_ascii=False)
