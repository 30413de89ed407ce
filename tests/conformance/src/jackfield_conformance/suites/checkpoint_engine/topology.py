"""Checks of checkpoint engines: tensors, the topology, a weight sync, deltas, late workers."""

from __future__ import annotations

import asyncio
import itertools
import json

import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, Topology, TopologyRequest
from jackfield.abc.rollout import ServerInfo, UpdateWeightsRequest, WeightReceipt, WorkerReceipt
from jackfield.clock import Clock
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import HeldWeights
from jackfield.weights import Replica, WeightSender, WeightSynchronizer
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support import checkpoint_engine as support

_TENSORS = "docs/plugins/checkpoint_engine.md#tensors"


async def _arrive(subject: Subject, tensors: dict[str, torch.Tensor], workers: int = 1) -> None:
    async with support.ends(subject, workers) as made:
        for worker, found in enumerate(await made.sync(tensors)):
            support.assert_received(tensors, found, f"worker {worker}")


@check("CKE-010", page=_TENSORS)
async def every_tensor_arrives_once(subject: Subject) -> None:
    """Every tensor arrives exactly once and bit-exact."""
    await _arrive(subject, support.numbers())


@check("CKE-011", page=_TENSORS)
async def every_dtype_arrives(subject: Subject) -> None:
    """Tensors of every dtype arrive bit-exact, including NaN, infinities and negative zeros."""
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.5, -3.25])
    tensors = {str(dtype): special.to(dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
    whole = torch.tensor([0, 1, 2, 100, 127])
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        tensors[str(dtype)] = whole.to(dtype)
    tensors["torch.bool"] = torch.tensor([True, False, True])
    for name in ("float8_e4m3fn", "float8_e5m2"):
        tensors[name] = torch.arange(8, dtype=torch.uint8).view(getattr(torch, name))
    await _arrive(subject, tensors)


@check("CKE-012", page=_TENSORS)
async def every_shape_arrives(subject: Subject) -> None:
    """Scalars, empty tensors and tensors of many dimensions arrive with their shapes."""
    shapes: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0, 2), (1,), (1, 1, 1), (2, 3, 4, 5), (7,))
    await _arrive(subject, {f"shape {list(shape)}": torch.full(shape, 1.5) for shape in shapes})


@check("CKE-013", page=_TENSORS)
async def strided_tensors_arrive(subject: Subject) -> None:
    """Tensors that are not contiguous arrive with their logical values."""
    base = torch.arange(60, dtype=torch.float32).view(6, 10)
    tensors = {
        "transposed": base.T,
        "every second column": base[:, ::2],
        "a part from the middle": base[2:4, 3:7],
        "permuted": base.view(2, 3, 10).permute(2, 0, 1),
    }
    await _arrive(subject, tensors)


@check("CKE-014", page=_TENSORS)
async def any_bucket_size_will_do(subject: Subject) -> None:
    """Every tensor arrives whatever the bucket size, including tensors larger than a bucket."""
    generator = torch.Generator().manual_seed(3)
    tensors = {f"{size}": torch.randn(size, generator=generator) for size in (1, 16, 17, 15, 250, 3, 251, 5000, 1, 2)}
    for settings in support.bucket_settings(subject):
        async with support.ends(subject, **settings) as made:
            (found,) = await made.sync(tensors)
        support.assert_received(tensors, found, f"with {settings or 'the plugin as it is'}")


@check("CKE-015", page=_TENSORS)
async def many_tiny_tensors_arrive(subject: Subject) -> None:
    """Many tiny tensors arrive, such as those of an adapter or of a model with many layers."""
    await _arrive(subject, {f"layer.{index}.lora_A.weight": torch.full((2,), float(index)) for index in range(700)})


@check("CKE-016", page=_TENSORS)
async def every_worker_gets_everything(subject: Subject) -> None:
    """Each of several workers gets every tensor."""
    await _arrive(subject, support.numbers(), workers=3)


@check("CKE-017", page=_TENSORS)
async def a_tensor_is_valid_until_the_next_is_drawn(subject: Subject) -> None:
    """A received tensor keeps its values until the next one is drawn, however slow its receiver is."""
    tensors = support.numbers(8)

    async def dawdle(name: str) -> None:
        for _ in range(30):
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)

    settings = support.bucket_settings(subject)
    for each in (settings[0], settings[-1]):
        async with support.ends(subject, workers=2, **each) as made:
            for found in await made.sync(tensors, meanwhile=dawdle):
                support.assert_received(tensors, found, "at a slow receiver")


@check("CKE-018", page=_TENSORS)
async def the_sender_does_not_count_on_memory_of_the_generator(subject: Subject) -> None:
    """A tensor whose memory is overwritten once the next but one is drawn arrives with its original values."""
    wanted = {f"step {index}": torch.full((6, 5), float(index)) for index in range(12)}
    buffers = torch.empty(2, 6, 5)

    def reused() -> support.Weights:
        for (name, tensor), buffer in zip(wanted.items(), itertools.cycle(buffers)):
            yield name, buffer.copy_(tensor)

    for settings in support.bucket_settings(subject):
        async with support.ends(subject, workers=2, **settings) as made:
            await made.prepare()
            found = await made.together(made.send(reused()), made.receive_all())
        for each in found:
            support.assert_received(wanted, each, "from memory that is used again")


