"""Values of a run whose processes are launched separately pass the queue's controller by."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from .conftest import QUICKSTART
from .counting import Seen, check_traffic, command, install, read
from .test_modes import GRADED

pytestmark = pytest.mark.timeout(300)

GUIDE = QUICKSTART.parent / "guides" / "distributed.yaml"  #: what the guide shows
STEPS, GROUPS, RUNS = 2, 2, 2
SAMPLES = STEPS * GROUPS * RUNS


@pytest.fixture(scope="module")
def seen(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A controller, a trainer, an explorer and rewards in a process each."""
    folder = tmp_path_factory.mktemp("values")
    settings = [
        f"folder={folder / 'run'}", f"model.path={made / 'model'}", f"data.train={made / 'problems'}.jsonl",
        f"data.groups_per_batch={GROUPS}", f"data.rollouts_per_group={RUNS}", "sampling.max_new_tokens=8",
        f"schedule.steps={STEPS}", "evaluation.every=0", "observe.progress=false", "observe.curve=false",
        "observe.report_to=[]", "observe.samples_per_step=0", "checkpoint={every: 0, at_end: false}",
        "algorithm.old_log_probs=engine", "algorithm.epochs=2", "transfer_queue={name: counting, shared_from_bytes: 1}",
        "queue.rewards=distributed", f"checkpoint_engine={{name: file, folder: {folder / 'weights'}}}", *GRADED,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **install(folder)}
    roles = {"queue": ["queue", "serve"], **{name: ["run", "--role", name] for name in ("train", "explore", "reward")}}
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, words in roles.items():
            told = command(folder / f"traffic-{name}", *words, str(GUIDE), *settings)
            process = subprocess.Popen(
                told, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            processes[name] = process
            if name == "queue":
                assert process.stdout is not None
                assert any("the queue is served" in line for line in process.stdout)
        for name in ("train", "explore", "reward"):
            printed, _ = processes[name].communicate(timeout=250)
            assert 0 == processes[name].returncode, printed[-3000:]
        processes["queue"].send_signal(signal.SIGTERM)
        processes["queue"].communicate(timeout=50)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return read(folder / "run", folder / "traffic-queue", {each.pid: name for name, each in processes.items()})


def test_the_controller_carries_no_values(seen: Seen) -> None:
    """It puts and gets nothing, and no value is in a message to or from it, neither as bytes nor as numbers."""
    assert {"train", "explore", "reward"} == {each.worker for each in seen.calls}
    check_traffic(seen, ("prompt_ids", "rollout_log_probs", "old_log_probs"), SAMPLES)


def test_each_value_reaches_a_process_that_needs_it_once(seen: Seen) -> None:
    """The explorer gets nothing back, rewards get what they score, and the trainer nothing that it wrote."""
    assert not seen.of("explore", "get")
    for name, columns in (("reward", ("prompt_ids", "response_ids", "task")), ("train", ("prompt_ids", "reward"))):
        got = seen.of(name, "get", *columns)
        assert {1} == set(got.values()), got.most_common(3)
        assert len(columns) * SAMPLES == len(got)
    assert not seen.of("train", "get").keys() & seen.of("train", "put").keys()
