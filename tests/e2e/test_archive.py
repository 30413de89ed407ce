"""The archive of consumed samples: what other programs read, exactly once, and runs on it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from jackfield.queue import effective_acks, read_ledger

from .conftest import Run
from .test_kill import DONE, PROMPTS, RUNS, STEPS, Start, moments, start  # noqa: F401, the fixture
from .test_modes import GRADED

SMALL = ("data.groups_per_batch=2", "data.rollouts_per_group=2", "sampling.max_new_tokens=3", *GRADED)


def rows(archive: Path, cache: Path) -> list[dict[str, Any]]:
    """Return the rows of all files, as a user of ``datasets`` gets them."""
    files = sorted(str(file) for file in archive.glob("*.parquet"))
    found = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(cache))
    return list(found)


def check_once(folder: Path, archive: Path, cache: Path) -> list[dict[str, Any]]:
    """Each key that the trainer was finally done with is there once, with the step of the ledger, and no other."""
    found = [row for row in rows(archive, cache) if row["status"] == "trained"]
    trained = {key: [step] for key, step in effective_acks(read_ledger(folder))["trainer"].items()}
    assert {1} == set(Counter(row["key"] for row in found).values())
    assert trained == {row["key"]: row["steps"] for row in found}
    return found


def test_another_program_reads_what_was_trained_on(small_run: Run, tmp_path: Path) -> None:
    """Tokens, log-probs, rewards and tags of every sample that the ledger says was used."""
    archive = tmp_path / "archive"
    result, _ = small_run("run", "checkpoint.every=2", f"queue.archive={archive}", *SMALL)
    found = check_once(result.folder, archive, tmp_path / "cache")
    assert 2 == len(list(archive.glob("*.parquet"))), "one file for each checkpoint"
    for row in found:
        length = json.loads(row["tags"])["response_tokens"]
        for name in ("response_ids", "response_mask", "rollout_log_probs", "advantages"):
            assert length == len(row[f"columns.{name}"]), name
        assert 1 == len(row["columns.reward"])
        assert row["columns.prompt_ids"]
        assert row["columns.values"] is None
        assert {"extra_info", "ground_truth"} <= json.loads(row["columns.task"]).keys()


@pytest.mark.parametrize("seed", [11, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(12, 16))])
@pytest.mark.parametrize(
    "settings",
    [("schedule.sync_offset=1",), ("transfer_queue={name: sql}", "queue.durable=true")],
    ids=["memory", "durable"],
)
@pytest.mark.timeout(300)
def test_killed_again_and_again_every_sample_is_archived_once(
    start: Start, tmp_path: Path, settings: tuple[str, ...], seed: int  # noqa: F811
) -> None:
    """Also in the moments around the writing of a file, which is in the run's folder here."""
    finished = 0

    def again(kill: tuple[str, int] | None = None) -> dict[str, Any]:
        folder = tmp_path / str(finished)
        return start(folder, f"queue.archive={folder / 'archive'}", "evaluation.every=0", *settings, kill=kill)

    for kill in [*moments(seed, 6, 90), *(("/archive", number) for number in range(1, 14, 2))]:
        while "killed" not in (answer := again(kill)):  # the run ended before its moment came
            assert DONE == answer
            finished += 1
    assert DONE == again()
    for number in range(finished + 1):
        folder = tmp_path / str(number)
        assert STEPS * PROMPTS * RUNS == len(check_once(folder, folder / "archive", tmp_path / "cache"))
