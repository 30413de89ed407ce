"""Conversations in records: lists of messages, as prompts and as answers.

What is refused is ``data.malformed``.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from jackfield.data.sources import malformed

Conversation: TypeAlias = tuple[Mapping[str, Any], ...]  #: messages with a role and content each
Answer: TypeAlias = str | Conversation  #: a text, or the messages that follow the prompt

_ASKING = ("user", "system", "developer")  #: roles of which the last ends the prompt of a conversation
_ROLES = {*_ASKING, "assistant", "tool", "function"}
_PACKED = re.compile(r"""\s*\[\s*\{\s*(['"])\w+\1\s*:""")
_MESSAGES = "a list of messages, each with a role (a text) and content (a text, or parts)"


def unpacked(value: Any) -> Any:
    """Return messages that a table has as a text (JSON, or Python's notation, as pandas writes CSV); else the value.

    A text is taken for messages only if the whole of it is a list of objects with a known role and content each.
    """
    if not isinstance(value, str) or not _PACKED.match(value):
        return value
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = parse(value.strip())
            roles = [message.get("role") for message in found] if is_conversation(found) else [None]
            return found if set(roles) <= _ROLES else value
    return value


def read_conversation(value: Any, key: str) -> Conversation:
    """Check a list of messages."""
    if not is_conversation(value):
        raise malformed(f"field {key!r} is not a conversation", _MESSAGES, repr(value)[:200])
    return tuple(value)


def read_answer(value: Any, key: str) -> Answer:
    """Check an answer that is taught: a text, a number (as its JSON text), or a list of messages."""
    if isinstance(value, str | int | float):
        return plain_text(value)
    if not isinstance(value, list):
        raise malformed(f"field {key!r} is not an answer", f"a text, or {_MESSAGES}", repr(value)[:200])
    return read_conversation(value, key)


def check_turn(answer: Answer | None) -> None:
    """Refuse messages that do not begin and end with the assistant."""
    roles = [message["role"] for message in answer] if isinstance(answer, tuple) else ["assistant"]
    if roles[:1] != ["assistant"] or roles[-1:] != ["assistant"]:
        raise malformed(
            "the messages of an answer do not begin and end with the assistant's",
            "messages from the assistant's first to its last; the prompt is apart",
            f"the roles {', '.join(roles) or '(none)'}",
            "where the answer repeats the whole conversation, set data.format.prompt_key to null",
        )


def check_preference(better: Answer | None, worse: Answer) -> None:
    """Refuse two answers of which neither is the better one."""
    one, other = (
        each[0]["content"] if isinstance(each, tuple) and len(each) == 1 else each for each in (better, worse)
    )
    if one == other:
        found = repr(one)[:200]
        raise malformed("the two answers are the same", "two different answers", found, "leave the record out")


def split(messages: Conversation, key: str) -> tuple[Conversation, Conversation | None]:
    """Return prompt and answer of a conversation; no answer where the assistant does not have the last word.

    The answer is the last turn: what follows the last message of a user (or system), from the assistant's first
    message on, tool calls and their results included. A conversation without a prompt is refused.
    """
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        return messages, None
    asked = max((index for index, role in enumerate(roles) if role in _ASKING), default=-1)
    first = roles.index("assistant", asked + 1)
    if not first:
        found = f"the roles {', '.join(roles)}"
        raise malformed(f"the conversation {key!r} has no prompt", "a message before the assistant's", found)
    return messages[:first], messages[first:]


def implied_prompt(
    answer: Answer | None, rejected: Answer | None
) -> tuple[Conversation, Conversation, Conversation | None]:
    """Return prompt and answers where answers repeat the whole conversation: the prompt is what two of them share."""
    if not isinstance(answer, tuple) or isinstance(rejected, str):
        expected = "whole conversations, as lists of messages, as data.format.prompt_key is null"
        fix = "name the prompt's field as data.format.prompt_key"
        raise malformed("the answers do not hold the prompt", expected, "a text", fix)
    if rejected is None:
        prompt, own = split(answer, "response_key")
        check_turn(own or ())
        return prompt, own or (), None
    shared = next((n for n, pair in enumerate(zip(answer, rejected, strict=False)) if pair[0] != pair[1]), 0)
    if not shared:
        found = "the same conversation twice" if answer == rejected else "nothing in common at the beginning"
        expected = "messages that both share, then two answers"
        raise malformed("the two conversations imply no prompt", expected, found)
    for each in (answer[shared:], rejected[shared:]):
        check_turn(each)
    return answer[:shared], answer[shared:], rejected[shared:]


def plain_text(value: Any) -> str:
    """Return a text as it is, the last message's content of a conversation, and anything else as JSON."""
    if is_conversation(value):
        value = value[-1].get("content")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of at least one message."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list) or bool(value.get("tool_calls"))
