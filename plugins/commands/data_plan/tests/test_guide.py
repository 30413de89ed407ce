"""The guide's commands print what the guide shows."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from jackfield.cli import main

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[4]
BLOCK = re.compile(
    r"^```console\n\$ (?P<command>[^\n]*)\n```(?:\n\n```text\n(?P<output>.*?)^```)?", re.MULTILINE | re.DOTALL
)


def test_the_commands_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line with an ellipsis stands for any lines, and DIGEST for the end of a folder's name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples" / "guides", tmp_path / "examples" / "guides")
    text = (ROOT / "docs" / "guides" / "data_plan.md").read_text(encoding="utf-8")
    blocks = [(found["command"], found["output"]) for found in BLOCK.finditer(text)]
    assert ["plan", "run", "statistics", "tighten"] == [command.split()[2] for command, _ in blocks]
    for command, output in blocks:
        found = CliRunner().invoke(main, shlex.split(command)[1:])
        assert 0 == found.exit_code, found.output
        pattern = re.escape(output or "…\n").replace("…\\\n", "(?:.*\n)*").replace("DIGEST", "[0-9a-f]{12}")
        assert re.fullmatch(pattern, found.stdout), found.stdout


def test_the_file_of_the_guide_has_the_draft() -> None:
    text = (ROOT / "docs" / "guides" / "data_plan.md").read_text(encoding="utf-8")
    drafted = yaml.safe_load(text[text.index("data:\n  pipeline") : text.index("\nDry run")])
    run = yaml.safe_load((ROOT / "examples" / "guides" / "data_plan.yaml").read_text(encoding="utf-8"))
    assert drafted["data"]["pipeline"] == run["data"]["pipeline"]
    assert "examples/guides/data/maths_problems.jsonl" == run["data"]["train"]
