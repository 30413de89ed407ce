"""Processes in which ``torch.cuda`` is the CPU: Megatron-Core's tests run in them, and never in pytest's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DEADLINE = 480.0  # seconds for all processes of a launch, imports included, on a busy machine


def pytest_configure(config: pytest.Config) -> None:
    """Declare this folder's marker."""
    config.addinivalue_line("markers", "multiprocess: starts processes of its own")


@pytest.fixture(scope="session")
def redirected() -> dict[str, str]:
    """The environment of such processes."""
    return {
        **os.environ,
        "PYTHONPATH": str(HERE / "interpreter"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture(scope="session")
def play(redirected: dict[str, str]) -> Callable[..., None]:
    """``play(folder, world_size, jobs)``: ranks of ``worker.py``; the problems that they tell fail the test."""

    def launch(folder: Path, world_size: int, jobs: list[dict[str, Any]]) -> None:
        order = folder / "order.json"
        order.write_text(json.dumps({"world_size": world_size, "folder": str(folder), "jobs": jobs}))
        command = [sys.executable, str(HERE / "worker.py"), str(order)]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, env=redirected, start_new_session=True, **options) as process:
            try:
                said = process.communicate(timeout=DEADLINE)[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said = f"(ended after {DEADLINE:g} s)\n" + process.communicate()[0]
        assert 0 == process.returncode, said[-12000:]

    return launch
