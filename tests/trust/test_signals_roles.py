"""SIGTERM and SIGINT to the commands of a run that are launched separately: each ends in order, and goes on later."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jackfield_commands import Command, CommandServer

pytestmark = pytest.mark.timeout(400)

STEPS = 12
COMMANDS = {
    "controller": ("queue", "serve"),
    "trainer": ("run", "--role", "train"),
    "reward": ("run", "--role", "reward"),
    "explorer": ("run", "--role", "explore"),
}


def until(what: str, condition: Callable[[], object], seconds: float = 180.0) -> None:
    """Wait for what commands do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def in_session(command: Command) -> list[str]:
    """The living processes of a command's session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text(errors="replace").rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it has ended meanwhile
        if int(session) == command.pid and state not in "ZX":
            found.append(stat.parent.name)
    return found


class Roles:
    """The commands of one run, all with the same arguments."""

    def __init__(self, jackfield: CommandServer, arguments: list[str], folder: Path) -> None:
        self.jackfield, self.arguments, self.folder = jackfield, arguments, folder
        self.running: dict[str, Command] = {}

    def start(self) -> None:
        """Start all of them, the controller first."""
        for role, words in COMMANDS.items():
            self.running[role] = command = self.jackfield.start(*words, *self.arguments)
            if role == "controller":
                until("the queue is served", lambda command=command: "the queue is served" in command.out)

    def steps(self) -> list[dict[str, float]]:
        """The steps done so far."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [
            line for line in map(json.loads, (each for each in lines if each.endswith("\n"))) if line["kind"] == "step"
        ]

    def ended(self, role: str, number: signal.Signals, *, times: int = 1) -> None:
        """Send a role a signal; it ends with one line, its exit code, no error.txt, and no process left."""
        command = self.running.pop(role)
        before = command.error
        for _ in range(times):
            command.send(number)
        done = command.wait(90)
        assert 128 + number == done.code, (role, done.error)
        said = [line for line in done.error[len(before) :].splitlines() if line.startswith(number.name)]
        assert 1 == len(said), (role, done.error)
        assert "Traceback" not in done.error
        until(f"the end of all that {role} has started", lambda: not in_session(command))
        assert [] == list(self.folder.rglob("error.txt"))


@pytest.fixture
def roles(jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path) -> Iterator[Roles]:
    folder = tmp_path / "run"
    arguments = quickstart_settings(
        "run", f"checkpoint_engine={{name: file, folder: {tmp_path / 'weights'}}}",
        "transfer_queue={name: zmq, units: 2}",
        "queue.rewards=distributed",
        f"schedule.steps={STEPS}", "schedule.sync_offset=1", "checkpoint.every=0",
        "data.groups_per_batch=2", "data.rollouts_per_group=2", "sampling.max_new_tokens=3", "cluster.threads=1",
    )  # fmt: skip
    roles = Roles(jackfield, arguments, folder)
    yield roles
    for command in roles.running.values():
        command.kill()


def test_each_role_ends_in_order_and_the_same_commands_finish_the_run(roles: Roles) -> None:
    """First by SIGINT, then by SIGTERM, the second time by two signals in a row; nothing is lost or doubled."""
    roles.start()
    until("step 1", lambda: len(roles.steps()) >= 1)
    for role in ("explorer", "reward"):
        pid = roles.running[role].pid
        roles.ended(role, signal.SIGINT)
        until(f"news of the end of {role}", lambda pid=pid: f"process {pid}" in roles.running["trainer"].error)
    roles.ended("trainer", signal.SIGINT)
    done = len(roles.steps())
    assert done < STEPS
    newest = max(path.name for path in (roles.folder / "checkpoints").glob("step_????????"))
    assert f"step_{done:08}" == newest, "the trainer has written a checkpoint of its newest step"
    roles.ended("controller", signal.SIGTERM)
    roles.start()
    until("a further step", lambda: len(roles.steps()) > done)
    for role in ("explorer", "reward"):
        roles.ended(role, signal.SIGTERM, times=2)
    roles.ended("trainer", signal.SIGTERM)
    roles.ended("controller", signal.SIGINT, times=2)
    roles.start()
    for role in ("trainer", "reward", "explorer"):
        ended = roles.running.pop(role).wait(240)
        assert 0 == ended.code, (role, ended.error)
    assert list(range(1, STEPS + 1)) == [line["step"] for line in roles.steps()]
    assert {4.0} == {line["samples"] for line in roles.steps()}, "each step has trained on a whole batch"
    assert (roles.folder / "model" / "model.safetensors").is_file()
