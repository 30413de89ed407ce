"""Texts and conversations of a row's columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_of(values: Mapping[str, Any], column: str) -> str:
    """Return the text of a column: a text, or the contents of a conversation.

    A ``ValueError`` says that there is none.
    """
    if (value := values.get(column)) is None:
        raise ValueError(f"there is no column {column!r}")
    if isinstance(value, str):
        return value
    return "\n".join(_content(message) for message in messages_of(values, column))


def messages_of(values: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """Return a column as a conversation: that which it has, or its text as a user's message."""
    if (value := values.get(column)) is None:
        raise ValueError(f"there is no column {column!r}")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and value and all(isinstance(each, Mapping) and "role" in each for each in value):
        return [dict(message) for message in value]
    raise ValueError(f"column {column!r} has neither a text nor a conversation")


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
