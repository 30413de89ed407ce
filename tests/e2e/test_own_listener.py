"""The user's own hooks hear a run and can end it, and a run trains with the parts of another package."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from jackfield.algorithms import names
from jackfield.errors import PluginError
from jackfield_conformance.commands import write_scaffold

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


def test_a_run_trains_with_the_loss_of_another_package(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package of ``jackfield plugins new algorithm``, laid out as pip leaves it."""
    source = write_scaffold("algorithm", "newborn", tmp_path) / "src"
    info = source / "jackfield_algorithm_newborn-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jackfield-algorithm-newborn\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[jackfield.hooks]\nnewborn = jackfield_algorithm_newborn:plugin.toml\n")
    monkeypatch.syspath_prepend(str(source))
    _, lines = small_run("newborn", "algorithm.name=newborn", "schedule.steps=1")
    assert "newborn" in names("loss")
    (step,) = [line for line in lines if line["kind"] == "step"]
    assert 1.0 == pytest.approx(step["policy/ratio"], abs=1e-4)
