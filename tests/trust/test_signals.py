"""SIGTERM and SIGINT: a run ends at its next boundary, with a checkpoint; the same command goes on, bit for bit."""

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

pytestmark = pytest.mark.timeout(300)

_VARYING = ("seconds", "samples_per_second", "tokens_per_second", "time", "waits")


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The steps in the metrics file so far, without what takes time."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [
        {name: value for name, value in line.items() if not name.startswith(_VARYING)}
        for line in lines
        if line["kind"] == "step"
    ]


def until(condition: Callable[[], bool], command: Command, seconds: float = 120.0) -> None:
    """Wait for what a running command does."""
    end = time.monotonic() + seconds
    while not condition():
        assert command.running, f"it has ended: {command.error}"
        assert time.monotonic() < end, f"not within {seconds:g} s: {command.out} {command.error}"
        time.sleep(0.01)


def checkpoints(folder: Path) -> list[int]:
    """The steps of the whole checkpoints."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_????????"))


def weights(folder: Path) -> bytes:
    """The trained model."""
    return (folder / "model" / "model.safetensors").read_bytes()


def assert_ended(folder: Path, ended: Any, number: signal.Signals) -> None:
    """Exit code, one line on standard error, and no trace of a failure."""
    assert 128 + number == ended.code, ended.error
    assert [number.name] == [line.partition(":")[0] for line in ended.error.splitlines()], ended.error
    assert not (folder / "error.txt").exists()
    assert not list((folder / "checkpoints").glob("*.partial"))


def test_a_signal_ends_a_run_with_a_checkpoint_and_the_same_command_goes_on(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """TERM, then INT, at steps of their own; in the end weights and metrics are those of a run without a break."""
    overrides = ("schedule.steps=8", "checkpoint.every=0", "rollout.batch_invariant=true")
    assert 0 == jackfield("run", *quickstart_settings("whole", *overrides)).code
    settings, folder = quickstart_settings("broken", *overrides, "name=whole"), tmp_path / "broken"
    done = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        command = jackfield.start("run", *settings)
        until(lambda: len(steps_of(folder)) >= done + 2, command)  # noqa: B023
        command.send(number)
        assert_ended(folder, command.wait(120), number)
        done = len(steps_of(folder))
        assert done < 8
        assert done == checkpoints(folder)[-1]
    finished = jackfield("run", *settings)
    assert 0 == finished.code, finished.error
    assert steps_of(tmp_path / "whole") == steps_of(folder)
    assert weights(tmp_path / "whole") == weights(folder)
    assert not (folder / "error.txt").exists()


def test_generation_under_way_is_not_awaited(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """While the rewards of step 3 do not come, a signal still cuts a checkpoint of step 2, and step 3 is made again."""
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    while os.path.exists({str(tmp_path / 'hold')!r}):\n"
        f"        open({str(tmp_path / 'held')!r}, 'w').close()\n"
        "        time.sleep(0.01)\n"
        "    return len(solution_str)\n"
    )
    reward = (
        "reward.name=function",
        "reward.method=compute_score",
        f"reward.path={tmp_path / 'slow.py'}:compute_score",
        "reward.try_first=false",
    )
    overrides = ("schedule.steps=5", "checkpoint.every=0", "rollout.batch_invariant=true", *reward)
    assert 0 == jackfield("run", *quickstart_settings("whole", *overrides)).code
    settings, folder = quickstart_settings("held", *overrides, "name=whole"), tmp_path / "held_run"
    settings = [*settings, f"folder={folder}"]
    command = jackfield.start("run", *settings)
    until(lambda: len(steps_of(folder)) >= 1, command)
    (tmp_path / "hold").touch()
    until((tmp_path / "held").exists, command)
    command.send(signal.SIGTERM)
    ended = command.wait(120)
    assert_ended(folder, ended, signal.SIGTERM)
    assert [len(steps_of(folder))] == checkpoints(folder)
    assert f"ending now, with a checkpoint of {checkpoints(folder)[0]} steps" in ended.error
    (tmp_path / "hold").unlink()
    finished = jackfield("run", *settings)
    assert 0 == finished.code, finished.error
    assert steps_of(tmp_path / "whole") == steps_of(folder)
    assert weights(tmp_path / "whole") == weights(folder)


def test_a_signal_before_the_first_step_says_that_nothing_is_saved(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The first rewards never come; then the same command begins again."""
    (tmp_path / "first.py").write_text(
        "import asyncio\n"
        "async def compute_score(solution_str):\n"
        f"    open({str(tmp_path / 'asked')!r}, 'w').close()\n"
        "    await asyncio.Event().wait()\n"
    )
    reward = f"reward={{name: function, path: '{tmp_path / 'first.py'}:compute_score', try_first: false}}"
    command = jackfield.start("run", *quickstart_settings("early", "schedule.steps=4", reward))
    until((tmp_path / "asked").exists, command)
    command.send(signal.SIGINT)
    ended = command.wait(60)
    assert_ended(tmp_path / "early", ended, signal.SIGINT)
    assert "ending now, before the first step" in ended.error
    assert "stopped after 0 steps; the same command begins again" in ended.out
    assert [] == checkpoints(tmp_path / "early")


