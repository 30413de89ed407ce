"""Settings of the rewards by rule."""

from __future__ import annotations

from typing import Literal

import attrs
import regex
from attrs.validators import gt, le

from jackfield.errors import ConfigError
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
