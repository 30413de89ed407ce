"""Tests of the training loop under every schedule: batches, their order and staleness, and durations."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from jackfield.errors import AgentError, DataError, JackfieldError, RolloutError
from jackfield.trainer.role import Schedule

from .simulation import Simulation


def simulate(steps: int = 6, k: int = 1, o: int = 0, **settings: object) -> Simulation:
    return Simulation(Schedule(steps=steps, sync_interval=k, sync_offset=o), **settings).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(("k", "o", "shared"), list(itertools.product((1, 2, 3), (0, 1, 2), (False, True))))
def test_each_step_trains_on_its_own_batch_and_staleness_reaches_but_never_passes_the_bound(
    k: int, o: int, shared: bool
) -> None:
    run = simulate(steps=9, k=k, o=o, shared=shared, generate_seconds=1.0)
    batches = [{key.split("/")[1] for key in batch.keys} for batch, _ in run.actor.updates]
    assert 9 == len(run.actor.updates)
    assert all(len(batch) == 1 for batch in batches), batches
    staleness = [
        step - min(tags["weight_version_min"] for tags in batch.tags)
        for step, (batch, _) in enumerate(run.actor.updates)
    ]
    # on one device they take turns, and a large offset is not always used up
    assert max(staleness) <= k - 1 + o if shared and o == 2 else max(staleness) == k - 1 + o
    assert [step + 1 for step in range(9) if (step + 1) % k == 0] == run.synchronizer.syncs
    assert 0 == run.samples_left, "every row was consumed exactly once, and deleted"


def test_on_policy_takes_the_sum_and_one_step_off_the_longest_stage() -> None:
    """On separate devices, generation of the next batch overlaps with training on this one."""
    generate, update, sync, steps = 10.0, 6.0, 1.0, 20
    on_policy = simulate(steps=steps, generate_seconds=generate, update_seconds=update, sync_seconds=sync)
    one_off = simulate(steps=steps, o=1, generate_seconds=generate, update_seconds=update, sync_seconds=sync)
    assert steps * (generate + update + sync) == pytest.approx(on_policy.recorder.ended_at[-1])
    critical_path = steps * max(generate, update + sync) + update + sync
    assert critical_path == pytest.approx(one_off.recorder.ended_at[-1])


@pytest.mark.needs("module:pyinstrument")
def test_ranks_are_traced_from_begin_to_end_of_the_profiled_steps_only(tmp_path: Path) -> None:
    """Steps are counted from 1: before step 2 one update has been made, at its end two."""
    run = simulate(steps=5, folder=tmp_path, profile="step:2,4-5")
    two, four, five = folders = [str(tmp_path / "profile" / f"step-{step}") for step in (2, 4, 5)]
    begun = "begins"
    assert [(begun, 1), (two, 2), (begun, 3), (four, 4), (begun, 4), (five, 5)] == run.actor.traces
    assert folders == sorted(str(file.parent) for file in tmp_path.rglob("controller.html"))
    assert [] == simulate(steps=5).actor.traces


def test_colocated_one_step_off_hides_the_wait_for_rewards() -> None:
    """On one device, the next rollout runs while rewards are pending (the asynchronous reward agent's recipe)."""
    settings = {"shared": True, "generate_seconds": 10.0, "update_seconds": 6.0, "reward_seconds": 8.0}
    on_policy, one_off = simulate(steps=12, **settings), simulate(steps=12, o=1, **settings)
    assert 12 * (10 + 8 + 6 + 1) == pytest.approx(on_policy.recorder.ended_at[-1])
    assert one_off.recorder.ended_at[-1] <= 12 * (10 + 6 + 1) + 8 + 10


def test_an_explorer_that_waits_for_queue_capacity_does_not_hold_the_devices() -> None:
    """The trainer's acks make room in the queue."""
    run = simulate(steps=6, o=2, shared=True, max_samples=9, generate_seconds=1.0, update_seconds=20.0)
    assert 6 == len(run.actor.updates)
    assert 6 * 21 + 7 > run.recorder.ended_at[-1], "no wait reached its deadline"


def test_advantages_compare_the_rollouts_of_one_task() -> None:
    run = simulate(steps=2, runs=2)
    for batch, loss in run.actor.updates:
        counts = (loss.global_counts["global_tokens"], loss.global_counts["global_sequences"])
        assert (16, 8) == counts
        groups = [batch.groups[index : index + 2] for index in range(0, 8, 2)]
        assert all(first == second for first, second in groups)
    for values in run.actor.advantages:
        for row in range(0, 16, 4):
            first, second = values[row], values[row + 2]
            assert abs(first) in (0.0, pytest.approx(2**-0.5, abs=1e-4))
            assert 0.0 == pytest.approx(first + second, abs=1e-6)


def test_seeds_do_not_depend_on_the_schedule() -> None:
    assert sorted(simulate(steps=4).seeds) == sorted(simulate(steps=4, k=2, o=1).seeds)


def test_mini_batches_have_their_own_global_counts() -> None:
    run = simulate(steps=2, mini_batches=2)
    assert [4, 4, 4, 4] == [loss.global_counts["global_sequences"] for _, loss in run.actor.updates]


@pytest.mark.parametrize(("letter", "reason"), [("x", "cannot score an x"), ("s", "waited 100 s for the reward")])
def test_a_sample_without_a_reward_is_named_and_its_group_retried(letter: str, reason: str) -> None:
    """A failed or late score is never a score of 0; the group is retried in the same batch."""
    bad = ("task-1-2-0", "task-1-2-1")
    run = simulate(steps=3, answer=lambda task, seed: letter if task in bad else "ab"[seed % 2])
    assert 3 == len(run.actor.updates)
    tasks = [tags["task"] for tags in run.actor.updates[1][0].tags]
    assert ["task-1-0-0", "task-1-1-0", "task-1-2-2", "task-1-3-0"] == sorted(set(tasks))
    assert any(reason in text for text in run.recorder.failed.values()), run.recorder.failed


def test_a_task_that_can_never_be_scored_ends_the_run_with_its_reasons() -> None:
    """Its last retry reaches two limits; which one is seen first depends on when other groups are scored."""
    error = failure(max_retries=2, answer=lambda task, seed: "x" if task.startswith("task-1-2") else "a")
    assert error.code in ("queue.batch-failed", "reward.too-many-failures")
    assert "cannot score an x" in str(error)


@pytest.mark.parametrize(("letter", "reason"), [("x", "cannot score an x"), ("s", "waited 100 s for the reward")])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_reward_that_always_fails_ends_the_run_soon(letter: str, reason: str, groups: int) -> None:
    """A few groups in a row are enough for the error, which gives the last reason."""
    schedule = Schedule(steps=3, sync_interval=1, sync_offset=0)
    run = Simulation(schedule, groups=groups, max_retries=2, answer=lambda task, seed: letter)
    error = failure_of(run)
    assert reason in " ".join(run.recorder.failed.values()), "the failures that end the run are reported, too"
    assert "reward.too-many-failures" == error.code
    assert "3 groups in a row ended without a single score" in error.message
    assert reason in str(error)


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (DataError("too long", code="data.prompt-too-long"), "data.prompt-too-long"),
        (RolloutError("replica 0 died", code="rollout.stopped"), "rollout.stopped"),
        (AgentError("lost its way"), "queue.batch-failed"),
        (RuntimeError("lost its way"), "queue.batch-failed"),
        (ValueError("lost its way \udcff"), "queue.batch-failed"),
        (SystemExit("lost its way"), "queue.batch-failed"),
        (KeyboardInterrupt("lost its way"), "queue.batch-failed"),
        (GeneratorExit("lost its way"), "queue.batch-failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_only_errors_that_a_retry_may_cure_lead_to_a_retry(raised: BaseException, code: str) -> None:
    error = failure(max_retries=2, failure=raised)
    assert code == error.code
    assert str(raised.args[0]).removesuffix(" \udcff") in str(error)
    assert "\udcff" not in str(error)


def failure(**settings: object) -> JackfieldError:
    """Return the error that ends a run."""
    return failure_of(Simulation(Schedule(steps=3, sync_interval=1, sync_offset=0), **settings))  # type: ignore[arg-type]


def failure_of(run: Simulation) -> JackfieldError:
    """Return the error that ends a run."""
    with pytest.raises(BaseExceptionGroup) as caught:
        run.run()
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, JackfieldError)
    return error


def test_step_metrics_are_those_of_the_batch() -> None:
    run = simulate(steps=2, answer=lambda task, seed: "a")
    metrics = run.recorder.steps[0].metrics
    assert (1.0, 0.0, 8.0, 2.0) == tuple(
        metrics[name] for name in ("reward/mean", "reward/std", "samples", "response_tokens/mean")
    )
    assert {"seconds/update_actor", "seconds/publish_weights", "seconds/next_batch"} <= set(metrics)


def test_the_loop_fits_on_one_screen() -> None:
    import inspect

    from jackfield.trainer import trainer

    lines = inspect.getsource(trainer.Trainer.run).splitlines()
    assert len(lines) <= 30, Path(trainer.__file__)
