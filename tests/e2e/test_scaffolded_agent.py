"""The agent that ``jackfield plugins new agent`` writes, installed by pip, learns to play against its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, metrics

EXAMPLE = ROOT / "examples" / "scaffolded_agent"
JACKFIELD = (sys.executable, "-c", "from jackfield.cli import main; main(prog_name='jackfield')")


def do(folder: Path, *command: str, seconds: float = 180) -> str:
    """Run a command to its end with what is installed in ``folder/site``; return its output."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "site")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert 0 == done.returncode, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder with the new agent in ``site`` and the game's tasks and model in ``runs/newborn/made``."""
    do(tmp_path, *JACKFIELD, "plugins", "new", "agent", "newborn")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", "site")
    do(tmp_path, *pip, str(tmp_path / "jackfield-agent-newborn"))
    do(tmp_path, sys.executable, str(EXAMPLE / "make_game.py"), "runs/newborn/made")
    return tmp_path


def train(folder: Path, *overrides: str, seconds: float) -> Path:
    """Run the example; return the run's folder."""
    quiet = ("observe.progress=false", "observe.report_to=[]")
    do(folder, *JACKFIELD, "run", str(EXAMPLE / "grpo.yaml"), *quiet, *overrides, seconds=seconds)
    return folder / "runs" / "newborn" / "grpo"


@pytest.mark.timeout(600)
def test_the_new_agent_trains_on_rewards_of_its_own_environment(installed: Path) -> None:
    """Several turns in a sample, rewards of the environment, a reason for each end, and an update in each step."""
    small = ("schedule.steps=3", "data.groups_per_batch=8", "evaluation.every=0")
    steps = [line for line in metrics(train(installed, *small, seconds=240)) if line["kind"] == "step"]
    assert 3 == len(steps)
    assert all(1.0 < step["agent/turns"] <= 3.0 for step in steps)
    ends = {name for step in steps for name in step if name.startswith("agent/ended/")}
    assert {"agent/ended/turns"} <= ends <= {"agent/ended/turns", "agent/ended/found"}
    assert any(step["reward/mean"] > 0.0 for step in steps)
    assert all(0.0 <= step["reward/mean"] < 1.0 for step in steps)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_model_learns_to_find_the_number(installed: Path) -> None:
    """From guesses at random to a strategy that finds most numbers, on tasks that training did not see."""
    run = train(installed, seconds=1400)
    scores = [line["score"] for line in metrics(run) if line["kind"] == "evaluation"]
    assert scores[0] <= 0.3, scores
    assert scores[-1] >= 0.8, scores
