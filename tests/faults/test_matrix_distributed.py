"""The fault matrix of roles that are launched separately: each gets every signal, and the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackfield_commands import Command, CommandServer

from .matrix import (
    APART,
    ASYNC,
    PIPELINE,
    QUICKSTART,
    SIGNALS,
    WORKS_ON,
    check_once,
    codes,
    lives,
    seen,
    send,
    steps,
    until,
)

pytestmark = pytest.mark.timeout(600)

SILENCE = 4.0
HOW = {"KILL": "", "STOP": "killed for its silence, ", "TERM": "ends in order with exit code 143, "}
COMMANDS = {
    "controller": ("queue", "serve"),
    "trainer": ("run", "--role", "train"),
    "reward": ("run", "--role", "reward"),
    "explorer": ("run", "--role", "explore"),
}


class Apart:
    """The commands of one run."""

    def __init__(self, jackfield: CommandServer, folder: Path, made: Path, schedule: tuple[str, ...]) -> None:
        self._jackfield, self.folder = jackfield, folder
        self._settings = [
            str(QUICKSTART), f"folder={folder}", f"model.path={made / 'model'}",
            f"data.train={made / 'problems.jsonl'}", f"checkpoint_engine={{name: file, folder: {folder / 'weights'}}}",
            "transfer_queue={name: zmq, units: 5}", "queue.rewards=distributed", "schedule.steps=500",
            *schedule, "evaluation.every=0", "checkpoint.every=1", "observe.progress=false",
            "observe.curve=false", "observe.report_to=[]", "data.groups_per_batch=2", "data.rollouts_per_group=2",
            "sampling.max_new_tokens=3", "cluster.threads=1", f"deadlines.heartbeat={SILENCE}",
        ]  # fmt: skip
        self.running: dict[str, Command] = {}

    def start(self, *roles: str) -> None:
        """Give commands; the controller serves when this returns."""
        for role in roles:
            self.running[role] = command = self._jackfield.start(*COMMANDS[role], *self._settings)
            if role == "controller":
                until("the queue is served", lambda command=command: "the queue is served" in command.out)

    def moves_on(self) -> None:
        """Return when every role has worked: samples of two batches (k=1, o=1) may have been there already."""
        before = max((line["step"] for line in steps(self.folder)), default=0) + 2

        def further() -> bool:
            ended = [role for role, command in self.running.items() if not command.running]
            assert not ended, "\n".join([self.running[role].error for role in ended])
            return any(line["step"] > before for line in steps(self.folder))

        until(f"a step after step {before}", further)

    @property
    def checkpoints(self) -> list[str]:
        """The whole checkpoints."""
        return sorted(path.name for path in (self.folder / "checkpoints").glob("step_????????"))

    def end(self, role: str, name: str) -> Command:
        """Send a signal to a role, and return when it has ended."""
        command = self.running.pop(role)
        send(name, command.pid)
        ended = command.wait(60)
        assert name != "TERM" or 143 == ended.code, ended.error
        return command


@pytest.fixture(
    scope="module",
    params=[
        ASYNC,
        pytest.param(PIPELINE, marks=pytest.mark.nightly),
        pytest.param(("schedule.sync_offset=1",), marks=pytest.mark.nightly),
    ],
    ids=["async", "pipeline", "one-step"],
)
def run(
    jackfield: CommandServer, made: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Apart]:
    run = Apart(jackfield, tmp_path_factory.mktemp("apart") / "run", made, request.param)
    run.start("controller", "trainer", "reward", "explorer")
    run.moves_on()
    until("a checkpoint", lambda: run.checkpoints)
    yield run
    for command in run.running.values():
        command.kill()
    check_once(run.folder, groups=2, rollouts=2)


def told(command: Command, who: str, pid: int, name: str) -> None:
    """A command has been told of the death of a process; of one that is stopped, that it was killed."""
    line = until(
        f"news of {who}, process {pid}",
        lambda: next((line for line in command.error.splitlines() if f"process {pid}" in line), ""),
    )
    assert who in line
    if name == "STOP":
        assert f"sent no heartbeat for {SILENCE:g} s" in line
        assert "deadlines.heartbeat" in line
    if name == "TERM":
        assert "has ended before its work was done" in line


@pytest.mark.parametrize("name", SIGNALS)
def test_explorers_rewards_and_storage_units_that_die_are_named_to_all_and_replaced(run: Apart, name: str) -> None:
    """Explorers and rewards by the same command; the rows of a unit are made again in the others."""
    number = SIGNALS.index(name)
    unit = json.loads((run.folder / "queue" / "units.json").read_text())["units"][number][1]
    send(name, unit)
    for role in ("explorer", "reward"):
        ended = run.end(role, name)
        told(run.running["trainer"], role if role == "explorer" else "role rewards", ended.pid, name)
    if name != "TERM":
        until("the end of the unit", lambda: not lives(unit))
        for command in run.running.values():
            told(command, f"storage unit {number}", unit, "KILL")  # the controller alone says why
        told(run.running["controller"], f"storage unit {number}", unit, name)
    run.start("reward", "explorer")
    run.moves_on()
    assert lives(unit) == (name == "TERM")
    killed = HOW[name]
    for role in ("explorer", "reward"):
        seen("distributed", role, name, f"{killed}named to all others; the same command takes over what it had")
    killed = "killed for its silence, " if name == "STOP" else ""
    outcome = f"{killed}named; its rows are made again by the others"
    seen("distributed", "storage unit", name, WORKS_ON if name == "TERM" else outcome)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_trainer_that_dies_is_named_to_explorers_and_its_command_goes_on(run: Apart, name: str) -> None:
    ended = run.end("trainer", name)
    if name == "TERM":
        assert f"step_{steps(run.folder)[-1]['step']:08}" == run.checkpoints[-1]
    for role in ("explorer", "reward"):
        told(run.running[role], "the trainer of", ended.pid, name)
    run.start("trainer")
    run.moves_on()
    seen(
        "distributed", "trainer", name, f"{HOW[name]}named to all others; the same command goes on from its checkpoint"
    )


@pytest.mark.parametrize("name", SIGNALS)
def test_a_controller_that_dies_is_named_to_all_and_the_same_commands_go_on(run: Apart, name: str) -> None:
    ended = run.end("controller", name)
    for role in ("trainer", "reward", "explorer"):
        done = run.running.pop(role).wait(60)
        assert 1 == done.code, done.error
        (code,) = codes(done.error)[-1:]
        assert code in ("queue.session", "queue.unreachable"), done.error  # its storage units end with it
        if code == "queue.session":
            assert f"process {ended.pid}" in done.error or name == "TERM", done.error
    run.start("controller", "trainer", "reward", "explorer")
    run.moves_on()
    outcome = f"{HOW[name]}named; everybody ends with queue.session, the same commands go on from the newest checkpoint"
    seen("distributed", "controller", name, outcome)


def test_parts_of_a_role_end_with_it(run: Apart) -> None:
    """Replica and agent are in the explorer's process, ranks in the trainer's."""
    for role in ("replica", "agent", "rank"):
        for name in SIGNALS:
            seen("distributed", role, name, APART)
