"""Skips: a missing tool or folder skips at home; in CI only missing data and hardware may."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from packages import ROOT

TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.needs("module:no_such_module")
def test_tool():
    raise AssertionError("must not run")

@pytest.mark.needs("cuda")
def test_hardware():
    pass

@pytest.mark.needs_data("sample")
def test_data(shared_data):
    assert (shared_data / "sample").is_dir()

def test_own_skip():
    pytest.skip("because")

@pytest.mark.xfail(reason="known", strict=True)
def test_known_to_fail():
    raise AssertionError
"""


def outcomes(folder: Path, ci: str, tests: str = TESTS) -> dict[str, str]:
    """Run ``tests`` in ``folder`` and return the outcome of each."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "test_sample.py").write_text(tests, encoding="utf-8")
    environment = {**os.environ, "CI": ci, "JACKFIELD_DATA": str(folder / "data")}
    (folder / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n", encoding="utf-8")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tools" / "testing"), str(folder)])
    command = [sys.executable, "-m", "pytest", "-v", "-p", "jackfield_testing", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=50, check=False)
    found = dict(re.findall(r"::test_(\w+) (PASSED|FAILED|SKIPPED|XFAIL|ERROR)", done.stdout))
    return found or {"module": re.findall(r"^(?:ERROR|SKIPPED)|no tests ran", done.stdout, re.MULTILINE)[0]}


@pytest.mark.parametrize(
    ("ci", "tool", "own_skip"),
    [("", "SKIPPED", "SKIPPED"), ("true", "ERROR", "FAILED"), ("false", "SKIPPED", "SKIPPED")],
)
def test_skips(tmp_path: Path, ci: str, tool: str, own_skip: str) -> None:
    """In CI a tool that is missing fails its test, and so does a skip that gives no allowed reason."""
    expected = {
        "passes": "PASSED",
        "tool": tool,
        "hardware": "SKIPPED",
        "data": "SKIPPED",
        "own_skip": own_skip,
        "known_to_fail": "XFAIL",
    }
    assert expected == outcomes(tmp_path, ci)


def test_data_that_is_there_is_used(tmp_path: Path) -> None:
    """A test that needs shared data runs where the data is."""
    (tmp_path / "data" / "sample").mkdir(parents=True)
    assert "PASSED" == outcomes(tmp_path, "true")["data"]


def test_module_that_skips_itself_fails_in_ci(tmp_path: Path) -> None:
    """A whole module of checks must not vanish."""
    text = 'import pytest\npytest.importorskip("no_such_module")\ndef test_never(): pass\n'
    assert {"module": "ERROR"} == outcomes(tmp_path, "true", text)
