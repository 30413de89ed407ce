"""A vision-language model learns from pixels, by the example and by supervised training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, metrics

VISION = ROOT / "examples" / "vision"


def vision(folder: Path, *arguments: str) -> list[dict[str, float]]:
    """Run the example; return its evaluations."""
    command = [sys.executable, str(VISION / "vision.py"), "--folder", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False, cwd=folder.parent)
    assert 0 == done.returncode, done.stdout[-4000:] + done.stderr[-4000:]
    return [line for line in metrics(folder / "grpo") if line["kind"] == "evaluation"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("steps", "score"), [(24, 0.4), pytest.param(120, 0.9, marks=pytest.mark.nightly)], ids=["short", "whole"]
)
def test_a_model_learns_from_pixels(tmp_path: Path, steps: int, score: float) -> None:
    """The score on pictures that it has never seen rises far above 0.25, which is the most for a model that is blind.

    The short form leads from 0.00 to 0.61 with seed 2, and to 0.66 with seed 3; with seed 1, 30 steps lead to 0.64.

    The log-probs of server and engine are compared on the way, with the images.
    """
    folder = tmp_path / "vision"
    given = [f"schedule.steps={steps}", f"evaluation.every={min(steps, 30)}", "observe.samples_per_step=4"]
    evaluations = vision(folder, *given)
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
