"""SIGTERM and SIGINT in a Ray cluster that a run has started: a checkpoint, the same command, and no process left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield_commands import Command, CommandServer

from ..faults.matrix import lives, seen

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)

RAY = (
    "cluster.name=ray", "cluster.ray={num_cpus: 3, object_store_bytes: 100000000}", "data.groups_per_batch=2",
    "schedule.steps=1000", "checkpoint.every=0",
)  # fmt: skip


def steps_of(folder: Path) -> list[int]:
    """The steps in the metrics file so far."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line["step"] for line in lines if line["kind"] == "step"]


def checkpoints(folder: Path) -> list[int]:
    """The steps of the whole checkpoints."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_????????"))


def until(what: Callable[[], Any], command: Command, seconds: float = 400.0) -> None:
    """Wait for what a running command does."""
    end = time.monotonic() + seconds
    while not what():
        assert command.running or what(), f"it has ended: {command.error}"
        assert time.monotonic() < end, f"not within {seconds:g} s: {command.out} {command.error}"
        time.sleep(0.05)


def workers_of(folder: Path) -> dict[str, int]:
    """The run's workers, and their processes."""
    told = json.loads((folder / "workers.json").read_text())
    return {name: worker["pid"] for name, worker in told.items()}


def of_session(session: int) -> list[str]:
    """The living processes of a command's session, whatever their process group: its cluster, too."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text(errors="replace").rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(name)
    return found


def assert_ended(command: Command, folder: Path, number: signal.Signals) -> None:
    """The exit code, one line that says so, no trace of a failure, and no process of its session and no worker."""
    ended = command.wait(120)
    assert 128 + number == ended.code, ended.error
    first, *further = ended.error.splitlines()
    assert "RAY_AUTH_MODE" in first, "Ray's own line"
    assert [number.name] == [line.partition(":")[0] for line in further], ended.error
    assert not (folder / "error.txt").exists()
    end = time.monotonic() + 60
    while left := [*of_session(command.pid), *filter(lives, workers_of(folder).values())]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_signals_end_a_run_and_its_cluster(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path, ray_interpreters: str
) -> None:
    """The same command three times: SIGTERM to all processes; twice at its start; SIGINT, after which a rank dies."""
    more = (*RAY, "checkpoint.grace_seconds=300", ray_interpreters)
    settings, folder = quickstart_settings("run", *more), tmp_path / "run"
    command = jackfield.start("run", *settings)
    until(lambda: len(steps_of(folder)) >= 2, command)
    os.killpg(command.pid, signal.SIGTERM)
    for pid in workers_of(folder).values():  # Ray gives each a process group of its own
        os.kill(pid, signal.SIGTERM)
    assert_ended(command, folder, signal.SIGTERM)
    done = steps_of(folder)
    assert [len(done)] == checkpoints(folder)

    (folder / "workers.json").unlink()
    command = jackfield.start("run", *settings)
    until((folder / "workers.json").exists, command)
    command.send(signal.SIGTERM)
    until(lambda: "SIGTERM" in command.error, command)
    with contextlib.suppress(ProcessLookupError):  # it was quick
        command.send(signal.SIGTERM)
    assert_ended(command, folder, signal.SIGTERM)
    assert (done, [len(done)]) == (steps_of(folder), checkpoints(folder))

    command = jackfield.start("run", *settings)
    until(lambda: len(steps_of(folder)) > len(done), command)
    command.send(signal.SIGINT)
    until(lambda: "SIGINT" in command.error, command)
    with contextlib.suppress(ProcessLookupError):
        os.kill(workers_of(folder)["the actor engine, rank 0"], signal.SIGKILL)
    assert_ended(command, folder, signal.SIGINT)
    assert list(range(1, len(steps_of(folder)) + 1)) == steps_of(folder), "it went on where it was"
    seen("ray", "trainer", "TERM", "a checkpoint at the next boundary, exit code 143; the same command goes on")
