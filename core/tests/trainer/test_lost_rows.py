"""Units of the store die at random times: every step still trains on a full batch, and nothing hangs."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from jackfield.queue.meta import Reuse
from jackfield.trainer.role import Schedule

from .simulation import Simulation

STEPS, GROUPS, RUNS, PARTS = 5, 4, 2, 4


def simulate(seed: int, **settings: object) -> Simulation:
    """Let units die while samples are generated, scored, waited for, trained on and saved."""
    drawn = random.Random(seed)
    k, o = drawn.choice([(1, 0), (1, 1), (2, 0), (2, 1)])
    drawn_settings = {
        "reward_seconds": drawn.choice([0.0, 3.0]),
        "update_seconds": drawn.choice([0.0, 2.0, 6.0]),
        "mini_batches": drawn.choice([1, 4]),
        "shared": drawn.random() < 0.5,
        "critic_warmup": drawn.choice([None, 0]),
        "max_retries": 2 * PARTS,
        "deaths": sorted(drawn.uniform(0, 60) for _ in range(PARTS)),
    }
    schedule = Schedule(steps=STEPS, sync_interval=k, sync_offset=o)
    return Simulation(schedule, groups=GROUPS, runs=RUNS, **{**drawn_settings, **settings}).run()  # type: ignore[arg-type]


def check(run: Simulation) -> int:
    """Check that every step's batch was complete; return how many samples were lost."""
    parts = len(run.actor.updates) // STEPS
    for step in range(STEPS):
        updates = run.actor.updates[step * parts : (step + 1) * parts]
        own = [key for batch, _ in updates for key in batch.keys if key.split("/")[1] == str(step)]
        assert GROUPS * RUNS == len(own) == len(set(own))
        assert 1 == len({len(batch) for batch, _ in updates})
    assert [f"{step + 1}" for step in range(STEPS)] == [f"{event.step}" for event in run.recorder.steps]
    lost = [key for entry in run.ledger if entry["event"] == "lose" for key in entry["keys"]]
    assert set(Counter(lost).values()) <= {1}
    return len(lost)


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_every_step_trains_on_a_full_batch_when_parts_of_the_store_die(first: int) -> None:
    lost = sum(check(simulate(seed)) for seed in range(first, first + 10))
    assert lost > 20, "parts died with rows that were needed"


def test_checkpoints_and_replay_leave_out_lost_samples(tmp_path: Path) -> None:
    """Restored samples have their values."""
    for seed in range(10):
        settings = {"folder": tmp_path / str(seed), "checkpoint_every": 1, "replay": Reuse(max_uses=2)}
        (tmp_path / str(seed)).mkdir()
        kill_at = random.Random(seed).uniform(20, 60)
        simulate(seed, **settings, kill_at=kill_at, deaths=[kill_at * part / 4 for part in range(1, 4)])
        run = simulate(seed, **settings, deaths=())
        assert STEPS == run.first_step + len(run.recorder.steps)
