"""Hand-overs of a device: every model of the trainer moves, and every replica sleeps and wakes up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jackfield.abc.rollout import BaseRolloutServer, ServerInfo, SleepRequest, WakeUpRequest
from jackfield.errors import WorkerLost
from jackfield.runtime.engine_group import EngineGroup
from jackfield.runtime.revival import LastingServer
from jackfield.runtime.shared_device import SharedDevice
from jackfield.weights import Replica, ReplicaProbe, WeightSynchronizer


class Model:
    """Of the trainer."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    async def to(self, device: str) -> None:
        self.log.append(f"{self.name} to {device}")


class Server:
    """A replica, and its place in a list of replicas."""

    dead = False

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.server = name, log, self

    async def sleep(self, request: SleepRequest) -> None:
        self.log.append(f"{self.name} sleeps on level {request.level}")

    async def wake_up(self, request: WakeUpRequest) -> None:
        self.log.append(f"{self.name} wakes up {request.tags}")


class Synchronizer:
    """Of weights."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def sync(self, version: int) -> Any:
        self.log.append(f"version {version}")


def test_everybody_takes_part_in_a_hand_over() -> None:
    log: list[str] = []
    engines = [Model(name, log) for name in ("actor", "reference", "critic")]
    replicas = [Server("first", log), Server("second", log)]
    device = SharedDevice(
        cast(list[EngineGroup], engines),
        cast(list[Replica], replicas),
        "cuda",
        cast(WeightSynchronizer, Synchronizer(log)),
    )

    async def main() -> None:
        await device.leave_rollout()
        await device.enter_train()
        await device.sync(3)
        await device.leave_train()
        await device.enter_rollout()

    asyncio.run(main())
    assert [
        *("first sleeps on level 1", "second sleeps on level 1"),
        *("actor to cuda", "reference to cuda", "critic to cuda"),
        *("first wakes up ('weights',)", "second wakes up ('weights',)", "version 3"),
        *("actor to cpu", "reference to cpu", "critic to cpu"),
        *("first wakes up ()", "second wakes up ()"),
    ] == log


class FakeProbe:
    """Notes who is asked, and what is compared."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def ask(self, servers: Mapping[int, Any], version: int) -> list[str]:
        self.log.append(f"asks {list(servers)} with {version}")
        if any(server.dead for server in servers.values()):
            raise WorkerLost("a replica died")
        return ["answer"]

    async def compare(self, answers: Sequence[str]) -> None:
        self.log.append(f"compares {answers}")


def test_the_probe_is_asked_and_compared_at_hand_overs() -> None:
    """Neither side takes room that the other has; a version is compared once, before the engine trains further."""
    log: list[str] = []
    replica = Replica(cast(BaseRolloutServer, Server("first", [])), ServerInfo(replica=5))
    probe = cast(ReplicaProbe, FakeProbe(log))
    device = SharedDevice([], [replica], "cuda", cast(WeightSynchronizer, Synchronizer(log)), probe)

    async def main() -> None:
        await device.enter_rollout()  # with the model folder's weights
        await device.enter_train()
        await device.sync(3)
        for _ in range(2):
            await device.enter_rollout()
            await device.enter_train()

    asyncio.run(main())
    assert ["version 3", "asks [5] with 3", "compares ['answer']"] == log


class New(LastingServer, Server):  # type: ignore[misc]
    """A replica that was made anew."""

    behind = True

    def __init__(self) -> None:
        Server.__init__(self, "second", [])

    sleep, wake_up = Server.sleep, Server.wake_up  # type: ignore[assignment]


def test_who_has_no_weights_is_not_asked_and_who_dies_need_not_answer() -> None:
    log: list[str] = []
    servers = [Server("first", []), New()]
    replicas = [Replica(cast(BaseRolloutServer, each), ServerInfo(replica=n)) for n, each in enumerate(servers)]
    probe = cast(ReplicaProbe, FakeProbe(log))
    device = SharedDevice([], replicas, "cuda", cast(WeightSynchronizer, Synchronizer(log)), probe)

    async def main() -> None:
        for version in (3, 4):
            await device.sync(version)
            await device.enter_rollout()
            await device.enter_train()
            servers[0].dead = True

    asyncio.run(main())
    assert ["version 3", "asks [0] with 3", "compares ['answer']", "version 4", "asks [0] with 4"] == log
