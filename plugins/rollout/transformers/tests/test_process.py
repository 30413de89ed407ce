"""The server in a process of its own: all checks of the suite, through a socket, and a death during an update."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import RolloutContext
from jackfield.clock import Clock
from jackfield.cluster.pool import ReplicaPool
from jackfield.config import make_config
from jackfield.plugins import installed, load_plugin
from jackfield.routing import Replica, Router
from jackfield.weights import WeightSender, WeightSynchronizer
from jackfield_conformance.registry import FIRST_BEHAVIOUR, Check, Subject, checks, run_check
from jackfield_conformance.support.rollout import LONG, greedy
from jackfield_conformance.support.rollout_model import model_folder, named_weights
from jackfield_kept_process import KeptRolloutProcess, RolloutProcess
from jackfield_rollout_transformers.config import Config
from jackfield_rollout_transformers.server import TransformersServer

RECORD = installed().resolve("transformers", "rollout")
assert RECORD.manifest is not None
CAPABILITIES = RECORD.manifest.capabilities
CHECKS = [check for check in checks("rollout") if check.number >= FIRST_BEHAVIOUR and check.tier != "gpu"]


class Reused(KeptRolloutProcess):
    """Takes a process that an earlier server has left: each costs an import of torch."""

    def __init__(self, config: Any, context: RolloutContext, seconds: float = 25.0) -> None:
        super().__init__(attrs.asdict(config), context, record=RECORD, python=sys.executable, seconds=seconds)


class Fresh(RolloutProcess):
    """Starts a process, and ends it: for the check of what is left behind."""

    def __init__(self, config: Any, context: RolloutContext) -> None:
        super().__init__(attrs.asdict(config), context, record=RECORD, python=sys.executable, seconds=55.0)


@pytest.fixture(scope="module")
def processes() -> Iterator[None]:
    """Starts the first one, which takes long on a busy machine, and ends those that were reused."""

    async def warm_up() -> None:
        server = Reused(Config(), RolloutContext(model=ModelSpec(path=model_folder())), seconds=200.0)
        await server.start()
        await server.stop()

    asyncio.run(warm_up())
    yield
    KeptRolloutProcess.end_all()


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


class TwoReplicas:
    """One in a process that can die, one in this process."""

    def __init__(self) -> None:
        self.router, self.started = Router(Clock()), 0
        self.process = Reused(Config(), RolloutContext(model=ModelSpec(path=model_folder())))

    async def start(self, replica: Replica) -> None:
        if replica.number == 1:
            context = RolloutContext(model=ModelSpec(path=model_folder()), replica=1)
            replica.server = TransformersServer(Config(), context)
            return
        self.started += 1
        await self.process.make(replica)

    async def end(self, number: int) -> None:
        return

    async def route(self, replicas: Mapping[int, Replica], seconds: float, updating: Sequence[int] = ()) -> int:
        return await self.router.route(replicas, seconds, updating)


def test_a_replica_killed_during_an_update_loses_nothing(processes: None) -> None:
    """The update is repeated without it, and another takes its place with the new weights. Its request is generated
    again, and that of the other replica, whose update broke off, after the next."""
    weights, killed, places = named_weights(), list[int](), TwoReplicas()

    def export() -> Generator[tuple[str, torch.Tensor], None, None]:
        for number, item in enumerate(weights.items()):
            if number == 5 and not killed:
                killed.append(places.process.pid)
                os.kill(killed[0], signal.SIGKILL)
            yield item

    @asynccontextmanager
    async def hold() -> AsyncIterator[None]:
        async with synchronized:
            yield

    async def main() -> None:
        settings = ["model.path=m", "cluster.replica_restarts=1", "deadlines.start=60", "deadlines.drain=1"]
        pool = ReplicaPool(places, make_config({}, settings), Clock())
        try:
            await pool.start(2)
            plugin = load_plugin("checkpoint_engine", "zmq")
            engine: Any = plugin.build({"bucket_bytes": 1 << 12}, CheckpointEngineContext(end="sender"))
            sender = WeightSender(engine, lambda: (export(), None))
            synchronizer = WeightSynchronizer([sender], pool.members, "zmq", Clock(), deadline_seconds=30.0)

            async def load(replica: Replica) -> None:
                await synchronizer.catch_up(replica, 1)

            pool.source = SimpleNamespace(load=load, hold=hold, takes_turns=False)
            keeping = asyncio.create_task(pool.keep())
            running = [
                asyncio.create_task(places.router.of_one_rollout()(greedy(f"running-{n}", LONG))) for n in range(2)
            ]
            async with synchronized:
                report = await pool.sync(1, synchronizer.sync)
            assert [1] == [receipt.replica for receipt in report.receipts]
            assert [LONG, LONG] == [len(result.token_ids) for result in await asyncio.gather(*running)]
            while len(pool.members) < 2:
                await asyncio.sleep(0.1)
            for member in pool.members:
                assert {1} == set((await member.server.generate(greedy("new", 4))).weight_versions)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        finally:
            await pool.close()
            await places.process.stop()

    synchronized = asyncio.Lock()
    asyncio.run(main())
    assert (1, 2) == (len(killed), places.started)
