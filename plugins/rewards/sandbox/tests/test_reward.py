"""The agent: scores of each form of tests, failures, deadlines, other languages, and levels that a machine lacks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield.plugins import discover
from jackfield.sdk import structure
from jackfield_reward_sandbox.reward import SandboxReward
from jackfield_reward_sandbox.settings import Config
from jackfield_sandbox.box import LEVELS
from jackfield_testing import refused

Run = Callable[..., list[ScoreResult]]

_ADD = "def add(a, b):\n    return a + b"
_SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


def test_the_plugin_is_found_and_passes_its_gates() -> None:
    loaded = discover().load("reward", "sandbox")
    assert "jackfield_reward_sandbox.reward.SandboxReward" == f"{loaded.cls.__module__}.{loaded.cls.__name__}"
    assert loaded.settings_class() == loaded.settings_class()


def test_scores_dimensions_and_explanations(run: Run, levels: list[str]) -> None:
    codes = ["print(sum(map(int, input().split())))", "print(3)", "print(", "1 / 0"]
    right, half, broken, raised = run([(code, _SUM) for code in codes])
    metrics = {"well_formed": 1.0, "late": 0.0, "isolation": float(LEVELS.index(levels[-1]))}
    passed = {"passed": 1.0, "compiled": 1.0}
    assert ScoreResult(score=1.0, dimensions=passed, metrics=metrics, explanation="all 2 tests passed") == right
    why = r"test input 1: expected '7\n', found '3\n'"
    assert (0.5, {"passed": 0.5, "compiled": 1.0}, why) == (half.score, half.dimensions, half.explanation)
    assert (0.0, {"passed": 0.0, "compiled": 0.0}) == (broken.score, broken.dimensions)
    assert "SyntaxError" in str(broken.explanation)
    assert "ZeroDivisionError" in str(raised.explanation)


def test_all_or_nothing_stops_at_the_first_failure(run: Run) -> None:
    tests = {"inputs": ["1", "2", "3"], "outputs": ["1", "x", "3"]}
    half, right = run([("print(input())", tests), ("i = input()\nprint('x' if i == '2' else i)", tests)], score="all")
    assert [(0.0, pytest.approx(1 / 3)), (1.0, 1.0)] == [
        (each.score, each.dimensions["passed"]) for each in (half, right)
    ]


_CASES: dict[str, tuple[str, Any, str, float]] = {
    "APPS": (_ADD, {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}, "", 1.0),
    "TACO's class": (
        "class Solution:\n    def add(self, a, b):\n        return a + b",
        {"inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]], "fn_name": "add"},
        "",
        1.0,
    ),
    "LiveCodeBench": (_ADD, [{"input": "1\n2", "output": "3", "testtype": "functional"}], "add", 1.0),
    "LiveCodeBench, wrong": (_ADD, [{"input": "1\n2", "output": "4", "testtype": "functional"}], "add", 0.0),
    "HumanEval": (_ADD, "def check(candidate):\n    assert candidate(1, b=2) == 3", "add", 1.0),
    "HumanEval with helpers": (
        f"{_ADD}\nimport math\ndef twice(a):\n    return 2 * a",
        "def check(candidate):\n    assert candidate(1, twice(2)) == math.floor(5.5)",
        "add",
        1.0,
    ),
    "MBPP": (
        _ADD,
        {"test_list": ["assert add(1, 2) == x", "assert add(1, 2) == 4"], "test_setup_code": "x = 3"},
        "",
        0.5,
    ),
    "a test file": (
        _ADD,
        "from solution import add\nimport solution\ndef test_a():\n    assert add(1, 2) == 3\n"
        "def test_b():\n    assert solution.add('a', 'b') == 'ab'\ndef test_c():\n    assert add(1, 1) == 3",
        "",
        pytest.approx(2 / 3),
    ),
    "unittest": (
        _ADD,
        "import unittest\nclass A(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(3, "
        "add(1, 2))\n    def test_b(self):\n        self.assertEqual(4, add(1, 2))",
        "",
        0.5,
    ),
    "an argument that changes": ("def f(x):\n    x.append(1)", "x = []\nf(x)\nassert x == [1]", "", 1.0),
    "an exception": (
        "def f(x):\n    raise KeyError(x)",
        "try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    assert 0",
        "",
        1.0,
    ),
    "objects": (
        "class Stack(list):\n    pass\nclass Node:\n    def __init__(self, x):\n        self.x, self.next = x, None\n"
        "def f(n):\n    return n.next.x",
        "a, b = Node(1), Node([2])\na.next = b\nassert f(a) == [2] and isinstance(a, Node)\n"
        "assert not isinstance(a, Stack) and a.next == b and a != b and a.next.x[0] == 2",
        "",
        1.0,
    ),
    "a generator": (
        "def f(n):\n    yield from range(n)",
        "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0",
        "",
        1.0,
    ),
    "sets and tuples": ("def f(n):\n    return {(n, 1.5): {n}}", "assert f(3) == {(3, 1.5): {3}}", "", 1.0),
    "no such function": ("x = 1", "def check(candidate):\n    assert candidate(1)", "add", 0.0),
}


def test_forms_of_tests(run: Run) -> None:
    found = {}
    for entry in {entry for _, _, entry, _ in _CASES.values()}:
        names = [name for name, case in _CASES.items() if case[2] == entry]
        results = run([_CASES[name][:2] for name in names], {"entry_point": entry})
        found |= {name: (each.score, each.explanation, each.error) for name, each in zip(names, results, strict=True)}
    assert {name: score for name, (_, _, _, score) in _CASES.items()} == {
        name: each[0] for name, each in found.items()
    }, found


def test_code_before_that_of_the_response(run: Run) -> None:
    extra = {"prompt": "def twice(x):\n    return 2 * x", "entry_point": "f"}
    code = "def f(x):\n    return twice(math.floor(x))"
    tests = "def check(candidate):\n    assert candidate(1.5) == 2"
    settings = {"preamble": "import math", "preamble_field": "prompt"}
    [found], [without] = run([(code, tests)], extra, **settings), run([(code, tests)], extra)
    assert [1.0, 0.0] == [found.score, without.score]


def test_tests_in_other_fields(run: Run) -> None:
    extra = {"private": json.dumps({"tests": _SUM})}
    [result] = run([("print(3)", "")], extra, tests_field="private.tests")
    assert 0.5 == result.score


@pytest.mark.parametrize(
    "tests", ["", "no tests", {"inputs": [1], "outputs": []}, "def check(candidate):\n    assert candidate(lambda: 1)"]
)
def test_tests_that_cannot_be_run_are_a_final_failure(run: Run, tests: Any) -> None:
    """The task is broken, and no response is wrong by it."""
    [result] = run([("def add(f):\n    return f()", tests)], {"entry_point": "add"} if "check" in str(tests) else {})
    assert ("failed", None, True) == (result.status, result.score, result.is_final)
    assert "[reward.tests]" in str(result.error)


def test_a_response_without_code_is_wrong() -> None:
    async def main() -> ScoreResult:
        agent = SandboxReward(Config(), RewardContext())
        await agent.start()
        try:
            request = ScoreRequest(data_source="x", solution_str="print(3)", ground_truth=json.dumps(_SUM))
            return await agent.compute_score(request)
        finally:
            await agent.close()

    result = asyncio.run(main())
    assert (0.0, 0.0) == (result.score, result.metrics["well_formed"])


def test_time_limits(run: Run) -> None:
    """A test that takes too long is not passed, or has no score; so are tests after the time of all."""
    slow = (
        "if input() == '2':\n    while True:\n        pass\nprint('x')",
        {"inputs": ["1", "2"], "outputs": ["x", "x"]},
    )
    [late] = run([slow], seconds=0.5)
    assert ("ok", 0.5, 0.0) == (late.status, late.score, late.metrics["late"])
    [failed] = run([slow], seconds=0.5, on_timeout="fail")
    assert ("timeout", None) == (failed.status, failed.score)
    many = (slow[0], {"inputs": ["2", "1"], "outputs": ["x", "x"]})
    [cut] = run([many], seconds=5.0, task_seconds=0.5)
    assert ("ok", 0.0, 1.0) == (cut.status, cut.score, cut.metrics["late"])


@pytest.mark.needs("node")
def test_other_languages(run: Run) -> None:
    code = "const lines = require('fs').readFileSync(0, 'utf8').split(' ');\nconsole.log(+lines[0] + +lines[1]);"
    settings: dict[str, Any] = {"command": ["node"], "file": "main.js", "processes": 32}
    wrong_tests = {"inputs": [[1]], "outputs": [1], "fn_name": "f"}
    right, refusal = run([(code, _SUM), (code, wrong_tests)], **settings)
    assert (1.0, {"passed": 1.0}) == (right.score, right.dimensions), right.explanation
    assert ("failed", True) == (refusal.status, refusal.is_final)
    [shell] = run([("read a b; echo $((a + b))", _SUM)], command=["bash"])
    assert 1.0 == shell.score, shell.explanation


def test_numbers_within_a_tolerance(run: Run) -> None:
    tests = {"inputs": ["", ""], "outputs": ["0.333333 x", "1e3"]}
    code = ("import sys\nprint(1 / 3, 'x')", tests)
    [near], [exact] = run([code], compare="float", tolerance=1e-3), run([code], compare="exact")
    assert [0.5, 0.0] == [near.score, exact.score]


def test_a_cancelled_score_leaves_nothing(run: Run, isolated: dict[str, Any]) -> None:
    """The fixture waits for every process; the next score gets a new one."""

    async def main() -> ScoreResult:
        agent = SandboxReward(structure(Config, {"workers": 1, "seconds": 50.0, **isolated}), RewardContext())
        await agent.start()
        try:
            call = asyncio.create_task(agent.compute_score(_request("while True:\n    pass")))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            late = await agent.compute_score(attrs.evolve(_request("while True:\n    pass"), deadline_seconds=1.0))
            assert ("ok", 0.0, 1.0) == (late.status, late.score, late.metrics["late"])
            return await agent.compute_score(_request("print(3)"))
        finally:
            await agent.close()

    assert 0.5 == asyncio.run(main()).score


def _request(code: str) -> ScoreRequest:
    return ScoreRequest(data_source="x", solution_str=f"```python\n{code}\n```", ground_truth=json.dumps(_SUM))


def test_versions_know_what_scores_depend_on() -> None:
    one, other = (
        SandboxReward(structure(Config, each), RewardContext()) for each in ({}, {"python": "/usr/bin/python3"})
    )
    assert one.version == SandboxReward(Config(), RewardContext()).version
    assert one.version != other.version


def test_an_interpreter_that_is_missing_is_refused() -> None:
    async def main() -> None:
        agent = SandboxReward(structure(Config, {"python": "/nowhere/python"}), RewardContext())
        try:
            with refused("reward.isolation", "/nowhere/python", "namespaces: ", "limits: "):
                await agent.start()
        finally:
            await agent.close()

    asyncio.run(main())


_WEAK = """
import asyncio, sys
from jackfield.abc.reward import RewardContext
from jackfield.errors import RewardError
from jackfield.sdk import structure
from jackfield_reward_sandbox.reward import SandboxReward
from jackfield_reward_sandbox.settings import Config

async def main(isolation):
    agent = SandboxReward(structure(Config, {"isolation": isolation}), RewardContext())
    try:
        await agent.start()
        print(agent.level)
    except RewardError as error:
        print(error.code, error.expected, "user" in error.fix)
    finally:
        await agent.close()

asyncio.run(main("namespaces"))
asyncio.run(main("auto"))
"""


@pytest.mark.needs("mount")
def test_a_machine_that_lets_processes_mount_has_the_best_level(levels: list[str]) -> None:
    """A level that does not hold any more is missed here: other tests run at those that hold."""
    assert "namespaces" == levels[-1]


@pytest.mark.needs("mount")
def test_what_a_machine_does_not_allow_is_refused_at_the_start() -> None:
    """A machine without user namespaces: asked for by name they are refused, and auto takes less and says so."""
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh", sys.executable, "-c", _WEAK]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "error"}, check=False
    )
    first, second = done.stdout.splitlines()
    assert "reward.isolation namespaces True" == first
    assert second in ("filters", "limits")


def test_the_levels_are_listed(levels: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jackfield_reward_sandbox"], capture_output=True, text=True, check=True
    )
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert list(LEVELS) == list(lines)
    assert "allowed" == lines["none"]
    assert "allowed" == lines[levels[-1]]
