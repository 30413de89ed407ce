"""Ratings in the answers of models."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jackfield.errors import ConfigError, OperatorError
from jackfield_model_requests.asking import Model
from jackfield_reward_requests import names

_THOUGHT = re.compile(r"\A.*</(?:think|thinking|reasoning)>|\A\s*<(?:think|thinking|reasoning)>.*", re.DOTALL)
_NUMBER = r"([-+]?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?))?(?![\w/%]|[.,]\d|\s*[-–]\s*\d|\s+to\s)"
_AGAIN = "I cannot read a rating in that. Answer with JSON in this form, and with nothing else: {form}"
_ALONE = re.compile(rf"\W*?{_NUMBER}\W*")


def form_of(config: Any, name: str) -> str:
    """Return the JSON that is asked for, for a template."""
    return f'{{"{name}": <number from {config.low:g} to {config.high:g}>}}'


async def rated(model: Model, question: str, config: Any, name: str, *about: object) -> float:
    """Ask until an answer has a rating; return it, 0 at the low end of the scale and 1 at the high one.

    ``config`` has ``low``, ``high``, ``temperature``, ``max_tokens`` and ``repairs``, how often an answer without a
    rating is asked for once more; ``about`` is what seeds are made of. ``operator.answer`` if no answer has one.
    """
    messages, form = [{"role": "user", "content": question}], form_of(config, name)
    sampling: Any = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    async with model.turn():
        for attempt in range(config.repairs + 1):
            answer = await model.ask(messages, seed=model.seed(*about, attempt), **sampling)
            try:
                rating = read_rating(answer.text, config.low, config.high, name)
                return float((rating - config.low) / (config.high - config.low))
            except ValueError as error:
                last = str(error)
            again = {"role": "user", "content": _AGAIN.replace("{form}", form)}
            messages = [*messages[:1], {"role": "assistant", "content": answer.text or "(no text)"}, again]
    fix = "use a model that keeps to the form, or raise max_tokens or repairs"
    details: Any = {"where": model.name, "expected": form, "found": last, "fix": fix}
    raise OperatorError("a model gave no rating", code="operator.answer", **details)


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
