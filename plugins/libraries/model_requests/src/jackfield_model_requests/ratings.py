"""Ratings in the answers of models."""

from __future__ import annotations

import re
from functools import cache

_THOUGHT = re.compile(r"\A.*</(?:think|thinking|reasoning)>|\A\s*<(?:think|thinking|reasoning)>.*", re.DOTALL)
_NUMBER = r"([-+]?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?))?(?![\w/%]|[.,]\d|\s*[-–]\s*\d|\s+to\s)"
_ALONE = re.compile(rf"\W*?{_NUMBER}\W*")


def read_rating(text: str, low: float, high: float, name: str = "difficulty") -> float:
    """Return the rating in an answer: ``"NAME": 7`` in JSON, ``Name: 7/10`` in a text, or a number alone.

    A ``ValueError`` says what is there if there is none, or two that differ, or one that is out of range. What comes
    before the end of a thought is not read.
    """
    told = _THOUGHT.sub("", text, count=1).strip()
    found = {_rating(number, of, high) for number, of in _named(name).findall(told)}
    if not found and (alone := _ALONE.fullmatch(told)):
        found = {_rating(alone[1], alone[2], high)}
    if len(found) != 1 or (rating := found.pop()) is None:
        raise ValueError(f"{'two ratings' if found else 'no rating'} in {told[-300:]!r}")
    if not low <= rating <= high:
        raise ValueError(f"{rating:g}, which is not from {low:g} to {high:g}")
    return rating


@cache
def _named(name: str) -> re.Pattern[str]:
    words = rf"\b(?:{re.escape(name)}|rating)\b"
    return re.compile(rf"{words}[\s\"'*_`]*(?:is\b|of\b|[:=])[\s\"'*_`]*{_NUMBER}", re.IGNORECASE)


def _rating(number: str, of: str | None, high: float) -> float | None:
    """Return a number such as ``7/10``, if what it is out of is the end of the scale."""
    return float(number) if not of or float(of) == high else None
