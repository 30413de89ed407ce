"""Tests of code: how they are read from a task, and how results are compared."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import attrs

from jackfield.errors import RewardError

_FENCE = "```"


@attrs.frozen(kw_only=True)
class Case:
    """One test of a task."""

    name: str
    kind: Literal["stdin", "call", "check"]
    given: Any  #: the input's text, the arguments, or the source with assertions
    expected: Any = None  #: the output's text or the function's value
    entry: str = ""  #: the function that is called, or that tests get as `candidate`
    call: str = ""  #: of a source with assertions: the function, or class and method, that is the test
    is_wrapped: bool = False  #: an expected value may be in a list of its own, as in APPS


def extract(text: str, which: str, fences: Sequence[str] | None) -> str | None:
    """Return the code of a response; None if it has no fenced block."""
    if which == "whole":
        return text
    found = [code for name, code in _blocks(text) if fences is None or name in fences]
    return found[-1 if which == "last" else 0] if found else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the code of each fenced block that is closed."""
    name: str | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        mark = line.strip()
        if mark == _FENCE and name is not None:
            yield name, "".join(each + "\n" for each in lines)
            name = None
        elif mark.startswith(_FENCE) and "`" not in mark[len(_FENCE) :]:
            name, lines = (mark[len(_FENCE) :].split() or [""])[0].lower(), []
        else:
            lines.append(line)


def field(values: Mapping[str, Any], path: str) -> Any:
    """Return a value by its path ``a.b``; None if there is none. A text on the way is read as JSON."""
    found: Any = values
    for part in path.split("."):
        if isinstance(found, str):
            found = _json(found)
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_cases(tests: Any, entry: str) -> list[Case]:
    """Return the tests of a task; ``reward.tests`` if there are none that can be run.

    A text is JSON, or Python with assertions. JSON is ``{"inputs": […], "outputs": […]}``, perhaps with ``fn_name``;
    a list of ``{"input": …, "output": …}``, perhaps with ``testtype`` functional; or a list of sources with assertions,
    also as ``{"test_list": […], "test_setup_code": …}``.
    """
    if isinstance(tests, str):
        parsed = _json(tests)
        tests = parsed if isinstance(parsed, list | dict) else tests
    if isinstance(tests, str):
        cases = _checks(tests, entry)
    elif isinstance(tests, Mapping) and "test_list" in tests:
        cases = _sources(tests["test_list"], entry, tests.get("test_setup_code") or "")
    elif isinstance(tests, Mapping):
        cases = _columns(tests, entry)
    elif isinstance(tests, Sequence) and all(isinstance(each, str) for each in tests):
        cases = _sources(tests, entry, "")
    else:
        cases = _rows(tests, entry)
    return cases or _refuse("there is no test", repr(tests)[:200])


def _refuse(what: str, found: str) -> NoReturn:
    raise RewardError(
        f"the tests cannot be run: {what}", code="reward.tests", where="the ground truth, or tests_field",
        expected="inputs and outputs, or Python with assertions", found=found,
        fix="set tests_field of the sandbox to the field that has them",
    )  # fmt: skip


def _columns(tests: Mapping[str, Any], entry: str) -> list[Case]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
        _refuse("inputs and outputs are not two lists of the same length", f"keys {sorted(map(str, tests))}")
    name = tests.get("fn_name")
    rows = [{"input": given, "output": expected} for given, expected in zip(inputs, outputs, strict=True)]
    if not name:
        return _rows(rows, entry)
    return [
        Case(name=f"{name} {n}", kind="call", given=_arguments(row["input"]), expected=row["output"], entry=str(name),
             is_wrapped=True)
        for n, row in enumerate(rows)
    ]  # fmt: skip


def _arguments(given: Any) -> list[Any]:
    """Return the arguments of a call: a list, or a text with one value in JSON per line (LiveCodeBench)."""
    if isinstance(given, str):
        try:
            return [json.loads(line) for line in given.splitlines() if line.strip()]
        except ValueError as error:
            _refuse("arguments are not JSON, one per line", f"{given[:100]!r}: {error}")
    return list(given) if isinstance(given, list | tuple) else [given]