def test_what_reaches_no_boundary_in_time_ends_without_a_checkpoint(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """With two steps to a synchronisation, and rewards that do not come for the second one, the grace ends it."""
    (tmp_path / "never.py").write_text(
        "import asyncio\n"
        "async def compute_score(solution_str, group_id):\n"
        "    if group_id.split('/')[1] != '0':  # not of the first batch\n"
        f"        open({str(tmp_path / 'asked')!r}, 'w').close()\n"
        "        await asyncio.Event().wait()\n"
        "    return len(solution_str)\n"
    )
    reward = (
        "reward.name=function",
        "reward.method=compute_score",
        f"reward.path={tmp_path / 'never.py'}:compute_score",
        "reward.try_first=false",
    )
    overrides = ("schedule.steps=4", "schedule.sync_interval=2", "checkpoint.grace_seconds=2", *reward)
    command, folder = jackfield.start("run", *quickstart_settings("late", *overrides)), tmp_path / "late"
    until(lambda: (tmp_path / "asked").exists() and len(steps_of(folder)) == 1, command)
    command.send(signal.SIGTERM)
    assert_ended(folder, command.wait(60), signal.SIGTERM)
    assert [] == checkpoints(folder)


def test_two_signals_end_at_once(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The second signal waits for nothing: not even for a grace of an hour."""
    command = jackfield.start(
        "run", *quickstart_settings("twice", "schedule.steps=100000", "checkpoint.grace_seconds=3600")
    )
    until(lambda: len(steps_of(tmp_path / "twice")) >= 1, command)
    command.send(signal.SIGINT)
    until(lambda: "SIGINT" in command.error, command)
    command.send(signal.SIGINT)
    ended = command.wait(60)
    assert 128 + signal.SIGINT == ended.code
    assert "Traceback" not in ended.error
    assert not (tmp_path / "twice" / "error.txt").exists()


@pytest.mark.timeout(180)
def test_a_run_that_still_starts_ends_at_once(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """It has no boundary to reach: here, it reads a model that never comes, and may take an hour."""
    model = tmp_path / "model"
    model.mkdir()
    os.mkfifo(model / "config.json")
    overrides = (f"model.path={model}", "checkpoint.grace_seconds=3600")
    command = jackfield.start("run", *quickstart_settings("starting", *overrides))
    with contextlib.ExitStack() as stack:
        until(lambda: _opened_by_reader(model / "config.json", stack), command)
        command.send(signal.SIGTERM)
        assert_ended(tmp_path / "starting", command.wait(60), signal.SIGTERM)


def _opened_by_reader(pipe: Path, stack: contextlib.ExitStack) -> bool:
    """Whether a reader has opened a pipe; it then waits for what this process could write."""
    try:
        number = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    stack.callback(os.close, number)
    return True


def test_a_command_that_reads_its_file_ends_on_an_interrupt(jackfield: CommandServer, tmp_path: Path) -> None:
    """Before a run has begun, and in commands that are none: one line, and the code of the signal."""
    os.mkfifo(tmp_path / "run.yaml")
    command, writers = jackfield.start("config", "validate", str(tmp_path / "run.yaml")), list[int]()

    def is_read() -> bool:
        with contextlib.suppress(OSError):  # it has no reader yet
            writers.append(os.open(tmp_path / "run.yaml", os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    until(is_read, command)
    command.send(signal.SIGINT)
    assert_ended(tmp_path, command.wait(60), signal.SIGINT)
    os.close(writers[0])
