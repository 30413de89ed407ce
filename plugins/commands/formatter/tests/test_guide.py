"""The guide's commands print what the guide shows, and its classes work."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield_formatter import DpoRow, FormatContext, FormatSettings, TaskRow, read_rows

ROOT = Path(__file__).parents[4]
GUIDE = (ROOT / "docs" / "guides" / "formatter.md").read_text(encoding="utf-8")
CONSOLE = re.compile(r"^```console\n\$ ([^\n]*)\n```(?:\n\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples, which is the current one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples" / "guides", tmp_path / "examples" / "guides")
    return tmp_path


@pytest.mark.timeout(180)
def test_the_commands_of_the_guide(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With formatting_columns.yaml, formatting.py and formatting.yaml of examples/guides."""
    blocks = CONSOLE.findall(GUIDE)
    assert ["format", "format", "format", "run"] == [command.split()[2] for command, _ in blocks]
    for command, output in blocks:
        done = CliRunner().invoke(main, shlex.split(command)[1:])
        assert 0 == done.exit_code, done.output
        assert output in ("", done.stdout)
    exec(PYTHON.findall(GUIDE)[0], {})  # it reads what the first command wrote
    assert "How many rolls are left? 9" in capsys.readouterr().out
    tasks = [*read_rows("tasks.jsonl", TaskRow)]
    assert [("9", 1), ("5", 1), ("84", 2), ("4", 2)] == [(row.ground_truth, row.extra["level"]) for row in tasks]
    assert [("9", "10"), ("5", "6")] == [(row.chosen, row.rejected) for row in read_rows("pairs.jsonl", DpoRow)][:2]
    (rows,) = workplace.glob("runs/formatting/data/2-difficulty_rules-*/rows.jsonl")
    assert ["9", "5", "84", "24", "4"] == [row.ground_truth for row in read_rows(rows, TaskRow)]


def test_the_classes_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card is made from what the shape finds, and one of version 1 is upgraded."""
    (tmp_path / "package_of_the_guide.py").write_text(PYTHON.findall(GUIDE)[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    found = importlib.import_module("package_of_the_guide")
    shape, model = found.Flashcards(), found.CardRow
    record = {"front": "1 + 1", "back": "2"}
    assert shape.fits(record)
    context = FormatContext(settings=FormatSettings(into="card"))
    (values,) = model.of_example(shape.example(record), context)
    row = model.make(values, context)
    assert {"_schema": "my.card/2", **record, "level": 1} == row.record()
    assert row == model.of_record({"_schema": "my.card/1", **record})
