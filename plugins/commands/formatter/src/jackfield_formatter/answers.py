"""Final answers in texts, which are marked in one of several ways."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from jackfield.data.formats import refusal
from jackfield_formatter.examples import Said

AUTO, WHOLE, HASHES, BOXED = "auto", "whole", "####", "boxed"
_HASHES = re.compile(r"####[ \t]*(\S.*)")
_BOXED = re.compile(r"\\boxed\s*\{")
_THOUGHT = re.compile(r"\A\s*(?:<think>)?.*</think>\s*", re.DOTALL)
_MARKED = {HASHES: "a last line `#### …`", BOXED: r"`\boxed{…}`"}


def final_answer(text: str, how: str = AUTO, *, strict: bool = True) -> str:
    r"""Return the final answer of a text.

    ``how`` is ``####`` (GSM8K's last line), ``boxed`` (the last ``\boxed{…}``), ``whole``, the name of a tag
    (``answer``: ``<answer>…</answer>``, the last one), or ``auto``: the first of ``<answer>``, ``boxed`` and ``####``
    that is there, else the whole text without thoughts. A text that lacks the mark raises ``data.malformed``; if not
    ``strict``, it is the answer.
    """
    if how == AUTO:
        how = style_of(text)
    if how == WHOLE:
        return text
    found = marked(text, how)
    if found is None and strict:
        fix = "correct the record, or say with `answers` how its answer is marked"
        raise refusal("the answer is not marked", _MARKED.get(how, f"`<{how}>…</{how}>`"), repr(text)[-200:], fix)
    return text if found is None else found


def marked(text: str, how: str) -> str | None:
    """Return what a text marks as its answer in one way, after its thoughts; None: nothing."""
    said = _THOUGHT.sub("", text)
    if how == AUTO:  # the whole text without thoughts
        return said.strip()
    if how == HASHES:
        last = _HASHES.fullmatch(said.rstrip().rpartition("\n")[2])
        return None if last is None else last[1]
    if how == BOXED:
        return _boxed(said)
    tags = re.findall(rf"<{re.escape(how)}>(.*?)</{re.escape(how)}>", said, re.DOTALL)
    return tags[-1].strip() if tags else None


def style_of(text: str) -> str:
    """Return how a text marks its answer."""
    for how in ("answer", BOXED, HASHES):
        if marked(text, how) is not None:
            return how
    return AUTO if _THOUGHT.match(text) else WHOLE


def common_style(texts: Iterable[str]) -> str:
    """Return how all texts mark their answers; ``auto`` if they do it in different ways, or not at all."""
    styles = {style_of(text) for text in texts}
    found = styles.pop() if len(styles) == 1 else AUTO
    return AUTO if found == WHOLE else found


def thoughts(text: str) -> str:
    """Return what precedes ``</think>`` in a text, without the mark that begins it; empty if there is nothing."""
    found = _THOUGHT.match(text)
    return found[0].strip().removeprefix("<think>").removesuffix("</think>").strip() if found else ""


def without_thoughts(said: Said) -> Any:
    """Return an answer without what precedes ``</think>``."""
    if isinstance(said, str):
        return _THOUGHT.sub("", said)
    content = [message.get("content") for message in said]
    return tuple(
        {**message, "content": _THOUGHT.sub("", text)} if isinstance(text, str) else message
        for message, text in zip(said, content, strict=True)
    )


def _boxed(text: str) -> str | None:
    r"""Return what the last ``\boxed{…}`` has between its braces, which may be nested."""
    starts = [match.end() for match in _BOXED.finditer(text)]
    for start in reversed(starts):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
            if not depth:
                return text[start:place].strip()
    return None
