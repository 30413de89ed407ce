"""The plugin keeps its contract on the real vLLM: the checks of the suite, through a process of vLLM's interpreter.

The environment: see ``environment.yaml`` beside this file. Without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import os
import select
from pathlib import Path
from typing import Any

import pytest

from jackfield.plugins import installed
from jackfield_conformance.registry import FIRST_BEHAVIOUR, Check, checks, run_check
from jackfield_conformance.subject import Subject
from jackfield_rollout_vllm.config import Config

from .conftest import Kept, KeptProcess, descendants

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.timeout(400)]  # the first one waits for vLLM

_RECORD = installed().resolve("vllm", "rollout")
assert _RECORD.manifest is not None
CAPABILITIES = _RECORD.manifest.capabilities
#: Looks at what a server leaves behind; here, vLLM is left on purpose. See the last test.
NOT_KEPT = "ROL-100"


def applicable() -> list[Any]:
    """What the plugin has to pass."""
    return [
        pytest.param(check, id=check.id)
        for check in checks("rollout")
        if check.number >= FIRST_BEHAVIOUR
        and check.tier in ("base", "capability")
        and check.id != NOT_KEPT
        and check.applies("1.0", CAPABILITIES)
    ]


@pytest.mark.parametrize("check", applicable())
def test_the_contract_holds(check: Check, kept: Kept, tmp_path: Path) -> None:
    """Log-probabilities, before and after updates, are those of a plain forward pass in float64, within 1e-4."""
    subject = Subject(
        kind="rollout",
        name="vllm_kept",
        cls=lambda _, context: kept.server(context),
        config=Config(),
        config_class=Config,
        capabilities=CAPABILITIES,
        fixture={"checkpoint_engine": "shared"},
        folder=tmp_path,
    )
    outcome = run_check(check, subject)
    assert "passed" == outcome.status, outcome.message


def test_nothing_is_left(kept: Kept) -> None:
    """When the process of a replica ends, so do vLLM's core and workers. Comes last: it ends the session's vLLM."""
    process = KeptProcess.idle.pop()
    pid = process.pid
    assert pid is not None
    watched = {each: os.pidfd_open(each) for each in descendants(pid) | {pid}}
    assert len(watched) > 1
    asyncio.run(process.close())
    left = [each for each, descriptor in watched.items() if not select.select([descriptor], [], [], 10.0)[0]]
    for descriptor in watched.values():
        os.close(descriptor)
    assert [] == left
