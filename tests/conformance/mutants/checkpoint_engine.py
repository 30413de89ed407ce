"""Checkpoint engines with one fault each."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch

from jackfield.abc.checkpoint_engine import (
    ConnectRequest,
    PrepareResult,
    Topology,
    TopologyRequest,
)
from jackfield.errors import WeightsError
from mutants.bucket_engine import BucketEngine, BucketsConfig, Meeting, Piece, Weights
from mutants.harness import Mutant, Reference

REFERENCE = Reference(
    cls=BucketEngine,
    config_class=BucketsConfig,
    fixture={"silence_seconds": 0.05},
    capabilities={"delta": "full", "retains_weights": "full"},
)
MUTANTS: dict[str, Mutant] = {}
CHILDREN: list[subprocess.Popen[bytes]] = []  #: what leaky mutants leave, for the tests to end
SHARED: dict[Path, torch.Tensor] = {}


def mutant(*killed_by: str) -> Callable[[type[BucketEngine]], type[BucketEngine]]:
    """Register a class; its docstring is the fault."""

    def register(cls: type[BucketEngine]) -> type[BucketEngine]:
        MUTANTS[cls.__name__] = Mutant(cls=cls, killed_by=killed_by, what=(cls.__doc__ or "").strip())
        return cls

    return register


# -- tensors -----------------------------------------------------------------------------------------------------------


@mutant(
    "CKE-010",
    "CKE-011",
    "CKE-012",
    "CKE-013",
    "CKE-014",
    "CKE-015",
    "CKE-016",
    "CKE-017",
    "CKE-018",
    "CKE-020",
    "CKE-021",
    "CKE-023",
    "CKE-024",
    "CKE-026",
    "CKE-036",
    "CKE-042",
    "CKE-045",
)
class DroppedTensor(BucketEngine):
    """The third tensor is not sent."""

    def drawn(self, weights: Weights) -> Weights:
        for number, pair in enumerate(weights):
            if number != 2:
                yield pair


@mutant(
    "CKE-010",
    "CKE-011",
    "CKE-012",
    "CKE-013",
    "CKE-014",
    "CKE-015",
    "CKE-016",
    "CKE-017",
    "CKE-018",
    "CKE-020",
    "CKE-021",
    "CKE-023",
    "CKE-024",
    "CKE-026",
    "CKE-036",
    "CKE-042",
    "CKE-045",
    "CKE-050",
)
class DoubledTensor(BucketEngine):
    """The third tensor is sent twice."""

    def drawn(self, weights: Weights) -> Weights:
        for number, pair in enumerate(weights):
            yield pair
            if number == 2:
                yield pair


@mutant(
    "CKE-010",
    "CKE-016",
    "CKE-017",
    "CKE-020",
    "CKE-021",
    "CKE-023",
    "CKE-024",
    "CKE-026",
    "CKE-036",
    "CKE-042",
    "CKE-045",
)
class FlippedBit(BucketEngine):
    """A bit flips in every tensor of 40 rows."""

    def raw(self, tensor: torch.Tensor) -> Any:
        data = bytearray(super().raw(tensor))
        if tensor.dim() and tensor.shape[0] == 40:
            data[100] ^= 1
        return bytes(data)


@mutant("CKE-011", "CKE-045")
class HalfAsFloat16(BucketEngine):
    """bfloat16 arrives as float16 of the same bits."""

    def pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        made = super().pieces(name, tensor)
        return [attrs.evolve(piece, dtype=piece.dtype.replace("bfloat16", "float16")) for piece in made]


@mutant("CKE-011")
class NumbersThroughFloat(BucketEngine):
    """int64 passes through float32, and NaN becomes 0."""

    def raw(self, tensor: torch.Tensor) -> Any:
        if tensor.is_floating_point() and tensor.element_size() > 1:
            tensor = tensor.nan_to_num(0.0, float("inf"), float("-inf"))
        return super().raw(tensor)


@mutant("CKE-012")
class ScalarsOfOneDimension(BucketEngine):
    """Scalars arrive with one dimension."""

    def pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        return super().pieces(name, tensor if tensor.dim() else tensor[None])


@mutant("CKE-012")
class EmptyTensorsDropped(BucketEngine):
    """Tensors without elements are not sent."""

    def drawn(self, weights: Weights) -> Weights:
        return (pair for pair in weights if pair[1].numel())


@mutant("CKE-013")
class StridesIgnored(BucketEngine):
    """The memory of a tensor is sent as it lies there."""

    def raw(self, tensor: torch.Tensor) -> Any:
        if tensor.is_contiguous():
            return super().raw(tensor)
        return super().raw(tensor.as_strided((tensor.numel(),), (1,)))


@mutant("CKE-014", "CKE-018")
class TruncatedAtTheBucket(BucketEngine):
    """Of a tensor larger than a bucket of 64 bytes the rest is zeros."""

    def pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        first, *rest = super().pieces(name, tensor)
        if self.config.bucket_bytes == 64:
            rest = [attrs.evolve(piece, data=bytes(len(piece.data))) for piece in rest]
        return [first, *rest]


@mutant("CKE-014", "CKE-017", "CKE-018")
class LastBucketLost(BucketEngine):
    """A last bucket that is not full is not sent, where buckets are large."""

    async def put_last(self, meeting: Meeting, bucket: list[Piece]) -> None:
        if self.config.bucket_bytes < 1 << 20:
            await self.put(meeting, bucket)


@mutant("CKE-015")
class AtMost512Tensors(BucketEngine):
    """What comes after 512 tensors is not sent."""

    def drawn(self, weights: Weights) -> Weights:
        for number, pair in enumerate(weights):
            if number < 512:
                yield pair


@mutant("CKE-016", "CKE-017", "CKE-018", "CKE-020", "CKE-021", "CKE-023", "CKE-032", "CKE-042", "CKE-045", "CKE-050")
class DealtOut(BucketEngine):
    """Of several workers each gets a share of the buckets."""

    async def put(self, meeting: Meeting, bucket: list[Piece]) -> None:
        self.turn = getattr(self, "turn", 0) + 1
        if meeting.channels:
            meeting.channels[self.turn % len(meeting.channels)].buckets.append(bucket)
        meeting.notify()
        await self.until_workers(meeting, lambda channel: len(channel.buckets) <= 1)


@mutant(
    "CKE-010",
    "CKE-013",
    "CKE-014",
    "CKE-015",
    "CKE-016",
    "CKE-017",
    "CKE-018",
    "CKE-020",
    "CKE-021",
    "CKE-023",
    "CKE-024",
    "CKE-026",
    "CKE-036",
    "CKE-042",
    "CKE-045",
)
class OneBuffer(BucketEngine):
    """All buckets are written to one buffer, while a worker may still read it."""

    async def put(self, meeting: Meeting, bucket: list[Piece]) -> None:
        buffer = self.__dict__.setdefault("buffer", bytearray(1 << 20))
        placed, start = [], 0
        for piece in bucket:
            end = start + len(piece.data)
            buffer[start:end] = piece.data
            placed.append(attrs.evolve(piece, data=memoryview(buffer)[start:end]))
            start = end
        await super().put(meeting, placed)

    def joined(self, held: list[Piece]) -> Any:
        return held[0].data if len(held) == 1 else super().joined(held)


@mutant("CKE-018")
class MemoryOfTheGenerator(BucketEngine):
    """A bucket refers to the memory of the tensors until it is full."""

    def raw(self, tensor: torch.Tensor) -> Any:
        if not tensor.numel() or not tensor.is_contiguous():
            return super().raw(tensor)
        return memoryview(tensor.flatten().view(torch.uint8).numpy().data)


# -- order of calls ----------------------------------------------------------------------------------------------------


@mutant("CKE-020", "CKE-036", "CKE-042", "CKE-045")
class StaleValues(BucketEngine):
    """A name that was sent before is sent with its old values again."""

    def drawn(self, weights: Weights) -> Weights:
        cache = self.__dict__.setdefault("cache", {})
        for name, tensor in weights:
            yield name, cache.setdefault(name, tensor.clone())


@mutant("CKE-021")
class WorkersRemembered(BucketEngine):
    """The number of workers is that of the first transfer."""

    async def connect(self, request: ConnectRequest) -> None:
        if self.context.end == "sender" and self.context.rank == 0:
            count = self.__dict__.setdefault("count", request.arguments["workers"])
            request = attrs.evolve(request, arguments={**request.arguments, "workers": count})
        await super().connect(request)


@mutant("CKE-022", "CKE-045")
class EmptyTransferRefused(BucketEngine):
    """A transfer without tensors raises."""

    async def send(self, meeting: Meeting, weights: Weights) -> None:
        first = next(weights, None)
        if first is None:
            raise WeightsError("there is nothing to send")
        await super().send(meeting, (pair for pair in itertools.chain([first], weights)))


@mutant("CKE-023")
class OtherRanksDrawNothing(BucketEngine):
    """A rank that does not send draws nothing from its generator."""

    def exhaust(self, weights: Weights) -> None:
        return


@mutant("CKE-024")
class OneMeeting(BucketEngine):
    """All transfers of a process meet at one place."""

    def meet(self, name: str) -> Meeting:
        return super().meet("the meeting")


@mutant("CKE-025")
class AnyVersion(BucketEngine):
    """A worker takes weights of another version than it was told."""

    def check_version(self, meeting: Meeting) -> None:
        return


@mutant("CKE-026")
class FinalizeOnce(BucketEngine):
    """A second finalize raises."""

    async def prepare(self) -> PrepareResult:
        self.finalized = False
        return await super().prepare()

    async def finalize(self) -> None:
        if self.context.end == "sender" and self.__dict__.get("finalized"):
            raise RuntimeError("finalized already")
        self.finalized = True
        await super().finalize()


# -- failures ----------------------------------------------------------------------------------------------------------


@mutant("CKE-030")
class SwallowedException(BucketEngine):
    """When the generator raises, the transfer ends as if all had been sent."""

    def drawn(self, weights: Weights) -> Weights:
        try:
            yield from weights
        except Exception:
            return


@mutant("CKE-030")
class BreakNotTold(BucketEngine):
    """When the sender breaks off, receivers end as if all had come."""

    def sender_gone(self, meeting: Meeting) -> None:
        if "failed" in str(meeting.over):
            meeting.complete = True
            return
        super().sender_gone(meeting)


@mutant("CKE-031")
class LeaverIgnored(BucketEngine):
    """A worker that leaves half-way is taken off the list, and the transfer ends well."""

    def leave(self) -> None:
        if self.channel is not None and self.meeting is not None and not self.channel.taken:
            self.channel.taken = True
            self.channel.buckets = _Sink()
        super().leave()


class _Sink(list):  # type: ignore[type-arg]
    """Takes everything."""

    def append(self, _: Any) -> None:
        return


@mutant("CKE-031", "CKE-032", "CKE-033")
class LeaverUnseen(BucketEngine):
    """A worker that leaves half-way says nothing, and the sender waits for it without a deadline."""

    async def send(self, meeting: Meeting, weights: Weights) -> None:
        self.deadline += 1e6
        await super().send(meeting, weights)

    def leave(self) -> None:
        if self.channel is not None:
            self.meeting = self.channel = None
        super().leave()


@mutant("CKE-032", "CKE-033")
class WaitsForever(BucketEngine):
    """The sender waits for its workers without a deadline."""

    async def send(self, meeting: Meeting, weights: Weights) -> None:
        self.deadline += 1e6
        await super().send(meeting, weights)


@mutant("CKE-032", "CKE-033")
class NobodyNamed(BucketEngine):
    """The sender does not say for whom it waited."""

    def names(self, workers: list[int]) -> str:
        return "a worker"


@mutant("CKE-034")
class ReceiverWaitsForever(BucketEngine):
    """A worker waits for its sender without a deadline."""

    async def until_sender(self, meeting: Meeting, ready: Callable[[], bool]) -> None:
        self.deadline += 1e6
        await super().until_sender(meeting, ready)


@mutant("CKE-035")
class SenderGoesUnseen(BucketEngine):
    """A sender that goes leaves its workers to believe that all has come."""

    def end(self, meeting: Meeting) -> None:
        super().end(meeting)
        if meeting.over == "the sender left":
            meeting.over, meeting.complete, meeting.version = None, True, meeting.version or 1


@mutant("CKE-036")
class StuckAfterFailure(BucketEngine):
    """After a transfer that broke off the engine refuses the next one."""

    def broken(self, meeting: Meeting, error: BaseException) -> None:
        super().broken(meeting, error)
        self.failed = True

    async def prepare(self) -> PrepareResult:
        if self.__dict__.get("failed"):
            raise WeightsError("an earlier transfer broke off")
        return await super().prepare()


# -- topology ----------------------------------------------------------------------------------------------------------


@mutant("CKE-040")
class BytesInTheMetadata(BucketEngine):
    """The metadata holds bytes."""

    async def prepare(self) -> PrepareResult:
        prepared = await super().prepare()
        return attrs.evolve(prepared, metadata={**prepared.metadata, "key": b"\x00"})


@mutant("CKE-040")
class TuplesInTheTopology(BucketEngine):
    """The topology holds tuples, which JSON makes lists of."""

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        made = super().build_topology(request)
        return attrs.evolve(made, rollout=tuple({**share, "range": (0, 1)} for share in made.rollout))


@mutant("CKE-023", "CKE-041")
class OneShareForAllRanks(BucketEngine):
    """The topology has one share for the trainer, whatever its number of ranks."""

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        made = super().build_topology(request)
        return attrs.evolve(made, trainer=made.trainer[:1])


# -- who comes late ----------------------------------------------------------------------------------------------------


@mutant("CKE-046")
class TellsNobodyWhoIsLate(BucketEngine):
    """The topology has nothing for those who come late."""

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        return attrs.evolve(super().build_topology(request), retained=None)


@mutant("CKE-046")
class ShowsTheFirstVersionToTheLate(BucketEngine):
    """Who comes late gets what was sent first."""

    first: ClassVar[list[tuple[str, torch.Tensor]]] = []

    def late(self, name: str) -> list[tuple[str, torch.Tensor]]:
        self.first.extend(() if self.first else super().late(name))
        return self.first


# -- deltas ------------------------------------------------------------------------------------------------------------


@mutant("CKE-045")
class KnowsTheTensorsOfTheFirstTransfer(BucketEngine):
    """What was not among the tensors of the first transfer is not sent."""

    known: frozenset[str] = frozenset()

    def drawn(self, weights: Weights) -> Weights:
        seen = set()
        for name, tensor in weights:
            seen.add(name)
            if not self.known or name in self.known:
                yield name, tensor
        self.known = self.known or frozenset(seen)


# -- what is left ------------------------------------------------------------------------------------------------------


class _Leaking(BucketEngine):
    async def prepare(self) -> PrepareResult:
        if self.context.rank == 0:
            self.leak()
        return await super().prepare()

    def leak(self) -> None:
        raise NotImplementedError


@mutant("CKE-050", "CKE-051")
class LeakedTask(BucketEngine):
    """A task goes on after the transfer."""

    async def connect(self, request: ConnectRequest) -> None:
        await super().connect(request)
        self.task = asyncio.ensure_future(asyncio.sleep(30.0))


@mutant("CKE-050", "CKE-051")
class LeakedThread(_Leaking):
    """A thread goes on after the transfer."""

    def leak(self) -> None:
        threading.Thread(target=threading.Event().wait, args=(5.0,), daemon=True).start()


@mutant("CKE-050", "CKE-051")
class LeakedProcess(_Leaking):
    """A process goes on after the transfer."""

    def leak(self) -> None:
        CHILDREN.append(subprocess.Popen(["sleep", "20"]))


@mutant("CKE-050", "CKE-051")
class LeakedSocket(_Leaking):
    """A socket stays open."""

    kept: list[socket.socket] = []  # noqa: RUF012

    def leak(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.kept.append(listener)


@mutant("CKE-050", "CKE-051")
class LeakedSharedMemory(_Leaking):
    """Shared memory is not unlinked."""

    def leak(self) -> None:
        path = Path("/dev/shm") / f"jackfield-mutant-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        SHARED[path] = torch.from_file(str(path), shared=True, size=1)  # mapped, as leaked memory is


@mutant("CKE-051")
class LeakAfterFailure(BucketEngine):
    """When a transfer breaks off, its thread is not ended."""

    def broken(self, meeting: Meeting, error: BaseException) -> None:
        threading.Thread(target=threading.Event().wait, args=(5.0,), daemon=True).start()
        super().broken(meeting, error)
