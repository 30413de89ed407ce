"""``kill -9`` at any moment, then the same command: nothing is lost and nothing is used twice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jackfield.queue import effective_acks, read_ledger
from jackfield_commands import IMPORTS

from .conftest import QUICKSTART, metrics
from .test_modes import GRADED, INVARIANT, TIMES

STEPS, PROMPTS, RUNS = 4, 2, 4
DONE = {"code": 0, "error": ""}

Start = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def start(made: Path) -> Iterator[Start]:
    """``start(folder, *overrides, kill=None)``: the same command once more, ended by SIGKILL at a moment or not."""
    command = [sys.executable, str(Path(__file__).with_name("killed_runs.py")), *IMPORTS]
    quiet = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with subprocess.Popen(command, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers = process.stdout

        def do(
            folder: Path,
            *overrides: str,
            kill: tuple[str, int] | None = None,
            room: int | None = None,
            file: str = "grpo.yaml",
        ) -> dict[str, Any]:
            train = "problems" if file == "grpo.yaml" else "demonstrations"
            small = [
                "name=killed",
                f"folder={folder}",
                f"model.path={made / 'model'}",
                f"data.train={made / train}.jsonl",
                f"data.eval={made / 'held_out.jsonl'}",
                f"data.groups_per_batch={PROMPTS}",
                f"data.rollouts_per_group={RUNS}",
                "sampling.max_new_tokens=4",
                f"schedule.steps={STEPS}",
                "evaluation.every=2",
                "evaluation.tasks=4",
                "checkpoint.every=2",
                "cluster.threads=1",
                "observe.progress=false",
                "observe.curve=false",
                "observe.report_to=[]",
                INVARIANT,
                *GRADED,
            ]
            command = {"config": str(QUICKSTART / file), "overrides": [*small, *overrides], "kill": kill, "room": room}
            print(json.dumps(command), file=process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(answers.readline())
            return answer

        yield do
        process.stdin.close()


def moments(seed: int, count: int, last: int) -> list[tuple[str, int]]:
    """Random moments of a run's life, every third inside of the writing of a checkpoint; ``last`` is the last one."""
    draw = random.Random(seed)
    return [
        ("checkpoint", draw.randint(1, 30)) if number % 3 == 2 else ("anywhere", draw.randint(1, last))
        for number in range(count)
    ]


def kill_again_and_again(
    start: Start,
    folder: Path,
    settings: tuple[str, ...],
    seed: int,
    kills: int,
    file: str = "grpo.yaml",
    last: int = 90,
) -> list[Path]:
    """Start, kill and start again, in a further folder where a run came to its end; the folders of finished runs."""
    finished: list[Path] = []
    for kill in moments(seed, kills, last):
        answer = start(folder / str(len(finished)), *settings, kill=kill, file=file)
        while "killed" not in answer:  # the run ended before its moment came
            assert DONE == answer
            finished.append(folder / str(len(finished)))
            answer = start(folder / str(len(finished)), *settings, kill=kill, file=file)
    last = folder / str(len(finished))
    assert DONE == start(last, *settings, file=file)
    return [*finished, last]


def check_equal(whole: Path, folder: Path, *, besides: tuple[str, ...] = ()) -> None:
    """Weights, metrics (``besides`` some) and samples are those of the run that nothing interrupted, bit for bit."""
    weights = [(each / "model" / "model.safetensors").read_bytes() for each in (whole, folder)]
    assert weights[0] == weights[1]
    assert without_times(metrics(whole), besides) == without_times(metrics(folder), besides)
    for table in (whole / "samples").glob("*.jsonl"):
        assert table.read_text() == (folder / "samples" / table.name).read_text()


def without_times(lines: list[dict[str, Any]], besides: tuple[str, ...]) -> list[dict[str, Any]]:
    times = (*TIMES, "paused_seconds", *besides)
    return [{key: value for key, value in line.items() if not key.startswith(times)} for line in lines]


#: How often a run is killed; every third time while it writes a checkpoint.
KILLS = pytest.mark.parametrize("kills", [6, pytest.param(10, marks=pytest.mark.nightly)])


@KILLS
@pytest.mark.timeout(300)
def test_killed_again_and_again_a_synchronous_run_is_bitwise_the_uninterrupted_one(
    start: Start, tmp_path: Path, kills: int
) -> None:
    """``test_ray.py`` does the same in a cluster."""
    whole = tmp_path / "whole"
    assert DONE == start(whole)
    for folder in kill_again_and_again(start, tmp_path / "killed", (), seed=4, kills=kills):
        check_equal(whole, folder)
        check_ledger(folder)
        assert not list(folder.rglob("*.partial"))


@pytest.mark.timeout(300)
def test_killed_again_and_again_a_curriculum_makes_the_same_choices(start: Start, tmp_path: Path) -> None:
    """It learns from rewards, operators give it difficulties, and one of them learns from responses, too."""
    settings = (
        "data.pipeline.tasks=[{name: difficulty_rules}]",
        "data.pipeline.experiences=[{name: diversity}]",
        "data.curriculum={name: thompson, options: {by: difficulty, above: 0.05}}",
    )
    whole = tmp_path / "whole"
    assert DONE == start(whole, *settings)
    for folder in kill_again_and_again(start, tmp_path / "killed", settings, seed=8, kills=4):
        check_equal(whole, folder)
        check_ledger(folder)


