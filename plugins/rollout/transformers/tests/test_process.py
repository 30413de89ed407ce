"""The server keeps its contract in a process of its own, too: all checks of the suite, through a socket."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jackfield.abc.rollout import RolloutContext, ServerInfo
from jackfield.plugins import installed
from jackfield.runtime.process import RolloutProcess
from jackfield.runtime.process.connection import HostProcess
from jackfield.structuring import unstructure
from jackfield_conformance.registry import FIRST_BEHAVIOUR, Check, checks, run_check
from jackfield_conformance.subject import Subject
from jackfield_rollout_transformers.config import Config

RECORD = installed().resolve("transformers", "rollout")
assert RECORD.manifest is not None
CAPABILITIES = RECORD.manifest.capabilities
CHECKS = [check for check in checks("rollout") if check.number >= FIRST_BEHAVIOUR and check.tier != "gpu"]


class Reused(RolloutProcess):
    """Takes a process that an earlier server has left, and leaves it to the next one: each costs an import of torch."""

    idle: ClassVar[list[HostProcess]] = []

    def __init__(self, config: Any, context: RolloutContext) -> None:
        super().__init__(unstructure(config), context, record=RECORD, python=sys.executable, seconds=25.0)

    async def start(self) -> ServerInfo:
        if self.idle:
            self._process = self.idle.pop()
        return await super().start()

    async def _end(self) -> None:
        if self._process.death is None:
            await self._process.detach()
            self.idle.append(self._process)


class Fresh(RolloutProcess):
    """Starts a process, and ends it: for the check of what is left behind."""

    def __init__(self, config: Any, context: RolloutContext) -> None:
        super().__init__(unstructure(config), context, record=RECORD, python=sys.executable, seconds=25.0)


@pytest.fixture(scope="module")
def processes() -> Iterator[None]:
    """Ends those that were reused."""
    yield
    while Reused.idle:
        asyncio.run(Reused.idle.pop().close())


def applicable() -> list[Any]:
    """What the plugin has to pass, whether it lives here or there."""
    assert RECORD.manifest is not None
    chosen = [check for check in CHECKS if check.applies(RECORD.manifest.abi, CAPABILITIES)]
    return [pytest.param(check, id=check.id) for check in chosen]


def subject(check: Check, place: Path, engine: str = "shared", **settings: Any) -> Subject:
    """The plugin in a process, and what brings weights there."""
    return Subject(
        kind="rollout",
        name="transformers",
        cls=Fresh if check.id == "ROL-100" else Reused,
        config=Config(),
        config_class=Config,
        capabilities=CAPABILITIES,
        fixture={"checkpoint_engine": engine, "checkpoint_engine_config": settings},
        folder=place,
    )


@pytest.mark.parametrize("check", applicable())
def test_the_contract_holds_through_a_process(check: Check, processes: None, tmp_path: Path) -> None:
    """Weights come by ``shared``."""
    outcome = run_check(check, subject(check, tmp_path))
    assert "passed" == outcome.status, outcome.message


@pytest.mark.parametrize("engine", ["file", "nccl", "zmq"])
def test_every_engine_that_crosses_processes_brings_weights(engine: str, processes: None, tmp_path: Path) -> None:
    """New weights are used, and after them the first ones again: log-probabilities prove it."""
    (check,) = [check for check in CHECKS if check.id == "ROL-070"]
    settings = {"folder": str(tmp_path)} if engine == "file" else {}
    outcome = run_check(check, subject(check, tmp_path, engine, **settings))
    assert "passed" == outcome.status, outcome.message
