"""The fault matrix in a Ray cluster: each role gets KILL, STOP and TERM, all in one run, which goes on to its end."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from jackfield_commands import Command, CommandServer, Completed

from .matrix import (
    APART,
    ASYNC,
    PIPELINE,
    QUICKSTART,
    SIGNALS,
    WORKS_ON,
    check_once,
    lives,
    seen,
    send,
    state,
    steps,
    until,
)

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)

SILENCE = 4.0
NAMES = {
    "replica": "rollout replica 0",
    "rank": "the actor engine, rank 0",
    "agent": "agent worker 0",
    "reward": "reward worker 0",
    "storage unit": "storage unit",
}
#: One after the other, each followed by two further steps, which need them all.
FAULTS: tuple[dict[str, str], ...] = (
    {"replica": "STOP", "agent": "KILL"},
    {"reward": "KILL"},
    {"rank": "STOP"},
    {"storage unit": "STOP"},
    {"agent": "STOP"},
    {"reward": "STOP", "replica": "KILL"},
    {"rank": "KILL"},
    {"storage unit": "KILL"},
    dict.fromkeys(NAMES, "TERM"),
)
REWARD = """
import os, time

def score(data_source, solution_str, ground_truth, extra_info):
    while os.path.exists("{folder}/hold"):
        open("{folder}/held", "w").close()
        time.sleep(0.05)
    return float(len(solution_str) % 2)
"""
STEPS = 32  #: more than the run can do until it is killed


@attrs.frozen
class Sent:
    """A signal, and what the run had printed before."""

    role: str
    signal: str
    pid: int
    printed: int


@attrs.frozen
class Seen:
    """The run up to its death, what was done to it, and how the same command ended."""

    code: int
    error: str
    sent: list[Sent]
    folder: Path
    again: Completed


@pytest.fixture(
    scope="module",
    params=[PIPELINE, pytest.param(ASYNC, marks=pytest.mark.nightly), pytest.param((), marks=pytest.mark.nightly)],
    ids=["pipeline", "async", "on-policy"],
)
def ended(
    jackfield: CommandServer,
    made: Path,
    tmp_path_factory: pytest.TempPathFactory,
    ray_interpreters: str,
    request: pytest.FixtureRequest,
) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("ray")
    settings = [
        str(QUICKSTART), "name=ray", f"folder={folder / 'run'}",
        f"model.path={made / 'model'}", f"data.train={made / 'problems.jsonl'}", "data.groups_per_batch=2",
        "data.rollouts_per_group=4", "sampling.max_new_tokens=6", f"schedule.steps={STEPS}",
        "evaluation.every=0", *request.param,
        "observe.progress=false", "observe.curve=false", "observe.report_to=[]", "checkpoint.every=1",
        "cluster={name: ray, threads: 1, replicas: 1, replica_restarts: 10}",
        "cluster.ray={num_cpus: 3, object_store_bytes: 200000000}", "checkpoint.max_recoveries=10", ray_interpreters,
        f"deadlines.heartbeat={SILENCE}",
        f"reward={{name: function, path: {folder}/reward.py:score, try_first: false}}",
    ]  # fmt: skip
    (folder / "reward.py").write_text(REWARD.format(folder=folder))
    home = folder / "home"
    home.mkdir()
    environment = {"HOME": str(home), "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = jackfield.start("run", *settings, environment=environment)
    try:
        further(command, folder / "run")
        sent = [fault for faults in FAULTS for fault in send_all(command, folder / "run", faults)]
        send("STOP", command.pid)
        until("the stop", lambda: state(command.pid) == "T")
        assert all(lives(each.pid) for each in sent if each.signal == "TERM"), command.error
        send("CONT", command.pid)
        further(command, folder / "run")
        workers = workers_of(folder / "run")
        send("KILL", command.pid)
        done = command.wait(60)
        until("the end of all workers", lambda: not any(map(lives, workers.values())))  # agents of Ray's own take long
        again = jackfield("run", *settings, environment=environment, seconds=400)
        yield Seen(done.code, done.error, sent, folder / "run", again)
    finally:
        command.kill()


def workers_of(folder: Path) -> dict[str, int]:
    """The run's workers, and their processes; and that of the storage unit which was started last."""
    workers = {name: worker["pid"] for name, worker in json.loads((folder / "workers.json").read_text()).items()}
    units = json.loads((folder / "queue" / "units.json").read_text())["units"]
    return {**workers, NAMES["storage unit"]: units[-1][1]}


def further(command: Command, folder: Path) -> None:
    """Return when a run has done two steps that it had not done before, so that all of its workers have worked."""

    def newest() -> int:
        return max((line["step"] for line in steps(folder)), default=0)

    before = newest()
    until(f"step {before + 2}", lambda: newest() >= before + 2 or not command.running)
    assert command.running, command.error


