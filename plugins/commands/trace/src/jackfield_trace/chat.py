"""The messages of a sequence, split at the marks that chat templates put around them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

from jackfield_trace.rollouts import TokenSequence

#: The marks of one family each: of a message's beginning, with its role, and of its end.
_FAMILIES: tuple[tuple[re.Pattern[str], re.Pattern[str]], ...] = tuple(
    (re.compile(begin), re.compile(rf"(?:{end})\s*\Z"))
    for begin, end in (
        (r"<\|im_start\|>(\w+)\n?", r"<\|im_end\|>"),
        (r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*", r"<\|eot_id\|>|<\|eom_id\|>|<\|end_of_text\|>"),
        (r"<start_of_turn>(\w+)\n?", r"<end_of_turn>"),
        (r"<\|start\|>(\w+)[^<]*(?:<\|channel\|>[^<]*)?<\|message\|>", r"<\|end\|>|<\|return\|>|<\|call\|>"),
        (r"<\|(system|user|assistant|observation|tool)\|>\n?", r"<\|end\|>|<\|endoftext\|>"),
        ("<\uff5c(System|User|Assistant|tool\u2581output)[^\uff5c]*\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        (r"\[(SYSTEM_PROMPT|INST|/INST|TOOL_RESULTS|/TOOL_RESULTS)\]", r"</s>|\[/SYSTEM_PROMPT\]"),
        (r"<(system|user|assistant|tool)>\s?", r"<end>"),
    )
)
_ROLES = {
    "model": "assistant",
    "developer": "system",
    "system_prompt": "system",
    "inst": "user",
    "/inst": "assistant",
    "/tool_results": "assistant",
    "human": "user",
    "ipython": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_results": "tool",
    "tool\u2581output": "tool",
}


@attrs.define
class Message:
    """One message of a conversation."""

    role: str  #: ``system``, ``user``, ``assistant``, ``tool``, or another one of the template
    content: str
    is_trained: bool = False  #: whether it has tokens of the model of this sequence


def messages_of(one: TokenSequence) -> list[Message]:
    """Return the messages of a sequence; what was inserted into an answer without a message is part of the answer.

    Marks within the model's own tokens are text. A prompt whose marks are not known is one message of the user.
    """
    family = next((each for each in _FAMILIES if each[0].search(one.prompt)), None)
    found = [Message(role="user", content=one.prompt)] if family is None else _split(one.prompt, family)
    if found[-1].role != "assistant":
        found.append(Message(role="assistant", content=""))
    for piece in one.pieces:
        if piece.turn is not None:
            if found[-1].role != "assistant":
                found.append(Message(role="assistant", content=""))
            found[-1].content += piece.text
            found[-1].is_trained = True
            continue
        begin = None if family is None else family[0].search(piece.text)
        if begin is None or family is None:
            found[-1].content += piece.text
            continue
        found[-1].content += piece.text[: begin.start()]
        found += _split(piece.text[begin.start() :], family)
    for message in found:
        message.content = _without_end(message.content, family)
    return [message for message in found if message.content or message.is_trained]


def prompt_and_answers(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Return the messages before the model's first answer, and the rest."""
    first = next((at for at, message in enumerate(messages) if message.is_trained), len(messages))
    return list(messages[:first]), list(messages[first:])


def _split(text: str, family: tuple[re.Pattern[str], re.Pattern[str]]) -> list[Message]:
    """Return the messages of a text that has at least one mark of a beginning; what is before the first is left out."""
    begins = list(family[0].finditer(text))
    ends = [*(each.start() for each in begins[1:]), len(text)]
    return [
        Message(role=_role(each[1]), content=text[each.end() : end]) for each, end in zip(begins, ends, strict=True)
    ]


def _role(name: str) -> str:
    return _ROLES.get(name.lower(), name.lower())


def _without_end(text: str, family: tuple[re.Pattern[str], re.Pattern[str]] | None) -> str:
    if family is None:
        return text
    while (end := family[1].search(text)) is not None:
        text = text[: end.start()]
    return text.strip() if text.strip() else ""
