"""Tests of device hand-overs: every model of the trainer moves, and every replica sleeps and wakes up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jackfield.abc.rollout import BaseRolloutServer, ServerInfo, SleepRequest, WakeUpRequest
from jackfield.cluster.pool import DeviceLease
from jackfield.config import make_config
from jackfield.errors import WorkerLost
from jackfield.trainer.weights import EngineWeights
from jackfield.weights import Replica, WeightsSynced
from jackfield_virtual_clock import VirtualClock


class Model:
    """A fake model of the trainer."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    async def to(self, device: str) -> None:
        self.log.append(f"{self.name} to {device}")


class Server:
    """A fake replica, which is also its entry in a list of replicas."""

    dead = False

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.server = name, log, self

    async def sleep(self, request: SleepRequest) -> None:
        self.log.append(f"{self.name} sleeps on level {request.level}")

    async def wake_up(self, request: WakeUpRequest) -> None:
        self.log.append(f"{self.name} wakes up {request.tags}")


class Pool:
    """A fake pool of replicas."""

    def __init__(self, log: list[str], *servers: Server) -> None:
        self.log = log
        self.members = [Replica(cast(BaseRolloutServer, each), ServerInfo(replica=n)) for n, each in enumerate(servers)]

    async def each(self, what: str, call: Callable[[Any], Awaitable[object]]) -> None:
        for replica in self.members:
            await call(replica.server)

    async def sync(self, version: int, send: Callable[..., Awaitable[object]]) -> Any:
        self.log.append(f"version {version}")


def sharing(pool: Pool, engines: Sequence[Model] = (), probe: Any = None) -> EngineWeights:
    settings = ("cluster.device=cuda", "cluster.offload=true", "log_prob_check.probe_tokens=0")
    clock, config = VirtualClock(), make_config({"model": {"path": "none"}}, settings)
    workers = SimpleNamespace(ranks={"actor": []}, shares_devices=True)
    role: Any = SimpleNamespace(config=config, clock=clock, workers=workers, train_devices=DeviceLease(clock, 60.0))
    loaded: Any = {engine.name: engine for engine in engines}
    weights = EngineWeights(role=role, engines=loaded, pool=cast(Any, pool))
    weights.probe = probe
    return weights


def test_everybody_takes_part_in_a_hand_over() -> None:
    log: list[str] = []
    engines = [Model(name, log) for name in ("actor", "reference", "critic")]
    pool = Pool(log, Server("first", log), Server("second", log))
    device = sharing(pool, engines)

    async def main() -> None:
        await device.hand_over("rollout", "train")
        await device.sync(3)
        await device.hand_over("train", "rollout")

    asyncio.run(main())
    assert [
        *("first sleeps on level 1", "second sleeps on level 1"),
        *("actor to cuda", "reference to cuda", "critic to cuda"),
        *("first wakes up ('weights',)", "second wakes up ('weights',)", "version 3"),
        *("actor to cpu", "reference to cpu", "critic to cpu"),
        *("first wakes up ()", "second wakes up ()"),
    ] == log


def test_replicas_that_were_just_started_sleep_before_engines_are_on_the_device() -> None:
    """A run that resumes trains, or loads a checkpoint, before any rollout."""
    log: list[str] = []
    device = sharing(Pool(log, Server("first", log)), [Model("actor", log)])
    asyncio.run(device.hand_over(None, "train"))
    assert ["first sleeps on level 1", "actor to cuda"] == log


class FakeProbe:
    """A probe that records which replicas are asked and what is compared."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def ask(self, replicas: Sequence[Replica], version: int) -> list[str]:
        self.log.append(f"asks {[each.number for each in replicas]} with {version}")
        if any(each.server.dead for each in replicas):  # type: ignore[attr-defined]
            raise WorkerLost("a replica died")
        return ["answer"]

    async def compare(self, answers: Sequence[str]) -> None:
        self.log.append(f"compares {answers}")


def test_the_probe_is_asked_and_compared_at_hand_overs() -> None:
    """Neither side uses the other's memory; a version is compared once, before the engine trains again."""
    log: list[str] = []
    device = sharing(Pool(log, Server("first", [])), probe=FakeProbe(log))

    async def main() -> None:
        await device.hand_over(None, "rollout")  # replicas have the weights of the model's folder
        await device.hand_over("rollout", "train")
        await device.sync(3)
        for _ in range(2):
            await device.hand_over("train", "rollout")
            await device.hand_over("rollout", "train")

    asyncio.run(main())
    assert ["version 3", "asks [0] with 3", "compares ['answer']"] == log


def test_one_that_dies_need_not_answer() -> None:
    log: list[str] = []
    server = Server("first", [])
    device = sharing(Pool(log, server), probe=FakeProbe(log))

    async def main() -> None:
        for version in (3, 4):
            await device.sync(version)
            await device.hand_over("train", "rollout")
            await device.hand_over("rollout", "train")
            server.dead = True

    asyncio.run(main())
    assert ["version 3", "asks [0] with 3", "compares ['answer']", "version 4", "asks [0] with 4"] == log


def test_weights_are_sent_to_no_replica_only_for_explorers_elsewhere() -> None:
    """The engine need not open a transfer if all replicas of its run are being restarted."""

    class NoMembers(Pool):
        async def sync(self, version: int, send: Callable[..., Awaitable[object]]) -> Any:
            return await send(version, [], last=True)

    weights = sharing(NoMembers([]))
    weights.role.name = "all"
    assert (3, ()) == ((report := asyncio.run(weights.sync(3))).version, report.receipts)
    weights.role.name = "train"
    with pytest.raises(ValueError, match="empty"):  # it begins a transfer, and there is no sender
        asyncio.run(weights.sync(4))


def test_a_replica_waits_for_the_end_of_a_step_unless_it_is_the_only_one() -> None:
    """Between two updates, the step may wait for rollouts, which need a replica; no delta follows such weights."""
    log: list[str] = []
    pool = Pool(log, Server("first", log))
    weights = sharing(pool, [Model("actor", log)])
    role: Any = weights.role
    role.whole, role.updated, role.measure = asyncio.Event(), 4, lambda *_: nullcontext()
    weights.engines["actor"].reading = asyncio.Lock()
    sent: list[int] = []

    async def catch_up(replica: Replica, version: int) -> None:
        sent.append(version)

    async def join(seconds: float) -> None:
        async with asyncio.timeout(seconds), weights.hold():
            await weights.load(pool.members[0] if pool.members else last)

    async def main() -> None:
        before = WeightsSynced(version=4)
        weights.synchronizer = synchronizer = cast(Any, SimpleNamespace(last=before, catch_up=catch_up))
        with pytest.raises(TimeoutError):
            await join(20.0)
        pool.members.clear()
        await join(20.0)
        assert ([4], None) == (sent, synchronizer.last)
        synchronizer.last = before
        role.whole.set()
        await join(20.0)
        assert ([4, 4], before) == (sent, synchronizer.last)

    last = pool.members[0]
    role.clock.run(main())
