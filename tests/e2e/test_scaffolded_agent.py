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
    """Return a folder with the new agent in ``site``."""
    do(tmp_path, *JACKFIELD, "plugins", "new", "agent", "newborn")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", "site")
    do(tmp_path, *pip, str(tmp_path / "jackfield-agent-newborn"))
    return tmp_path


def train(folder: Path, numbers: int, *overrides: str, seconds: float) -> tuple[list[dict[str, float]], list[float]]:
    """Make the game, run the example; return the lines of its steps, and its held-out scores."""
    do(folder, sys.executable, str(EXAMPLE / "make_game.py"), "runs/newborn/made", "1", str(numbers))
    quiet = ("observe.progress=false", "observe.report_to=[]")
    do(folder, *JACKFIELD, "run", str(EXAMPLE / "grpo.yaml"), *quiet, *overrides, seconds=seconds)
    lines = metrics(folder / "runs" / "newborn" / "grpo")
    evaluations = [line["score"] for line in lines if line["kind"] == "evaluation"]
    return [line for line in lines if line["kind"] == "step"], evaluations


@pytest.mark.timeout(600)
def test_the_new_agent_learns_from_rewards_of_its_own_environment(installed: Path) -> None:
    """Three numbers and two guesses, from a model that says any word: two numbers learned are a score of 0.67.

    Held-out scores before and after, with seeds 1, 2 and 3: 0.08, 0.00 and 0.08, and 0.67 each. Each step has several
    turns in a sample, rewards of the environment, and a reason for each end.
    """
    small = ("schedule.steps=40", "data.groups_per_batch=16", "evaluation.every=40", "agent.guesses=2")
    budget = ("sampling.max_new_tokens=3", "evaluation.sampling.max_new_tokens=3")
    steps, scores = train(installed, 3, *small, *budget, seconds=480)
    assert scores[-1] >= scores[0] + 0.4, scores
    assert all(1.0 < step["agent/turns"] <= 2.0 for step in steps)
    ends = {name for step in steps for name in step if name.startswith("agent/ended/")}
    assert {"agent/ended/turns", "agent/ended/found"} == ends
    assert all(0.0 <= step["reward/mean"] < 1.0 for step in steps)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_model_learns_to_find_the_number(installed: Path) -> None:
    """From guesses at random to a strategy that finds most numbers, on tasks that training did not see."""
    _, scores = train(installed, 7, seconds=1400)
    assert scores[0] <= 0.3, scores
    assert scores[-1] >= 0.8, scores
