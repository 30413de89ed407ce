"""Runs whose storage units are killed: exactly the rows of a unit fail, by name, and the run makes them anew."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jackfield.plugins import hookimpl
from jackfield.queue import read_ledger

from .conftest import Run
from .test_modes import GRADED, steps

GROUPS, RUNS = 3, 2
SETTINGS = (
    "transfer_queue={name: zmq, units: 4}",
    f"data.groups_per_batch={GROUPS}",
    f"data.rollouts_per_group={RUNS}",
    "sampling.max_new_tokens=3",
    "schedule.steps=3",
    "checkpoint.every=1",
    *GRADED,
)


class Killer:
    """Kills one unit at the end of each of these stages of a run."""

    def __init__(self, folder: Path, *moments: tuple[str, int]) -> None:
        self.units, self.moments = folder / "queue" / "units.json", list(moments)
        self.killed: list[int] = []

    @hookimpl
    def stage_ended(self, event: Any) -> None:
        if (event.name, event.step) in self.moments:
            self.moments.remove((event.name, event.step))
            pid = json.loads(self.units.read_text())["units"][len(self.killed)][1]
            os.kill(pid, signal.SIGKILL)
            self.killed.append(pid)


def ledger(folder: Path) -> list[dict[str, Any]]:
    return list(read_ledger(folder))


def check_retried(folder: Path, lines: list[dict[str, Any]], *, prompts: int, runs: int) -> None:
    """Rows were lost, each is named once, and every step trained on a full batch; only what was lost was made anew."""
    replayed = [line.get("samples/replayed", 0) for line in lines]
    assert [prompts * runs] * 3 == [line["samples"] - more for line, more in zip(lines, replayed, strict=True)]
    entries = ledger(folder)
    lost = [key for entry in entries if entry["event"] == "lose" for key in entry["keys"]]
    assert lost
    assert {1} == set(Counter(lost).values()), "each is named once"
    for step in range(3):
        acks = [entry for entry in entries if entry["event"] == "ack" and entry["consumer"] == "trainer"]
        keys = [key for entry in acks if entry["step"] == step for key in entry["keys"]]
        own = [key for key in keys if key.split("/")[1] == str(step)]
        assert prompts == len({key.split("/")[2] for key in own})
        assert prompts * runs == len(set(own))
    refilled = [entry["group"] for entry in entries if entry["event"] == "drop"]
    assert set(refilled) <= {key.rsplit("/", 2)[0] for key in lost}, "nothing else is made again"


@pytest.mark.parametrize(
    ("moments", "settings"),
    [
        # leased by the trainer; in the middle of its step; scored and not yet leased
        ([("next_batch", 0), ("advantages", 1), ("reward", 2)], ("algorithm.mini_batches=2", "algorithm.epochs=2")),
        # while further batches are explored, and before a checkpoint that has rows of theirs
        (
            [("rollout", 1), ("update_actor", 0), ("publish_weights", 1)],
            ("schedule.sync_offset=1", "mixing.replay={ratio: 0.5}"),
        ),
    ],
)
@pytest.mark.timeout(120)
def test_every_step_trains_on_a_full_batch_though_units_are_killed(
    small_run: Run, tmp_path: Path, moments: list[tuple[str, int]], settings: tuple[str, ...]
) -> None:
    killer = Killer(tmp_path / "run", *moments)
    result, lines = small_run("run", *SETTINGS, *settings, hooks=[killer])
    assert ([], 3) == (killer.moments, len(set(killer.killed)))
    check_retried(result.folder, steps(lines), prompts=GROUPS, runs=RUNS)
