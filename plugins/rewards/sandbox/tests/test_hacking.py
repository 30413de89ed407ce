"""Code that tries to pass tests without solving the task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jackfield.abc.reward import ScoreResult

Run = Callable[..., list[ScoreResult]]

_CHECK = "def check(candidate):\n    assert candidate(3) == 918273645\n    assert candidate(4) == 918273646\n"
_RAISES = """
def check(candidate):
    try:
        candidate(3)
    except Exception:
        return
    assert False, "no exception"
"""
#: Looks for the expected number in memory: its own, that of frames and objects, and that of other processes.
_SEARCH = r"""
import gc, os, re, sys
def search(text):
    found = re.search(rb"918\d{6}", text)
    return found and int(found[0])
def memories():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
                for line in maps:
                    start, end = (int(each, 16) for each in line.split()[0].split("-"))
                    if "r" in line.split()[1] and end - start < 10**8:
                        try:
                            memory.seek(start)
                            yield memory.read(end - start)
                        except (OSError, ValueError, OverflowError):
                            pass
        except OSError:
            pass
def f(x):
    frame = sys._getframe()
    while frame:
        if found := search(repr(frame.f_locals).encode(errors="replace")):
            return found + x - 3
        frame = frame.f_back
    for memory in memories():
        if found := search(memory):
            return found + x - 3
    return 0
"""
_HACKS = {
    "leaves at the import": "import os\nos._exit(0)",
    "leaves with success": "raise SystemExit(0)",
    "leaves in the call": "import os\ndef f(x):\n    os._exit(0)",
    "raises SystemExit in the call": "import sys\ndef f(x):\n    sys.exit(0)",
    "equals everything": "class E:\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return E()",
    "is a number that equals everything": (
        "class E(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = int.__hash__\n"
        "def f(x):\n    return E(1)"
    ),
    "prints markers": "def f(x):\n    print('passed', 'OK', '{\"passed\": true}', flush=True)",
    "writes to every descriptor": (
        "import os, struct\ndef f(x):\n    data = b'{\"passed\": true, \"reason\": \"\", \"is_broken\": false}'\n"
        "    for n in range(3, 64):\n        try:\n            os.write(n, struct.pack('>I', len(data)) + data)\n"
        "        except OSError:\n            pass"
    ),
    "changes built-ins": (
        "import builtins, json, operator, unittest\nbuiltins.AssertionError = type('Never', (Exception,), {})\n"
        "json.dumps = lambda *a, **k: '{\"passed\": true}'\noperator.eq = lambda *a: True\ndef f(x):\n    return 0"
    ),
    "changes the checker": (
        "import sys\nfor module in list(sys.modules.values()):\n    for name in ('judge', '_run_test', 'encode'):\n"
        "        if hasattr(module, name):\n            setattr(module, name, lambda *a, **k: None)\n"
        "def f(x):\n    return 0"
    ),
    "searches memory": _SEARCH,
    "answers with nonsense": "def f(x):\n    return '\\ud800' * 10 + '\\x00'",
    "answers without end": "def f(x):\n    return 'x' * 10**8",
    "has a name only": "f = None",
    "kills what it can": "import os\ndef f(x):\n    os.kill(-1, 9)",
    "interrupts the first process": "import os\ndef f(x):\n    os.kill(1, 2)",
    "stops what it can": "import os\ndef f(x):\n    os.kill(-1, 19)",
    "kills the first process": "import os\ndef f(x):\n    os.kill(1, 9)",
}  # fmt: skip


@pytest.mark.parametrize("form", ["check", "call"])
def test_no_hack_passes(run: Run, levels: list[str], form: str) -> None:
    """The control is a solution that passes."""
    forms: dict[str, Any] = {
        "check": _CHECK,
        "call": {"inputs": [[3], [4]], "outputs": [918273645, 918273646], "fn_name": "f"},
    }
    hacks = [(code, forms[form]) for code in _HACKS.values()]
    solution = ("def f(x):\n    return x + 918273642", forms[form])
    settings = {"isolation": levels[-1], "seconds": 2.0, "score": "all", "workers": 4}
    *results, right = run([*hacks, solution], {"entry_point": "f"}, **settings)
    assert dict.fromkeys(_HACKS, ("ok", 0.0)) == {
        name: (result.status, result.score) for name, result in zip(_HACKS, results, strict=True)
    }, [each.error for each in results]
    assert ("ok", 1.0) == (right.status, right.score), right.explanation


def test_a_test_of_exceptions_is_not_passed_by_leaving(run: Run, levels: list[str]) -> None:
    codes = ["def f(x):\n    raise ValueError", "import os\ndef f(x):\n    os._exit(0)", "def f(x):\n    return 1"]
    for tests in (_RAISES, _RAISES.replace("except Exception", "except BaseException")):
        results = run([(code, tests) for code in codes], {"entry_point": "f"}, isolation=levels[-1])
        assert [1.0, 0.0, 0.0] == [each.score for each in results]


def test_code_does_not_define_what_tests_mean(run: Run, levels: list[str]) -> None:
    """Built-ins and modules of the standard library are real, also where the tests do not import them."""
    tests = "def check(candidate):\n    assert abs(candidate(3) - 5) < 1e-6\n    assert math.isclose(candidate(3), 5)\n"
    lies = "def abs(x):\n    return 0\nclass math:\n    isclose = staticmethod(lambda *a: True)\n"
    codes = [f"{lies}def f(x):\n    return {value}" for value in ("3.0", "5.0")]
    codes += ["import cmath as math\nabs = all = any = isinstance = lambda *a: True\ndef f(x):\n    return 4.0"]
    results = run([(code, tests) for code in codes], {"entry_point": "f"}, isolation=levels[-1])
    assert [0.0, 1.0, 0.0] == [each.score for each in results], [each.explanation for each in results]


def test_code_does_not_end_the_loops_of_tests(run: Run, levels: list[str]) -> None:
    tests = "for found, expected in zip(map(f, [3, 4]), [5, 6]):\n    assert found == expected"
    codes = ["def f(x):\n    raise StopIteration", "def f(x):\n    return x + 2"]
    results = run([(code, tests) for code in codes], isolation=levels[-1])
    assert [0.0, 1.0] == [each.score for each in results], [each.explanation for each in results]


def test_output_without_input_is_not_passed_by_markers(run: Run, levels: list[str]) -> None:
    tests = {"inputs": ["1", "2"], "outputs": ["1", "2"]}
    codes = ["print(1, 2)", "import os\nprint(1)\nos._exit(1)", "print(open('expected').read())", "print(input())"]
    results = run([(code, tests) for code in codes], isolation=levels[-1], score="all")
    assert [0.0, 0.0, 0.0, 1.0] == [each.score for each in results]
