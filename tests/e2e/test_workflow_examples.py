"""The examples of workflows: a game over several turns, and two agents on one task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jackfield_commands import CommandServer

from .conftest import metrics

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(jackfield: CommandServer, name: str, folder: Path, *arguments: str) -> None:
    given = (str(EXAMPLES / name / f"{name}.py"), "--folder", str(folder), "--warmup", "evaluation.every=0", *arguments)
    command = jackfield.start(*given, program="python", folder=folder.parent)
    done = command.wait(1700)
    assert 0 == done.code, done.out[-4000:] + done.error[-4000:]
    assert (folder / "learning_curve.png").stat().st_size > 10_000


def evaluations(folder: Path, name: str) -> list[float]:
    return [line[name] for line in metrics(folder) if line["kind"] == "evaluation"]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder) if line["kind"] == "step"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("arguments", "gain", "least"),
    [
        (("schedule.steps=10",), 0.2, 0.0),
        pytest.param((), 0.4, 0.9, marks=pytest.mark.nightly),
    ],
    ids=["short", "whole"],
)
def test_a_model_learns_errands_over_several_turns(
    jackfield: CommandServer, tmp_path: Path, arguments: tuple[str, ...], gain: float, least: float
) -> None:
    """The share of errands that are done rises, in houses that were not trained on. Steps are samples with rewards.

    The short form leads from 0.35 to 0.73 with seed 1; other seeds are not measured.
    """
    example(jackfield, "household_game", tmp_path / "game", *arguments)
    done = evaluations(tmp_path / "game" / "gigpo", "agent/won/mean")
    assert done[-1] >= max(least, done[0] + gain), done
    trained = steps(tmp_path / "game" / "gigpo")
    assert all(step["agent/turns"] > 3 for step in trained)
    assert all(step["reward/min"] == pytest.approx(-0.1) or step["reward/min"] >= 0 for step in trained)


@pytest.mark.timeout(900)
def test_two_agents_learn_to_work_together(jackfield: CommandServer, tmp_path: Path) -> None:
    """The share of right answers rises; each rollout has two sequences, with one reward.

    It rises with seeds 1, 2 and 3; docs/guides/workflows.md has the figures.
    """
    example(jackfield, "two_agents", tmp_path / "team", "schedule.steps=10")
    right = evaluations(tmp_path / "team" / "grpo", "score")
    assert right[-1] >= right[0] + 0.3, right
    assert all(2.0 == step["agent/turns"] for step in steps(tmp_path / "team" / "grpo"))
