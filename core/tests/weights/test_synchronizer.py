"""A synchronisation proves what every worker serves; every fault is found, named and bounded in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing
from typing import Any

import attrs
import pytest

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.rollout import ServerInfo, UpdateWeightsRequest, WeightReceipt, WorkerReceipt
from jackfield.errors import WeightsError
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import WeightReceiver
from jackfield.weights import Replica, WeightSender, WeightsSynced, WeightSynchronizer, in_process, run_together
from jackfield.weights.in_process import InProcessCheckpointEngine, InProcessConfig
from jackfield_testing import refused
from jackfield_virtual_clock import VirtualClock

torch = pytest.importorskip("torch")

Receive = AsyncGenerator[tuple[str, Any], None]


def model() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{index}.weight": torch.randn(4, 3, generator=generator) for index in range(6)}


class Transport(InProcessCheckpointEngine):
    """The in-process engine with a fault between sender and receiver."""

    fault: Callable[[Receive], Receive] = staticmethod(lambda stream: stream)

    async def receive_weights(self) -> Receive:
        async with aclosing(super().receive_weights()) as stream:
            async for item in self.fault(stream):
                yield item


async def dropped(stream: Receive) -> Receive:
    async for name, tensor in stream:
        if name != "layer.2.weight":
            yield name, tensor


async def doubled(stream: Receive) -> Receive:
    async for name, tensor in stream:
        yield name, tensor
        if name == "layer.2.weight":
            yield name, tensor


async def corrupted(stream: Receive) -> Receive:
    async for name, tensor in stream:
        if name == "layer.2.weight":
            tensor = tensor.clone()
            tensor.view(torch.uint8)[1, 2] ^= 1
        yield name, tensor


async def renamed(stream: Receive) -> Receive:
    async for name, tensor in stream:
        yield name.replace("layer.2", "layer.9"), tensor


@attrs.define(eq=False)
class FakeReplica:
    """Loads what it receives, in each of its workers, and acknowledges the bytes that it holds then."""

    number: int
    workers: int = 1
    faults: Mapping[int, Callable[[Receive], Receive]] = attrs.field(factory=dict)  # by worker
    edit: Callable[[WeightReceipt], WeightReceipt] = lambda receipt: receipt
    before: Callable[[], Any] | None = None
    stubborn: float = 0.0  # seconds for which it ignores a cancellation
    loaded: dict[int, dict[str, Any]] = attrs.field(factory=dict)
    requests: list[UpdateWeightsRequest] = attrs.field(factory=list)
    cancelled: bool = False

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        self.requests.append(request)
        try:
            if self.before is not None:
                await self.before()
            receipts = await asyncio.gather(*(self.load(worker, request) for worker in range(self.workers)))
        except asyncio.CancelledError:
            self.cancelled = True
            await asyncio.sleep(self.stubborn)
            raise
        receipt = WeightReceipt(
            version=request.version, replica=self.number, workers=tuple(receipts), paused_seconds=self.number / 10
        )
        return self.edit(receipt)

    async def load(self, worker: int, request: UpdateWeightsRequest) -> WorkerReceipt:
        assert "in_process" == request.checkpoint_engine
        config = InProcessConfig(**request.checkpoint_engine_config)
        engine = Transport(config, CheckpointEngineContext(end="receiver", rank=worker))
        engine.fault = self.faults.get(worker, lambda stream: stream)
        loaded: dict[str, Any] = {}
        async with aclosing(WeightReceiver(engine).tensors(request.connect[worker], request.version)) as stream:
            async for name, tensor in stream:
                loaded[name] = tensor.clone()
        self.loaded[worker] = loaded
        return WorkerReceipt(worker=worker, digests={name: digest(tensor) for name, tensor in loaded.items()})

    def started(self) -> Replica:
        return Replica(self, ServerInfo(replica=self.number, workers=self.workers))  # type: ignore[arg-type]


@attrs.define(eq=False)
class FakeTrainer:
    """A training engine's weights."""

    tensors: dict[str, Any] = attrs.field(factory=model)
    peft_config: dict[str, Any] | None = None
    breaks_after: int | None = None
    open_generators: int = 0

    def get_per_tensor_param(self) -> tuple[Generator[tuple[str, Any], None, None], dict[str, Any] | None]:
        return self.export(), self.peft_config

    def export(self) -> Generator[tuple[str, Any], None, None]:
        self.open_generators += 1
        try:
            for index, item in enumerate(self.tensors.items()):
                if index == self.breaks_after:
                    raise RuntimeError("an engine rank died")
                yield item
        finally:
            self.open_generators -= 1


