"""Tests of a task and code of a response: how they are read, and how results are compared."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from jackfield.sdk import structure
from jackfield_reward_sandbox.cases import extract, field, read_cases, same_texts, same_values
from jackfield_reward_sandbox.settings import Config
from jackfield_sandbox.values import CannotSend, decode, encode
from jackfield_testing import refused

_PYTHON = ("", "python")


@pytest.mark.parametrize(
    ("text", "which", "expected"),
    [
        ("a\n```python\nx\n```\nb\n```\ny\n```", "last", "y\n"),
        ("a\n```python\nx\n```\nb\n```\ny\n```", "first", "x\n"),
        ("```python\nx\n```\n```bash\nls\n```", "last", "x\n"),
        ("  ```python\n  x\n  ```", "last", "  x\n"),
        ("```python\nx", "last", None),
        ("x", "last", None),
        ("x", "whole", "x"),
        ("```Python title=a\nx\n```", "last", "x\n"),
        ("```python\nprint('```')\n```", "last", "print('```')\n"),
        ("```python\n```", "last", ""),
        ("```python\nx\n```python\ny\n```", "last", "y\n"),
        ("```python\nx\n````\n```", "last", "x\n````\n"),
        ("```x\n" * 50_000, "last", None),
    ],
)
def test_code_is_found_in_a_response(text: str, which: str, expected: str | None) -> None:
    assert expected == extract(text, which, _PYTHON)


def test_any_language_counts_without_names() -> None:
    assert "ls\n" == extract("```bash\nls\n```", "last", None)


@pytest.mark.parametrize(
    ("tests", "entry", "expected"),
    [
        ({"inputs": ["1"], "outputs": ["2"]}, "", [("stdin", "1", "2", "")]),
        ({"inputs": [["1", "2"]], "outputs": [["3", "4"]]}, "", [("stdin", "1\n2", "3\n4", "")]),
        ({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "f"}, "", [("call", [1, 2], [3], "f")]),
        ({"inputs": ["[1]\n2"], "outputs": [3], "fn_name": "f"}, "", [("call", [[1], 2], 3, "f")]),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], "", [("stdin", "1", "2", "")]),
        ([{"input": "1", "output": "[2]", "testtype": "functional"}], "f", [("call", [1], [2], "f")]),
        (["assert f(1) == 2"], "", [("check", "\nassert f(1) == 2", None, "")]),
        ({"test_list": ["assert f()"], "test_setup_code": "x = 1"}, "", [("check", "x = 1\nassert f()", None, "")]),
        ("assert f(1) == 2", "", [("check", "assert f(1) == 2", None, "")]),
    ],
)
def test_forms_of_tests(tests: Any, entry: str, expected: list[tuple[Any, ...]]) -> None:
    for given in (tests, json.dumps(tests)) if not isinstance(tests, str) else (tests,):
        found = read_cases(given, entry)
        assert expected == [(case.kind, case.given, case.expected, case.entry) for case in found]


def test_functions_and_methods_of_a_source_are_tests() -> None:
    source = "def test_a(): assert f()\ndef helper(): ...\nclass A(unittest.TestCase):\n def test_b(self): ...\n"
    assert ["test_a", "A.test_b"] == [case.call for case in read_cases(source, "")]
    assert ["check"] == [case.call for case in read_cases("def check(candidate):\n assert candidate()", "f")]


@pytest.mark.parametrize(
    "tests",
    [
        "", "42", "{}", "[]", "x = 1", "assert (", "null", ["assert ("], [1], {"inputs": ["1"], "outputs": []},
        [{"input": "1"}], [{"input": "1", "output": "2", "testtype": "functional"}], "def check(candidate): assert 1",
        {"inputs": ["x"], "outputs": [1], "fn_name": "f"},
    ],
)  # fmt: skip
def test_what_is_no_test_is_refused(tests: Any) -> None:
    with refused("reward.tests"):
        read_cases(tests, "")


def test_fields_by_path() -> None:
    values = {"a": {"b": 1}, "c": '{"d": 2}'}
    assert [1, 2, None, None] == [field(values, path) for path in ("a.b", "c.d", "a.x", "c.d.e")]


@pytest.mark.parametrize(
    ("expected", "found", "passes"),
    [
        ("3\n", "3", {"exact", "whitespace", "float"}),
        ("3 4", "3  4\n", {"whitespace", "float"}),
        ("3\n4", "3 4", {"whitespace", "float"}),
        ("0.5", "0.50000001", {"float"}),
        ("nan", "nan", {"exact", "whitespace", "float"}),
        ("3", "4", set()),
        ("3", "", set()),
        ("yes 1", "no 1", set()),
        ("1 2", "1", set()),
    ],
)
def test_outputs_are_compared(expected: str, found: str, passes: set[str]) -> None:
    kinds = ("exact", "whitespace", "float")
    assert passes == {kind for kind in kinds if same_texts(expected, found, kind, 1e-6)}


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ([1, 2], (1, 2), True), ({"1": 2}, {1: 2}, True), (1, True, False), (True, 1, False), (1, 1.0, True),
        (0.1, 0.1 + 1e-9, True), ("1", 1, False), (None, None, True), ([1], {1}, False), ([[1]], [1], False),
    ],
)  # fmt: skip
def test_values_are_compared(expected: Any, found: Any, same: bool) -> None:
    assert same is same_values(expected, found, "float", 1e-6)


def test_only_apps_wraps_expected_values() -> None:
    assert not same_values([5], 5, "exact", 0.0)
    assert same_values([5], 5, "exact", 0.0, is_wrapped=True)


def test_plain_values_survive() -> None:
    values = [
        None, True, -(10**40), 1.5, "a\ud800", [1, (2, {3}), frozenset({4})], {"a": {(1, 2): 3}}, b"\x00\xff", 1 + 2j,
        Decimal("1.50"), Fraction(1, 3), range(1, 9, 2), math.inf,
    ]  # fmt: skip
    assert values == decode(json.loads(json.dumps(encode(values))))
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan)))))


def test_subclasses_become_plain() -> None:
    class Liar(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    [found] = decode(json.loads(json.dumps(encode([Liar("x")]))))
    assert (str, "x") == (type(found), found)


def test_other_objects_are_not_sent() -> None:
    with pytest.raises(CannotSend):
        encode(object())
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(CannotSend):
        encode(deep)


@pytest.mark.parametrize(
    "content", [{}, {"a": 1}, {"int": "x"}, {"set": [[1]]}, {"dict": [1]}, {"complex": [[]]}, {"Fraction": "1/0"},
                {"bytes": 1}, {"handle": 1}, {"tuple": 1, "set": 2}, {"Decimal": "x"}],
)  # fmt: skip
def test_malformed_values_are_refused(content: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(content)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"tolerance": 0.1}, "tolerance"),
        ({"extract": "whole", "fences": ["py"]}, "fences"),
        ({"isolation": "limits", "readable": ["/data"]}, "readable"),
        ({"isolation": "none", "processes": 3}, "processes"),
        ({"command": []}, "command"),
        ({"isolation": "gvisor"}, "isolation"),
        ({"memory_bytes": 1}, "memory_bytes"),
        ({"workers": 0}, "workers"),
    ],
)
def test_settings_that_are_wrong_or_do_nothing_are_refused(settings: dict[str, Any], name: str) -> None:
    with refused("config.invalid-value", name):
        structure(Config, settings)
