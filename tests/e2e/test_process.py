"""A run whose rollout server has an interpreter of its own: the same losses, also where the replica dies."""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from jackfield.errors import RolloutError
from jackfield.plugins import hookimpl

from .conftest import Run
from .test_modes import steps

pytestmark = pytest.mark.timeout(240)  # imports of torch in several processes, on a busy machine

#: Neither tokens nor losses depend on what a replica computes beside other requests.
SAME = ("algorithm.old_log_probs=engine", "rollout.batch_invariant=true")
OURS = ("policy/loss", "grad_norm", "reward/mean", "response_tokens/mean")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another interpreter that has what this one has."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    (packages / "here.pth").write_text("".join(lines))
    return str(folder / "bin" / "python")


class Killer:
    """Kills the replica's process after each step."""

    def __init__(self, python: str) -> None:
        self._python = python
        self.killed: list[int] = []

    @hookimpl
    def step_ended(self, event: Any) -> None:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        (replica,) = [int(pid) for pid in children if self._python in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(replica, signal.SIGKILL)
        self.killed.append(replica)


def test_a_server_elsewhere_that_is_killed_after_every_step_changes_no_loss(small_run: Run, python: str) -> None:
    """Another one replaces it, with the weights of the step, and generates the same.

    Weights reach it through ``shared``, the default for a server in another process, as deltas to those that it got
    when it was started again. Its output is in the run's folder.
    """
    _, here = small_run("here", *SAME)
    killer = Killer(python)
    settings = (*SAME, f"cluster.interpreters={{rollout: {python}}}", "weights.kind=delta")
    result, there = small_run("there", *settings, hooks=[killer])
    assert 3 == len(set(killer.killed))
    for one, other in zip(steps(here), steps(there), strict=True):
        assert [pytest.approx(one[name], abs=1e-5) for name in OURS] == [other[name] for name in OURS]
    assert (result.folder / "replica-0.log").is_file()
    config = yaml.safe_load((result.folder / "config.yaml").read_text())
    assert "shared" == config["checkpoint_engine"]["name"]


def test_a_replica_that_is_killed_once_too_often_is_named(small_run: Run, python: str) -> None:
    settings = (f"cluster.interpreters={{rollout: {python}}}", "cluster.replica_restarts=1")
    with pytest.raises(RolloutError) as caught:
        small_run("killed", *settings, hooks=[Killer(python)])
    assert "rollout.stopped" == caught.value.code
    assert "rollout replica 0 died again after 1 restarts" in str(caught.value)
    assert "SIGKILL" in str(caught.value)


def test_doctor_looks_at_the_interpreters_of_a_configuration(python: str, tmp_path: Path) -> None:
    """In seconds, without torch where there is none to look at: a missing one, and one that will do."""
    file = tmp_path / "run.yaml"

    def doctor(rollout: str) -> tuple[int, dict[str, Any]]:
        values = {"model": {"path": "x"}, "cluster": {"interpreters": {"rollout": rollout}}}
        file.write_text(yaml.safe_dump(values))
        program = str(Path(sys.executable).with_name("jackfield"))
        done = subprocess.run(
            [program, "plugins", "doctor", "--config", str(file), "--kind", "rollout", "--json"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return done.returncode, answer

    code, report = doctor(python)
    assert (0, "ok", [python]) == (code, report["status"], [row["path"] for row in report["interpreters"]])
    code, report = doctor(str(tmp_path / "absent"))
    assert (2, "plugin.interpreter") == (code, report["error"]["code"])
