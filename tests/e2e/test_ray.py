"""The same configuration in a Ray cluster: the same losses, no tensor in the controller, and workers that die."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("ray")

from .conftest import QUICKSTART, Run, metrics
from .test_modes import GRADED, steps

pytestmark = pytest.mark.timeout(600)

GUIDE = QUICKSTART.parent / "guides" / "ray_runtime.yaml"  #: what the guide shows
RAY = Path(sys.executable).with_name("ray")
SCRIPT = Path(__file__).with_name("ray_run.py")
#: What a replica computes depends in its last bits on what else it computes; losses do not, with these settings.
SAME = ("algorithm.old_log_probs=engine",)
OURS = ("policy/loss", "policy/ratio", "grad_norm", "lr", "reward/mean", "response_tokens/mean")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Ray's token is in it, and the home folder is a temporary one."""
    home = str(tmp_path_factory.mktemp("home"))
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_A")},
        "HOME": home,
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[str]:
    """A cluster that somebody else runs, on this machine; its address."""
    folder = tempfile.mkdtemp(prefix="jackfield")  # the path of a socket is short
    port = 20_000 + secrets.randbelow(10_000)
    command = [
        RAY, "start", "--head", "--block", "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats",
        "--node-ip-address=127.0.0.2", f"--port={port}", "--object-store-memory=200000000",
        f"--temp-dir={folder}",
    ]  # fmt: skip
    head = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert head.stdout is not None
        said = []
        for line in head.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                break
        else:
            pytest.fail("".join(said))
        yield f"127.0.0.2:{port}"
    finally:
        head.terminate()
        head.wait(60)
        head.stdout.close()
        shutil.rmtree(folder)


RayRun = Callable[..., Any]


@pytest.fixture(scope="module")
def ray_run(made: Path, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Callable[..., Any]:
    """Do a run in a process of its own; returns how it ended and its folder. No worker is left."""

    def do(name: str, *overrides: str, kill: dict[str, list[str]] | None = None) -> Any:
        folder = tmp_path_factory.mktemp("runs") / name
        small = [
            f"name={name}", f"folder={folder}", f"model.path={made / 'model'}", f"data.train={made / 'problems'}.jsonl",
            "data.prompts_per_step=4", "data.runs_per_prompt=4", "sampling.max_new_tokens=6", "schedule.steps=4",
            "evaluation.every=0", "observe.progress=false", "observe.curve=false", "observe.tensorboard=false",
            f"runtime={GUIDE.read_text()}", "runtime.ray.object_store_bytes=200000000", *SAME, *GRADED,
        ]  # fmt: skip
        command = [sys.executable, str(SCRIPT), str(QUICKSTART / "grpo.yaml"), json.dumps({"kill": kill or {}})]
        ended = subprocess.run(
            [*command, *small, *overrides], env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert 0 == ended.returncode, ended.stderr[-3000:]
        workers = json.loads((folder / "workers.json").read_text())
        left = [name for name, worker in workers.items() if Path(f"/proc/{worker['pid']}").exists()]
        assert [] == left, "workers outlive their run"
        return ended, folder

    return do


@pytest.fixture(scope="module")
def joined(ray_run: RayRun, cluster: str) -> Path:
    """The folder of a run in a cluster that is there, with two ranks and two replicas.

    Workers without state are killed on the way.
    """
    kill = {"1": ["agent worker 0"], "2": ["reward worker 0"]}
    folder: Path = ray_run("joined", f"runtime.ray.address={cluster}", kill=kill)[1]
    return folder


def test_a_run_in_a_cluster_is_the_inline_run(small_run: Run, joined: Path) -> None:
    """The controller cannot import torch or numpy: no tensor passes it. Deaths of stateless workers do not show."""
    _, expected = small_run("inline", *GRADED, *SAME, "schedule.steps=4")
    lines = metrics(joined)
    assert 4 == len(steps(lines))
    for ours, theirs in zip(steps(lines), steps(expected), strict=True):
        for name in OURS:
            assert theirs[name] == pytest.approx(ours[name], abs=1e-5), (ours["step"], name)
    workers = json.loads((joined / "workers.json").read_text())
    names = {"the actor engine, rank 1", "rollout replica 1", "agent worker 0", "reward worker 0"}
    assert names <= set(workers)


def test_a_rank_that_dies_is_named_and_the_run_ends_as_if_it_had_not(ray_run: RayRun, joined: Path) -> None:
    """The run goes on from its newest checkpoint, in a cluster of its own; weights are the same, bit for bit."""
    kill = {"3": ["the actor engine, rank 1"]}
    ended, folder = ray_run("recovered", "checkpoint.every=1", "runtime.rollout_replicas=1", kill=kill)
    assert "the actor engine, rank 1 died; the run goes on after step" in ended.stderr
    names = ("policy/loss", "grad_norm", "lr", "reward/mean")
    values = [[[line[name] for name in names] for line in steps(metrics(each))] for each in (joined, folder)]
    assert values[0] == values[1]
    weights = [load_file(each / "model" / "model.safetensors") for each in (joined, folder)]
    assert set(weights[0]) == set(weights[1])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
