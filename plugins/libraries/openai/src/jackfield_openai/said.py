"""What a model said, whatever the form of the API that a client uses."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

import attrs

from jackfield.abc.agent import ToolCall


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
