"""A run that is killed at any time and restarted uses each sample once, in its step, under every schedule."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from jackfield.queue import effective_acks, read_ledger
from jackfield.queue.meta import Reuse
from jackfield.trainer.role import Schedule

from .simulation import DyingBackend, Simulation

STEPS, GROUPS, RUNS = 8, 3, 2
pytestmark = pytest.mark.timeout(180)


def simulate(folder: Path, k: int, o: int, kill_at: float | None, **settings: object) -> Simulation:
    schedule = Schedule(steps=STEPS, sync_interval=k, sync_offset=o)
    simulation = Simulation(  # type: ignore[arg-type]
        schedule, groups=GROUPS, runs=RUNS, folder=folder, checkpoint_every=2, kill_at=kill_at, **settings
    )
    return simulation.run()


def trained(folder: Path) -> list[tuple[int | None, int, int, int]]:
    """Return step, batch, group index and rollout of all samples that were used and not taken back."""
    entries, used = list(read_ledger(folder)), []
    for index, entry in enumerate(entries):
        if entry["event"] == "ack" and entry["consumer"] == "trainer":
            assert not set(entry["keys"]) & effective_acks(entries[:index]).get("trainer", {}).keys()
    for key, step in effective_acks(entries)["trainer"].items():
        _, batch, index, _, rollout, _ = key.split("/")
        used.append((step, int(batch), int(index), int(rollout.partition("r")[0])))
    return used


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(("k", "o", "shared"), list(itertools.product((1, 2), (0, 1, 2), (False, True))))
def test_every_sample_is_used_once_by_its_own_step(tmp_path: Path, k: int, o: int, shared: bool, durable: bool) -> None:
    """Rewards come late, and one task gets none: its group is replaced, also in a restored batch."""
    draw = random.Random(f"{k} {o} {shared}")
    settings: dict[str, object] = {"shared": shared, "reward_seconds": 4.0, "answer": _answer}
    resumed = Counter[bool]()
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings["store"] = DyingBackend() if durable else None
        for _ in range(draw.randint(1, 3)):
            resumed[simulate(folder, k, o, draw.uniform(5, 150), **settings).first_step > 0] += 1
        run = simulate(folder, k, o, None, **settings)
        resumed[run.first_step > 0] += 1
        expected = [
            (step, step, index, rollout) for step in range(STEPS) for index in range(GROUPS) for rollout in range(RUNS)
        ]
        assert expected == sorted(trained(folder))
        assert 0 == run.samples_left
    assert resumed[True] > 1, "some starts went on from a checkpoint"


@pytest.mark.parametrize("o", [0, 1])
@pytest.mark.parametrize("background", [1, 3])
def test_a_kill_between_copy_and_files_loses_nothing(tmp_path: Path, o: int, background: int) -> None:
    """Until its files are there a checkpoint does not count: the run resumes from the one before."""
    draw = random.Random(background)
    expected = [
        (step, step, index, rollout) for step in range(STEPS) for index in range(GROUPS) for rollout in range(RUNS)
    ]
    resumed, partial = Counter[int](), 0
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        simulate(folder, 1, o, draw.uniform(20, 150), background=background)
        left = sorted(path.name for path in (folder / "checkpoints").glob("*.partial"))
        partial += any((folder / "checkpoints" / name / "actor").is_dir() for name in left)
        run = simulate(folder, 1, o, None, background=background)
        resumed[run.first_step] += 1
        assert expected == sorted(trained(folder))
        assert 0 == run.samples_left
        assert [] == list((folder / "checkpoints").glob("*.partial"))
    assert partial, "a run was killed between copy and files"
    assert any(resumed), "some starts went on from a checkpoint"


def test_a_checkpoint_in_the_background_counts_after_its_steps(tmp_path: Path) -> None:
    """Its acks are final then, not before; the last one is written at once."""
    run = simulate(tmp_path, 1, 0, None, background=1)
    entries = [
        entry
        for entry in read_ledger(tmp_path)
        if entry["event"] == "commit" or (entry["event"] == "ack" and entry["consumer"] == "trainer")
    ]
    commits = [
        (entry["step"], max((each["step"] for each in entries[:index] if each["event"] == "ack"), default=-1))
        for index, entry in enumerate(entries)
        if entry["event"] == "commit"
    ]
    assert [(1, 2), (3, 4), (5, 6), (7, 7)] == commits
    assert 0 == run.first_step


@pytest.mark.parametrize("o", [0, 2])
def test_what_is_replayed_does_not_depend_on_kills(tmp_path: Path, o: int) -> None:
    """The last use of every sample, and the batch of every step, equal those of an uninterrupted run."""
    draw = random.Random(o)
    reuse = Reuse(max_uses=3, cooldown=1, max_staleness=5, capacity=4)
    folders = [tmp_path / str(number) for number in range(3)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        for _ in range(number):
            simulate(folder, 1, o, draw.uniform(30, 150), replay=reuse)
        assert simulate(folder, 1, o, None, replay=reuse).first_step > 0 or not number
    whole, *killed = [sorted(trained_last(folder)) for folder in folders]
    assert any(step > batch for step, batch, *_ in whole)
    for each in killed:
        assert whole == each


def trained_last(folder: Path) -> list[tuple[int, int, int, int]]:
    """Return step, batch, group index and rollout of the last use of all samples not taken back."""
    used = []
    for key, step in effective_acks(read_ledger(folder))["trainer"].items():
        _, batch, index, _, rollout, _ = key.split("/")
        assert step is not None
        used.append((step, int(batch), int(index), int(rollout.partition("r")[0])))
    return used


def test_without_an_offset_a_resumed_run_makes_the_same_requests(tmp_path: Path) -> None:
    whole = simulate(tmp_path, 1, 0, None)
    for number, kill_at in enumerate((30.0, 77.0, 100.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        simulate(folder, 1, 0, kill_at)
        again = simulate(folder, 1, 0, None)
        assert whole.seeds[again.first_step * GROUPS * RUNS :] == again.seeds


@pytest.mark.parametrize("o", [0, 2])
def test_a_durable_queue_keeps_what_was_made_since_the_checkpoint(tmp_path: Path, o: int) -> None:
    """Only rollouts of unfinished groups are repeated, with the requests of an uninterrupted run."""
    whole, kept = simulate(tmp_path, 1, o, None), []
    for number, kill_at in enumerate((61.0, 69.0, 100.0)):
        folder, store = tmp_path / str(number), DyingBackend()
        folder.mkdir()
        simulate(folder, 1, o, kill_at, store=store)
        there = len(store._cells)
        again = simulate(folder, 1, o, None, store=store)
        assert again.first_step > 0
        kept.append(len(whole.seeds) - again.first_step * GROUPS * RUNS - len(again.seeds))
        assert 0 <= kept[-1] <= there
        assert set(again.seeds) < set(whole.seeds)
        assert STEPS * GROUPS * RUNS == len(trained(folder))
    assert sum(kept) > 0


def test_restored_batches_that_are_complete_and_rewarded_delay_no_consumer(tmp_path: Path) -> None:
    """The next batches are complete when the checkpoint is cut; the run then lasts longer than every deadline."""
    settings = {"generate_seconds": 0.5, "update_seconds": 150.0}
    simulate(tmp_path, 1, 2, 720.0, **settings)
    again = simulate(tmp_path, 1, 2, None, **settings)
    assert 2 == again.first_step
    assert STEPS == len({step for step, *_ in trained(tmp_path)})
    assert STEPS - 2 - 2 == len(again.seeds) // (GROUPS * RUNS), "two batches came with the checkpoint"


def test_a_restored_batch_that_loses_a_group_is_completed(tmp_path: Path) -> None:
    """Rewards were pending at the checkpoint, and one of them fails afterwards."""
    settings = {
        "generate_seconds": 0.5,
        "update_seconds": 20.0,
        "reward_seconds": 30.0,
        "answer": lambda task, seed: "x" if task.endswith("-0-0") else "ab"[seed % 2],
    }
    for kill_at in (140.0, 200.0, 260.0):
        folder = tmp_path / f"{kill_at}"
        folder.mkdir()
        simulate(folder, 1, 2, kill_at, **settings)
        assert simulate(folder, 1, 2, None, **settings).first_step > 0
        assert STEPS * GROUPS * RUNS == len(trained(folder))


def _answer(task: str, seed: int) -> str:
    return "x" if task in ("task-3-1-0", "task-6-0-0") else "ab"[seed % 2]
