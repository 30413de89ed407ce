"""VeOmni's own interpreter, and ranks in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.plugins.interpreters import run_bounded
from jackfield_testing import veomni_python

HERE = Path(__file__).parent
CONFORMANCE = HERE.parents[3] / "tests" / "conformance" / "src"


def pytest_configure(config: pytest.Config) -> None:
    """Declare this folder's marker."""
    config.addinivalue_line("markers", "multiprocess: starts processes of its own")


@pytest.fixture(scope="session")
def variables() -> dict[str, str]:
    """The variables of a process in VeOmni's interpreter, which finds the conformance suite in the repository."""
    return os.environ | {
        "PYTHONPATH": str(CONFORMANCE),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture(scope="session")
def launch(
    tmp_path_factory: pytest.TempPathFactory, variables: dict[str, str]
) -> Callable[[list[dict[str, Any]], float], Path]:
    """``launch(scenarios, seconds)``: play them in as many ranks as they need; the folder of the results."""

    def do(scenarios: list[dict[str, Any]], seconds: float) -> Path:
        out = tmp_path_factory.mktemp("veomni")
        settings = out / "settings.json"
        settings.write_text(json.dumps({"out": str(out), "scenarios": scenarios}))
        command = [str(veomni_python()), str(HERE / "worker.py"), str(settings)]
        with (out / "log.txt").open("wb") as log:
            code = run_bounded(command, seconds, stdout=log, stderr=log, env=variables)
        assert 0 == code, "\n".join(log.read_text()[-3000:] for log in sorted(out.glob("log*.txt")))
        return out

    return do
