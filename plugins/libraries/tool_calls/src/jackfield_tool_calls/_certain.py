"""What of an answer is certain while the model still generates it."""

# ruff: noqa: RUF001 (the bars of DeepSeek's tokens)

from __future__ import annotations

from collections.abc import Sequence

#: Before and after reasoning.
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))

#: What ends an answer, in any format, and what begins a call.
_ENDS = ("<|", "<｜", "<end_of_turn>", "<eos>", "</s>")
_MARKS = (*("<tool", "</tool", "<function", "</function", "<invoke", "[TOOL_CALLS]", "functools"), *_ENDS)
_FURTHER = {"llama3": ("{",), "pythonic": ("[",)}


def begins_thought(prompt: str) -> bool:
    """Return whether a prompt, as templates of reasoning models end it, has begun the model's reasoning."""
    return prompt.rstrip().endswith(tuple(opening for opening, _ in THOUGHTS))


def certain(text: str, format: str | None, *, thinks: bool = False) -> tuple[str, str]:
    """Return the content and the reasoning of an answer's beginning, as far as nothing that follows changes them.

    ``format``: calls are looked for, as :func:`jackfield_tool_calls.parse` does; None: only reasoning is, as
    :func:`jackfield_tool_calls.split_reasoning` does. ``thinks``: the prompt has begun the reasoning. The channels of
    ``gpt_oss`` tell what they are at their end: nothing is certain before. Reasoning that has an end and
    no beginning counts as content.
    """
    if format == "gpt_oss":
        return "", ""
    reasoning, rest = _thought(text, thinks, () if format is None else _ENDS)
    if format is None or not rest:
        return rest, reasoning
    return _before(rest, (*_MARKS, *_FURTHER.get(format, ()))).strip(), reasoning


def _thought(text: str, thinks: bool, ends: Sequence[str]) -> tuple[str, str]:
    """Return the certain part of the reasoning, which ``ends`` may end, and of what follows it."""
    begun = text.lstrip()
    if any(opening.startswith(begun) for opening, _ in THOUGHTS):
        return "", ""
    first = [pair for pair in THOUGHTS if begun.startswith(pair[0])]
    for opening, closing in first or [pair for pair in THOUGHTS if thinks and pair[1] in text]:
        inside, ended, rest = begun.removeprefix(opening).partition(closing)
        return (inside if ended else _before(inside, (closing, *ends))).strip(), rest.lstrip()
    if thinks:
        return _before(begun, (*(closing for _, closing in THOUGHTS), *ends)).strip(), ""
    return "", text


def _before(text: str, marks: Sequence[str]) -> str:
    """Return a text up to the first mark, or to what may become one."""
    places = [place for mark in marks if (place := text.find(mark)) >= 0]
    if places:
        return text[: min(places)]
    return text[: len(text) - max(_overlap(text, mark) for mark in marks)]


def _overlap(text: str, mark: str) -> int:
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
