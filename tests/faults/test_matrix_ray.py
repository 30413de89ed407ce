"""The fault matrix in a Ray cluster: each role gets KILL, STOP and TERM, all in one run, which ends well."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from jackfield_commands import Command, CommandServer

from .matrix import QUICKSTART, lives, seen, send, steps, until

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)

SILENCE = 4.0
NAMES = {
    "replica": "rollout replica 0",
    "rank": "the actor engine, rank 0",
    "agent": "agent worker 0",
    "reward": "reward worker 0",
    "storage unit": "the queue's storage worker",
}
#: By step, after which the signals are sent. Workers without state of a run may die at the same time.
FAULTS = {
    1: {"replica": "STOP", "agent": "KILL", "reward": "TERM"},
    2: {"rank": "STOP"},
    3: {"storage unit": "STOP"},
    4: {"replica": "TERM", "agent": "STOP", "reward": "KILL"},
    5: {"rank": "KILL"},
    6: {"storage unit": "KILL"},
    7: {"replica": "KILL", "agent": "TERM", "reward": "STOP"},
    8: {"rank": "TERM"},
    9: {"storage unit": "TERM"},
}


@attrs.frozen
class Sent:
    """A signal, and what the run had printed before."""

    role: str
    signal: str
    pid: int
    printed: int


@attrs.frozen
class Ended:
    """The run, and what was done to it."""

    code: int
    error: str
    sent: list[Sent]
    folder: Path


@pytest.fixture(scope="module")
def ended(jackfield: CommandServer, made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    folder = tmp_path_factory.mktemp("ray")
    settings = [
        str(QUICKSTART), "name=ray", f"folder={folder / 'run'}",
        f"model.path={made / 'model'}", f"data.train={made / 'problems.jsonl'}", "data.prompts_per_step=2",
        "data.runs_per_prompt=4", "sampling.max_new_tokens=6", f"schedule.steps={max(FAULTS) + 1}",
        "evaluation.every=0",
        "observe.progress=false", "observe.curve=false", "observe.tensorboard=false", "checkpoint.every=1",
        "runtime={name: ray, threads: 1, rollout_replicas: 1, replica_restarts: 10}",
        "runtime.ray={recoveries: 10, num_cpus: 3, object_store_bytes: 200000000}",
        f"deadlines.silence={SILENCE}",
    ]  # fmt: skip
    home = folder / "home"
    home.mkdir()
    environment = {"HOME": str(home), "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_worker_niceness": "0"}
    command = jackfield.start("run", *settings, environment=environment)
    try:
        sent = [fault for step, faults in FAULTS.items() for fault in send_all(command, folder / "run", step, faults)]
        done = command.wait(120)
        yield Ended(done.code, done.error, sent, folder / "run")
    finally:
        command.kill()


def send_all(command: Command, folder: Path, step: int, faults: dict[str, str]) -> list[Sent]:
    """Send signals after a step, and see that each process has ended, by the signal or by the run."""
    until(f"step {step}", lambda: any(line["step"] >= step for line in steps(folder)) or not command.running)
    assert command.running, command.error
    workers = json.loads((folder / "workers.json").read_text())
    sent = [Sent(role, name, workers[NAMES[role]]["pid"], len(command.error)) for role, name in faults.items()]
    for each in sent:
        send(each.signal, each.pid)
    for each in sent:
        until(f"the end of {each}", lambda each=each: not lives(each.pid) or not command.running)
    return sent


@pytest.mark.parametrize("name", ["KILL", "STOP", "TERM"])
@pytest.mark.parametrize("role", NAMES)
def test_a_worker_is_named_and_what_it_did_is_done_again(ended: Ended, role: str, name: str) -> None:
    """Agent, reward and replica are replaced; a rank or the storage has the run go on from its newest checkpoint."""
    (sent,) = [each for each in ended.sent if (each.role, each.signal) == (role, name)]
    assert not lives(sent.pid), "it can do no harm any more"
    printed, process = ended.error[sent.printed :], f"process {sent.pid} on node 127.0.0.2"
    assert f"{NAMES[role]} died" in printed
    if name == "STOP":
        assert f"{NAMES[role]} ({process}) gave no sign of life for {SILENCE:g} s" in printed
        assert "(deadlines.silence)" in printed
    if role in ("rank", "storage unit"):
        outcome = "named; the run goes on from its newest checkpoint"
        assert f"{NAMES[role]} died; the run goes on after step" in printed
    else:
        outcome = "named and replaced; what it did is done again"
    seen("ray", role, name, ("killed for its silence, " if name == "STOP" else "") + outcome)


def test_the_run_ends_well_though_each_role_has_died_three_times(ended: Ended) -> None:
    assert (0, 3 * len(NAMES)) == (ended.code, len(ended.sent)), ended.error[-3000:]
    assert list(range(1, max(FAULTS) + 2)) == sorted({line["step"] for line in steps(ended.folder)})
    assert {8.0} == {line["samples"] for line in steps(ended.folder)}, "every step has trained on a whole batch"