def synchronizer(
    clock: VirtualClock, trainer: FakeTrainer, *replicas: FakeReplica, settings: dict[str, Any] | None = None
) -> WeightSynchronizer:
    engine = InProcessCheckpointEngine(InProcessConfig(), CheckpointEngineContext(end="sender"))
    return WeightSynchronizer(
        senders=[WeightSender(engine, trainer.get_per_tensor_param)],
        replicas=[replica.started() for replica in replicas],
        name="in_process",
        clock=clock,
        settings=settings or {},
        deadline_seconds=30.0,
    )


def sync(trainer: FakeTrainer, *replicas: FakeReplica, version: int = 1) -> WeightsSynced:
    clock = VirtualClock()

    async def main() -> WeightsSynced:
        tasks = asyncio.all_tasks()
        try:
            return await synchronizer(clock, trainer, *replicas).sync(version)
        finally:
            assert tasks == asyncio.all_tasks(), "a side was left running"
            assert {} == in_process._SESSIONS
            assert 0 == trainer.open_generators

    return clock.run(main())


def refused_sync(trainer: FakeTrainer, *replicas: FakeReplica) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        sync(trainer, *replicas)
    return caught.value


def test_every_worker_of_every_replica_gets_the_weights_and_proves_it() -> None:
    trainer, replicas = FakeTrainer(), [FakeReplica(0, workers=2), FakeReplica(1), FakeReplica(2, workers=3)]
    report = sync(trainer, *replicas)
    assert (1, [(0, 0.0), (1, 0.1), (2, 0.2)], 6 * 48) == (
        report.version,
        [(receipt.replica, receipt.paused_seconds) for receipt in report.receipts],
        report.sent_bytes,
    )
    for replica in replicas:
        assert set(range(replica.workers)) == set(replica.loaded)
        for loaded in replica.loaded.values():
            assert all(torch.equal(tensor, loaded[name]) for name, tensor in trainer.tensors.items())
        (request,) = replica.requests
        assert ("full", None, replica.workers, 30.0) == (
            request.kind,
            request.peft_config,
            len(request.connect),
            request.deadline_seconds,
        )
    numbers = [place["worker"] for replica in replicas for place in replica.requests[0].connect]
    assert list(range(6)) == numbers


def test_an_adapter_is_announced_as_one() -> None:
    replica = FakeReplica(0)
    sync(FakeTrainer(peft_config={"r": 8}), replica)
    assert ("adapter", {"r": 8}) == (replica.requests[0].kind, replica.requests[0].peft_config)


def test_versions_only_go_up_and_a_failed_one_may_be_repeated() -> None:
    clock, trainer, replica = VirtualClock(), FakeTrainer(), FakeReplica(0)

    async def main() -> None:
        weights = synchronizer(clock, trainer, replica, settings={"bucket_bytes": 64})
        await weights.sync(3)
        for stale in (3, 2):
            with pytest.raises(WeightsError) as caught:
                await weights.sync(stale)
            assert "weights.version" == caught.value.code
        trainer.breaks_after = 2
        with pytest.raises(WeightsError):
            await weights.sync(4)
        assert 3 == weights.version
        trainer.breaks_after = None
        await weights.sync(4)
        assert 4 == weights.version
        assert {"bucket_bytes": 64} == replica.requests[-1].checkpoint_engine_config

    clock.run(main())


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (dropped, "weights.missing", "not loaded: layer.2.weight"),
        (doubled, "weights.missing", "tensor 'layer.2.weight' arrived twice"),
        (corrupted, "weights.digest", "other bytes than were sent: layer.2.weight"),
        (renamed, "weights.missing", "not loaded: layer.2.weight; never sent: layer.9.weight"),
    ],
)
def test_a_tensor_that_is_dropped_doubled_or_corrupted_on_the_way_is_found(fault: Any, code: str, words: str) -> None:
    error = refused_sync(FakeTrainer(), FakeReplica(0), FakeReplica(1, workers=2, faults={1: fault}))
    assert code == error.code
    assert words in error.message
    assert "replica 1" in str(error)
    if fault is not doubled:
        assert "replica 1, worker 1" in str(error)


