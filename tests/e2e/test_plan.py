"""``jackfield plan`` predicts a run from what the run measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackfield_commands import CommandServer

from .conftest import QUICKSTART, Run

pytestmark = [pytest.mark.timeout(240), pytest.mark.needs("module:jackfield_simulation")]

#: The larger share by which the predicted step may differ: the machine's other work changes stages from step to step.
TOLERANCE = 0.35


def test_a_run_is_predicted_from_its_own_metrics(small_run: Run, jackfield: CommandServer, tmp_path: Path) -> None:
    """The same file and overrides find the run's metrics, and the prediction is the mean of its steps."""
    result, lines = small_run("measured", "schedule.steps=6", "algorithm.old_log_probs=engine")
    measured = [line["seconds/step"] for line in lines if line["kind"] == "step"][1:]
    before = (result.folder / "metrics.jsonl").read_bytes()
    config = ("data.groups_per_batch=4", "data.rollouts_per_group=4", "schedule.steps=6")
    file = (str(QUICKSTART / "grpo.yaml"), f"folder={result.folder}", "algorithm.old_log_probs=engine", *config)
    ended = jackfield("plan", *file, "--json")
    assert 0 == ended.code, ended.error
    plan = json.loads(ended.out)
    assert str(result.folder / "metrics.jsonl") == plan["times"]
    own = plan["own"]
    assert sum(measured) / len(measured) == pytest.approx(own["step_time"], rel=TOLERANCE)
    assert (0, 0.0) == (own["staleness_bound"], own["staleness_max"])
    assert before == (result.folder / "metrics.jsonl").read_bytes()
    again = jackfield("plan", *file, "--json", "--times", str(result.folder))
    assert plan == json.loads(again.out), "predictions are the same each time"
