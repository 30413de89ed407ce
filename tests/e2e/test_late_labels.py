"""Labels that come late change what replay chooses and what it is rewarded for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.plugins import hookimpl
from jackfield.plugins.hooks import StepEnded
from jackfield.queue import read_ledger

from .conftest import Run
from .test_mixing import SMALL, acked
from .test_modes import INVARIANT, steps

BY_UTILITY = "{name: priority, options: {tag: reward/utility, decay: 0}}"
REPLAY = f"mixing.replay={{ratio: 0.5, max_uses: 9, sampler: {BY_UTILITY}}}"


def label(folder: Path, lines: list[dict[str, Any]], *, by: str = "me") -> Any:
    file = folder.parent / "labels.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return CliRunner().invoke(main, ["queue", "label", str(folder), str(file), "--by", by])


class Labels:
    """Labels the samples of step 1's second group after step 2: highest utility, and reward 7."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @hookimpl
    def step_ended(self, event: StepEnded) -> None:
        if event.step == 2:
            lines = [{"key": f"train/0/1/0/{number}/0", "utility": 5.0, "reward": 7.0} for number in range(2)]
            done = label(self.folder, [*lines, {"key": "train/9/0/0/0/0", "utility": 1.0}])
            assert 0 == done.exit_code, done.output


def test_replay_sees_labels_of_a_run_that_goes_on(small_run: Run, tmp_path: Path) -> None:
    """After step 2 the labelled group is chosen in each step, with its new reward; resuming repeats it bit for bit."""
    settings = ("checkpoint.every=3", INVARIANT, *SMALL, REPLAY)
    result, lines = small_run("labelled", "schedule.steps=5", *settings, hooks=[Labels(tmp_path / "labelled")])
    replayed = [(step, key) for _, step, keys in acked(result.folder) for key in keys if int(key.split("/")[1]) != step]
    assert {(step, f"train/0/1/0/{number}/0") for step in (2, 3, 4) for number in range(2)} == {
        each for each in replayed if each[0] >= 2
    }
    assert [7.0] * 3 == [line["reward/max"] for line in steps(lines)[2:]]
    (entry,) = [each for each in read_ledger(result.folder) if each["event"] == "label"]
    assert ("me", 1, 2) == (entry["by"], entry["version"], len(entry["keys"]))
    small_run("parts", "schedule.steps=3", *settings, hooks=[Labels(tmp_path / "parts")])
    parts, again = small_run("parts", "schedule.steps=5", *settings)
    assert acked(result.folder) == acked(parts.folder)
    assert [line["reward/mean"] for line in steps(lines)] == [line["reward/mean"] for line in steps(again)]


def test_the_same_labels_are_one_version(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    first = [{"key": "train/0/0/0/0/0", "utility": 1}]
    versions = [label(folder, first), label(folder, first), label(folder, [{**first[0], "utility": 2}])]
    versions.append(label(folder, first, by="you"))
    assert ["version 1", "version 1", "version 2", "version 3"] == [each.output[:9] for each in versions]


@pytest.mark.parametrize(
    "line",
    [
        {"key": "a"},
        {"utility": 1.0},
        {"key": "a", "utility": "high"},
        {"key": "a", "utility": True},
        {"key": "a", "utility": 1e999},
        {"key": 3, "utility": 1.0},
        {"key": "a", "a b": 1.0},
        [1],
    ],
)
def test_a_line_that_is_no_label_is_refused_with_its_place(line: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    done = label(folder, [{"key": "b", "utility": 1.0}, line])
    assert 0 != done.exit_code
    assert "labels.jsonl:2" in done.output + done.stderr
    assert not list((folder / "labels").glob("*.json")) if (folder / "labels").exists() else True
