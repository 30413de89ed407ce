"""A queue whose controller is a process of its own, and who connects to it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

from jackfield.compose import run
from jackfield.compose.controller import serve_queue
from jackfield.config import load_config
from jackfield.errors import PluginError, QueueError
from jackfield.queue import effective_acks, read_ledger

from .conftest import QUICKSTART, Run
from .test_modes import GRADED, steps, without_times

SMALL = ("data.prompts_per_step=2", "data.runs_per_prompt=2", "sampling.max_new_tokens=3", *GRADED)
SQL = "transfer_queue={name: sql}"


@contextmanager
def served(made: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """``jackfield queue serve`` as people start it."""
    cli = [sys.executable, "-c", "from jackfield.cli import main; main()"]
    command = [*cli, "queue", "serve", str(QUICKSTART / "grpo.yaml")]
    needed = [f"model.path={made / 'model'}", f"data.train={made / 'problems.jsonl'}", "evaluation.every=0"]
    process = subprocess.Popen([*command, *needed, *overrides], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert "the queue is served" in process.stdout.readline()
        yield process
        process.send_signal(signal.SIGTERM)
        assert "ended; refused: nothing\n" == process.stdout.readline()
        assert 0 == process.wait(20)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_run_by_a_served_controller_is_the_one_by_its_own(small_run: Run, made: Path, tmp_path: Path) -> None:
    """Bit for bit; the controller's process has the ledger, and the run's the checkpoints."""
    _, expected = small_run("alone", "schedule.steps=2", SQL, *SMALL)
    folder = tmp_path / "served"
    address = f"queue.controller.address={folder / 'queue' / 'address.json'}"
    with served(made, f"folder={folder}", SQL, *SMALL):
        result, lines = small_run("run", "schedule.steps=2", address, SQL, *SMALL)
    assert without_times(expected) == without_times(lines)
    assert 2 == len(steps(lines))
    acks = effective_acks(read_ledger(folder / "ledger.jsonl"))["trainer"]
    assert {0: 4, 1: 4} == {step: list(acks.values()).count(step) for step in (0, 1)}
    assert not (folder / "queue" / "address.json").exists()
    assert (result.folder / "checkpoints").is_dir()


def test_a_backend_of_one_process_is_refused(made: Path, tmp_path: Path) -> None:
    config = load_config(
        QUICKSTART / "grpo.yaml",
        [f"folder={tmp_path}", f"model.path={made / 'model'}", "transfer_queue.name=memory"],
    )
    with pytest.raises(PluginError, match="does not have the capability 'joins'") as caught:
        asyncio.run(serve_queue(config, asyncio.Event(), ready=lambda *_: None))
    assert "plugin.capability" == caught.value.code
    apart = attrs.evolve(config.queue.controller, address=str(tmp_path / "address.json"))
    with pytest.raises(PluginError, match="joins"):
        run(attrs.evolve(config, queue=attrs.evolve(config.queue, controller=apart)))


def test_a_run_without_its_controller_says_what_to_start(small_run: Run, tmp_path: Path) -> None:
    with pytest.raises(QueueError, match="no controller of a queue is to be found") as caught:
        small_run("run", f"queue.controller.address={tmp_path / 'address.json'}", SQL, *SMALL)
    assert "jackfield queue serve" in str(caught.value.fix)
