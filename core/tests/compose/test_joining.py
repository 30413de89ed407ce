"""A replica that joins an explorer while newer weights arrive from the trainer's process gets them, too."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jackfield.abc.rollout import BaseRolloutServer, ServerInfo, UpdateWeightsRequest, WeightReceipt, WorkerReceipt
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.cluster.pool import DeviceLease, Places, ReplicaPool
from jackfield.config import make_config
from jackfield.plugins import HookManager
from jackfield.trainer.role import Role
from jackfield.trainer.weights import WeightSubscriber
from jackfield.weights import Replica, WeightsSynced
from jackfield_virtual_clock import VirtualClock


def replica(clock: VirtualClock, number: int) -> Any:
    """Make a replica that needs five seconds for an update."""

    async def update_weights(request: UpdateWeightsRequest) -> WeightReceipt:
        await clock.sleep(5.0)
        server.version = request.version
        return WeightReceipt(version=request.version, replica=number, workers=(WorkerReceipt(worker=0, digests={}),))

    server = SimpleNamespace(version=0, update_weights=update_weights)
    return Replica(cast(BaseRolloutServer, server), ServerInfo(replica=number))


def published(version: int) -> WeightsSynced:
    return WeightsSynced(version=version, retained={})


@pytest.mark.parametrize("seconds", [1.0, 7.0], ids=["first", "second"])
def test_newer_weights_wait_for_one_that_joins_or_are_its_first(seconds: float) -> None:
    """They arrive before or during the replica's first load, and it never keeps older weights."""
    clock = VirtualClock()

    async def main() -> None:
        values = {"model": {"path": "none"}, "data": {"train": "none"}, "deadlines": {"sync": 60.0}}
        hooks, algorithm = HookManager(), ResolvedAlgorithm(loss="ppo", loss_options={})
        role = Role(config=make_config(values, ()), name="explore", algorithm=algorithm, clock=clock, hooks=hooks)
        role.rollout_devices = DeviceLease(clock, 60.0)
        pool = ReplicaPool(None, role.config, clock)  # type: ignore[arg-type]
        members = pool.members
        members.append(replica(clock, 0))
        subscriber = WeightSubscriber(role=role, pool=pool)
        await subscriber.load_all(published(1))
        later = asyncio.ensure_future(clock.sleep(4.0))
        later.add_done_callback(lambda _: loads.append(asyncio.ensure_future(subscriber.load_all(newer))))
        loads: list[asyncio.Task[None]] = []
        newer = published(2)
        await clock.sleep(seconds)
        async with subscriber.hold():
            second = replica(clock, 1)
            await subscriber.load(second)
            members.append(second)
        await later
        await asyncio.gather(*loads)
        assert [2, 2] == [each.server.version for each in members]

    clock.run(main())


def test_replicas_of_an_explorer_load_published_weights_in_turns() -> None:
    clock = VirtualClock()

    async def main() -> None:
        values = {"model": {"path": "none"}, "data": {"train": "none"}, "weights": {"in_turns": True}}
        hooks, algorithm = HookManager(), ResolvedAlgorithm(loss="ppo", loss_options={})
        role = Role(config=make_config(values, ()), name="explore", algorithm=algorithm, clock=clock, hooks=hooks)
        role.rollout_devices = DeviceLease(clock, 60.0)
        pool = ReplicaPool(Tables(), role.config, clock)
        pool.members += [replica(clock, number) for number in range(3)]
        loading = asyncio.create_task(WeightSubscriber(role=role, pool=pool).load_all(published(4)))
        await clock.sleep(7.0)
        assert [4, 0, 4] == [each.server.version for each in pool.members]
        await loading
        assert ([4, 4, 4], 10.0) == ([each.server.version for each in pool.members], clock.time())
        assert [[0, 2], [1], []] == tables

    tables = list[list[int]]()

    class Tables(Places):
        async def route(self, replicas: Mapping[int, Replica], seconds: float, updating: Sequence[int] = ()) -> int:
            tables.append(list(updating))
            return 0

    clock.run(main())
