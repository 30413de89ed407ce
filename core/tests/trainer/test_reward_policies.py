"""What happens to samples without a score, by ``reward_service.on_failure`` and ``data.minimum_rows``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from jackfield.errors import JackfieldError
from jackfield.trainer.role import Schedule

from .simulation import Simulation

pytest.importorskip("torch")

#: The first try of one group has one rollout of four that cannot be scored.
_BAD = "task-1-2-0"


def simulate(on_failure: str, bad: int = 1, **options: Any) -> Simulation:
    """Run three steps, of 4 groups of 4 rollouts; ``bad`` rollouts of one group have no score."""
    schedule = Schedule(steps=3, sync_interval=1, sync_offset=0)
    run = Simulation(schedule, runs=4, reward_service={"on_failure": on_failure}, **options)
    run.answer = _answers(run, bad)
    return run.run()


def _answers(run: Simulation, bad: int) -> Callable[[str, int], str]:
    seen = Counter[str]()

    def answer(task: str, seed: int) -> str:
        seen[task] += 1
        return "x" if task == _BAD and seen[task] <= bad else "ab"[seed % 2]

    return answer


def tasks_of(run: Simulation, step: int) -> Counter[str]:
    return Counter(tags["task"] for tags in run.actor.updates[step][0].tags)


def test_a_group_goes_on_with_the_rollouts_that_are_enough() -> None:
    """One failed rollout does not have its whole group made again."""
    run = simulate("refill", minimum_rows=3)
    assert {"task-1-0-0": 4, "task-1-1-0": 4, _BAD: 3, "task-1-3-0": 4} == tasks_of(run, 1)
    assert 1 == len(run.recorder.failed)
    assert 15 == run.actor.updates[1][1].global_counts["global_sequences"]


def test_too_few_rollouts_have_their_group_made_again() -> None:
    run = simulate("refill", bad=2, minimum_rows=3)
    assert {"task-1-0-0": 4, "task-1-1-0": 4, "task-1-2-1": 4, "task-1-3-0": 4} == tasks_of(run, 1)


def test_without_a_minimum_one_failure_has_its_group_made_again() -> None:
    run = simulate("refill")
    assert 4 == tasks_of(run, 1)["task-1-2-1"]


def test_a_failed_sample_may_get_the_mean_of_its_group() -> None:
    run = simulate("group_mean", bad=3)
    assert 4 == tasks_of(run, 1)[_BAD]
    assert ["reward failed: ValueError: cannot score an x"] * 3 == [
        reason.partition(" (")[0] for reason in run.recorder.failed.values()
    ], "the reasons are told"


def test_a_batch_may_go_on_without_a_group() -> None:
    run = simulate("drop_group")
    assert {"task-1-0-0": 4, "task-1-1-0": 4, "task-1-3-0": 4} == tasks_of(run, 1)
    assert [16, 12, 16] == [loss.global_counts["global_sequences"] for _, loss in run.actor.updates]
    assert 1 == sum(entry["event"] == "drop" for entry in run.ledger)
    assert any("cannot score an x" in reason for reason in run.recorder.failed.values())


def test_the_last_group_of_a_batch_is_made_again() -> None:
    """A step without any sample would be no step."""
    schedule = Schedule(steps=2, sync_interval=1, sync_offset=0)
    run = Simulation(schedule, groups=1, runs=2, reward_service={"on_failure": "drop_group"})
    run.answer = lambda task, seed: "x" if task == "task-1-0-0" else "a"
    run.run()
    assert {"task-1-0-1": 2} == tasks_of(run, 1)


def test_a_run_may_stop_at_the_first_sample_without_a_score() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        simulate("stop")
    (error,) = _errors(caught.value)
    assert "reward.failed" == error.code
    assert "sample train/1/2/0/" in str(error.where)
    assert "cannot score an x" in str(error)


def test_the_policy_retry_waits_until_there_is_a_score() -> None:
    schedule, tries = Schedule(steps=2, sync_interval=1, sync_offset=0), Counter[str]()
    run = Simulation(schedule, runs=2, reward_service={"on_failure": "retry", "outage_seconds": 300.0})

    def seconds(key: str) -> float:
        tries[key] += 1
        if key == "train/0/1/0/0/0" and tries[key] <= 6:
            raise ConnectionResetError("gone for a while")
        return 1.0

    run.score_seconds = seconds
    run.run()
    assert 7 == tries["train/0/1/0/0/0"]
    assert ({}, 2) == (run.recorder.failed, len(run.actor.updates))


def _errors(group: BaseExceptionGroup[Any]) -> list[JackfieldError]:
    found = list[JackfieldError]()
    for each in group.exceptions:
        found += _errors(each) if isinstance(each, BaseExceptionGroup) else [each]
    return found
