"""Texts of a row's columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_of(values: Mapping[str, Any], column: str) -> str:
    """Return the text of a column: a text, or the contents of a conversation. A missing column raises ``KeyError``."""
    value = values[column]
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(_content(each) for each in value)
    raise TypeError(f"column {column!r} has {type(value).__name__}, not a text or a conversation")


def _content(message: Any) -> str:
    if not isinstance(message, Mapping):
        raise TypeError(f"a conversation has {type(message).__name__}, not a message")
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