def send_all(command: Command, folder: Path, faults: dict[str, str]) -> list[Sent]:
    """Send signals, see that each process has ended, by the signal or by the run (but for TERM), and the run go on."""
    workers, printed, kills = workers_of(folder), len(command.error), "TERM" not in faults.values()
    sent = [Sent(role, name, workers[NAMES[role]], printed) for role, name in faults.items()]
    if kills and "agent" in faults:  # while its requests wait for a replica that is silent
        replica = workers[NAMES["replica"]]
        send("STOP", replica)
        until("a silent replica", lambda: f"process {replica} on" in command.error[printed:] or not command.running)
    if kills and "reward" in faults:  # while it scores
        (folder.parent / "hold").touch()
        until("a score", lambda: (folder.parent / "held").exists() or not command.running)
    for each in sent:
        if each.role != "replica" or "agent" not in faults or not kills:
            send(each.signal, each.pid)
    for each in sent:
        if kills:
            until(f"the end of {each}", lambda each=each: not lives(each.pid) or not command.running)
    for file in ("hold", "held"):
        (folder.parent / file).unlink(missing_ok=True)
    further(command, folder)
    assert all(map(lives, workers_of(folder).values())), "workers.json names the processes that came after, too"
    return sent


@pytest.mark.parametrize("name", ["KILL", "STOP"])
@pytest.mark.parametrize("role", NAMES)
def test_a_worker_is_named_and_what_it_did_is_done_again(ended: Seen, role: str, name: str) -> None:
    """All but ranks are replaced; a rank has the run go on from its newest checkpoint."""
    (sent,) = [each for each in ended.sent if (each.role, each.signal) == (role, name)]
    assert not lives(sent.pid), "it can do no harm any more"
    who, process = NAMES[role], f"process {sent.pid} on node 127.0.0.1"
    lines = ended.error[sent.printed :].splitlines()
    if role == "storage unit":
        check_unit(lines, sent.pid, name)
        return
    named = [index for index, line in enumerate(lines) if line.startswith(f"{who} died") and process in line]
    died = "\n".join("\n".join(lines[index : index + 2]) for index in named)  # the reason may be on a line of its own
    assert died, (who, process, ended.error)
    if name == "STOP":
        assert f"sent no heartbeat for {SILENCE:g} s" in died, ended.error
        assert "(deadlines.heartbeat)" in died, ended.error
    outcome = "named and replaced; what it did is done again"
    if role == "rank":
        outcome = "named; the run goes on from its newest checkpoint"
        assert "the run goes on after step" in died
    elif role == "replica":
        assert "is started again" in died
    else:  # with the samples
        assert "train/" in died
        assert "made again" in died
    seen("ray", role, name, ("killed for its silence, " if name == "STOP" else "") + outcome)


def check_unit(lines: list[str], pid: int, name: str) -> None:
    """A unit is named, and its rows are made again in the unit that takes its place."""
    silent = f"process {pid} on" in "".join(lines) and "and was killed (deadlines.heartbeat)" in "".join(lines)
    assert silent == (name == "STOP"), lines
    assert any(line.startswith("storage unit") and f"(process {pid}," in line for line in lines), lines
    assert not any("the run goes on after step" in line for line in lines[:3]), lines
    how = "killed for its silence, " if name == "STOP" else ""
    seen("ray", "storage unit", name, f"{how}named and replaced; its rows are made again")


@pytest.mark.parametrize("role", NAMES)
def test_a_worker_leaves_sigterm_to_its_run(ended: Seen, role: str) -> None:
    """Schedulers send it to every process: the run, which gets it as well, needs its workers for a checkpoint."""
    (sent,) = [each for each in ended.sent if (each.role, each.signal) == (role, "TERM")]
    assert "died" not in ended.error[sent.printed :]
    seen("ray", role, "TERM", WORKS_ON)


def test_the_run_is_killed_as_a_whole_and_the_same_command_goes_on(ended: Seen) -> None:
    """STOP and CONT leave it as it was; KILL ends its workers, too. For TERM see tests/trust/test_signals_ray.py."""
    assert 137 == ended.code
    assert (0, []) == (ended.again.code, ended.again.error.splitlines()[1:]), ended.again.error
    check_once(ended.folder, groups=2, rollouts=4)
    seen("ray", "trainer", "STOP", "stands still; CONT lets it go on, and nothing of it was killed")
    seen("ray", "trainer", "KILL", "its workers end; the same command goes on from the newest checkpoint")
    for role in ("controller", "explorer"):
        for name in SIGNALS:
            seen("ray", role, name, APART)


def test_every_step_is_done_though_each_role_has_died(ended: Seen) -> None:
    assert 3 * len(NAMES) == len(ended.sent)
    assert list(range(1, STEPS + 1)) == sorted({line["step"] for line in steps(ended.folder)})
    assert {8.0} == {line["samples"] for line in steps(ended.folder)}, "every step has trained on a whole batch"
    assert not (ended.folder / "error.txt").exists()
    file = ended.folder / "samples" / "failed.jsonl"
    failed = file.read_text().splitlines() if file.exists() else []  # where a unit took rows with it
    assert all("its values are gone from the store" in line for line in failed), "nothing else failed for a death"
