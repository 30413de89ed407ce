"""The reference of checkpoint engines: for one event loop, tensors packed into buckets of bytes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import attrs
import torch

from jackfield.abc.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineContext,
    ConnectRequest,
    PrepareResult,
    Topology,
    TopologyRequest,
)
from jackfield.errors import DeadlineExceeded, WeightsError

Weights = Generator[tuple[str, torch.Tensor], None, None]
Received = AsyncGenerator[tuple[str, torch.Tensor], None]


@attrs.frozen(kw_only=True)
class BucketsConfig:
    """How much is handed over at once."""

    bucket_bytes: int = attrs.field(default=256, validator=attrs.validators.gt(0))


@attrs.frozen(eq=False)
class Piece:
    """A part of a tensor's bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    total: int
    data: Any  #: bytes-like


@attrs.define(eq=False)
class Channel:
    """What a worker has still to take."""

    buckets: list[list[Piece]] = attrs.field(factory=list)
    connected: bool = False
    taken: bool = False
    left: bool = False


@attrs.define(eq=False)
class Meeting:
    """Where both sides of one transfer meet."""

    name: str
    version: int | None = None
    channels: dict[int, Channel] = attrs.field(factory=dict)
    complete: bool = False
    over: str | None = None  #: why the sender will send no more
    waiting: list[asyncio.Future[None]] = attrs.field(factory=list)

    def notify(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, ready: Callable[[], bool], deadline: float, who: Callable[[], str]) -> None:
        while not ready():
            future = asyncio.get_running_loop().create_future()
            self.waiting.append(future)
            try:
                async with asyncio.timeout_at(deadline):
                    await future
            except TimeoutError:
                raise DeadlineExceeded(f"waited for {who()}") from None


_NUMBERS = itertools.count()
MEETINGS: dict[str, Meeting] = {}
KEPT: dict[str, list[tuple[str, torch.Tensor]]] = {}  #: of the newest transfers, for those who come late


