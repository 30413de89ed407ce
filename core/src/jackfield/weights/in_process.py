"""The in-process checkpoint engine: trainer and replicas on one event loop, tensors handed over by reference."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Generator
from typing import TYPE_CHECKING

import attrs

from jackfield.abc.checkpoint_engine import (
    CheckpointEngine,
    CheckpointEngineContext,
    ConnectRequest,
    PrepareResult,
    Topology,
    TopologyRequest,
)
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, WeightsError
from jackfield.settings import option

if TYPE_CHECKING:
    import torch

__all__ = ["InProcessCheckpointEngine", "InProcessConfig"]


@attrs.frozen(kw_only=True)
class InProcessConfig:
    """Settings of the in-process checkpoint engine."""

    bucket_bytes: int = option(
        0,
        help="Tensors are copied into buckets of about this size, and the sender runs up to two buckets ahead of its "
        "receivers; larger tensors, and all tensors with 0, are handed over one by one without a copy.",
        validator=attrs.validators.ge(0),
    )


Bucket = list[tuple[str, "torch.Tensor"]]


@attrs.define(eq=False)
class _Channel:
    """What one receiver has still to take."""

    number: int
    buckets: list[Bucket] = attrs.field(factory=list)
    connected: bool = False
    busy: bool = False  #: holds tensors of a bucket that it has taken
    ended: bool = False  #: has taken everything
    broken: str | None = None  #: why it will take no more


@attrs.define(eq=False)
class _Rendezvous:
    """Where a sender and its receivers meet. Everything that happens wakes everybody who waits here."""

    id: str
    version: int | None = None
    channels: dict[int, _Channel] = attrs.field(factory=dict)
    complete: bool = False  #: the sender has put everything
    broken: str | None = None  #: why the sender will put no more
    waiting: set[asyncio.Future[None]] = attrs.field(factory=set)

    def notify(self) -> None:
        waiting, self.waiting = self.waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, ready: Callable[[], bool], deadline: float, who: Callable[[], str]) -> None:
        """Wait until ``ready()`` or the loop's time ``deadline``, for what ``who()`` then says."""
        start = _now()
        while not ready():
            future = asyncio.get_running_loop().create_future()
            self.waiting.add(future)
            try:
                await Clock().wait_for(future, max(deadline - _now(), 0.0), "a peer")
            except DeadlineExceeded:
                raise DeadlineExceeded(
                    f"waited {_now() - start:.6g} s for {who()}, in the weight transfer {self.id}",
                    fix="look at why the peer did not answer, or raise the deadline of the sync",
                ) from None
            finally:
                self.waiting.discard(future)


_NUMBERS = itertools.count()
_MEETINGS: dict[str, _Rendezvous] = {}