def _rows(rows: Any, entry: str) -> list[Case]:
    if not isinstance(rows, list | tuple):
        _refuse("they are no list", repr(rows)[:200])
    return [_row(row, number, entry) for number, row in enumerate(rows)]


def _row(row: Any, number: int, entry: str) -> Case:
    expected = row.get("output", row.get("expected")) if isinstance(row, Mapping) else None
    if not isinstance(row, Mapping) or "input" not in row or expected is None:
        _refuse("a test has no input and output", repr(row)[:200])
    if row.get("testtype", row.get("type")) not in ("functional", "function_call") and not row.get("fn_name"):
        return Case(name=f"input {number}", kind="stdin", given=_text(row["input"]), expected=_text(expected))
    name = str(row.get("fn_name") or entry)
    if not name:
        _refuse("no function is named", "neither fn_name nor entry_point_field")
    value = _json(expected) if isinstance(expected, str) else expected
    return Case(name=f"{name} {number}", kind="call", given=_arguments(row["input"]), expected=value, entry=name)


def _text(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else "\n".join(map(str, value))
        if isinstance(value, list | tuple)
        else str(value)
    )


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        _refuse(f"they are no Python: {error}", repr(source[:100]))


def _sources(sources: Sequence[Any], entry: str, setup: str) -> list[Case]:
    texts = [f"{setup}\n{source}" for source in sources]
    for text in texts:
        _parsed(text)
    return [Case(name=str(source).strip()[:80], kind="check", given=text, entry=entry)
            for source, text in zip(sources, texts, strict=True)]  # fmt: skip


def _checks(source: str, entry: str) -> list[Case]:
    """Return the tests of a source: its check(candidate), its functions and methods test_…, or all of it."""
    tree, calls = _parsed(source), []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            calls.append(node.name)
        if isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            calls += [f"{node.name}.{name}" for name in methods if name.startswith("test")]
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "check" in functions:
        calls = ["check"]
        if not entry:
            _refuse("check(candidate) needs the name of a function", "nothing in entry_point_field")
    if not calls and not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        _refuse("the source has no assertion", repr(source[:100]))
    return [Case(name=call or "tests", kind="check", given=source, entry=entry, call=call) for call in calls or [""]]


def same_texts(expected: str, found: str, compare: str, tolerance: float) -> bool:
    """Return whether an output is the expected one."""
    if compare == "exact":
        return expected.rstrip("\n") == found.rstrip("\n")
    left, right = expected.split(), found.split()
    if compare == "whitespace" or len(left) != len(right):
        return left == right
    return all(one == other or _close_words(one, other, tolerance) for one, other in zip(left, right, strict=True))


def _close_words(one: str, other: str, tolerance: float) -> bool:
    try:
        return math.isclose(float(one), float(other), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False


def same_values(expected: Any, found: Any, compare: str, tolerance: float, is_wrapped: bool = False) -> bool:
    """Return whether a function's value is the expected one of JSON, in which tuples are lists and keys are texts."""
    found = _plain(found)
    if _equal(expected, found, compare, tolerance):
        return True
    return (
        is_wrapped and isinstance(expected, list) and len(expected) == 1
        and _equal(expected[0], found, compare, tolerance)
    )  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return {str(key): _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _equal(expected: Any, found: Any, compare: str, tolerance: float) -> bool:
    if isinstance(expected, list) and isinstance(found, list):
        pairs = zip(expected, found, strict=False)
        return len(expected) == len(found) and all(_equal(*pair, compare, tolerance) for pair in pairs)
    if isinstance(expected, dict) and isinstance(found, dict):
        same = expected.keys() == found.keys()
        return same and all(_equal(each, found[key], compare, tolerance) for key, each in expected.items())
    if isinstance(expected, bool) is not isinstance(found, bool):
        return False
    if compare == "float" and isinstance(expected, int | float) and isinstance(found, int | float):
        return expected == found or math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance)
    return type(found) in (bool, int, float, str, type(None)) and bool(expected == found)
