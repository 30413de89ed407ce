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
from functools import partial
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
from mutants import harness
from mutants.bucket_engine import BucketEngine, BucketsConfig, Meeting, Piece, Weights
from mutants.harness import Reference

REFERENCE = Reference(
    cls=BucketEngine,
    config_class=BucketsConfig,
    fixture={"silence_seconds": 0.05},
    capabilities={"delta": "full", "retains_weights": "full"},
)
CHILDREN: list[subprocess.Popen[bytes]] = []  #: what leaky mutants leave, for the tests to end
SHARED: dict[Path, torch.Tensor] = {}

mutant = partial(harness.mutant, "checkpoint_engine")

#: The checks that fail when a plain transfer of several tensors fails.
_MOST = "010 011 012 013 014 015 016 017 018 020 021 023 024 026 036 042 045"


class DroppedTensor(BucketEngine):
    def drawn(self, weights: Weights) -> Weights:
        for number, pair in enumerate(weights):
            if number != 2:
                yield pair


class DoubledTensor(BucketEngine):
    def drawn(self, weights: Weights) -> Weights:
        for number, pair in enumerate(weights):
            yield pair
            if number == 2:
                yield pair


class FlippedBit(BucketEngine):
    def raw(self, tensor: torch.Tensor) -> Any:
        data = bytearray(super().raw(tensor))
        if tensor.dim() and tensor.shape[0] == 40:
            data[100] ^= 1
        return bytes(data)


class HalfAsFloat16(BucketEngine):
    def pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        made = super().pieces(name, tensor)
        return [attrs.evolve(piece, dtype=piece.dtype.replace("bfloat16", "float16")) for piece in made]


class NumbersThroughFloat(BucketEngine):
    def raw(self, tensor: torch.Tensor) -> Any:
        if tensor.is_floating_point() and tensor.element_size() > 1:
            tensor = tensor.nan_to_num(0.0, float("inf"), float("-inf"))
        return super().raw(tensor)


class ScalarsOfOneDimension(BucketEngine):
    def pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        return super().pieces(name, tensor if tensor.dim() else tensor[None])


class EmptyTensorsDropped(BucketEngine):
    def drawn(self, weights: Weights) -> Weights:
        return (pair for pair in weights if pair[1].numel())


class StridesIgnored(BucketEngine):
    def raw(self, tensor: torch.Tensor) -> Any:
        if tensor.is_contiguous():
            return super().raw(tensor)
        return super().raw(tensor.as_strided((tensor.numel(),), (1,)))


class TruncatedAtTheBucket(BucketEngine):
    def pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        first, *rest = super().pieces(name, tensor)
        if self.config.bucket_bytes == 64:
            rest = [attrs.evolve(piece, data=bytes(len(piece.data))) for piece in rest]
        return [first, *rest]


class LastBucketLost(BucketEngine):
    async def put_last(self, meeting: Meeting, bucket: list[Piece]) -> None:
        if self.config.bucket_bytes < 1 << 20:
            await self.put(meeting, bucket)


class AtMost512Tensors(BucketEngine):
    def drawn(self, weights: Weights) -> Weights:
        for number, pair in enumerate(weights):
            if number < 512:
                yield pair


class DealtOut(BucketEngine):
    async def put(self, meeting: Meeting, bucket: list[Piece]) -> None:
        self.turn = getattr(self, "turn", 0) + 1
        if meeting.channels:
            meeting.channels[self.turn % len(meeting.channels)].buckets.append(bucket)
        meeting.notify()
        await self.until_workers(meeting, lambda channel: len(channel.buckets) <= 1)


class OneBuffer(BucketEngine):
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


class MemoryOfTheGenerator(BucketEngine):
    def raw(self, tensor: torch.Tensor) -> Any:
        if not tensor.numel() or not tensor.is_contiguous():
            return super().raw(tensor)
        return memoryview(tensor.flatten().view(torch.uint8).numpy().data)


class StaleValues(BucketEngine):
    def drawn(self, weights: Weights) -> Weights:
        cache = self.__dict__.setdefault("cache", {})
        for name, tensor in weights:
            yield name, cache.setdefault(name, tensor.clone())


class WorkersRemembered(BucketEngine):
    async def connect(self, request: ConnectRequest) -> None:
        if self.context.end == "sender" and self.context.rank == 0:
            count = self.__dict__.setdefault("count", request.arguments["workers"])
            request = attrs.evolve(request, arguments={**request.arguments, "workers": count})
        await super().connect(request)


class EmptyTransferRefused(BucketEngine):
    async def send(self, meeting: Meeting, weights: Weights) -> None:
        first = next(weights, None)
        if first is None:
            raise WeightsError("there is nothing to send")
        await super().send(meeting, (pair for pair in itertools.chain([first], weights)))


class OtherRanksDrawNothing(BucketEngine):
    def exhaust(self, weights: Weights) -> None:
        return


