"""Tests of the loop's support for algorithms: replaced groups, baselines, expert samples, a critic, KL control."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from jackfield.errors import RunError
from jackfield.queue.meta import BatchMeta, Lease
from jackfield.runtime.samples import global_counts, mini_batches
from jackfield.trainer.role import Schedule

from .simulation import Simulation


def simulate(steps: int = 3, **settings: object) -> Simulation:
    return Simulation(Schedule(steps=steps), **settings).run()  # type: ignore[arg-type]


def equal_at_first() -> Callable[[str, int], str]:
    """Give equal rewards to the first try of group 1 and the first two of group 2; others differ."""
    asked: Counter[str] = Counter()

    def answer(task: str, seed: int) -> str:
        index, retry = task.split("-")[2:]
        if index == "1" and retry == "0":
            return "a"
        if index == "2" and retry in "01":
            return "b"
        asked[task] += 1
        return "ab"[asked[task] % 2]

    return answer


def test_groups_of_equal_rewards_are_replaced_inside_their_batch() -> None:
    run = simulate(answer=equal_at_first(), replaces_equal_groups=True, max_retries=3)
    for step, (batch, _) in enumerate(run.actor.updates):
        assert [f"task-{step}-0-0", f"task-{step}-1-1", f"task-{step}-2-2", f"task-{step}-3-0"] == sorted(
            {tags["task"] for tags in batch.tags}
        )
    assert all(abs(value) == pytest.approx(2**-0.5, abs=1e-4) for row in run.actor.advantages for value in row)
    assert [3.0, 3.0, 3.0] == [step.metrics["groups/retries"] for step in run.recorder.steps]
    assert {} == run.recorder.failed, "a group that a filter replaced has not failed"
    assert 0 == run.samples_left


def test_without_dynamic_sampling_they_stay() -> None:
    run = simulate(answer=equal_at_first())
    assert {"0"} == {tags["task"].split("-")[-1] for batch, _ in run.actor.updates for tags in batch.tags}


def test_a_group_whose_rewards_never_differ_is_used_after_the_last_retry() -> None:
    """Its samples have no gradient, but a run that has learnt its task continues."""
    run = simulate(answer=lambda task, seed: "a", replaces_equal_groups=True, max_retries=2)
    assert 3 == len(run.actor.updates)
    assert {"2"} == {tags["task"].split("-")[-1] for batch, _ in run.actor.updates for tags in batch.tags}
    assert {0.0} == {value for row in run.actor.advantages for value in row}


def test_a_greedy_rollout_is_a_baseline_and_not_trained_on() -> None:
    run = simulate(answer=lambda task, seed: "a", greedy_baseline=True, advantages="remax", groups=2, runs=3)
    assert 3 * 2 == run.temperatures.count(0.0), "one for each group"
    assert 3 * 2 * 3 == run.temperatures.count(1.0)
    for batch, loss in run.actor.updates:
        assert 6 == len(batch) == loss.global_counts["global_sequences"]
        assert {0, 1, 2} == {tags["rollout"] for tags in batch.tags}
    assert {0.0} == {value for row in run.actor.advantages for value in row}, "1 less the greedy answer's 1"
    assert 0 == run.samples_left, "baselines are consumed, too"


@pytest.mark.parametrize("mini", [1, 2])
def test_every_mini_batch_has_samples_of_the_expert_with_their_own_counts(mini: int) -> None:
    run = simulate(experts=3, groups=2, runs=2, mini_batches=mini, steps=2)
    experts = [sum(bool(tags.get("expert")) for tags in batch.tags) for batch, _ in run.actor.updates]
    assert {1: [3, 3], 2: [2, 1, 2, 1]}[mini] == experts
    for (batch, loss), rows in zip(run.actor.updates, experts, strict=True):
        counts = loss.global_counts
        assert (rows, 3 * rows) == (counts["global_expert_sequences"], counts["global_expert_tokens"])
        assert (len(batch) - rows, 2 * (len(batch) - rows)) == (
            counts["global_usual_sequences"],
            counts["global_usual_tokens"],
        )
    names = {tags["task"] for batch, _ in run.actor.updates for tags in batch.tags if tags.get("expert")}
    assert {f"expert-{batch}-{index}" for batch in range(2) for index in (2, 3, 4)} == names
    assert (0, 0) == (run.samples_left, run.recorder.steps[0].metrics["staleness/max"])


def test_a_critic_is_trained_first_alone_then_beside_the_actor() -> None:
    run = simulate(critic_warmup=2, advantages="gae", mini_batches=2, steps=4)
    assert (8, 4) == (len(run.critic.updates), len(run.actor.updates))
    assert {"value"} == {loss.name for _, loss in run.critic.updates}
    assert [{"clip": 0.1}] * 8 == [loss.options for _, loss in run.critic.updates]
    first, last = run.recorder.steps[0].metrics, run.recorder.steps[-1].metrics
    assert (0.25, 2.0, 0.1) == (first["value/loss"], first["critic/grad_norm"], first["critic/lr"])
    assert "policy/loss" not in first
    assert (0.5, 1.0, 0.25) == (last["policy/loss"], last["grad_norm"], last["value/loss"])
    rewards = [value + 0.5 for row in run.actor.advantages for value in row]
    assert set(rewards) == {0.0, 1.0}, "advantages are rewards to go, less the values"


def test_a_controller_steers_the_coefficient_of_the_kl_in_the_loss() -> None:
    kl = {"coefficient": 0.1, "target": 0.1, "horizon": 80.0}
    run = simulate(kl=kl, loss_options={"kl": "k2"})
    coefficients = [loss.options["kl_coefficient"] for _, loss in run.actor.updates]
    grown = 1 + 0.2 * 8 / 80  # 8 samples per step, and an error clipped to 0.2
    assert [0.1, 0.1 * grown, 0.1 * grown**2] == pytest.approx(coefficients)
    assert coefficients == [step.metrics["policy/kl_coefficient"] for step in run.recorder.steps]
    constant = simulate(kl={"coefficient": 0.2}, loss_options={"kl": "k2"})
    assert [0.2] * 3 == [loss.options["kl_coefficient"] for _, loss in constant.actor.updates]


def rows(groups: str, experts: str = "") -> BatchMeta:
    names = groups + experts.upper()
    return BatchMeta(
        keys=tuple(f"{name}{index}" for index, name in enumerate(names)),
        tags=tuple({"model_tokens": 2, "expert": name.isupper()} for name in names),
        groups=tuple(names),
        leases=(Lease("train", "trainer", 1),) * len(names),
    )


def test_mini_batches_keep_groups_together_where_asked() -> None:
    batch = rows("aaaaabbc")
    assert [4, 4] == [len(part) for part in mini_batches(batch, 2, whole_groups=False)]
    parts = mini_batches(batch, 2, whole_groups=True)
    assert [("a",) * 5 + ("b",) * 2, ("c",)] == [part.groups for part in parts]
    parts = mini_batches(rows("aabb", "xyz"), 2, whole_groups=True)
    assert ["aaXZ", "bbY"] == ["".join(part.groups) for part in parts]


def test_counts_are_of_all_samples_and_of_both_kinds() -> None:
    assert {
        "global_tokens": 6,
        "global_sequences": 3,
        "global_usual_tokens": 4,
        "global_usual_sequences": 2,
        "global_expert_tokens": 2,
        "global_expert_sequences": 1,
    } == global_counts(rows("ab", "x").tags)


def test_an_update_whose_gradients_overflow_ends_the_run() -> None:
    """The engine has not applied it; steps before it are not lost."""
    run = Simulation(Schedule(steps=3), overflows=(2,))
    with pytest.raises(ExceptionGroup) as caught:
        run.run()
    (error,) = caught.value.exceptions
    assert isinstance(error, RunError)
    assert ("run.not-finite", "step 2") == (error.code, error.where)
    assert [1] == [event.step for event in run.recorder.steps]


def test_an_update_whose_gradients_overflow_is_left_out_if_asked() -> None:
    """The run goes on, and counts it; means are those of the other updates."""
    run = simulate(mini_batches=2, overflows=(3,), optimizer={"on_nonfinite": "skip"})
    assert 6 == len(run.actor.updates)
    metrics = [event.metrics for event in run.recorder.steps]
    assert [0.0, 0.5, 0.0] == [each["updates_skipped"] for each in metrics]
    assert [1.0] * 3 == [each["grad_norm"] for each in metrics]
