"""A queue whose controller is a process of its own, and who connects to it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.compose import run
from jackfield.compose.run import serve_queue
from jackfield.config import load_config
from jackfield.errors import ConfigError, PluginError, QueueError
from jackfield.queue import effective_acks, read_ledger
from jackfield_commands import IMPORTS

from .conftest import QUICKSTART, Run
from .test_modes import GRADED, INVARIANT, steps, without_times

ROLES = Path(__file__).with_name("roles.py")
SMALL = ("data.groups_per_batch=2", "data.rollouts_per_group=2", "sampling.max_new_tokens=3", *GRADED)
SQL = "transfer_queue={name: sql}"

pytestmark = pytest.mark.timeout(180)


class Roles:
    """Commands of :mod:`roles`, and what they say."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.said: list[dict[str, Any]] = []

    def order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def start(self, name: str, *argv: str, die_at: tuple[str, int] | None = None) -> None:
        self.order(start=name, argv=argv, die_at=die_at)

    def until(self, text: str, of: str) -> None:
        """Wait for a line of a command."""
        while text not in (said := self._next()).get("line", "") or said["of"] != of:
            assert of != said.get("ended"), self.printed(of)

    def ended(self, name: str) -> int:
        """Wait for a command's end; its status."""
        while not any(said.get("ended") == name for said in self.said):
            self._next()
        return next(int(said["status"]) for said in self.said if said.get("ended") == name)

    def end_queue(self) -> None:
        """Have the controller end as people do; it has refused nothing."""
        self.order(end="queue")
        assert 128 + signal.SIGTERM == self.ended("queue"), self.printed("queue")
        assert "ended; connections refused: 0" in self.printed("queue")

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        self.said.append(json.loads(self._process.stdout.readline()))
        return self.said[-1]

    def printed(self, name: str) -> str:
        return "\n".join(said["line"] for said in self.said if said.get("of") == name)


