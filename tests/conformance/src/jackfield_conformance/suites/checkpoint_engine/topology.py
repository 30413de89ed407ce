"""Checks of checkpoint engines: the topology, a synchronisation, deltas, and workers that come late."""

from __future__ import annotations

import asyncio
import json

import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, Topology, TopologyRequest
from jackfield.abc.rollout import ServerInfo, UpdateWeightsRequest, WeightReceipt, WorkerReceipt
from jackfield.clock import Clock
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import HeldWeights
from jackfield.weights import Replica, WeightSender, WeightSynchronizer
from jackfield_conformance.registry import check
from jackfield_conformance.subject import Subject
from jackfield_conformance.support import checkpoint_engine as support

_TOPOLOGY = "docs/plugins/checkpoint_engine.md#topology"
_DELTAS = "docs/plugins/checkpoint_engine.md#deltas"


@check("CKE-040", page=_TOPOLOGY)
async def metadata_and_topology_are_plain(subject: Subject) -> None:
    """Metadata and topology are plain values that come back from JSON as they were."""
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
    """A rollout server of two workers, as far as a synchronisation needs one."""

    def __init__(self, subject: Subject, replica: int) -> None:
        self._subject = subject
        self._replica = replica

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        receipts = []
        for worker, arguments in enumerate(request.connect):
            context = CheckpointEngineContext(
                end="receiver",
                rank=2 * self._replica + worker,
                world_size=4,
                deadline_seconds=support.PATIENCE_SECONDS,
            )
            receipts.append(self._load(worker, self._subject.make(context), arguments, request.version))
        done = tuple(await asyncio.gather(*receipts))
        return WeightReceipt(version=request.version, replica=self._replica, workers=done)

    @staticmethod
    async def _load(worker: int, engine: object, arguments: object, version: int) -> WorkerReceipt:
        found = await support.receive(engine, arguments, version)  # type: ignore[arg-type]
        return WorkerReceipt(worker=worker, digests={name: digest(tensor) for name, tensor in found.items()})


@check("CKE-042", page=_TOPOLOGY)
async def a_synchronisation_is_proved(subject: Subject) -> None:
    """The core's coordinator brings two versions to two replicas of two workers, with receipts that prove them."""
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
    """Changed blocks bring workers from version to version, bit for bit; a version without a change, too."""
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
            found = await support.sync_delta(made, tensors, held, version)
            wanted = {name: digest(tensor) for name, tensor in tensors.items()}
            for worker, digests in enumerate(found):
                wrong = sorted(name for name in wanted if digests.get(name) != wanted[name])
                assert not wrong, f"worker {worker} holds other values of {wrong[:4]} after version {version}"


@check("CKE-046", capability="retains_weights", page=_TOPOLOGY)
async def who_comes_late_gets_the_newest(subject: Subject) -> None:
    """A worker that comes late gets every tensor when the transfer is over, be it one without any worker."""
    async with support.ends(subject, workers=0) as made, support.ends(subject, workers=2) as late:
        for version in (1, 2):
            tensors, topology = support.numbers(seed=version), await made.prepare()
            assert topology.retained is not None, "the topology has no connect arguments for those who come late"
            await support.send(made, topology, [support.source(tensors) for _ in made.senders], version)
            await made.finalize()
            for number, worker in enumerate(late.workers):
                found = await support.receive(worker, topology.retained, version)
                support.assert_received(tensors, found, f"worker {number}, late for version {version}")
