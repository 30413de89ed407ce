"""The fault matrix of a run in one process, and of the processes that it starts itself."""

from __future__ import annotations

import json
import site
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from jackfield_commands import Command, CommandServer

from .matrix import APART, WORKS_ON, children, codes, lives, seen, send, steps, until

pytestmark = pytest.mark.timeout(400)

Settings = Callable[..., list[str]]
SILENCE = 3.0
REWARD = """
import os, pathlib

def score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 2)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another interpreter that has what this one has: a replica there is a process of its own."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    (packages / "here.pth").write_text("".join(lines))
    return str(folder / "bin" / "python")


def after(command: Command, folder: Path, step: int) -> None:
    """Return when a run has done a step."""
    until(f"step {step}", lambda: len(steps(folder)) >= step or not command.running)
    assert command.running, command.error


def child(command: Command, mark: str) -> int:
    """The process that a run has started whose command line has a mark."""

    def look() -> int | None:
        return next((pid for pid, line in children(command.pid).items() if mark in line), None)

    pid = until(f"a process of {mark}", lambda: look() or not command.running)
    assert command.running, command.error
    return int(pid)


def test_a_replica_and_a_reward_of_a_run_that_die_are_replaced(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path, python: str
) -> None:
    """Both have a process of their own; each gets every signal, after a step of its own."""
    (tmp_path / "reward.py").write_text(REWARD)
    settings = quickstart_settings(
        "run", f"cluster.interpreters={{rollout: {python}}}",
        f"reward={{name: function, path: {tmp_path}/reward.py:score, try_first: false}}",
        "schedule.steps=4", "data.groups_per_batch=2", "data.rollouts_per_group=2", "cluster.replica_restarts=5",
        "algorithm.old_log_probs=engine", f"deadlines.heartbeat={SILENCE}",
    )  # fmt: skip
    command, sent = jackfield.start("run", *settings), []
    for step, name in enumerate(("STOP", "KILL", "TERM"), 1):
        after(command, tmp_path / "run", step)
        for role, mark in (("reward", "jackfield_user_code/_child.py"), ("replica", "jackfield.runtime.process")):
            pid = child(command, mark)
            send(name, pid)
            sent.append((role, name, pid))
        for _, _, pid in sent[-2:]:
            until(f"the end of {pid}", lambda pid=pid: not lives(pid) or not command.running)
    done = command.wait(60)
    assert 0 == done.code, done.error
    assert 4 == len(steps(tmp_path / "run"))
    failed = tmp_path / "run" / "samples" / "failed.jsonl"
    assert not failed.exists(), "no sample failed for the death of a process"
    for role, name, pid in sent:
        (line,) = [line for line in done.error.splitlines() if f"process {pid}" in line and "warn" not in line][:1] or [
            ""
        ]
        assert line, (role, name, done.error)
        if name == "STOP":
            assert f"sent no heartbeat for {SILENCE:g} s" in line
            assert "deadlines.heartbeat" in line
        killed = "killed for its silence, " if name == "STOP" else ""
        seen("inline", role, name, f"{killed}named and replaced; what it did is done again")


def test_storage_units_of_a_run_that_die_are_named_and_their_rows_made_again(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path
) -> None:
    settings = quickstart_settings(
        "run", "transfer_queue={name: zmq, units: 4}", "schedule.steps=4", "data.groups_per_batch=3",
        "data.rollouts_per_group=2", f"deadlines.heartbeat={SILENCE}",
    )  # fmt: skip
    command, sent = jackfield.start("run", *settings), []
    for step, name in enumerate(("STOP", "KILL", "TERM"), 1):
        after(command, tmp_path / "run", step)
        unit = json.loads((tmp_path / "run" / "queue" / "units.json").read_text())["units"][step]
        send(name, unit[1])
        sent.append((name, unit[0], unit[1]))
        if name != "TERM":
            until(f"the end of {unit}", lambda pid=unit[1]: not lives(pid) or not command.running)
    done = command.wait(60)
    assert 0 == done.code, done.error
    assert [6.0] * 4 == [line["samples"] for line in steps(tmp_path / "run")], "every step trains on a whole batch"
    seen("inline", "storage unit", "TERM", WORKS_ON)
    for name, number, pid in sent:
        assert (f"storage unit {number} (process {pid}" in done.error) == (name != "TERM")
        silent = f"storage unit {number} (process {pid} on" in done.error
        assert (name == "STOP") == silent
        killed = "killed for its silence, " if name == "STOP" else ""
        if name != "TERM":
            seen("inline", "storage unit", name, f"{killed}named; its rows are made again by the others")


def test_a_run_in_one_process_is_killed_or_stopped_as_a_whole(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path
) -> None:
    """It starts no process; after KILL the same command goes on, and after STOP and CONT the run itself."""
    folder = tmp_path / "run"
    settings = quickstart_settings("run", "schedule.steps=4", "checkpoint.every=1", f"deadlines.heartbeat={SILENCE}")
    command = jackfield.start("run", *settings)
    after(command, folder, 1)
    assert {} == children(command.pid)
    for role in ("rank", "agent", "controller", "explorer"):
        for name in ("KILL", "STOP", "TERM"):
            seen("inline", role, name, APART)
    until("a checkpoint", lambda: list((folder / "checkpoints").glob("step_*[0-9]")))
    send("KILL", command.pid)
    assert 137 == command.wait(30).code
    command = jackfield.start("run", *settings)
    after(command, folder, 2)
    send("STOP", command.pid)
    until("the stop", lambda: Path(f"/proc/{command.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    send("CONT", command.pid)
    done = command.wait(60)
    assert (0, []) == (done.code, codes(done.error)), done.error
    assert [1, 2, 3, 4] == sorted({line["step"] for line in steps(folder)})
    seen("inline", "trainer", "KILL", "the same command goes on from the newest checkpoint")
    seen("inline", "trainer", "STOP", "stands still; CONT lets it go on, and nothing of it was killed")


def test_a_run_that_is_terminated_ends_at_the_next_boundary(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path
) -> None:
    """SIGTERM: one line, a checkpoint at the next boundary, exit code 143, and the same command goes on."""
    folder = tmp_path / "run"
    settings = quickstart_settings("run", "schedule.steps=4", "checkpoint.every=0")
    command = jackfield.start("run", *settings)
    after(command, folder, 1)
    send("TERM", command.pid)
    done = command.wait(60)
    assert 143 == done.code, done.error
    assert list((folder / "checkpoints").glob("step_*[0-9]"))
    assert not (folder / "error.txt").exists()
    assert 0 == jackfield("run", *settings).code
    seen("inline", "trainer", "TERM", "a checkpoint at the next boundary, exit code 143; the same command goes on")
