"""A run whose rewards arrive later, from outside, and over a ``kill -9``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow import parquet

from jackfield.queue import effective_acks, read_ledger
from jackfield_commands import Command, CommandServer
from jackfield_reward_service import Pending, Reward, pending, push_all

pytestmark = pytest.mark.timeout(180)

STEPS, GROUPS, ROLLOUTS = 5, 2, 2
SETTINGS = (
    *("schedule.mode=async", "schedule.max_staleness=6", "schedule.rollouts_in_flight=16", f"schedule.steps={STEPS}"),
    *(f"data.groups_per_batch={GROUPS}", f"data.rollouts_per_group={ROLLOUTS}", "checkpoint.every=1"),
)
SECONDS = 120.0
LENGTH = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str)\n"


def group(sample: Pending) -> str:
    """Return the group of a sample."""
    return sample.sample.rsplit("/", 2)[0]


class Person:
    """Rewards answers by their length, when asked to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def waiting(self) -> list[Pending]:
        """Return the samples that wait."""
        return pending(self.folder) if (self.folder / "rewards.sqlite").is_file() else []

    def reward(self, held: str = "") -> None:
        """Reward all samples that wait, but for those of one group."""
        there = [each for each in self.waiting() if group(each) != held]
        if there:
            push_all(self.folder, [Reward(key=each.key, score=float(len(each.response))) for each in there])

    def until(self, done: Callable[[], bool], command: Command, held: str | None = None) -> None:
        """Go on rewarding, unless ``held`` is None, until something is there."""
        end = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < end, command.error
            assert command.running or command.wait().code == 0, command.error
            if held is not None:
                self.reward(held)
            time.sleep(0.01)


def test_a_group_that_waits_holds_nobody_and_survives_a_kill(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Steps are made without it. After the kill its samples are still there, and get the rewards that came meanwhile.

    At the end each sample has been trained on once, by its one reward, and the run's own data of rewards says so.
    """
    folder, run = tmp_path / "arriving", tmp_path / "lagged"
    reward = f"reward={{name: lagged, folder: {folder}, poll_seconds: 0.02}}"
    command = ["run", *quickstart_settings("lagged", *SETTINGS, reward)]
    person, first = Person(folder), jackfield.start(*command)
    person.until(lambda: len(person.waiting()) > GROUPS * ROLLOUTS, first)
    held = group(person.waiting()[0])
    person.until(lambda: any((run / "checkpoints").glob("*2")), first, held)
    first.kill()
    assert first.wait(60).code == 137
    left = {each.sample for each in person.waiting() if group(each) == held}
    assert len(left) == ROLLOUTS, "the group that got no reward still waits"
    person.reward()
    assert person.waiting() == []
    second = jackfield.start(*command)
    person.until(lambda: not second.running, second, held="")
    assert second.wait(60).code == 0
    kept = [row for file in sorted((run / "scores").glob("*.parquet")) for row in parquet.read_table(file).to_pylist()]
    assert [] == [row["key"] for row in kept if (row["status"], row["score"]) != ("ok", float(len(row["response"])))]
    assert left <= {row["key"] for row in kept}
    trained = effective_acks(read_ledger(run))["trainer"]
    assert len(trained) == STEPS * GROUPS * ROLLOUTS
    assert left <= trained.keys()
    (tmp_path / "length.py").write_text(LENGTH)
    other = tmp_path / "other.yaml"
    other.write_text(f"reward: {{name: function, path: '{tmp_path / 'length.py'}:compute_score'}}\n")
    changes = jackfield("rewards", "rescore", str(run), "--with", str(other), "--json")
    assert changes.code == 0, changes.error
    assert json.loads(changes.out)["all"]["changed"] == 0.0
