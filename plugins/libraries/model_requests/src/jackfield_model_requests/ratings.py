"""Ratings in the answers of models."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jackfield.errors import ConfigError
from jackfield_reward_requests import names

_THOUGHT = re.compile(r"\A.*</(?:think|thinking|reasoning)>|\A\s*<(?:think|thinking|reasoning)>.*", re.DOTALL)
_NUMBER = r"([-+]?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?))?(?![\w/%]|[.,]\d|\s*[-–]\s*\d|\s+to\s)"
_ALONE = re.compile(rf"\W*?{_NUMBER}\W*")


def check_scale(low: float, high: float, template: str, shows: str) -> None:
    """Refuse a scale without extent, and a template that does not show what is rated, or shows parts of columns."""
    shown = names(template)
    where, found, expected, fix = "high", f"{high:g}", f"more than low ({low:g})", "give high the best rating"
    what = "a scale has no extent" if low >= high else ""
    if not what and shows not in shown:
        what, expected, fix = (
            f"a template does not show the {shows}",
            f"{{{shows}}}",
            f"add {{{shows}}} to the template",
        )
        where, found = "template", ", ".join(sorted(shown)) or "no names"
    elif not what and (paths := sorted(name for name in shown if "." in name)):
        what, expected, fix = "a template names a part of a column", "names of columns", "show the whole column"
        where, found = "template", ", ".join(paths)
    if what:
        details: Any = {"where": where, "expected": expected, "found": found, "fix": fix}
        raise ConfigError(what, **details)


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