@pytest.fixture(scope="module")
def commands() -> Iterator[subprocess.Popen[str]]:
    """The process that imports everything once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(ROLES), *IMPORTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    yield process
    process.communicate(timeout=30)
    assert 0 == process.returncode


@pytest.fixture
def roles(commands: subprocess.Popen[str]) -> Roles:
    return Roles(commands)


def shared(folder: Path, made: Path, *more: str) -> list[str]:
    """What all roles of a run of three steps are told."""
    return [
        str(QUICKSTART / "grpo.yaml"),
        f"folder={folder}",
        f"model.path={made / 'model'}",
        f"data.train={made / 'problems.jsonl'}",
        f"checkpoint_engine={{name: file, folder: {folder / 'weights'}}}",
        "schedule.steps=3",
        "schedule.sync_offset=1",
        "evaluation.every=0",
        "checkpoint.every=1",
        "observe.progress=false",
        "observe.curve=false",
        "observe.report_to=[]",
        SQL,
        *SMALL,
        *more,
    ]


@pytest.mark.parametrize("backend", ["transfer_queue=auto", SQL])
def test_a_run_by_a_served_controller_is_the_one_by_its_own(
    small_run: Run, roles: Roles, made: Path, tmp_path: Path, backend: str
) -> None:
    """Metrics are equal bit for bit; the controller's process has the ledger, and the run's the checkpoints."""
    _, expected = small_run("alone", "schedule.steps=2", INVARIANT, SQL, *SMALL)
    folder = tmp_path / "served"
    address = f"queue.address={folder / 'queue' / 'address.json'}"
    needed = [f"model.path={made / 'model'}", f"data.train={made / 'problems.jsonl'}", "evaluation.every=0"]
    roles.start("queue", "queue", "serve", str(QUICKSTART / "grpo.yaml"), f"folder={folder}", backend, *needed, *SMALL)
    roles.until("the queue is served", of="queue")
    result, lines = small_run("run", "schedule.steps=2", address, INVARIANT, backend, *SMALL)
    roles.end_queue()
    assert without_times(expected) == without_times(lines)
    assert 2 == len(steps(lines))
    acks = effective_acks(read_ledger(folder))["trainer"]
    assert {0: 4, 1: 4} == {step: list(acks.values()).count(step) for step in (0, 1)}
    assert not (folder / "queue" / "address.json").exists()
    assert (result.folder / "checkpoints").is_dir()


def test_a_backend_of_one_process_is_refused(made: Path, tmp_path: Path) -> None:
    config = load_config(
        QUICKSTART / "grpo.yaml",
        [f"folder={tmp_path}", f"model.path={made / 'model'}", "transfer_queue.name=memory"],
    )

    async def serve() -> None:
        async with serve_queue(config):
            pytest.fail("it is served")

    with pytest.raises(PluginError) as caught:
        asyncio.run(serve())
    assert "plugin.capability" == caught.value.code
    queue = attrs.evolve(config.queue, address=str(tmp_path / "address.json"))
    with pytest.raises(PluginError) as caught:
        run(attrs.evolve(config, queue=queue))
    assert "plugin.capability" == caught.value.code


def test_a_run_without_its_controller_says_what_to_start(small_run: Run, tmp_path: Path) -> None:
    for backend in ("transfer_queue=auto", SQL):
        with pytest.raises(QueueError) as caught:
            small_run("run", f"queue.address={tmp_path / 'address.json'}", backend, *SMALL)
        assert "queue.unreachable" == caught.value.code
        assert "jackfield queue serve" in str(caught.value.fix)


def test_who_rewards_is_said_once_for_all(small_run: Run) -> None:
    config = load_config(QUICKSTART / "grpo.yaml", [])
    with pytest.raises(ConfigError) as caught:
        run(config, role="reward")
    assert ("queue.rewards", "distributed") == (caught.value.where, caught.value.expected)
    with pytest.raises(ConfigError) as caught:
        small_run("alone", "queue.rewards=distributed")
    assert ("config.invalid-value", "queue.rewards") == (caught.value.code, caught.value.where)


def test_explorers_come_and_go_and_every_batch_is_trained_once(roles: Roles, made: Path, tmp_path: Path) -> None:
    """A controller, a trainer, rewards and two explorers.

    The first explorer is killed in the middle of a batch, rewards when a group of the second batch is to be rewarded,
    the trainer when it writes its second checkpoint; the controller and the other explorer go on meanwhile.
    """
    folder = tmp_path / "run"
    common = shared(folder, made, "queue.rewards=distributed", "deadlines.heartbeat=8")
    roles.start("queue", "queue", "serve", *common)
    roles.until("the queue is served", of="queue")
    second_save = ("jackfield.trainer.checkpoint:Checkpointer.save", 2)
    third_run_of_the_second_batch = ("jackfield.runtime.agent_worker:AgentWorker._rollout", 7)
    third_group = ("jackfield.runtime.rewards:RewardWorker._group", 3)
    roles.start("trainer", "run", *common, "--role", "train", die_at=second_save)
    roles.start("rewards", "run", *common, "--role", "reward", die_at=third_group)
    roles.start("first", "run", *common, "--role", "explore", die_at=third_run_of_the_second_batch)
    assert -signal.SIGKILL == roles.ended("first"), roles.printed("first")
    roles.start("second", "run", *common, "observe.progress=true", "--role", "explore")
    assert -signal.SIGKILL == roles.ended("rewards"), roles.printed("rewards")
    roles.start("rewards again", "run", *common, "--role", "reward")
    assert -signal.SIGKILL == roles.ended("trainer"), roles.printed("trainer")
    roles.start("trainer again", "run", *common, "--role", "train")
    assert 0 == roles.ended("trainer again"), roles.printed("trainer again")
    assert 0 == roles.ended("second"), roles.printed("second")
    assert "explored up to weights" in roles.printed("second")
    assert "run ended well" in roles.printed("second")
    assert "run stopped" not in roles.printed("second")
    assert 0 == roles.ended("rewards again"), roles.printed("rewards again")
    assert re.search("[1-9] groups rewarded", roles.printed("rewards again"))
    roles.end_queue()
    entries = list(read_ledger(folder))
    trained = effective_acks(entries)["trainer"]
    assert 3 * 4 == len(trained)
    assert all(step == int(key.split("/")[1]) for key, step in trained.items())
    rolled_back = [entry for entry in entries if entry["event"] == "rollback"]
    assert [("trainer", 0, 4)] == [(entry["consumer"], entry["step"], len(entry["keys"])) for entry in rolled_back]
    released = [entry for entry in entries if entry["event"] == "release"]
    assert any("was released" in entry["reason"] for entry in released)
    assert 2 == len(list((folder / "explorers").iterdir()))
    assert (folder / "model" / "config.json").is_file()


def test_a_run_outlives_its_controller(roles: Roles, made: Path, tmp_path: Path) -> None:
    """With a journal: it is killed at the second checkpoint, before that is written; everybody says so, and ends.

    The same commands go on from the first checkpoint, with the very rows that had been made and scored since.
    """
    folder = tmp_path / "run"
    common = shared(folder, made, "queue={durable: true}", "deadlines.heartbeat=8")
    second_cut = ("jackfield_transport_sql.backend:SQLBackend.checkpoint", 2)
    roles.start("queue", "queue", "serve", *common, die_at=second_cut)
    roles.until("the queue is served", of="queue")
    roles.start("trainer", "run", *common, "--role", "train")
    roles.start("explorer", "run", *common, "--role", "explore")
    assert -signal.SIGKILL == roles.ended("queue"), roles.printed("queue")
    for name in ("trainer", "explorer"):
        assert 1 == roles.ended(name), roles.printed(name)
        assert "the connection to the queue's controller is lost" in roles.printed(name)
        assert "queue.session" in roles.printed(name)
    before = list(read_ledger(folder))
    roles.said.clear()
    roles.start("queue", "queue", "serve", *common)
    roles.until("the queue is served", of="queue")
    roles.start("trainer", "run", *common, "--role", "train")
    roles.start("explorer", "run", *common, "--role", "explore")
    assert 0 == roles.ended("trainer"), roles.printed("trainer")
    assert 0 == roles.ended("explorer"), roles.printed("explorer")
    roles.end_queue()
    entries = list(read_ledger(folder))
    first, then = effective_acks(before), effective_acks(entries)
    assert 4 * [0] + 4 * [1] == list(first["trainer"].values())
    assert first["trainer"].items() <= then["trainer"].items(), "the same rows are trained on at the same steps"
    assert {0: 4, 1: 4, 2: 4} == Counter(then["trainer"].values())
    assert before == entries[: len(before)]
    rolled_back = [entry for entry in entries if entry["event"] == "rollback"]
    assert [("trainer", 0, 4)] == [(entry["consumer"], entry["step"], len(entry["keys"])) for entry in rolled_back]
    scored = [
        key for entry in entries if entry["event"] == "ack" and entry["consumer"] == "reward" for key in entry["keys"]
    ]
    assert len(set(scored)) == len(scored) >= 12, "and none of them is scored again"
