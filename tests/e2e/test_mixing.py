"""Replay and mixing in whole runs, on the real plugins."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from jackfield.cli import main
from jackfield.errors import JackfieldError
from jackfield.plugins import hookimpl
from jackfield.queue import Ready, Sampler, read_ledger
from jackfield.queue.meta import SAMPLERS

from .conftest import Run
from .test_modes import GRADED, INVARIANT, steps

SMALL = ("data.groups_per_batch=2", "data.rollouts_per_group=2", "sampling.max_new_tokens=3", *GRADED)
REPLAY = "mixing.replay={ratio: 0.5, max_uses: 2, cooldown: 1, max_staleness: 3, sampler: {name: priority}}"


def acked(folder: Path) -> list[tuple[str, int, list[str]]]:
    """What the trainer was done with: consumer, step, keys."""
    entries = list(read_ledger(folder))
    return [
        (entry["consumer"], entry["step"], entry["keys"])
        for entry in entries
        if entry["event"] == "ack" and str(entry["consumer"]).startswith("trainer")
    ]


def tickets(keys: Sequence[str]) -> list[int]:
    return sorted({int(key.split("/")[1]) for key in keys})


def test_replay_trains_on_earlier_groups_again_and_resumes_bit_for_bit(small_run: Run) -> None:
    """Half a group for each new one; a group once more at most, two steps later at the earliest."""
    whole, lines = small_run("whole", "schedule.steps=6", "checkpoint.every=3", INVARIANT, *SMALL, REPLAY)
    replayed = [line.get("samples/replayed", 0.0) for line in steps(lines)]
    assert [0, 0, 2, 2, 2, 2] == replayed
    assert [4, 4, 6, 6, 6, 6] == [line["samples"] for line in steps(lines)]
    uses = Counter(key for _, _, keys in acked(whole.folder) for key in keys)
    assert {1, 2} == set(uses.values())
    again = [(step, tickets(keys)) for _, step, keys in acked(whole.folder) if tickets(keys) != [step]]
    assert [2, 3, 4, 5] == [step for step, _ in again]
    assert all(step - ticket == 2 for step, (ticket,) in again), "the newest that has rested"
    small_run("parts", "schedule.steps=3", "checkpoint.every=3", INVARIANT, *SMALL, REPLAY)
    parts, _ = small_run("parts", "schedule.steps=6", "checkpoint.every=3", INVARIANT, *SMALL, REPLAY)
    assert acked(whole.folder) == acked(parts.folder)
    weights = [load_file(result.model / "model.safetensors") for result in (whole, parts)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_rows_of_an_expert_are_mixed_in_by_ratio(small_run: Run, made: Path, tmp_path: Path) -> None:
    """MIX: a file of token ids, one expert's group for every two new ones, in random order, none a third time."""
    file = tmp_path / "expert.jsonl"
    rows = [{"columns": {"prompt_ids": [5, 6, 7], "response_ids": [8, number % 4 + 4]}} for number in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mix = f"mixing.expert={{ratio: 0.5, samples: {file}, max_uses: 2, sampler: {{name: random, options: {{seed: 4}}}}}}"
    result, lines = small_run("mix", "algorithm.name=mix", "schedule.steps=5", *SMALL, mix)
    assert [1.0] * 5 == [line["samples/expert"] for line in steps(lines)]
    assert all(line["samples"] == 5 for line in steps(lines))
    experts = [keys for consumer, _, keys in acked(result.folder) if consumer == "trainer/expert"]
    uses = Counter(key for keys in experts for key in keys)
    assert (5, {1, 2}) == (sum(uses.values()), set(uses.values()))


def test_rows_of_another_run_are_mixed_in(small_run: Run, tmp_path: Path) -> None:
    """Through `queue export` and `queue import`, with their rewards, as groups."""
    first, _ = small_run("first", "schedule.steps=1", REPLAY, *SMALL)
    for arguments in (
        ["export", first.folder, tmp_path / "rows.jsonl", "--partition", "train"],
        ["import", tmp_path / "rows.jsonl", tmp_path / "kept", "--partition", "human"],
    ):
        done = CliRunner().invoke(main, ["queue", *map(str, arguments)])
        assert (0, "4 samples") == (done.exit_code, done.output[:9]), done.output
    human = f"mixing.human={{ratio: 1, samples: {tmp_path / 'kept'}}}"
    second, lines = small_run("second", "schedule.steps=2", human, *SMALL)
    assert [4.0, 4.0] == [line["samples/human"] for line in steps(lines)]
    shown = CliRunner().invoke(main, ["queue", "trace", str(second.folder), "human/0/0/0/1/0"]).output
    kept, rows = tmp_path / "kept", tmp_path / "rows.jsonl"
    assert [
        ["human/0/0/0/1/0", "import", "True"],
        [f"{kept}:human/0/0/0/1/0", "import", "False"],
        [f"{rows}:train/0/0/0/1/0", "-", "False"],
    ] == [line.split() for line in shown.splitlines()[1:]]


def test_rows_of_another_program_have_one_number_as_their_reward(small_run: Run, tmp_path: Path) -> None:
    """As the guide shows them, beside the run's own samples, whose rewards are lists."""
    file = tmp_path / "rows.jsonl"
    row = {"prompt_ids": [5, 6], "response_ids": [7, 8], "rollout_log_probs": [-0.1, -0.2]}
    rows = [{"columns": {**row, "reward": reward}, "group": "a"} for reward in (1.0, 0)]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    human = f"mixing.human={{ratio: 1, samples: {file}}}"
    _, lines = small_run("human", "schedule.steps=1", "data.groups_per_batch=1", *SMALL[1:], human)
    assert [2.0] == [line["samples/human"] for line in steps(lines)]


def test_supervised_training_replays_and_mixes_too(small_run: Run, tmp_path: Path) -> None:
    """Offline, rows from elsewhere need no rewards."""
    file = tmp_path / "rows.jsonl"
    file.write_text(
        json.dumps({"columns": {"prompt_ids": [5, 6], "response_ids": [7, 8, 9]}, "tags": {"source": "me"}})
    )
    human = f"mixing.human={{ratio: 0.5, samples: {file}}}"
    settings = ("schedule.steps=3", "data.groups_per_batch=2", "mixing.replay={ratio: 0.5, max_uses: 3}", human)
    result, lines = small_run("sft", *settings, file="warmup.yaml")
    assert [(2 + 1, None), (2 + 2, 1.0), (2 + 2, 1.0)] == [
        (line["samples"], line.get("samples/replayed")) for line in steps(lines)
    ]
    assert [1.0] * 3 == [line["samples/human"] for line in steps(lines)]
    assert {"trainer", "trainer/human"} == {consumer for consumer, *_ in acked(result.folder)}


def test_a_plugins_sampler_is_named_in_the_configuration(small_run: Run) -> None:
    class Oldest(Sampler):
        def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
            return list(ready)[:count]

    class Plugin:
        @hookimpl
        def register_parts(self, register: Any) -> None:
            register("sampler", "oldest", Oldest)

    replay = "mixing.replay={ratio: 0.5, sampler: {name: oldest}}"
    try:
        result, _ = small_run("oldest", "schedule.steps=4", *SMALL, replay, hooks=[Plugin()])
    finally:
        SAMPLERS.pop("oldest", None)
    again = [tickets(keys) for _, step, keys in acked(result.folder) if tickets(keys) != [step]]
    assert [[0]] * 3 == again


def test_rows_that_lack_a_column_are_refused_first(small_run: Run, tmp_path: Path) -> None:
    """Else the first batch would wait for it until its deadline."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"columns": {"prompt_ids": [1], "response_ids": [2], "reward": 1.0}}))
    with pytest.raises(JackfieldError) as caught:
        small_run("bad", f"mixing.human={{ratio: 1, samples: {file}}}")
    assert ("config.invalid-value", "mixing.human.samples") == (caught.value.code, caught.value.where)
    assert "reward, rollout_log_probs at least" in str(caught.value.expected)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("mixing.replay={ratio: 1, sampler: {name: newest}}", "no sampler is named 'newest'"),
        ("mixing.replay={ratio: 1, sampler: {options: {decai: 1}}}", "mixing.replay.sampler.options.decai"),
        ("mixing.replay={}", "mixing.replay.ratio"),
        ("mixing.expert={ratio: 1, samples: rows.jsonl}", "mixing.expert has no effect"),
        ("mixing.human={ratio: 1, samples: rows.jsonl}", "there is no such file"),
    ],
)
def test_bad_settings_are_refused_first(small_run: Run, tmp_path: Path, setting: str, found: str) -> None:
    with pytest.raises(JackfieldError) as caught:
        small_run("bad", setting)
    assert found in str(caught.value)
    assert not (tmp_path / "bad").exists()
