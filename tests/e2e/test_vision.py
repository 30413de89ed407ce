"""A vision-language model learns from pixels, by the example and by supervised training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackfield_commands import CommandServer

from .conftest import ROOT, metrics

VISION = ROOT / "examples" / "vision"


def vision(jackfield: CommandServer, folder: Path, *arguments: str) -> list[dict[str, float]]:
    """Run the example; return its evaluations."""
    file = str(VISION / "vision.py")
    command = jackfield.start(file, "--folder", str(folder), *arguments, program="python", folder=folder.parent)
    done = command.wait(840)
    assert 0 == done.code, done.out[-4000:] + done.error[-4000:]
    return [line for line in metrics(folder / "grpo") if line["kind"] == "evaluation"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("steps", "score"), [(30, 0.4), pytest.param(120, 0.9, marks=pytest.mark.nightly)], ids=["short", "whole"]
)
def test_a_model_learns_from_pixels(jackfield: CommandServer, tmp_path: Path, steps: int, score: float) -> None:
    """The score on pictures that it has never seen rises far above 0.25, which is the most for a model that is blind.

    The log-probs of server and engine are compared on the way, with the images.
    """
    folder = tmp_path / "vision"
    given = [f"schedule.steps={steps}", "evaluation.every=30", "observe.samples_per_step=4"]
    evaluations = vision(jackfield, folder, *given)
    assert evaluations[0]["score"] < 0.2
    assert max(each["score"] for each in evaluations) >= score, evaluations
    lines = metrics(folder / "grpo")
    distances = [line["log_prob_check/rollout/max"] for line in lines if "log_prob_check/rollout/max" in line]
    assert distances
    assert max(distances) < 1e-3
    pictures = {
        name: {json.loads(line)["prompt"][0]["content"][0]["image_url"]["url"] for line in text.splitlines()}
        for name in ("problems", "held_out")
        if (text := (folder / "made" / f"{name}.jsonl").read_text())
    }
    assert not pictures["problems"] & pictures["held_out"]