_TOPOLOGY = "docs/plugins/checkpoint_engine.md#topology"
_DELTAS = "docs/plugins/checkpoint_engine.md#deltas"


@check("CKE-040", page=_TOPOLOGY)
async def metadata_and_topology_are_plain(subject: Subject) -> None:
    """Metadata and topology are plain values that survive a round trip through JSON."""
    async with support.ends(subject, workers=2) as made:
        made.prepared = True
        prepared = await made.senders[0].prepare()
        request = TopologyRequest(trainer_metadata=(prepared.metadata,), rollout_workers=2)
        topology = made.cls.build_topology(request)
        for what, value in (("metadata", prepared.metadata), ("topology", [*topology.trainer, *topology.rollout])):
            try:
                back = json.loads(json.dumps(value, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise AssertionError(f"the {what} does not fit into JSON: {error}; it is {value!r}") from error
            assert back == value, f"the {what} comes back from JSON as {back!r}, it was {value!r}"


@check("CKE-041", page=_TOPOLOGY)
async def the_topology_counts_ranks_and_workers(subject: Subject) -> None:
    """The topology has one share per trainer rank and one per inference worker."""
    for ranks, workers in ((1, 1), (2, 3), (1, 5)):
        async with support.ends(subject, workers, ranks) as made:
            topology: Topology = await made.prepare()
        found = (len(topology.trainer), len(topology.rollout))
        assert found == (ranks, workers), f"shares for {found}, expected {ranks} ranks and {workers} workers"


class _Worker:
    """A rollout server with two workers that can only update weights."""

    def __init__(self, subject: Subject, replica: int) -> None:
        self._subject = subject
        self._replica = replica

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        async def load(worker: int) -> WorkerReceipt:
            rank, seconds = 2 * self._replica + worker, support.PATIENCE_SECONDS
            context = CheckpointEngineContext(end="receiver", rank=rank, world_size=4, deadline_seconds=seconds)
            found = await support.receive(self._subject.make(context), request.connect[worker], request.version)
            return WorkerReceipt(worker=worker, digests={name: digest(tensor) for name, tensor in found.items()})

        done = tuple(await asyncio.gather(*map(load, range(len(request.connect)))))
        return WeightReceipt(version=request.version, replica=self._replica, workers=done)


@check("CKE-042", page=_TOPOLOGY)
async def a_synchronisation_is_proved(subject: Subject) -> None:
    """The core's synchroniser brings two versions to two replicas of two workers, with receipts that prove them."""
    version = 0
    replicas = [Replica(_Worker(subject, number), ServerInfo(replica=number, workers=2)) for number in (0, 1)]  # type: ignore[arg-type]
    async with support.ends(subject, workers=0) as made:
        sender = WeightSender(made.trainers[0], lambda: (support.source(support.numbers(seed=version)), None))
        seconds = support.PATIENCE_SECONDS
        coordinator = WeightSynchronizer([sender], replicas, subject.name, Clock(), deadline_seconds=seconds)
        for version in (1, 2):
            report = await coordinator.sync(version)
            wanted = {name: digest(tensor) for name, tensor in support.numbers(seed=version).items()}
            for receipt in report.receipts:
                for worker in receipt.workers:
                    assert worker.digests == wanted, f"worker {worker.worker} has loaded other values of {version}"


@check("CKE-045", capability="delta", page=_DELTAS)
async def deltas_arrive(subject: Subject) -> None:
    """Deltas bring workers from version to version bit for bit, also to a version without a change."""
    tensors = {**support.numbers(), "half": torch.zeros(2000, dtype=torch.bfloat16)}
    held = [HeldWeights(), HeldWeights()]
    async with support.ends(subject, workers=2) as made:
        made.senders = [WeightSender(engine, block_bytes=64) for engine in made.trainers]
        for version in range(1, 5):
            if version == 2:
                tensors["half"][::700] = 1.5  # three blocks, the last one of them short
                tensors["layer.1.weight"][3, 3] += 1
            if version == 4:
                tensors["layer.2.weight"] = tensors["layer.2.weight"] + 1
            found = await made.sync_delta(tensors, held, version)
            wanted = {name: digest(tensor) for name, tensor in tensors.items()}
            for worker, digests in enumerate(found):
                wrong = sorted(name for name in wanted if digests.get(name) != wanted[name])
                assert not wrong, f"worker {worker} holds other values of {wrong[:4]} after version {version}"


@check("CKE-046", capability="retains_weights", page=_TOPOLOGY)
async def who_comes_late_gets_the_newest(subject: Subject) -> None:
    """A worker that connects after a transfer gets every tensor, even if the transfer had no worker."""
    async with support.ends(subject, workers=0) as made, support.ends(subject, workers=2) as late:
        for version in (1, 2):
            tensors, topology = support.numbers(seed=version), await made.prepare()
            assert topology.retained is not None, "the topology has no connect arguments for late workers"
            await made.send(tensors, version=version)
            await made.finalize()
            for number, worker in enumerate(late.workers):
                found = await support.receive(worker, topology.retained, version)
                support.assert_received(tensors, found, f"worker {number}, late for version {version}")
