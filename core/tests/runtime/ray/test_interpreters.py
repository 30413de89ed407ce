"""Interpreters that are missing or have another Ray are refused, because Ray would wait for them for ever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from jackfield.errors import PluginError
from jackfield.runtime.ray_cluster import check_interpreter


def interpreter(folder: Path, ray: str | None, python: str | None = None) -> str:
    """Write a program that responds like an interpreter with another version of Ray."""
    versions = {"jackfield": "0.1.0", "torch": None, "ray": ray}
    answer = json.dumps({"python": python or sys.version.split()[0], "versions": versions})
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    return str(program)


def test_this_interpreter_will_do() -> None:
    check_interpreter(sys.executable, "the engine worker")


@pytest.mark.parametrize(
    ("ray", "python", "found"),
    [("2.40.0", None, "Ray 2.40.0"), (None, None, "Ray None"), ("2.60.0", "3.12.1", "Python 3.12")],
)
def test_another_ray_or_python_is_refused(tmp_path: Path, ray: str | None, python: str | None, found: str) -> None:
    with pytest.raises(PluginError) as refused:
        check_interpreter(interpreter(tmp_path, ray, python), "the rollout worker")
    assert "plugin.interpreter" == refused.value.code
    assert "the rollout worker" in refused.value.message
    assert found in str(refused.value.found)


def test_a_missing_interpreter_is_refused() -> None:
    with pytest.raises(PluginError) as refused:
        check_interpreter("/nowhere/bin/python", "the engine worker")
    assert "plugin.interpreter" == refused.value.code


JOIN = """
import asyncio, json, sys
import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from jackfield.clock import Clock
from jackfield.config.sections import RayConfig
from jackfield.errors import RunError
from jackfield.runtime.ray_cluster import Cluster

assert not is_token_auth_enabled()
try:
    asyncio.run(Cluster(Clock(), print, 30.0).open(RayConfig(address=sys.argv[1]), needed_cpus=1))
except RunError as error:
    print(json.dumps([error.code, error.where, is_token_auth_enabled()]))
"""


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The error comes early. A token in the home folder is used, even if Ray was already imported."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_A")}
    done = subprocess.run(
        [sys.executable, "-c", JOIN, f"127.0.0.1:{port}"],
        env={**own, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    assert ["cluster.unavailable", f"127.0.0.1:{port}", True] == json.loads(done.stdout)
