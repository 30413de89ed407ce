"""Templates: which placeholders they have, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.abc.reward import ResponsePart, ScoreRequest
from jackfield_reward_requests import check_template, field_of, fill, fill_text, find, names
from jackfield_testing import refused

REQUEST = ScoreRequest(
    data_source="gsm8k",
    solution_str="It is {ground_truth}",
    ground_truth="4",
    extra_info={"level": 3, "tests": [{"input": "1"}], "a-b": None},
    idempotency_key="train/7",
    messages=(
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "2+2?"}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
    ),
    parts=(ResponsePart(author="model", text="It "), ResponsePart(author="tool", text="is")),
)


def read(name: str) -> Any:
    return field_of(REQUEST, name)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{ground_truth}", "4"),
        ("{extra_info.level}", 3),
        ("level {extra_info.level}", "level 3"),
        ("{extra_info.tests.0.input}", "1"),
        ("{extra_info.tests}", [{"input": "1"}]),
        ("tests: {extra_info.tests}", 'tests: [{"input":"1"}]'),
        ("{extra_info.a-b}", None),
        ("{solution_str}!", "It is {ground_truth}!"),  # what is filled in is not filled in again
        ('{"score": 1} {{ground_truth}} \\frac{1}{2} {}', '{"score": 1} {ground_truth} \\frac{1}{2} {}'),
        ("{model_text}|{tool_text}", "It |is"),
        ("{messages}", REQUEST.messages),
        ("so: {messages}", "so: system: Be brief.\n\nuser: 2+2?\n[image_url]"),
        ({"a": ["{ground_truth}", 1, True, None]}, {"a": ["4", 1, True, None]}),
    ],
)
def test_what_a_template_becomes(template: Any, expected: Any) -> None:
    assert expected == fill(template, read)


def test_the_names_of_a_template() -> None:
    assert {"a", "b.c", "d"} == names({"x": ["{a} {b.c}", {"y": "{d}"}], "z": "{{e}} {1} { f }"})


def test_an_unknown_placeholder_is_refused() -> None:
    check_template({"x": ["{samples} {{nothing}} {turns}"]}, "body", more=["samples"])
    with refused("config.invalid-value", "body", "solution_st", "did you mean 'solution_str'"):
        check_template({"x": ["{solution_st}"]}, "body")


def test_a_value_that_a_task_does_not_have_is_named() -> None:
    with refused("reward.template", "train/7", "extra_info.levels", "level"):
        fill_text("{extra_info.levels}", read)


@pytest.mark.parametrize("path", ["a.c", "a.b.2", "a.b.x", "a.b.-1", "a.b.0.x", "A"])
def test_a_wrong_path_says_what_is_there(path: str) -> None:
    with pytest.raises(LookupError):
        find({"a": {"b": ["x", "y"]}}, path)


def test_paths() -> None:
    value = {"a": {"b": ["x", "y"]}}
    assert [value, "y", value["a"]] == [find(value, ""), find(value, "a.b.1"), find(value, "a")]