class BucketEngine(CheckpointEngine):
    """The reference. Rank 0 sends to all workers."""

    config: BucketsConfig
    context: CheckpointEngineContext

    def __init__(self, config: BucketsConfig, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self.meeting: Meeting | None = None
        self.channel: Channel | None = None
        self.version = 0
        self.deadline = 0.0
        self.for_late: list[tuple[str, torch.Tensor]] | None = None  #: of who comes late

    async def prepare(self) -> PrepareResult:
        if self.context.rank:
            return PrepareResult()
        self.leave()
        self.meeting = self.meet(f"meeting-{next(_NUMBERS)}")
        return PrepareResult(metadata={"meeting": self.meeting.name})

    def meet(self, name: str) -> Meeting:
        return MEETINGS.setdefault(name, Meeting(name))

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        meeting = request.trainer_metadata[0]["meeting"]
        workers = request.rollout_workers
        return Topology(
            trainer=tuple({"meeting": meeting, "workers": workers} for _ in request.trainer_metadata),
            rollout=tuple({"meeting": meeting, "worker": worker} for worker in range(workers)),
            retained={"meeting": meeting},
        )

    async def connect(self, request: ConnectRequest) -> None:
        self.deadline = asyncio.get_running_loop().time() + self.context.deadline_seconds
        self.version = request.version
        if self.context.end == "sender":
            if self.meeting is not None:
                self.meeting.version = request.version
                for worker in range(request.arguments["workers"]):
                    self.meeting.channels.setdefault(worker, Channel())
                self.meeting.notify()
            return
        self.for_late = None
        if "worker" not in request.arguments:
            self.for_late = self.late(request.arguments["meeting"])
            return
        meeting = MEETINGS.get(request.arguments["meeting"])
        if meeting is None:
            raise WeightsError("this transfer is over")
        self.meeting = meeting
        self.channel = meeting.channels.setdefault(request.arguments["worker"], Channel())
        self.channel.connected = True
        meeting.notify()

    async def send_weights(self, weights: Weights) -> None:
        if self.context.rank:
            return self.exhaust(weights)
        meeting = self.meeting
        assert meeting is not None
        try:
            await self.send(meeting, self.keeping(meeting.name, weights))
        except BaseException as error:
            self.broken(meeting, error)
            raise
        return None

    def keeping(self, name: str, weights: Weights) -> Weights:
        KEPT[name] = []
        while len(KEPT) > 2:
            del KEPT[next(iter(KEPT))]
        for tensor_name, tensor in weights:
            KEPT[name].append((tensor_name, tensor.clone()))
            yield tensor_name, tensor

    def late(self, name: str) -> list[tuple[str, torch.Tensor]]:
        if name not in KEPT:
            raise WeightsError("these weights are not kept any more")
        return KEPT[name]

    def exhaust(self, weights: Weights) -> None:
        for _ in weights:
            pass

    def broken(self, meeting: Meeting, error: BaseException) -> None:
        meeting.over = f"the sender failed: {error}"
        meeting.notify()

    async def send(self, meeting: Meeting, weights: Weights) -> None:
        bucket: list[Piece] = []
        size = 0
        for name, tensor in self.drawn(weights):
            for piece in self.pieces(name, tensor):
                if bucket and size + len(piece.data) > self.config.bucket_bytes:
                    await self.put(meeting, bucket)
                    bucket, size = [], 0
                bucket.append(piece)
                size += len(piece.data)
        if bucket:
            await self.put_last(meeting, bucket)
        meeting.complete = True
        meeting.notify()
        await self.until_workers(meeting, lambda channel: channel.taken)

    def drawn(self, weights: Weights) -> Weights:
        return weights

    def pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        data, size = self.raw(tensor), self.config.bucket_bytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts = [data[start : start + size] for start in range(0, len(data), size)] or [data]
        return [Piece(name, dtype, tuple(tensor.shape), len(data), part) for part in parts]

    def raw(self, tensor: torch.Tensor) -> Any:
        return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().data) if tensor.numel() else b""

    async def put_last(self, meeting: Meeting, bucket: list[Piece]) -> None:
        await self.put(meeting, bucket)

    async def put(self, meeting: Meeting, bucket: list[Piece]) -> None:
        for channel in meeting.channels.values():
            channel.buckets.append(bucket)
        meeting.notify()
        await self.until_workers(meeting, lambda channel: len(channel.buckets) <= 1)

    async def until_workers(self, meeting: Meeting, ready: Callable[[Channel], bool]) -> None:
        channels = meeting.channels
        await meeting.until(
            lambda: any(channel.left for channel in channels.values()) or all(map(ready, channels.values())),
            self.deadline,
            lambda: self.names([worker for worker, channel in channels.items() if not ready(channel)]),
        )
        gone = [worker for worker, channel in channels.items() if channel.left]
        if gone:
            raise WeightsError(f"{self.names(gone)} left half-way")

    def names(self, workers: list[int]) -> str:
        return " and ".join(f"worker {worker}" for worker in workers)

    async def receive_weights(self) -> Received:
        for item in self.for_late or ():
            yield item
        if self.for_late is not None:
            return
        meeting, channel = self.meeting, self.channel
        assert meeting is not None
        assert channel is not None
        await self.until_sender(meeting, lambda: meeting.version is not None)
        self.check_version(meeting)
        held: list[Piece] = []
        while True:
            await self.until_sender(meeting, lambda: bool(channel.buckets) or meeting.complete)
            if not channel.buckets:
                break
            bucket = channel.buckets.pop(0)
            meeting.notify()
            for piece in bucket:
                held.append(piece)
                if sum(len(each.data) for each in held) >= piece.total:
                    yield piece.name, self.tensor(held)
                    held = []
        channel.taken = True
        meeting.notify()

    def check_version(self, meeting: Meeting) -> None:
        if meeting.version != self.version:
            raise WeightsError("weights of another version came", code="weights.version")

    def tensor(self, held: list[Piece]) -> torch.Tensor:
        first = held[0]
        dtype = getattr(torch, first.dtype)
        if not first.total:
            return torch.empty(first.shape, dtype=dtype)
        return torch.frombuffer(self.joined(held), dtype=torch.uint8).view(dtype).reshape(first.shape)

    def joined(self, held: list[Piece]) -> Any:
        return bytearray(b"".join(piece.data for piece in held))

    async def until_sender(self, meeting: Meeting, ready: Callable[[], bool]) -> None:
        await meeting.until(lambda: meeting.over is not None or ready(), self.deadline, lambda: "the sender")
        if meeting.over is not None:
            self.sender_gone(meeting)

    def sender_gone(self, meeting: Meeting) -> None:
        raise WeightsError(str(meeting.over))

    async def finalize(self) -> None:
        self.leave()

    def leave(self) -> None:
        meeting, channel = self.meeting, self.channel
        self.meeting = self.channel = None
        if meeting is None:
            return
        if channel is not None:
            channel.left = not channel.taken
        else:
            self.end(meeting)
        meeting.notify()

    def end(self, meeting: Meeting) -> None:
        MEETINGS.pop(meeting.name, None)
        if not meeting.complete:
            meeting.over = "the sender left"