class OneMeeting(BucketEngine):
    def meet(self, name: str) -> Meeting:
        return super().meet("the meeting")


class AnyVersion(BucketEngine):
    def check_version(self, meeting: Meeting) -> None:
        return


class FinalizeOnce(BucketEngine):
    async def prepare(self) -> PrepareResult:
        self.finalized = False
        return await super().prepare()

    async def finalize(self) -> None:
        if self.context.end == "sender" and self.__dict__.get("finalized"):
            raise RuntimeError("finalized already")
        self.finalized = True
        await super().finalize()


class SwallowedException(BucketEngine):
    def drawn(self, weights: Weights) -> Weights:
        try:
            yield from weights
        except Exception:
            return


class BreakNotTold(BucketEngine):
    def sender_gone(self, meeting: Meeting) -> None:
        if "failed" in str(meeting.over):
            meeting.complete = True
            return
        super().sender_gone(meeting)


class LeaverIgnored(BucketEngine):
    def leave(self) -> None:
        if self.channel is not None and self.meeting is not None and not self.channel.taken:
            self.channel.taken = True
            self.channel.buckets = _Sink()
        super().leave()


class _Sink(list):  # type: ignore[type-arg]
    """Takes everything."""

    def append(self, _: Any) -> None:
        return


class LeaverUnseen(BucketEngine):
    async def send(self, meeting: Meeting, weights: Weights) -> None:
        self.deadline += 1e6
        await super().send(meeting, weights)

    def leave(self) -> None:
        if self.channel is not None:
            self.meeting = self.channel = None
        super().leave()


class WaitsForever(BucketEngine):
    async def send(self, meeting: Meeting, weights: Weights) -> None:
        self.deadline += 1e6
        await super().send(meeting, weights)


class NobodyNamed(BucketEngine):
    def names(self, workers: list[int]) -> str:
        return "a worker"


class ReceiverWaitsForever(BucketEngine):
    async def until_sender(self, meeting: Meeting, ready: Callable[[], bool]) -> None:
        self.deadline += 1e6
        await super().until_sender(meeting, ready)


class SenderGoesUnseen(BucketEngine):
    def end(self, meeting: Meeting) -> None:
        super().end(meeting)
        if meeting.over == "the sender left":
            meeting.over, meeting.complete, meeting.version = None, True, meeting.version or 1


class StuckAfterFailure(BucketEngine):
    def broken(self, meeting: Meeting, error: BaseException) -> None:
        super().broken(meeting, error)
        self.failed = True

    async def prepare(self) -> PrepareResult:
        if self.__dict__.get("failed"):
            raise WeightsError("an earlier transfer broke off")
        return await super().prepare()


class BytesInTheMetadata(BucketEngine):
    async def prepare(self) -> PrepareResult:
        prepared = await super().prepare()
        return attrs.evolve(prepared, metadata={**prepared.metadata, "key": b"\x00"})


class TuplesInTheTopology(BucketEngine):
    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        made = super().build_topology(request)
        return attrs.evolve(made, rollout=tuple({**share, "range": (0, 1)} for share in made.rollout))


class OneShareForAllRanks(BucketEngine):
    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        made = super().build_topology(request)
        return attrs.evolve(made, trainer=made.trainer[:1])


class TellsNobodyWhoIsLate(BucketEngine):
    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        return attrs.evolve(super().build_topology(request), retained=None)


class ShowsTheFirstVersionToTheLate(BucketEngine):
    first: ClassVar[list[tuple[str, torch.Tensor]]] = []

    def late(self, name: str) -> list[tuple[str, torch.Tensor]]:
        self.first.extend(() if self.first else super().late(name))
        return self.first


class KnowsTheTensorsOfTheFirstTransfer(BucketEngine):
    known: frozenset[str] = frozenset()

    def drawn(self, weights: Weights) -> Weights:
        seen = set()
        for name, tensor in weights:
            seen.add(name)
            if not self.known or name in self.known:
                yield name, tensor
        self.known = self.known or frozenset(seen)


class _Leaking(BucketEngine):
    async def prepare(self) -> PrepareResult:
        if self.context.rank == 0:
            self.leak()
        return await super().prepare()

    def leak(self) -> None:
        raise NotImplementedError


class LeakedTask(BucketEngine):
    async def connect(self, request: ConnectRequest) -> None:
        await super().connect(request)
        self.task = asyncio.ensure_future(asyncio.sleep(30.0))


class LeakedThread(_Leaking):
    def leak(self) -> None:
        threading.Thread(target=threading.Event().wait, args=(5.0,), daemon=True).start()


class LeakedProcess(_Leaking):
    def leak(self) -> None:
        CHILDREN.append(subprocess.Popen(["sleep", "20"]))


