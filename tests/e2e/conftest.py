"""A tiny task and model, made once, and runs in this process."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jackfield.compose import RunResult, run
from jackfield.config import load_config

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"

Run = Callable[..., tuple[RunResult, list[dict[str, Any]]]]


@pytest.fixture
def small_run(made: Path, tmp_path: Path) -> Run:
    """Run one of the quickstart's files for a few small steps; returns the result and the lines of its metrics."""

    def do(
        name: str, *overrides: str, file: str = "grpo.yaml", hooks: Sequence[object] = ()
    ) -> tuple[RunResult, list[dict[str, Any]]]:
        train = "demonstrations" if file == "warmup.yaml" else "problems"
        small = [
            f"name={name}",
            f"folder={tmp_path / name}",
            f"model.path={made / 'model'}",
            f"data.train={made / train}.jsonl",
            f"data.eval={made / 'held_out.jsonl'}",
            "data.groups_per_batch=4",
            "data.rollouts_per_group=4",
            "sampling.max_new_tokens=6",
            "schedule.steps=3",
            "evaluation.every=0",
            "observe.progress=false",
            "observe.curve=false",
            "observe.report_to=[]",
        ]
        result = run(load_config(QUICKSTART / file, [*small, *overrides]), hooks=hooks)
        return result, metrics(result.folder)

    return do


@pytest.fixture(scope="session")
def ray_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Ray's token is in it, and the home folder is a temporary one."""
    home = str(tmp_path_factory.mktemp("home"))
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_A")},
        "HOME": home,
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def ray_cluster(ray_environment: dict[str, str]) -> Iterator[str]:
    """A cluster on this machine that runs join; its address."""
    folder = tempfile.mkdtemp(prefix="jackfield")  # the path of a socket is short
    port = 20_000 + 2 * secrets.randbelow(5_000)  # the next one is of Ray's clients; no ephemeral port is in this range
    command = [
        Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=2",
        "--include-dashboard=false", "--disable-usage-stats",
        "--node-ip-address=127.0.0.2", f"--port={port}", "--object-store-memory=200000000",
        f"--temp-dir={folder}", "--no-monitor", "--include-log-monitor=false",
        f"--ray-client-server-port={port + 1}",
    ]  # fmt: skip
    head = subprocess.Popen(
        command,
        env={**ray_environment, "RAY_worker_niceness": "0"},  # its workers compete with other tests
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
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


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics file."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
