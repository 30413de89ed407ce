"""The rules: extraction, comparison, and what is not a ground truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.sdk import structure
from jackfield_reward_rules.judge import Config, Judge
from jackfield_testing import refused

RIGHT, WRONG, FORMLESS = (True, True), (False, True), (False, False)


def judge(response: str, truth: str, **settings: Any) -> tuple[bool, bool]:
    return Judge(**attrs.asdict(structure(Config, settings))).judge(response, truth)


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("48 + 24 = 72\n#### 72", "so\n#### 72", RIGHT),
        ("####72", "#### 72", RIGHT),
        ("#### 1234", "#### 1,234", RIGHT),
        ("#### $1,234.50 in all", "#### 1234.50", RIGHT),
        ("#### -3", "#### -3", RIGHT),
        ("#### 72.", "#### 72", RIGHT),
        ("#### 3", "#### -3", WRONG),
        ("#### 7\n#### 8", "#### 8", RIGHT),
        ("#### 8\n#### 7", "#### 8", WRONG),
        ("#### 727", "#### 72", WRONG),
        ("the answer is 72", "#### 72", FORMLESS),
        ("#### none", "#### 72", FORMLESS),
        ("", "#### 72", FORMLESS),
    ],
)
def test_exact_reads_gsm8k(response: str, truth: str, expected: tuple[bool, bool]) -> None:
    assert expected == judge(response, truth)


@pytest.mark.needs_data("gsm8k")
def test_every_answer_of_the_real_gsm8k_is_right_and_no_other(shared_data: Path) -> None:
    for name in ("train", "test"):
        file = shared_data / "gsm8k" / f"{name}.jsonl"
        rules = Judge()
        answers = [json.loads(line)["answer"] for line in file.read_text().splitlines()]
        assert all(rules.judge(answer, answer) == RIGHT for answer in answers)
        changed = [answer.rpartition("#### ")[0] + "#### 1" + answer.rpartition("#### ")[2] for answer in answers]
        assert all(rules.judge(wrong, answer) == WRONG for wrong, answer in zip(changed, answers, strict=True))


def test_first_or_last_match_and_named_groups() -> None:
    pattern = r"(?:is|=) (?P<answer>\w+)"
    settings = {"pattern": pattern, "ground_truth_pattern": None}
    assert RIGHT == judge("it is a, no: it is b", "b", **settings)
    assert RIGHT == judge("it is a, no: it is b", "a", match="first", **settings)
    assert RIGHT == judge("abc 5 def", "5", pattern=r"\d", ground_truth_pattern=None)


def test_text_options_of_exact() -> None:
    whole: dict[str, Any] = {"pattern": None, "ground_truth_pattern": None}
    assert RIGHT == judge("  New \n York ", "New York", **whole)
    assert WRONG == judge(" New York", "New York", strip=False, **whole)
    assert WRONG == judge("new york", "New York", **whole)
    assert RIGHT == judge("new york", "New York", ignore_case=True, **whole)
    assert RIGHT == judge("1,2", "12", **whole)
    assert WRONG == judge("1,2", "12", remove="", **whole)
    assert RIGHT == judge("# 1 2 .", "12", remove="# .", **whole)


def test_regex_takes_the_ground_truth_as_pattern() -> None:
    assert (True, True) == judge("blue", "blue|azure", method="regex")
    assert (False, False) == judge("dark blue", "blue|azure", method="regex")
    assert (True, True) == judge("BLUE", "blue", method="regex", ignore_case=True)
    extracting = {"method": "regex", "pattern": r"<answer>(.*?)</answer>"}
    assert RIGHT == judge("<answer> blue </answer>", "blue|azure", **extracting)
    assert WRONG == judge("<answer>red</answer>", "blue|azure", **extracting)
    assert FORMLESS == judge("blue", "blue|azure", **extracting)


def test_regex_takes_a_pattern_around_the_ground_truth() -> None:
    settings = {"method": "regex", "expected": r".*the answer is {ground_truth}\b.*"}
    assert (True, True) == judge("So the answer is 1+1.", "1+1", **settings)
    assert (False, False) == judge("So the answer is 11.", "1+1", **settings)


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", RIGHT),
        (r"$\frac{\sqrt{2}}{2}$", r"\frac{1}{\sqrt{2}}", RIGHT),
        ("The answer is 72.", "72", RIGHT),
        (r"$\{2, 1\}$", r"\{1,2\}", RIGHT),
        (r"$x = 5$", "$5$", RIGHT),
        (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$", RIGHT),
        (r"\boxed{7}", "72", WRONG),
        (r"\boxed{\text{cat}}", "72", WRONG),
        ("no idea", "72", FORMLESS),
        ("", "72", FORMLESS),
    ],
)
def test_math_knows_equal_from_different(response: str, truth: str, expected: tuple[bool, bool]) -> None:
    assert expected == judge(response, truth, method="math")


def test_math_with_patterns() -> None:
    settings = {"method": "math", "pattern": r"####\s*(.+)", "ground_truth_pattern": r"####\s*(.+)"}
    assert RIGHT == judge("5 + 5\n#### 1/2", "so\n#### 0.5", **settings)
    assert RIGHT == judge("#### $1/2$", "#### 0.5", **settings)
    assert FORMLESS == judge("1/2", "#### 0.5", **settings)


@pytest.mark.parametrize(
    ("truth", "settings", "words"),
    [
        ("72", {}, ["ground_truth_pattern"]),
        ("(", {"method": "regex"}, []),
        ("", {"method": "math"}, []),
    ],
)
def test_a_ground_truth_that_is_none_is_an_error(truth: str, settings: dict[str, Any], words: list[str]) -> None:
    """The task is broken, not the answer: no score."""
    with refused("reward.failed", *words):
        judge("#### 72", truth, **settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"pattern": "("}, "pattern"),
        ({"ground_truth_pattern": "["}, "ground_truth_pattern"),
        ({"method": "regex", "expected": "({ground_truth}"}, "expected"),
        ({"expected": "x"}, "expected"),
        ({"method": "math", "ignore_case": True}, "ignore_case"),
        ({"method": "math", "remove": ","}, "remove"),
        ({"method": "regex", "format_score": 0.1}, "pattern"),
        ({"seconds": 0}, "seconds"),
        ({"workers": 0}, "workers"),
        ({"methd": "math"}, "'method'"),
        ({"method": "maths"}, "method"),
    ],
)
def test_settings_that_do_nothing_or_are_wrong_are_refused(settings: dict[str, Any], name: str) -> None:
    with refused(("config.invalid-value", "config.unknown-key"), name):
        structure(Config, settings)


def test_patterns_that_backtrack_are_stopped() -> None:
    rules = Judge(pattern=r"((?:a|a)+)$", ground_truth_pattern=None)
    with pytest.raises(TimeoutError):
        rules.judge("a" * 60 + "b", "a", timeout=0.05)
