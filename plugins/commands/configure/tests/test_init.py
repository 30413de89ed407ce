"""``jackfield init`` writes a file that a run takes, and asks only on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from jackfield.cli import main
from jackfield_configure.template import commented, settings


def init(*arguments: str) -> Result:
    """Call the command without a terminal."""
    return CliRunner().invoke(main, ["init", *arguments])


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def keys(values: Mapping[str, Any]) -> list[str]:
    """The keys of a mapping and of those in it, in order."""
    return [name for key, value in values.items() for name in [key, *(keys(value) if isinstance(value, dict) else [])]]


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_each_setting_has_a_comment(algorithm: str) -> None:
    values = settings(algorithm, "models/mine", "tasks.jsonl", "mine")
    lines = commented(values, "mine.yaml").splitlines()
    assert values == yaml.safe_load("\n".join(lines))
    places = [number for number, line in enumerate(lines) if line.strip() and not line.strip().startswith("#")]
    assert keys(values) == [lines[place].strip().partition(":")[0] for place in places]
    assert all(lines[place - 1].strip().startswith("# ") for place in places)


def test_without_a_terminal_nothing_is_asked(tmp_path: Path) -> None:
    done = init("--model", "m")
    assert 2 == done.exit_code
    assert "give --algorithm, --data" in done.stderr
    assert (2, True) == (
        (empty := init("--algorithm", "grpo", "--model", "", "--data", "d")).exit_code,
        not empty.stdout,
    )
    assert [] == list(tmp_path.iterdir())


def test_an_unknown_algorithm_is_refused(tmp_path: Path) -> None:
    for name in ("grpoo", "GRPO"):
        done = init("--algorithm", name, "--model", "m", "--data", "d.jsonl")
        assert 1 == done.exit_code
        assert "did you mean 'grpo'" in done.stderr
    assert [] == list(tmp_path.iterdir())


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("precious")
    done = init("mine.yaml", "--algorithm", "sft", "--model", "m", "--data", "d.jsonl")
    assert 1 == done.exit_code
    assert "the file is there already" in done.stderr
    assert "precious" == (tmp_path / "mine.yaml").read_text()


def test_on_a_terminal_three_questions_are_asked(tmp_path: Path) -> None:
    """The default of the first is taken."""
    ours, theirs = pty.openpty()
    os.write(ours, b"\nmodels/mine\ntasks.jsonl\n")
    command = [sys.executable, "-m", "jackfield", "init", "mine.yaml"]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, cwd=tmp_path, timeout=50, check=False)
    os.close(ours)
    os.close(theirs)
    questions = ("Which algorithm?", "Which model?", "Which training data?")
    assert [1, 1, 1] == [(done.stdout + done.stderr).count(question) for question in questions], done.stderr
