"""Every run reports how far its policy has moved from the initial model, without a second model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jackfield.trainer.role import Schedule

from .simulation import Simulation

NAME = "policy/initial_kl"


def expected(updates: int) -> float:
    """The estimate after updates that lower each log-prob by 0.1; the last token of a response is not the model's."""
    return math.exp(-0.1 * updates) - 1.0 + 0.1 * updates


@pytest.mark.parametrize("schedule", [Schedule(steps=3), Schedule(steps=3, stream_mini_batches=True)])
def test_it_is_measured_after_each_step_on_the_first_responses(schedule: Schedule) -> None:
    run = Simulation(schedule, mini_batches=2).run()
    found = [event.metrics[NAME] for event in run.recorder.steps]
    assert pytest.approx([expected(2), expected(4), expected(6)]) == found


def test_a_resumed_run_goes_on_with_the_same_responses(tmp_path: Path) -> None:
    schedule = Schedule(steps=6)
    Simulation(schedule, folder=tmp_path, checkpoint_every=1, kill_at=80.0).run()
    resumed = Simulation(schedule, folder=tmp_path, checkpoint_every=1).run()
    assert 0 < resumed.first_step < 6
    found = [event.metrics[NAME] for event in resumed.recorder.steps]
    assert pytest.approx([expected(count) for count in range(1, len(found) + 1)]) == found  # of this process's actor
    assert len(found) == 6 - resumed.first_step


def test_none_is_measured_with_none_to_measure_it_on() -> None:
    run = Simulation(Schedule(steps=2), kl={"initial_responses": 0}).run()
    assert not any(NAME in event.metrics for event in run.recorder.steps)
