"""The judge that compares answers, and its settings.

The same class works in the trainer's process and in worker processes.
"""

from __future__ import annotations

import functools
import itertools
import logging
from typing import Any, Literal

import attrs
import regex
from attrs.validators import gt, le

from jackfield.errors import ConfigError, RewardError
from jackfield.sdk import option

#: GSM8K's final line, ``#### 1,234``: a number, with or without a currency sign.
GSM8K_ANSWER = r"####\s*\$?\s*(-?(?:\d[\d,]*(?:\.\d+)?|\.\d+))"


def _default_pattern(config: Config) -> str | None:
    return GSM8K_ANSWER if config.method == "exact" else None


def _is_pattern(_: Config, attribute: attrs.Attribute[str | None], value: str | None) -> None:
    if value is None:
        return
    try:
        regex.compile(value)
    except regex.error as error:
        raise ConfigError(
            f"{attribute.name} is not a regular expression",
            where=attribute.name,
            expected="a pattern of Python's `regex` package (a superset of `re`)",
            found=f"{value!r}: {error}",
        ) from error


@attrs.frozen(kw_only=True)
class Config:
    """Settings of how an answer is found in a response, and when it is right."""

    method: Literal["exact", "regex", "math"] = option(
        "exact", "exact: equal texts; regex: the ground truth is a pattern; math: equal mathematically."
    )
    pattern: str | None = option(
        attrs.Factory(_default_pattern, takes_self=True),
        "Pattern that finds the answer in a response: its group `answer`, else its first group, else the whole match; "
        "null: the whole response. Default for exact: GSM8K's `#### n`; else null.",
        _is_pattern,
    )
    ground_truth_pattern: str | None = option(
        attrs.Factory(_default_pattern, takes_self=True),
        "The same for the ground truth, where it must match. Same defaults.",
        _is_pattern,
    )
    match: Literal["last", "first"] = option("last", "Which of several matches in the response counts.")
    expected: str | None = option(
        None, "regex: pattern with {ground_truth} that an answer must match fully; null: the ground truth."
    )
    correct: float = option(1.0, "Score of a right answer.")
    incorrect: float = option(0.0, "Score of a wrong or missing answer.")
    format_score: float | None = option(None, "Score of a wrong answer in the right form; null: incorrect.")
    remove: str | None = option(None, "exact: characters to ignore in both texts; null: commas.")
    ignore_case: bool = option(False, "exact, regex: ignore upper and lower case.")
    strip: bool = option(True, "exact, regex: ignore white space around answers, and its amount inside.")
    seconds: float = option(
        10.0,
        "Longest time for one answer, at most half of the request's deadline; then its worker is killed, see "
        "on_timeout.",
        gt(0.0),
    )
    on_timeout: Literal["incorrect", "fail"] = option(
        "incorrect",
        "Result of an answer that exceeds `seconds`. incorrect: wrong; fail: no score, so that it is left out of "
        "training, which a policy can learn to exploit.",
    )
    workers: int = option(1, "Worker processes for math, and for slow patterns.", [gt(0), le(4096)])
    memory_bytes: int = option(4 * 2**30, "Address space of a worker process.", gt(0))
    try_first: bool = option(
        True, "Score the first task's own answer before anything is generated, and refuse a task that has no score."
    )

    def __attrs_post_init__(self) -> None:
        if self.remove is not None and self.method != "exact":
            raise _without_effect("remove", self.method, "exact")
        if self.ignore_case and self.method == "math":
            raise _without_effect("ignore_case", self.method, "exact or regex")
        if self.expected is not None and self.method != "regex":
            raise _without_effect("expected", self.method, "regex")
        if self.expected is not None:
            _is_pattern(self, attrs.fields(Config).expected, self.expected.replace("{ground_truth}", "x"))
        if self.format_score is not None and self.pattern is None and self.method != "math":
            raise ConfigError(
                "format_score needs a pattern: without one, no answer is in a wrong form",
                where="format_score",
                fix="give a pattern, or remove format_score",
            )


def _without_effect(name: str, method: str, methods: str) -> ConfigError:
    return ConfigError(
        f"{name} has no effect with method {method!r}", where=name, expected=f"method {methods}", fix=f"remove {name}"
    )


_CACHED_TRUTHS = 4096
_MARKUP = ("$", "\\boxed", "\\(", "\\[")


