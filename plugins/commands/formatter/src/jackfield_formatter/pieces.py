"""Pieces of long texts."""

from __future__ import annotations

import re
from collections.abc import Callable

#: ends of parts of a text, the best first: paragraphs, lines, sentences, words
_ENDS = tuple(map(re.compile, (r"\n[ \t]*\n+", r"\n", r"(?<=[.!?\u3002\uff01\uff1f])\s+", r"\s+")))


def pieces(text: str, most: int, count: Callable[[str], int] = len) -> list[str]:
    """Return a text in pieces of at most ``most`` units each, which together are the text.

    A piece ends where the last paragraph ends that fits, if that leaves it at least half as long as it may be; else
    where a line, a sentence or a word does; else in a word. ``count`` returns the units of a text. A character that
    has more units than ``most`` is a piece of its own. Pieces of white space alone are left out.
    """
    found, start = list[str](), 0
    while start < len(text):
        end = start + _piece(text, start, most, count)
        found.append(text[start:end])
        start = end
    return [part for part in found if part.strip()]


def _piece(text: str, start: int, most: int, count: Callable[[str], int]) -> int:
    """Return the length of the piece that begins at ``start``."""
    longest = _longest(text, start, most, count)
    if start + longest >= len(text):
        return longest
    window = text[start : start + longest]
    for pattern in _ENDS:
        ends = [match.end() for match in pattern.finditer(window) if match.end() > longest // 2]
        fitting = next((end for end in reversed(ends) if count(window[:end]) <= most), None)
        if fitting:
            return fitting
    return longest


def _longest(text: str, start: int, most: int, count: Callable[[str], int]) -> int:
    """Return the length of the longest beginning that fits, at least 1; its count grows with its length."""
    rest = len(text) - start
    low, high = 1, min(max(most, 1), rest)
    while high < rest and count(text[start : start + high]) <= most:
        low, high = high, min(2 * high, rest)
    if count(text[start : start + high]) <= most:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(text[start : start + middle]) <= most else (low, middle)
    return low