STREAM = ("schedule.stream_mini_batches=true", "algorithm.mini_batches=2", "algorithm.old_log_probs=engine")
ASYNC = ("schedule.mode=async", "schedule.max_staleness=2", "schedule.rollouts_in_flight=4")
DURABLE = ("transfer_queue={name: sql}", "queue.durable=true")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings",
    [
        ("schedule.sync_offset=1",),
        (*STREAM, "schedule.sync_offset=1"),
        (*STREAM, *DURABLE),
        ASYNC,
        (*ASYNC, *DURABLE),
        pytest.param((*ASYNC, "schedule.on_stale=drop"), marks=pytest.mark.nightly),
    ],
    ids=["one-step", "pipeline", "pipeline-durable", "async", "async-durable", "async-drop"],
)
def test_killed_again_and_again_a_run_ahead_of_its_weights_uses_every_sample_once(
    start: Start, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    """The ledger says so; an asynchronous step uses groups of any batch."""
    for folder in kill_again_and_again(start, tmp_path, settings, seed=5, kills=6):
        check_ledger(folder, own_batch=settings[0] != ASYNC[0])
        lines = [line["step"] for line in metrics(folder) if line["kind"] == "step"]
        assert list(range(1, STEPS + 1)) == lines


@pytest.mark.timeout(300)
def test_killed_again_and_again_a_run_on_a_durable_queue_is_bitwise_the_uninterrupted_one(
    start: Start, tmp_path: Path
) -> None:
    """Rows that were made since the newest checkpoint are kept."""
    settings = ("transfer_queue={name: sql}", "queue.durable=true")
    assert DONE == start(tmp_path / "whole", *settings)
    for folder in kill_again_and_again(start, tmp_path / "killed", settings, seed=7, kills=5):
        check_equal(tmp_path / "whole", folder)
        check_ledger(folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("background", [0, 1])
def test_killed_supervised_training_is_bitwise_the_uninterrupted_one(
    start: Start, tmp_path: Path, background: int
) -> None:
    """With checkpoints that are written while training goes on, too."""
    settings = ("data.rollouts_per_group=1", "evaluation.every=0", f"checkpoint.background={background}")
    assert DONE == start(tmp_path / "whole", *settings, file="warmup.yaml")
    for folder in kill_again_and_again(start, tmp_path / "killed", settings, seed=6, kills=3, file="warmup.yaml"):
        check_equal(tmp_path / "whole", folder)


@pytest.mark.timeout(300)
def test_a_disk_that_is_full_at_a_checkpoint_ends_the_run_and_the_same_command_goes_on(
    start: Start, tmp_path: Path
) -> None:
    """The system refuses to let the engine's file grow; what was saved before is whole."""
    assert DONE == start(tmp_path / "whole")
    assert DONE == start(tmp_path / "full", "schedule.steps=2")
    answer = start(tmp_path / "full", room=1_000_000)
    assert 1 == answer["code"]
    assert "[run.checkpoint-write]" in answer["error"]
    assert "MB of the disk were free" in answer["error"]
    assert "it goes on after step 2" in answer["error"]
    assert ["step_00000002"] == [path.name for path in (tmp_path / "full" / "checkpoints").iterdir()]
    assert DONE == start(tmp_path / "full")
    check_equal(tmp_path / "whole", tmp_path / "full")


def check_ledger(folder: Path, prompts: int = PROMPTS, *, own_batch: bool = True) -> None:
    """Replay the ledger: what is committed stays; in the end every place of every batch was used once.

    With ``own_batch`` it was used by the step of its number.
    """
    entries = list(read_ledger(folder))
    committed: Mapping[str, int | None] = {}
    for end, entry in enumerate(entries, start=1):
        trained = effective_acks(entries[:end]).get("trainer", {})
        assert committed.items() <= trained.items(), f"line {end} takes back what is committed"
        if entry["event"] == "ack" and entry["consumer"] == "trainer":
            before = effective_acks(entries[: end - 1]).get("trainer", {})
            assert not before.keys() & set(entry["keys"]), f"line {end} uses again what was used"
        if entry["event"] == "commit":
            committed = {key: step for key, step in trained.items() if step is not None and step <= entry["step"]}
    places = Counter(place(key) for key in committed)
    assert not own_batch or all(step == place(key)[0] for key, step in committed.items())
    assert {prompts * RUNS} == set(Counter(committed.values()).values()), "each step used as many samples"
    expected = {(batch, slot, run) for batch in range(STEPS) for slot in range(prompts) for run in range(RUNS)}
    assert expected == places.keys()
    assert {1} == set(places.values())


def place(key: str) -> tuple[int, int, int]:
    """Batch, group and rollout of a row: keys are ``partition/batch/group/retry/rollout/sequence``."""
    _, ticket, slot, _, run, _ = key.split("/")
    return int(ticket), int(slot), int(run.partition("r")[0])
