"""What the guides on environments and workflows say can be done as they say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jackfield.compose import run
from jackfield.config import load_config

pytestmark = pytest.mark.timeout(300)

REPOSITORY = Path(__file__).parents[2]
GUIDES = REPOSITORY / "examples" / "guides"


@pytest.fixture
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's paths begin at the repository's root."""
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.usefixtures("in_repository")
@pytest.mark.parametrize("mode", ["steps", "concatenated"])
def test_a_class_is_trained_in_an_environment_of_ones_own(
    model_folder: Path, tasks: Path, tmp_path: Path, mode: str
) -> None:
    """The environment is in processes; steps are samples, with their numbers, and metrics of the workflow are there."""
    overrides = [
        f"folder={tmp_path}",
        f"model.path={model_folder}",
        f"data.train={tasks}",
        f"data.eval={tasks}",
        "data.groups_per_batch=2",
        "data.rollouts_per_group=2",
        "sampling.max_new_tokens=12",
        "evaluation.sampling.max_new_tokens=12",
        "schedule.steps=1",
        "agent.turn_tokens=4",
        f"agent.settings={{max_steps: 3, mode: {mode}}}",
        "agent.environment.size=2",
        "observe={progress: false, report_to: [], curve: false}",
    ]
    result = run(load_config(GUIDES / "workflow.yaml", overrides))
    assert 1 == result.steps
    lines: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    [step] = [line for line in lines if line["kind"] == "step"]
    assert step["agent/environment_steps/mean"] == step["agent/turns"]
    assert 1.0 < step["agent/turns"] <= 3.0, "the model's words have numbers, which may be right"
    assert 0.0 <= step["agent/won/mean"] <= 1.0
    samples = (tmp_path / "samples" / "train.jsonl").read_text().splitlines()
    steps = [json.loads(line)["tags"]["step_id"] for line in samples if "step_id" in line]
    assert (mode == "steps") == (max(steps, default=0) > 0)