class Judge:
    """A judge of responses by the fields of :class:`Config`."""

    def __init__(self, **settings: Any) -> None:
        self.config = config = Config(**settings)
        self._pattern = None if config.pattern is None else regex.compile(config.pattern)
        self._truth_pattern = (
            None if config.ground_truth_pattern is None else regex.compile(config.ground_truth_pattern)
        )
        self._ignored = str.maketrans("", "", "," if config.remove is None else config.remove)
        self._compare = {"exact": self._equal, "regex": self._matches, "math": self._equivalent}[config.method]
        self.truth = functools.lru_cache(_CACHED_TRUTHS)(self._truth)
        if config.method == "math":
            import math_verify  # noqa: F401

            logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns about time limits, which we enforce

    def judge(self, response: str, ground_truth: str, timeout: float | None = None) -> tuple[bool, bool]:
        """Return whether the response is right, and whether it has an answer in the right form.

        An unusable ground truth raises a ``RewardError``; a pattern that takes longer than ``timeout`` seconds on one
        text, a ``TimeoutError``.
        """
        truth = self.truth(ground_truth)
        answer = response if self._pattern is None else self._find(self._pattern, response, timeout)
        return (False, False) if answer is None else self._compare(answer, truth, timeout)

    def _find(self, pattern: regex.Pattern[str], text: str, timeout: float | None) -> str | None:
        if self.config.match == "first":
            first = pattern.search(text, timeout=timeout)
            return None if first is None else _answer(first)
        found = list(pattern.finditer(text, timeout=timeout))
        return _answer(found[-1]) if found else None

    def _truth(self, ground_truth: str) -> Any:
        """Parse the ground truth into a text, a pattern or mathematical expressions."""
        text = ground_truth
        if self._truth_pattern is not None:
            found = list(self._truth_pattern.finditer(ground_truth, timeout=self.config.seconds))
            if not found:
                raise RewardError(
                    "the ground truth has no answer",
                    expected=f"a match of {self._truth_pattern.pattern!r}",
                    found=repr(ground_truth[-200:]),
                    fix="set ground_truth_pattern of the rules; null takes the whole ground truth",
                )
            text = _answer(found[-1])
        if self.config.method == "exact":
            return self._normal(text)
        return self._truth_regex(text) if self.config.method == "regex" else _truth_expressions(text)

    def _normal(self, text: str) -> str:
        text = text.translate(self._ignored)
        if self.config.strip:
            text = " ".join(text.split())
        return text.casefold() if self.config.ignore_case else text

    def _equal(self, answer: str, truth: str, timeout: float | None) -> tuple[bool, bool]:
        return self._normal(answer) == truth, True

    def _truth_regex(self, text: str) -> regex.Pattern[str]:
        expected = self.config.expected
        pattern = text if expected is None else expected.replace("{ground_truth}", regex.escape(text))
        try:
            return regex.compile(pattern, regex.IGNORECASE if self.config.ignore_case else 0)
        except regex.error as error:
            raise RewardError(
                "the ground truth is not a regular expression",
                found=f"{pattern!r}: {error}",
                fix="set `expected` of the rules to a pattern with {ground_truth}, or another method",
            ) from error

    def _matches(self, answer: str, truth: regex.Pattern[str], timeout: float | None) -> tuple[bool, bool]:
        text = " ".join(answer.split()) if self.config.strip else answer
        matched = truth.fullmatch(text, timeout=timeout) is not None
        return matched, matched or self._pattern is not None

    def _equivalent(self, answer: str, truth: list[Any], timeout: float | None) -> tuple[bool, bool]:
        expressions = _expressions(answer if self._pattern is None else _marked(answer))
        return _any_equal(truth, expressions), bool(expressions)


def _answer(found: regex.Match[str]) -> str:
    if "answer" in found.re.groupindex:
        return str(found["answer"] or "")
    return str((found[1] if found.re.groups else found[0]) or "")


def _marked(text: str) -> str:
    """Mark a bare answer as LaTeX; an answer with LaTeX delimiters is found by them."""
    return text if any(mark in text for mark in _MARKUP) else f"\\boxed{{{text}}}"


def _expressions(text: str) -> list[Any]:
    from math_verify import parse

    expressions: list[Any] = parse(text, parsing_timeout=None, raise_on_error=True)
    return expressions


def _truth_expressions(text: str) -> list[Any]:
    expressions = _expressions(_marked(text)) or _expressions(text)
    if not expressions:
        raise RewardError(
            "the ground truth is not mathematics",
            expected="a number, an expression or LaTeX",
            found=repr(text[:200]),
            fix="set ground_truth_pattern of the rules to where the answer is, or another method",
        )
    return expressions


def _any_equal(truths: list[Any], answers: list[Any]) -> bool:
    """Return whether some pair is equal. If none is, raise the first exception of a comparison."""
    from math_verify import verify

    failure: Exception | None = None
    for truth, answer in itertools.product(truths, answers):
        try:
            if verify(truth, answer, timeout_seconds=None, raise_on_error=True):
                return True
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return False
