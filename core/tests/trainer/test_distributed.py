"""Tests of how explorers in other processes get the trainer's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest

from jackfield.abc.rollout import ServerInfo, UpdateWeightsRequest, WeightReceipt, WorkerReceipt
from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.cluster.pool import DeviceLease, ReplicaPool
from jackfield.config import make_config
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.plugins import HookManager
from jackfield.queue import TransferQueue
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.trainer.role import Role
from jackfield.trainer.weights import WeightSubscriber, publish
from jackfield.weights import Replica, WeightsSynced
from jackfield_virtual_clock import VirtualClock

pytest.importorskip("torch")

DIGESTS = {"layer": "abc"}


@attrs.define(eq=False)
class Server:
    """A server that takes weights; ``gone`` are transfers that are no longer kept."""

    gone: set[str] = attrs.field(factory=set)
    wrong: bool = False
    taken: list[int] = attrs.field(factory=list)
    asked: Callable[[], Awaitable[None]] | None = None

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        if self.asked is not None:
            await self.asked()
        if request.connect[0]["transfer"] in self.gone:
            raise WeightsError("the weight transfer is over")
        self.taken.append(request.version)
        digests = {"layer": "xyz"} if self.wrong else DIGESTS
        worker = WorkerReceipt(worker=0, digests=digests)
        return WeightReceipt(replica=0, version=request.version, workers=(worker,), seconds=0.0)


@attrs.define(eq=False)
class Bench:
    clock: VirtualClock
    queue: TransferQueue
    server: Server
    subscriber: WeightSubscriber

    async def publish(self, version: int, retained: str | None = "t") -> None:
        report = WeightsSynced(version=version, sent_bytes=1, digests=DIGESTS)
        report = attrs.evolve(report, retained=None if retained is None else {"transfer": retained})
        await publish(self.subscriber.role, report, version)


async def begun(bench: Bench) -> None:
    await bench.subscriber.role.version.until(lambda version: version >= 0, 5.0, "the trainer")


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    clock = VirtualClock()

    async def main() -> None:
        queue = TransferQueue(MemoryBackend(MemoryConfig(), TransferQueueContext()), clock)
        await queue.start()
        server = Server()
        replica: Any = Replica(server, ServerInfo(replica=0))  # type: ignore[arg-type]
        values = {"model": {"path": "none"}, "data": {"train": "none"}, "deadlines": {"sync": 10.0, "batch": 50.0}}
        hooks, algorithm = HookManager(), ResolvedAlgorithm(loss="ppo", loss_options={})
        role = Role(config=make_config(values, ()), name="explore", algorithm=algorithm, clock=clock, hooks=hooks)
        role.queue = queue
        role.rollout_devices = DeviceLease(clock, 60.0)
        pool = ReplicaPool(None, role.config, clock)  # type: ignore[arg-type]
        pool.members.append(replica)
        subscriber = WeightSubscriber(role=role, pool=pool)
        try:
            await test(Bench(clock, queue, server, subscriber))
        finally:
            await queue.close()

    clock.run(main())


def test_each_posted_version_comes_to_the_replicas_before_the_explorer_goes_on() -> None:
    """The first weights are those of the model's folder; a replica that joins late gets the newest only."""

    async def test(bench: Bench) -> None:
        with pytest.raises(DeadlineExceeded):
            await begun(bench)
        following = asyncio.ensure_future(bench.subscriber.run())
        await publish(bench.subscriber.role, None, 0)
        await begun(bench)
        assert (0, []) == (bench.subscriber.role.version.value, bench.server.taken)
        await bench.publish(2)
        await bench.publish(3)
        await bench.subscriber.role.version.until(lambda version: version >= 3, 5.0, "version 3")
        assert [3] == bench.server.taken
        following.cancel()

    run(test)


def test_a_version_that_a_restored_trainer_publishes_again_is_loaded_again() -> None:
    async def test(bench: Bench) -> None:
        following = asyncio.ensure_future(bench.subscriber.run())
        for transfer in ("before", "after"):
            await bench.publish(2, transfer)
            await bench.clock.sleep(1.0)
        assert [2, 2] == bench.server.taken
        following.cancel()

    run(test)


def test_weights_that_are_removed_during_the_transfer_are_followed_by_newer_ones() -> None:
    async def test(bench: Bench) -> None:
        async def newer() -> None:
            bench.server.asked = None
            await bench.publish(2, "new")

        bench.server.gone, bench.server.asked = {"old"}, newer
        following = asyncio.ensure_future(bench.subscriber.run())
        await bench.publish(1, "old")
        await bench.subscriber.role.version.until(lambda version: version >= 2, 5.0, "version 2")
        assert [2] == bench.server.taken
        following.cancel()

    run(test)


@pytest.mark.parametrize("fault", ["gone", "wrong bytes", "back"])
def test_an_explorer_ends_with_weights_that_it_cannot_have(fault: str) -> None:
    async def test(bench: Bench) -> None:
        bench.server.wrong = fault == "wrong bytes"
        bench.server.gone = {"t"} if fault == "gone" else set()
        following = asyncio.ensure_future(bench.subscriber.run())
        await bench.publish(2)
        if fault == "back":
            await bench.subscriber.role.version.until(lambda version: version >= 2, 5.0, "version 2")
            await bench.publish(1)
        with pytest.raises(WeightsError) as caught:
            await following
        codes = {"gone": "weights.transfer", "wrong bytes": "weights.digest", "back": "weights.version"}
        assert codes[fault] == caught.value.code

    run(test)


def test_a_checkpoint_engine_that_keeps_nothing_is_refused() -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(WeightsError) as caught:
            await bench.publish(1, retained=None)
        assert ("weights.transfer", "checkpoint_engine") == (caught.value.code, caught.value.where)

    run(test)
