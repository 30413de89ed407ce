"""What a chat message says, and messages cut to a length."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Encode: TypeAlias = Callable[[Messages], tuple[int, ...]]

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_CUT = "\n… (cut)"


def parts(answer: Mapping[str, Any]) -> list[str]:
    """Return the texts of an answer that a rendered conversation has to contain, in their order."""
    content = answer.get("content") or ""
    if not isinstance(content, str):
        content = "</think>".join(str(part["text"]) for part in content if part.get("text"))
    thought = next((str(answer[name]) for name in _THOUGHTS if answer.get(name)), "")
    calls = [str(call.get("function", call).get("name", "")) for call in answer.get("tool_calls") or ()]
    return [part.strip() for part in (thought, *re.split("</?think>", content), *calls) if part.strip()]


def thought_of(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the field of a message that has the model's thought, and the thought, which may be empty."""
    for name in _THOUGHTS:
        if message.get(name):
            return name, str(message[name])
    content = message.get("content")
    before, end, _ = content.rpartition("</think>") if isinstance(content, str) else ("", "", "")
    return "content", before + end if before.replace("<think>", "").strip() else ""


def last_thought(messages: Messages) -> Mapping[str, Any]:
    """Return the last message of the model that has a thought; empty if none has."""
    said = (each for each in reversed(messages) if each.get("role") == "assistant")
    return next((each for each in said if thought_of(each)[1]), {})


def with_thought(answer: Mapping[str, Any], others: Messages) -> Mapping[str, Any]:
    """Return an answer; if it has no thought, with the first one of the others."""
    name, thought = next((found for found in map(thought_of, (answer, *others)) if found[1]), ("", ""))
    if not thought or thought_of(answer)[1]:
        return answer
    return {**answer, name: thought + (answer.get("content") or "" if name == "content" else "")}


def _size(encode: Encode, messages: Messages, place: int, length: int) -> int:
    return len(encode(_cut(messages, place, length)))


def fit(
    messages: Messages, made: tuple[int, ...], room: int, encode: Encode, *, cuts: bool
) -> tuple[Messages, tuple[int, ...]]:
    """Return messages, with their longest texts cut so that there is room, and their tokens; nothing if none fit."""
    if len(made) <= room:
        return messages, made
    texts = {place: each["content"] for place, each in enumerate(messages) if isinstance(each.get("content"), str)}
    for place in sorted(texts, key=lambda place: -len(texts[place])) if cuts else ():
        cut = functools.partial(_cut, messages, place)
        size = functools.partial(_size, encode, messages, place)
        if fits := bisect.bisect_right(range(len(texts[place]) + 1), room, key=size):
            return cut(fits - 1), encode(cut(fits - 1))
        messages = cut(0)
    return (), ()


def _cut(messages: Messages, place: int, length: int) -> Messages:
    shown = [dict(each) for each in messages]
    shown[place]["content"] = shown[place]["content"][:length] + _CUT
    return shown
