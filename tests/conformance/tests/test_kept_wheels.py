"""Wheels of plugins that were built when the ABI became 1.0: whatever comes later has to certify them as they are.

They are those of ``examples/plugins_from_docs`` at that time. A change that a wheel does not survive is a major one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

KEPT = sorted((Path(__file__).parents[1] / "kept").glob("*.whl"))
KINDS = {
    "agent_second_try": "agent",
    "engine_plain": "engine",
    "reward_brevity": "reward",
    "rollout_plain": "rollout",
    "transport_sqlite": "transfer_queue",
    "transport_tcp": "checkpoint_engine",
}


@pytest.mark.parametrize("wheel", KEPT, ids=lambda wheel: wheel.name.split("-")[0].removeprefix("jackfield_"))
def test_a_plugin_that_was_built_for_1_0_is_certified(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    short = wheel.name.split("-")[0].removeprefix("jackfield_")
    name, kind = short.partition("_")[2], KINDS[short]
    certificate = tmp_path / "certificate.json"
    command = [sys.executable, "-m", "jackfield_conformance", "--plugin", f"{kind}:{name}"]
    command += ["--certificate", str(certificate)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "full" == json.loads(certificate.read_text(encoding="utf-8"))["level"]


def test_every_kind_has_a_wheel() -> None:
    assert sorted(KINDS) == [wheel.name.split("-")[0].removeprefix("jackfield_") for wheel in KEPT]
