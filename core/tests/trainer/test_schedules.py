"""Tests of what overlaps: streaming explorers, the update pipeline, and steps on any complete groups."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from jackfield.queue.meta import BatchMeta
from jackfield.trainer.role import Schedule

from .simulation import Simulation


def simulate(schedule: Schedule, **settings: object) -> Simulation:
    return Simulation(schedule, **settings).run()  # type: ignore[arg-type]


def trained_groups(run: Simulation) -> list[str]:
    """Return the places (batch and index) of the groups that were trained on, once for each update."""
    return [place for batch, _ in run.actor.updates for place in dict.fromkeys(map(place_of, batch.groups))]


def place_of(group: str) -> str:
    return "/".join(group.split("/")[1:3])


def staleness(run: Simulation, updates_per_step: int = 1) -> list[int]:
    return [
        number // updates_per_step - min(tags["weight_version_min"] for tags in batch.tags)
        for number, (batch, _) in enumerate(run.actor.updates)
    ]


# -- the streaming explorer


def test_a_straggler_delays_its_own_group_only() -> None:
    """Rollouts take 10 s, and 45 s for one of batch 0: the other batches of the interval do not wait for it."""
    slow: list[int] = []

    def seconds(task: str, seed: int) -> float:
        if task.startswith("task-0-1-") and not slow:
            slow.append(seed)
            return 45.0
        return 10.0

    times = {"generate_seconds": 10.0, "update_seconds": 1.0, "sync_seconds": 0.0}
    run = simulate(Schedule(steps=4, sync_interval=4), runs=2, rollout_seconds=seconds, **times)
    assert 45 + 4 * 1 == pytest.approx(run.recorder.ended_at[-1]), "with a barrier for each batch it takes 75 s"


@pytest.mark.parametrize("limit", [2, 4, 8, 64])
def test_rollouts_in_flight_are_limited_and_oldest_batches_come_first(limit: int) -> None:
    """With 4 groups of 2, and groups that start while fewer than the limit run."""
    running, most, begun = set[int](), 0, list[int]()

    def seconds(task: str, seed: int) -> float:
        nonlocal most
        running.add(seed)
        begun.append(int(task.split("-")[1]))
        most = max(most, len(running))
        return random.Random(seed).uniform(1, 30)

    run = Simulation(Schedule(steps=6, sync_interval=3, rollouts_in_flight=limit), rollout_seconds=seconds)

    def answer(task: str, seed: int) -> str:
        running.discard(seed)
        return "ab"[seed % 2]

    run.answer = answer
    run.run()
    assert begun == sorted(begun)
    assert most == min(limit + 1, 24), "the last group starts while one rollout less than the limit runs"


# -- the update pipeline


PIPELINE = {"groups": 8, "runs": 2, "mini_batches": 4, "generate_seconds": 10.0, "update_seconds": 5.0}


def uniform(low: float, high: float) -> dict[str, object]:
    return {"score_seconds": lambda key: random.Random(key).uniform(low, high)}


def pipeline(k: int = 1, o: int = 0, steps: int = 6, **settings: object) -> Simulation:
    schedule = Schedule(steps=steps, sync_interval=k, sync_offset=o, stream_mini_batches=True)
    return simulate(schedule, **{**PIPELINE, "sync_seconds": 1.0, **uniform(1, 40), **settings})


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("k", "o"), [(1, 0), (2, 0), (1, 1)])
def test_mini_batches_are_whole_groups_of_their_own_batch_each_used_once(k: int, o: int, shared: bool) -> None:
    run = pipeline(k, o, shared=shared)
    assert 6 * 4 == len(run.actor.updates)
    for number, (batch, loss) in enumerate(run.actor.updates):
        assert {str(number // 4)} == {group.split("/")[1] for group in batch.groups}
        assert [2, 2] == list(Counter(batch.groups).values())
        assert 4 == loss.global_counts["global_sequences"]
    assert 6 * 8 == len(set(trained_groups(run)))
    assert max(staleness(run, 4)) <= k - 1 + o
    assert 0 == run.samples_left


def test_groups_are_used_in_the_order_of_their_rewards() -> None:
    run = pipeline(steps=2)
    late = {group: max(random.Random(key).uniform(1, 40) for key in keys) for group, keys in by_group(run).items()}
    for step in range(2):
        order = [late[group] for batch, _ in run.actor.updates[4 * step : 4 * step + 4] for group in set(batch.groups)]
        pairs = [sorted(order[number : number + 2]) for number in range(0, 8, 2)]
        assert [each for pair in pairs for each in pair] == sorted(order)


def by_group(run: Simulation) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for batch, _ in run.actor.updates:
        for key, group in zip(batch.keys, batch.groups, strict=True):
            groups.setdefault(group, []).append(key)
    return groups


def test_updates_overlap_with_the_wait_for_rewards() -> None:
    """Rewards take 1 to 40 s and a mini-batch 5 s: three of four updates are hidden in the wait."""
    whole = simulate(Schedule(steps=6), **{**PIPELINE, "sync_seconds": 1.0, **uniform(1, 40)})
    assert run_time(pipeline()) < run_time(whole) - 6 * 2 * 5


def run_time(run: Simulation) -> float:
    return float(run.recorder.ended_at[-1])


@pytest.mark.parametrize("critic", [None, 0])
def test_log_probs_are_computed_once_while_rewards_are_pending_and_before_the_first_update(critic: int | None) -> None:
    run = pipeline(old_log_probs=True, critic_warmup=critic)
    assert 6 == len(run.actor.passes)
    for step, (ended, column, batch) in enumerate(run.actor.passes):
        assert "old_log_probs" == column
        assert 8 == len({group for group in batch.groups if group.split("/")[1] == str(step)})
        generated = ended - 2.5  # half an update's time after the rollouts
        assert generated == pytest.approx(10.0 if step == 0 else run.recorder.ended_at[step - 1] + 10.0)
        assert ended < run.actor.ended_at[4 * step] - 5.0 + 1e-6
    if critic is not None:
        assert 6 * 4 == len(run.critic.updates)


def test_a_group_that_is_made_again_after_the_first_update_gets_its_log_probs_then() -> None:
    bad = ("task-1-2-0", "task-1-2-1")
    run = pipeline(old_log_probs=True, answer=lambda task, seed: "x" if task in bad else "ab"[seed % 2])
    assert 6 * 4 == len(run.actor.updates)
    passes = [sorted({place_of(group) for group in batch.groups}) for _, _, batch in run.actor.passes]
    assert ["1/2"] in passes, "only the group that was made again"
    assert 6 == sum(len(groups) == 8 for groups in passes)
    assert 6 * 8 == len(set(trained_groups(run)))


def test_epochs_use_each_mini_batch_as_often() -> None:
    run = pipeline(epochs=3, steps=2)
    assert {3} == set(Counter(trained_groups(run)).values())
    first = [tuple(batch.keys) for batch, _ in run.actor.updates[:12]]
    assert first[:4] == first[4:8] == first[8:]


def test_the_ledger_says_which_mini_batch_used_which_group() -> None:
    run = pipeline(steps=3)
    acks = [entry for entry in run.ledger if entry["event"] == "ack" and entry["consumer"] == "trainer"]
    assert [(step, part) for step in range(3) for part in range(4)] == [
        (each["step"], each["mini_batch"]) for each in acks
    ]
    used = [sorted(batch.keys) for batch, _ in run.actor.updates]
    assert used == [sorted(entry["keys"]) for entry in acks]


@pytest.mark.parametrize("seed", range(12))
def test_lost_samples_leave_the_other_mini_batches_as_they_are(seed: int) -> None:
    drawn = random.Random(seed)
    deaths = sorted(drawn.uniform(0, 250) for _ in range(4))
    old = drawn.random() < 0.5
    run = pipeline(deaths=deaths, epochs=drawn.choice([1, 2]), old_log_probs=old, max_retries=9, shared=seed % 2 == 0)
    epochs = len(run.actor.updates) // 24
    for step in range(6):
        updates = run.actor.updates[4 * epochs * step : 4 * epochs * (step + 1)]
        assert {str(step)} == {group.split("/")[1] for batch, _ in updates for group in batch.groups}
        assert {4} == {len(batch) for batch, _ in updates}
    assert 0 == run.samples_left


@pytest.mark.parametrize("kill_at", [15.0, 33.0, 47.0, 61.0, 95.0, 130.0])
def test_a_killed_pipeline_goes_on_from_its_checkpoint_without_skip_or_double(tmp_path: Path, kill_at: float) -> None:
    settings = {"folder": tmp_path, "checkpoint_every": 1, "old_log_probs": True}
    pipeline(kill_at=kill_at, **settings)
    run = pipeline(**settings)
    assert 6 == run.first_step + len(run.recorder.steps)
    assert {f"{batch}/{index}" for batch in range(6) for index in range(8)} == final_places(run.ledger)


def final_places(ledger: list[dict[str, object]]) -> set[str]:
    """Return the groups whose acks hold, after rollbacks; each has to be acked once."""
    held = Counter[str]()
    for entry in ledger:
        if entry.get("consumer") == "trainer" and entry["event"] in ("ack", "rollback"):
            keys: list[str] = entry["keys"]  # type: ignore[assignment]
            for group in {key.rsplit("/", 2)[0] for key in keys}:
                held[place_of(group)] += 1 if entry["event"] == "ack" else -1
    assert {1} == set(+held and (+held).values())
    return set(+held)


# -- steps on any complete groups


def asynchronous(bound: int = 2, steps: int = 8, k: int = 1, on_stale: str = "wait", **settings: object) -> Simulation:
    schedule = Schedule(steps=steps, sync_interval=k, mode="async", max_staleness=bound, on_stale=on_stale)
    return simulate(schedule, **{"update_seconds": 4.0, "sync_seconds": 0.5, **settings})


def long_tail(task: str, seed: int) -> float:
    return random.Random(f"{task}/{seed}").choice([3.0, 4.0, 5.0, 30.0])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("k", "bound"), [(1, 0), (1, 1), (1, 3), (2, 1), (2, 4), (3, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_no_token_is_staler_than_the_bound_and_every_group_is_used_once(
    seed: int, k: int, bound: int, shared: bool
) -> None:
    drawn = random.Random(seed)
    times = {task: drawn.choice([3.0, 5.0, 45.0]) for task in range(64)}
    run = asynchronous(bound, 9, k, shared=shared, rollout_seconds=lambda task, seed: times[hash_of(task)])
    assert 9 == len(run.actor.updates)
    assert max(staleness(run)) <= bound
    assert Counter({f"{batch}/{index}": 1 for batch in range(9) for index in range(4)}) == Counter(trained_groups(run))
    assert not [entry for entry in run.ledger if entry["event"] == "drop"], "none was thrown away"
    assert 0 == run.samples_left


def hash_of(task: str) -> int:
    return random.Random(task).randrange(64)


def test_a_straggler_is_overtaken_as_long_as_the_bound_allows_it() -> None:
    """One group takes 40 s. With the bound 3 it is trained on at step 3, and steps 0 to 2 do not wait for it."""
    slow = {"rollout_seconds": lambda task, seed: 40.0 if task.startswith("task-0-1-") else 5.0}
    run = asynchronous(3, 8, **slow)
    used = [step for step, (batch, _) in enumerate(run.actor.updates) if "0/1" in set(map(place_of, batch.groups))]
    assert [3] == used
    assert run.recorder.ended_at[2] < 40 < run.recorder.ended_at[3]


@pytest.mark.parametrize("on_stale", ["train_corrected", "drop"])
def test_a_late_straggler_is_trained_on_or_generated_again_and_counted(on_stale: str) -> None:
    slow = {"rollout_seconds": lambda task, seed: 45.0 if task.startswith("task-0-1-") and len(calls) < 2 else 5.0}
    calls: list[str] = []

    def answer(task: str, seed: int) -> str:
        if task.startswith("task-0-1-"):
            calls.append(task)
        return "ab"[seed % 2]

    run = asynchronous(1, 16, on_stale=on_stale, answer=answer, **slow)
    assert 16 == len(run.actor.updates)
    counted = [event.metrics.get("stale/samples", 0.0) for event in run.recorder.steps]
    assert 2.0 == sum(counted), "the two rollouts of one group"
    assert 2.0 == sum(event.metrics.get("stale/samples/to_2_tokens", 0.0) for event in run.recorder.steps)
    (task,) = {name for event in run.recorder.steps for name in event.metrics if name.startswith("stale/tasks/")}
    assert "stale/tasks/task-0-1-0" == task
    if on_stale == "drop":
        assert max(staleness(run)) <= 1
        assert ["train/0/1/0"] == [entry["group"] for entry in run.ledger if entry["event"] == "drop"]
    else:
        assert max(staleness(run)) > 1
    assert 16 * 4 == len(set(trained_groups(run)))
    assert run.recorder.ended_at[3] < 45, "no step waited for it"


@pytest.mark.parametrize("kill_at", [7.0, 14.0, 26.0, 38.0, 51.0])
@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_a_killed_asynchronous_run_goes_on_without_skip_or_double(
    tmp_path: Path, kill_at: float, on_stale: str
) -> None:
    settings = {"folder": tmp_path, "checkpoint_every": 1, "rollout_seconds": long_tail, "on_stale": on_stale}
    asynchronous(kill_at=kill_at, **settings)
    run = asynchronous(**settings)
    assert 8 == run.first_step + len(run.recorder.steps)
    assert {f"{batch}/{index}" for batch in range(8) for index in range(4)} == final_places(run.ledger)


def test_metrics_of_parts_are_combined() -> None:
    run = pipeline(steps=1, answer=lambda task, seed: "ab"[seed % 2])
    metrics = run.recorder.steps[0].metrics
    rewards = [tags for batch, _ in run.actor.updates for tags in batch.tags]
    assert 16 == len(rewards) == metrics["samples"]
    assert (0.0, 1.0) == (metrics["reward/min"], metrics["reward/max"])
    assert isinstance(run.actor.updates[0][0], BatchMeta)


@pytest.mark.parametrize("seed", range(12))
def test_an_asynchronous_step_that_loses_samples_takes_what_is_made_in_their_places(seed: int) -> None:
    """Each place of each batch is used as often as there are epochs."""
    drawn = random.Random(seed)
    deaths = sorted(drawn.uniform(0, 150) for _ in range(3))
    settings = {"mini_batches": 2, "epochs": 2, "max_retries": 9, "deaths": deaths, "rollout_seconds": long_tail}
    uses = Counter(trained_groups(asynchronous(2, 6, **settings)))
    assert {f"{batch}/{index}": 2 for batch in range(6) for index in range(4)} == uses