@pytest.mark.parametrize(
    ("edit", "code", "words"),
    [
        (lambda receipt: attrs.evolve(receipt, version=0), "weights.version", "acknowledges another version"),
        (lambda receipt: attrs.evolve(receipt, workers=receipt.workers[:1]), "weights.missing", "does not cover"),
        (lambda receipt: attrs.evolve(receipt, replica=0), "weights.missing", "does not cover"),
        (lambda receipt: attrs.evolve(receipt, workers=(receipt.workers[0],) * 2), "weights.missing", "not cover"),
    ],
    ids=["stale version", "worker missing", "another replica's", "one worker twice"],
)
def test_a_receipt_that_proves_too_little_is_refused(edit: Any, code: str, words: str) -> None:
    error = refused_sync(FakeTrainer(), FakeReplica(0), FakeReplica(1, workers=2, edit=edit))
    assert code == error.code
    assert words in error.message
    assert "replica 1" in error.message


def test_a_replica_that_raises_is_named_and_ends_all_others() -> None:
    async def dies() -> None:
        raise ConnectionError("the replica was killed")

    waiting = FakeReplica(0, before=lambda: asyncio.sleep(20))
    error = refused_sync(FakeTrainer(), waiting, FakeReplica(1, before=dies))
    assert "weights.transfer" == error.code
    assert "replica 1 failed while weight version 1 was synchronised" in error.message
    assert "the replica was killed" in error.message
    assert isinstance(error.__cause__, ConnectionError)
    assert waiting.cancelled


def test_a_transfer_that_breaks_off_is_repeated_once() -> None:
    """As where a connection is cut: every end makes the whole transfer again, and all of them get the weights."""
    breaks = [True]

    async def once() -> None:
        if breaks:
            raise ConnectionError(breaks.pop())

    replicas = FakeReplica(0), FakeReplica(1, before=once)
    assert 2 == len(sync(FakeTrainer(), *replicas).receipts)
    assert [2, 2] == [len(replica.requests) for replica in replicas]


def test_an_engine_that_dies_while_it_sends_is_named() -> None:
    replica = FakeReplica(0)
    error = refused_sync(FakeTrainer(breaks_after=3), replica)
    assert ("weights.transfer", "sender 0") == (error.code, error.where)
    assert "an engine rank died" in error.message
    assert {} == replica.loaded


def test_a_replica_that_does_not_come_is_named_at_the_deadline() -> None:
    late = FakeReplica(1, before=lambda: asyncio.sleep(1000))
    with refused("deadline", "version 1", "sender 0", "replica 0", "replica 1"):
        sync(FakeTrainer(), FakeReplica(0), late)
    assert late.cancelled


def test_a_side_that_cannot_be_cancelled_is_named_and_not_waited_for() -> None:
    clock = VirtualClock()
    stuck = FakeReplica(0, before=lambda: asyncio.sleep(1000), stubborn=500.0)

    async def main() -> None:
        with refused("deadline", "sender 0", "replica 0"):
            await synchronizer(clock, FakeTrainer(), stuck).sync(1)
        assert 40 == clock.time()
        await asyncio.sleep(600)

    clock.run(main())


def test_a_cancelled_sync_leaves_nothing_running() -> None:
    clock, trainer = VirtualClock(), FakeTrainer()
    replica = FakeReplica(0, before=lambda: asyncio.sleep(1000))

    async def main() -> None:
        syncing = asyncio.ensure_future(synchronizer(clock, trainer, replica).sync(1))
        await asyncio.sleep(1)
        syncing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await syncing
        assert replica.cancelled
        assert {} == in_process._SESSIONS
        assert 1 == len(asyncio.all_tasks())

    clock.run(main())


def test_the_end_that_broke_a_transfer_off_is_named_and_not_one_that_notices_it_first() -> None:
    async def raising(error: WeightsError, seconds: float) -> None:
        await asyncio.sleep(seconds)
        raise error

    async def main() -> None:
        for seconds in (0.0, 0.5):
            ends = {
                "sender 0": raising(WeightsError("the receiver left"), 0.0),
                "replica 0": raising(WeightsError("no such tensor", code="weights.missing"), seconds),
                "replica 1": asyncio.sleep(10),
            }
            with pytest.raises(WeightsError) as caught:
                await run_together(ends, VirtualClock(), 20.0, "weights")
            assert ("weights.missing", "replica 0") == (caught.value.code, caught.value.where)

    VirtualClock().run(main())
