"""The plugin keeps its contract on the real vLLM: the checks of the suite, through a process of vLLM's interpreter.

The environment: see ``environment.yaml`` beside this file. Without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import RolloutContext
from jackfield.errors import RolloutError
from jackfield.plugins import installed
from jackfield_conformance.registry import FIRST_BEHAVIOUR, Check, Subject, checks, run_check
from jackfield_conformance.support.rollout import LONG, Reader, greedy
from jackfield_conformance.support.rollout_model import model_folder
from jackfield_rollout_vllm.config import Config

from .conftest import Kept, descendants

# the first one waits for vLLM
pytestmark = [pytest.mark.shared_interpreter, pytest.mark.needs("vllm"), pytest.mark.timeout(400)]

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


def test_a_core_that_dies_is_named_and_nothing_is_left(kept: Kept) -> None:
    """vLLM's core is killed during a request; then the replica ends with all that it has started.

    Comes last: it ends the session's vLLM.
    """

    async def life() -> set[int]:
        server = kept.server(RolloutContext(model=ModelSpec(path=model_folder())))
        await server.start()
        process = cast(Any, server.process)
        started = descendants(server.pid) | {server.pid}
        watched = {each: os.pidfd_open(each) for each in started}
        try:
            reader = Reader(server, greedy("running", LONG))
            await reader.at_least(2)
            (core,) = [each for each in started if "EngineCore" in Path(f"/proc/{each}/cmdline").read_text()]
            os.kill(core, signal.SIGKILL)
            with pytest.raises(RolloutError) as caught:
                await reader.result()
            assert caught.value.code in ("rollout.failed", "rollout.stopped")
            health = await server.health()
            assert not health.healthy
            assert "vLLM" in health.detail
            process.connection.end("was left")
            process.end()
            return {each for each, descriptor in watched.items() if not select.select([descriptor], [], [], 10.0)[0]}
        finally:
            process.end()
            for descriptor in watched.values():
                os.close(descriptor)

    assert set() == asyncio.run(life())
