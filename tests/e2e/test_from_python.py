"""A run from Python: objects in the place of a file."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import SamplingParams
from jackfield.compose import run
from jackfield.config.sections import ClusterConfig, DataConfig, PluginSection, RunConfig, ScheduleConfig
from jackfield.plugins import hookimpl
from jackfield.plugins.hooks import StepEnded


class Steps:
    """Notes the steps of a run."""

    def __init__(self) -> None:
        self.seen: list[StepEnded] = []
        self.exempt: list[int] = []  #: objects that the garbage collection does not look through

    @hookimpl
    def step_ended(self, event: StepEnded) -> None:
        self.seen.append(event)
        self.exempt.append(gc.get_freeze_count())


@pytest.mark.timeout(180)
def test_a_run_is_built_from_plain_objects(made: Path, tmp_path: Path) -> None:
    """No file of settings is read; what the run leaves is what ``jackfield run`` leaves."""
    config = RunConfig(
        folder=str(tmp_path / "run"),
        model=ModelSpec(path=str(made / "model")),
        data=DataConfig(train=str(made / "problems.jsonl"), groups_per_batch=2, rollouts_per_group=2),
        sampling=SamplingParams(max_new_tokens=4),
        schedule=ScheduleConfig(steps=2),
        cluster=ClusterConfig(threads=1),
        reward=PluginSection(name="rules", settings={"method": "exact"}),
    )
    steps = Steps()
    gc.unfreeze()  # what the test session exempts from collection
    result = run(config, hooks=[steps])
    assert 2 == result.steps == len(steps.seen)
    assert all("policy/loss" in step.metrics for step in steps.seen)
    assert all(steps.exempt), "steps do not pay for searching what the program has imported"
    assert 0 == gc.get_freeze_count(), "the program collects garbage as before"
    gc.freeze()
    assert (result.model / "model.safetensors").is_file()
    assert run(config).finished_before, "the same objects are the same run"
