"""``kill -9`` at any moment, then the same command: nothing is lost and nothing is used twice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jackfield.trainer import effective_acks, read_ledger

from .conftest import QUICKSTART, metrics
from .test_modes import GRADED, TIMES

STEPS, PROMPTS, RUNS = 6, 2, 4

Start = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def start(made: Path) -> Iterator[Start]:
    """``start(folder, *overrides, kill=None)``: the same command once more, ended by SIGKILL at a moment or not."""
    program = Path(__file__).with_name("killed_runs.py")
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers = process.stdout

        def do(folder: Path, *overrides: str, kill: tuple[str, int] | None = None) -> dict[str, Any]:
            small = [
                "name=killed",
                f"folder={folder}",
                f"model.path={made / 'model'}",
                f"data.train={made / 'problems.jsonl'}",
                f"data.eval={made / 'held_out.jsonl'}",
                f"data.prompts_per_step={PROMPTS}",
                f"data.runs_per_prompt={RUNS}",
                "sampling.max_new_tokens=4",
                f"schedule.steps={STEPS}",
                "evaluation.every=3",
                "evaluation.tasks=4",
                "checkpoint.every=2",
                "runtime.threads=1",
                "observe.progress=false",
                "observe.curve=false",
                "observe.tensorboard=false",
                *GRADED,
            ]
            command = {"config": str(QUICKSTART / "grpo.yaml"), "overrides": [*small, *overrides], "kill": kill}
            print(json.dumps(command), file=process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(answers.readline())
            return answer

        yield do
        process.stdin.close()


def moments(seed: int, count: int) -> list[tuple[str, int]]:
    """Random moments of a run's life, every third inside of the writing of a checkpoint."""
    draw = random.Random(seed)
    return [
        ("checkpoint", draw.randint(1, 40)) if number % 3 == 2 else ("anywhere", draw.randint(1, 120))
        for number in range(count)
    ]


def kill_again_and_again(start: Start, folder: Path, settings: tuple[str, ...], seed: int, kills: int) -> list[Path]:
    """Start, kill and start again, in a further folder where a run came to its end; the folders of finished runs."""
    finished: list[Path] = []
    for kill in moments(seed, kills):
        answer = start(folder / str(len(finished)), *settings, kill=kill)
        while "killed" not in answer:  # the run ended before its moment came
            assert {"steps": STEPS} == answer
            finished.append(folder / str(len(finished)))
            answer = start(folder / str(len(finished)), *settings, kill=kill)
    last = folder / str(len(finished))
    assert {"steps": STEPS} == start(last, *settings)
    return [*finished, last]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    times = (*TIMES, "paused_seconds")
    return [{key: value for key, value in line.items() if not key.startswith(times)} for line in lines]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("settings", [()], ids=["inline"])
def test_killed_ten_times_a_synchronous_run_is_bitwise_the_uninterrupted_one(
    start: Start, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    whole = tmp_path / "whole"
    assert {"steps": STEPS} == start(whole, *settings)
    for folder in kill_again_and_again(start, tmp_path / "killed", settings, seed=4, kills=10):
        weights = [(each / "model" / "model.safetensors").read_bytes() for each in (whole, folder)]
        assert weights[0] == weights[1]
        assert without_times(metrics(whole)) == without_times(metrics(folder))
        for table in ("train", "eval"):
            rows = [(each / "samples" / f"{table}.jsonl").read_text() for each in (whole, folder)]
            assert rows[0] == rows[1]
        check_ledger(folder)
        assert not list(folder.rglob("*.partial"))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("settings", [()], ids=["inline"])
def test_killed_ten_times_a_run_ahead_of_its_weights_uses_every_sample_once(
    start: Start, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    settings = ("schedule.sync_offset=1", *settings)
    for folder in kill_again_and_again(start, tmp_path, settings, seed=5, kills=10):
        check_ledger(folder)
        lines = [line["step"] for line in metrics(folder) if line["kind"] == "step"]
        assert list(range(1, STEPS + 1)) == lines


def check_ledger(folder: Path) -> None:
    """Replay the ledger: what is committed stays; in the end every place of every batch was used once, by its step."""
    entries = list(read_ledger(folder / "ledger.jsonl"))
    committed: Mapping[str, int | None] = {}
    for end, entry in enumerate(entries, start=1):
        trained = effective_acks(entries[:end]).get("trainer", {})
        assert committed.items() <= trained.items(), f"line {end} takes back what is committed"
        if entry["event"] == "ack" and entry["consumer"] == "trainer":
            assert not committed.keys() & set(entry["keys"]), f"line {end} uses again what is committed"
        if entry["event"] == "commit":
            committed = {key: step for key, step in trained.items() if step is not None and step <= entry["step"]}
    places = Counter((step, *place(key)) for key, step in committed.items())
    expected = {(step, step, slot, run) for step in range(STEPS) for slot in range(PROMPTS) for run in range(RUNS)}
    assert expected == places.keys()
    assert {1} == set(places.values())


def place(key: str) -> tuple[int, int, int]:
    """Ticket, slot and run of a row: keys are ``partition/ticket/slot/attempt/run/sequence``."""
    _, ticket, slot, _, run, _ = key.split("/")
    return int(ticket), int(slot), int(run.partition("r")[0])
