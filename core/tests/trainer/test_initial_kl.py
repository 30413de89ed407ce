"""Every run reports how far its policy has moved from the initial model, without a second model."""

from __future__ import annotations

import pytest

from jackfield.trainer.role import Schedule

from .simulation import Simulation

NAME = "policy/initial_kl"


@pytest.mark.parametrize("streams", [False, True])
def test_it_is_measured_after_each_step_on_samples_of_the_first_batch(streams: bool) -> None:
    """Samples are kept before the first update of all."""
    run = Simulation(Schedule(steps=3, stream_mini_batches=streams), mini_batches=2).run()
    assert pytest.approx([0.2, 0.4, 0.6]) == [event.metrics[NAME] for event in run.recorder.steps]


def test_a_critics_warm_up_leaves_the_policy_where_it_is() -> None:
    run = Simulation(Schedule(steps=3), critic_warmup=1).run()
    assert pytest.approx([0.0, 0.1, 0.2]) == [event.metrics[NAME] for event in run.recorder.steps]


def test_none_is_measured_with_none_to_measure_it_on() -> None:
    run = Simulation(Schedule(steps=2), kl={"initial_responses": 0}).run()
    assert not any(NAME in event.metrics for event in run.recorder.steps)
    assert not run.actor.kept
