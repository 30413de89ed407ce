"""Wheels of plugins that were built when the ABI became 1.0: whatever comes later has to certify them as they are.

They are those of ``examples/plugins_from_docs`` at that time. A change that a wheel does not survive is a major one.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from jackfield_commands import CommandServer

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
def test_a_plugin_that_was_built_for_1_0_is_certified(wheel: Path, tmp_path: Path, jackfield: CommandServer) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    short = wheel.name.split("-")[0].removeprefix("jackfield_")
    name, kind = short.partition("_")[2], KINDS[short]
    certificate = tmp_path / "certificate.json"
    done = jackfield(
        *("--plugin", f"{kind}:{name}", "--certificate", str(certificate)),
        program="jackfield_conformance",
        environment={"PYTHONPATH": str(tmp_path / "site"), "PYTHONDONTWRITEBYTECODE": "1"},
        folder=tmp_path,
        seconds=280,
    )
    assert 0 == done.code, done.out + done.error
    assert "full" == json.loads(certificate.read_text(encoding="utf-8"))["level"]


def test_every_kind_has_a_wheel() -> None:
    assert sorted(KINDS) == [wheel.name.split("-")[0].removeprefix("jackfield_") for wheel in KEPT]
