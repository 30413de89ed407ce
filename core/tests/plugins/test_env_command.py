"""``jackfield env create``, run as a person runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.plugins import interpreters

PARTS = {
    "engine": "some_engine",
    "agent": "some_agent",
    "reward": "good",
    "checkpoint_engine": "some_transport",
    "rollout": "far",
}


@pytest.fixture
def file(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a configuration with a rollout server in an environment, which other tests create."""
    folder = tmp_path / "serving"

    def make(*_: object) -> bool:
        python = folder / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nPYTHONPATH={site.folder} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return True

    monkeypatch.setattr(interpreters, "create_environment", make)
    for kind, name in PARTS.items():
        if name != "far":
            site.install(name, kind=kind)
    values = {"model": {"path": "nowhere"}, "data": {"train": "nowhere.jsonl"}, **PARTS}
    values |= {"environments": {"own": {"folder": str(folder)}}, "cluster": {"interpreters": {"rollout": "own"}}}
    values |= {"folder": str(tmp_path / "run")}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(values))
    return path


def test_a_module_that_is_installed_afterwards_is_named_and_no_error(site: Any, file: Path, tmp_path: Path) -> None:
    """The environment is made, exit code 0; a run is refused until the module is there."""
    site.install("far", kind="rollout", extra='[env]\nmodules = ["quite_absent"]')
    made = CliRunner().invoke(main, ["env", "create", "own", str(file)])
    assert 0 == made.exit_code, made.output
    assert "missing rollout 'far'" in made.stdout
    assert "the module quite_absent" in made.stdout
    run = site.cli("run", str(file))
    assert 1 == run.returncode, run.stdout
    assert run.stderr.startswith("[plugin.requirement]")
    assert not (tmp_path / "run").exists()


def test_any_other_problem_in_the_environment_is_an_error(site: Any, file: Path) -> None:
    site.install("far", kind="rollout", modules={"plugin.py": "raise OSError('no driver')"})
    made = CliRunner().invoke(main, ["env", "create", "own", str(file)])
    assert 1 == made.exit_code
    assert made.stderr.startswith("[plugin.import]")