class InProcessCheckpointEngine(CheckpointEngine):
    """One end of a transfer within one process and event loop. Trainer rank 0 sends; other ranks only exhaust."""

    config: InProcessConfig
    context: CheckpointEngineContext

    def __init__(self, config: InProcessConfig, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._meeting: _Rendezvous | None = None
        self._channel: _Channel | None = None
        self._deadline = 0.0  #: on the loop's clock
        self._version = 0

    def prepare(self) -> PrepareResult:
        """Open a rendezvous."""
        if self.context.rank != 0:
            return PrepareResult()
        self._leave("the sender began anew")
        self._meeting = _Rendezvous(f"in-process-{next(_NUMBERS)}")
        _MEETINGS[self._meeting.id] = self._meeting
        return PrepareResult(metadata={"rendezvous": self._meeting.id})

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        """Rank 0 sends to every worker."""
        meeting = request.trainer_metadata[0]["rendezvous"]
        workers = request.rollout_workers
        return Topology(
            trainer=tuple({"rendezvous": meeting, "receivers": workers} for _ in request.trainer_metadata),
            rollout=tuple({"rendezvous": meeting, "receiver": number} for number in range(workers)),
        )

    async def connect(self, request: ConnectRequest) -> None:
        """Meet at the rendezvous.

        Raises:
            WeightsError: ``weights.transfer`` for a rendezvous that is over, or a place there that is taken.
        """
        self._deadline = _now() + self.context.deadline_seconds
        if self.context.end == "sender":
            self._connect_sender(request)
        else:
            self._connect_receiver(request)

    def _connect_sender(self, request: ConnectRequest) -> None:
        if self.context.rank != 0:
            return
        meeting = self._meeting
        if meeting is None or meeting.id != request.arguments["rendezvous"]:
            raise WeightsError(
                "the sender was not prepared for this transfer",
                expected="connect after prepare",
                found=request.arguments["rendezvous"],
            )
        meeting.version = request.version
        for number in range(request.arguments["receivers"]):
            meeting.channels.setdefault(number, _Channel(number))
        meeting.notify()

    def _connect_receiver(self, request: ConnectRequest) -> None:
        name, number = request.arguments["rendezvous"], request.arguments["receiver"]
        meeting = _MEETINGS.get(name)
        if meeting is None:
            raise WeightsError(f"the weight transfer {name} is over or was never begun in this process", where=name)
        channel = meeting.channels.setdefault(number, _Channel(number))
        if channel.connected:
            raise WeightsError(f"receiver {number} of {name} has been connected already", where=name)
        channel.connected = True
        self._meeting, self._channel = meeting, channel
        self._version = request.version
        meeting.notify()

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Hand every tensor to every receiver; returns when each has taken all of them."""
        if self.context.rank != 0:
            for _ in weights:
                pass
            return
        meeting = self._meeting
        if meeting is None or meeting.version is None:
            raise WeightsError("the sender is not connected", expected="prepare, connect, send_weights")
        try:
            await self._send(meeting, weights)
        except BaseException as error:
            meeting.broken = f"the sender broke off: {_text(error)}"
            meeting.notify()
            raise

    async def _send(self, meeting: _Rendezvous, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        bucket: Bucket = []
        size = 0
        for name, tensor in weights:
            tensor = tensor.detach()
            if tensor.nbytes >= self.config.bucket_bytes:
                await self._put(meeting, bucket, ahead=1)
                bucket, size = [], 0
                await self._put(meeting, [(name, tensor)], ahead=0)
                continue
            if size + tensor.nbytes > self.config.bucket_bytes:
                await self._put(meeting, bucket, ahead=1)
                bucket, size = [], 0
            bucket.append((name, tensor.clone()))
            size += tensor.nbytes
        await self._put(meeting, bucket, ahead=1)
        meeting.complete = True
        meeting.notify()
        await self._until_all(meeting, lambda channel: channel.ended)

    async def _put(self, meeting: _Rendezvous, bucket: Bucket, ahead: int) -> None:
        """Hand a bucket over; return when each receiver is at most ``ahead`` buckets behind and, at 0, done with it."""
        if not bucket:
            return
        for channel in meeting.channels.values():
            channel.buckets.append(bucket)
        meeting.notify()
        if ahead:
            await self._until_all(meeting, lambda channel: len(channel.buckets) <= ahead)
        else:
            await self._until_all(meeting, lambda channel: not channel.buckets and not channel.busy)

    async def _until_all(self, meeting: _Rendezvous, ready: Callable[[_Channel], bool]) -> None:
        channels = meeting.channels.values()

        def ended() -> bool:
            return any(channel.broken for channel in channels) or all(map(ready, channels))

        def who() -> str:
            late = [channel for channel in channels if not ready(channel)]
            actions = {True: "take a tensor", False: "connect"}
            return " and ".join(f"receiver {channel.number} to {actions[channel.connected]}" for channel in late)

        await meeting.until(ended, self._deadline, who)
        broken = [f"receiver {channel.number} {channel.broken}" for channel in channels if channel.broken]
        if broken:
            raise WeightsError("; ".join(broken), where=meeting.id)

    async def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every tensor, by reference.

        Raises:
            WeightsError: ``weights.version`` for weights of another version; ``weights.transfer`` when the sender
                breaks off.
        """
        meeting, channel = self._meeting, self._channel
        if meeting is None or channel is None:
            raise WeightsError("the receiver is not connected", expected="connect, receive_weights")
        await self._until_sender(meeting, lambda: meeting.version is not None)
        if meeting.version != self._version:
            raise WeightsError(
                "weights of another version came", code="weights.version", expected=self._version, found=meeting.version
            )
        while True:
            await self._until_sender(meeting, lambda: bool(channel.buckets) or meeting.complete)
            if not channel.buckets:
                break
            channel.busy = True
            bucket = channel.buckets.pop(0)
            meeting.notify()
            for item in bucket:
                yield item
            channel.busy = False
            meeting.notify()
        channel.ended = True
        meeting.notify()

    async def _until_sender(self, meeting: _Rendezvous, ready: Callable[[], bool]) -> None:
        await meeting.until(lambda: meeting.broken is not None or ready(), self._deadline, lambda: "the sender")
        if meeting.broken is not None:
            raise WeightsError(meeting.broken, where=meeting.id)

    async def finalize(self) -> None:
        """Leave the rendezvous; whoever still needs this end is told so."""
        self._leave("the sender left before everything was taken")

    def _leave(self, reason: str) -> None:
        meeting, channel = self._meeting, self._channel
        self._meeting = self._channel = None
        if meeting is None:
            return
        if channel is not None:
            if not channel.ended:
                channel.broken = "left before it had taken everything"
                channel.buckets.clear()
        else:
            _MEETINGS.pop(meeting.id, None)
            if not meeting.complete and meeting.broken is None:
                meeting.broken = reason
        meeting.notify()


def _now() -> float:
    """Seconds on the running loop's clock, which may be a virtual one."""
    return asyncio.get_running_loop().time()


def _text(error: BaseException) -> str:
    return error.message if isinstance(error, JackfieldError) else f"{type(error).__name__}: {error}"
