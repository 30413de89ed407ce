"""What a record says, whatever its columns are called: the form between shapes and models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from jackfield.data.formats import plain_text

Messages: TypeAlias = tuple[Mapping[str, Any], ...]  #: a conversation, or schemas of tools
Said: TypeAlias = str | Messages  #: a text, or messages
_ASKING = ("user", "system", "developer")


@attrs.frozen(kw_only=True)
class Example:
    """One record in the form that shapes make and of which models make rows."""

    prompt: Messages = ()  #: empty: there is none
    response: Said | None = None  #: the answer to learn from, or the better one of two
    rejected: Said | None = None  #: the worse one
    ground_truth: str = ""  #: the right answer as the record has it
    text: str | None = None  #: of a corpus: a text without a prompt
    reward: float | None = None
    id: str | None = None
    group: str | None = None  #: the same for responses that are compared
    data_source: str | None = None
    tools: Messages = ()
    template_options: Mapping[str, Any] = attrs.field(factory=dict)
    columns: Mapping[str, Any] = attrs.field(factory=dict)  #: of a sample that has tokens already


def prompt_of(messages: Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """Return a prompt as a text if it is a single message of a user, which renders alike."""
    only = messages[0] if len(messages) == 1 else {}
    content = only.get("content")
    is_text = only.keys() == {"role", "content"} and only["role"] == "user" and isinstance(content, str)
    return content if is_text and isinstance(content, str) else list(messages)


def text_of(said: Said) -> str:
    """Return a text, or the text of a conversation's last message."""
    return said if isinstance(said, str) else plain_text(list(said))


def turns_of(messages: Messages) -> Iterator[tuple[Messages, Messages]]:
    """Yield each turn of the assistant in a conversation that a question follows: what precedes it, and the turn."""
    start: int | None = None
    for place, message in enumerate(messages):
        if message["role"] in _ASKING:
            if start:
                yield messages[:start], messages[start:place]
            start = None
        elif start is None and message["role"] == "assistant":
            start = place