class LeakedSocket(_Leaking):
    kept: list[socket.socket] = []  # noqa: RUF012

    def leak(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.kept.append(listener)


class LeakedSharedMemory(_Leaking):
    def leak(self) -> None:
        path = Path("/dev/shm") / f"jackfield-mutant-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        SHARED[path] = torch.from_file(str(path), shared=True, size=1)  # mapped, as leaked memory is


class LeakAfterFailure(BucketEngine):
    def broken(self, meeting: Meeting, error: BaseException) -> None:
        threading.Thread(target=threading.Event().wait, args=(5.0,), daemon=True).start()
        super().broken(meeting, error)


MUTANTS = harness.named(
    mutant(DroppedTensor, "the third tensor is not sent", _MOST),
    mutant(DoubledTensor, "the third tensor is sent twice", f"{_MOST} 050"),
    mutant(FlippedBit, "a bit flips in every tensor of 40 rows", "010 016 017 020 021 023 024 026 036 042 045"),
    mutant(HalfAsFloat16, "bfloat16 arrives as float16 of the same bits", "011 045"),
    mutant(NumbersThroughFloat, "int64 passes through float32, and NaN becomes 0", "011"),
    mutant(ScalarsOfOneDimension, "scalars arrive with one dimension", "012"),
    mutant(EmptyTensorsDropped, "tensors without elements are not sent", "012"),
    mutant(StridesIgnored, "the memory of a tensor is sent as it lies there", "013"),
    mutant(TruncatedAtTheBucket, "of a tensor larger than a bucket of 64 bytes the rest is zeros", "014 018"),
    mutant(LastBucketLost, "a last bucket that is not full is not sent, where buckets are large", "014 017 018"),
    mutant(AtMost512Tensors, "what comes after 512 tensors is not sent", "015"),
    mutant(DealtOut, "of several workers each gets a share of the buckets", "016 017 018 020 021 023 032 042 045 050"),
    mutant(
        OneBuffer,
        "all buckets are written to one buffer, while a worker may still read it",
        "010 013 014 015 016 017 018 020 021 023 024 026 036 042 045",
    ),
    mutant(MemoryOfTheGenerator, "a bucket refers to the memory of the tensors until it is full", "018"),
    mutant(StaleValues, "a name that was sent before is sent with its old values again", "020 036 042 045"),
    mutant(WorkersRemembered, "the number of workers is that of the first transfer", "021"),
    mutant(EmptyTransferRefused, "a transfer without tensors raises", "022 045"),
    mutant(OtherRanksDrawNothing, "a rank that does not send draws nothing from its generator", "023"),
    mutant(OneMeeting, "all transfers of a process meet at one place", "024"),
    mutant(AnyVersion, "a worker takes weights of another version than it expects", "025"),
    mutant(FinalizeOnce, "a second finalize raises", "026"),
    mutant(SwallowedException, "when the generator raises, the transfer ends as if all had been sent", "030"),
    mutant(BreakNotTold, "when the sender breaks off, receivers end as if all had come", "030"),
    mutant(LeaverIgnored, "a worker that leaves half-way is taken off the list, and the transfer ends well", "031"),
    mutant(
        LeaverUnseen,
        "a worker that leaves half-way says nothing, and the sender waits for it without a deadline",
        "031 032 033",
    ),
    mutant(WaitsForever, "the sender waits for its workers without a deadline", "032 033"),
    mutant(NobodyNamed, "the sender does not say for whom it waited", "032 033"),
    mutant(ReceiverWaitsForever, "a worker waits for its sender without a deadline", "034"),
    mutant(SenderGoesUnseen, "a sender that goes leaves its workers to believe that all has come", "035"),
    mutant(StuckAfterFailure, "after a transfer that broke off the engine refuses the next one", "036"),
    mutant(BytesInTheMetadata, "the metadata holds bytes", "040"),
    mutant(TuplesInTheTopology, "the topology holds tuples, which JSON makes lists of", "040"),
    mutant(OneShareForAllRanks, "the topology has one share for the trainer, whatever its number of ranks", "023 041"),
    mutant(TellsNobodyWhoIsLate, "the topology has nothing for those who come late", "046"),
    mutant(ShowsTheFirstVersionToTheLate, "who comes late gets what was sent first", "046"),
    mutant(
        KnowsTheTensorsOfTheFirstTransfer, "what was not among the tensors of the first transfer is not sent", "045"
    ),
    mutant(LeakedTask, "a task goes on after the transfer", "050 051"),
    mutant(LeakedThread, "a thread goes on after the transfer", "050 051"),
    mutant(LeakedProcess, "a process goes on after the transfer", "050 051"),
    mutant(LeakedSocket, "a socket stays open", "050 051"),
    mutant(LeakedSharedMemory, "shared memory is not unlinked", "050 051"),
    mutant(LeakAfterFailure, "when a transfer breaks off, its thread is not ended", "051"),
)
