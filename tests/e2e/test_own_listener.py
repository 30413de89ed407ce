"""The example of ``observe.hooks`` hears a run, and can end it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from jackfield.errors import PluginError

from .conftest import ROOT, Run


def test_the_example_hears_a_run(small_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    listener = ROOT / "examples" / "guides" / "own_listener.py"
    result, _ = small_run("heard", "schedule.steps=1", f"observe.hooks=['{listener}:Watch']")
    assert "heard: 1 steps" in capsys.readouterr().out
    assert 1 == result.steps


def test_an_error_ends_the_run_and_names_the_class(small_run: Run, tmp_path: Path) -> None:
    code = """
        class Breaks:
            def step_ended(self, event):
                raise KeyError("reward/men")
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(code), encoding="utf-8")
    with pytest.raises(PluginError) as caught:
        small_run("broken", f"observe.hooks=['{tmp_path}/mine.py:Breaks']")
    assert f"{tmp_path}/mine.py:Breaks.step_ended" == caught.value.where
    assert "KeyError: 'reward/men'" == caught.value.found
