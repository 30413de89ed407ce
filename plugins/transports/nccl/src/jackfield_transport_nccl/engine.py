"""Weights from the trainer's rank 0 to every inference worker, by broadcast in buckets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator, Mapping
from concurrent.futures import Future
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
from jackfield.errors import WeightsError
from jackfield.weights.buckets import Entry, views
from jackfield.weights.meeting import Meeting, Peer, reason_of
from jackfield_transport_nccl.config import Config
from jackfield_transport_nccl.group import Group, MeetingStore
from jackfield_transport_nccl.sending import SLOTS, Sending, finished, grown

__all__ = ["NCCLCheckpointEngine"]


@attrs.frozen(eq=False)
class _Arriving:
    """A bucket whose broadcast a worker has joined."""

    number: int
    buffer: torch.Tensor  #: uint8
    entries: list[Entry]
    done: Future[None]


class NCCLCheckpointEngine(CheckpointEngine):
    """One end of a broadcast. The trainer's rank 0 is the group's rank 0; its other ranks only exhaust.

    The sender announces each bucket through the meeting once every worker has room for it, and all then join the
    broadcast: so who is slow or silent is noticed and named there, and no broadcast begins that somebody will not join.
    """

    config: Config

    def __init__(self, config: Config, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._meeting: Meeting | None = None
        self._store: MeetingStore | None = None
        self._group: Group | None = None
        self._slots: list[torch.Tensor] = []  #: uint8; kept from one transfer to the next
        self._arriving: deque[_Arriving] = deque()
        self._whole = False  #: everything was sent, or taken
        self._closing: asyncio.Future[None] | None = None

    # -- before the transfer

    def prepare(self) -> PrepareResult:
        """Rank 0 listens, on loopback unless the context names another interface.

        Raises:
            WeightsError: the port is taken.
        """
        if self.context.rank != 0:
            return PrepareResult()
        self._forget()
        self._meeting = Meeting(self.context.deadline_seconds, self._heard)
        address = self._meeting.open(self.context.host, self.config.port)
        return PrepareResult(metadata={**address, "backend": self._backend()})

    def _forget(self) -> None:
        """Begin anew; a sender that was prepared before, and met nobody, stops listening there."""
        if self._meeting is not None:
            self._meeting.abandon()
        self._arriving.clear()
        self._whole = False

    def _backend(self) -> str:
        if self.config.backend != "auto":
            return self.config.backend
        return "nccl" if torch.device(self.context.device).type == "cuda" else "gloo"

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        """Rank 0 sends to every worker."""
        sender, workers = request.trainer_metadata[0], request.rollout_workers
        return Topology(
            trainer=tuple({"workers": workers} for _ in request.trainer_metadata),
            rollout=tuple({**sender, "worker": number, "workers": workers} for number in range(workers)),
        )

    async def connect(self, request: ConnectRequest) -> None:
        """Rank 0 waits for every worker; a worker comes to rank 0; all form a group.

        Raises:
            WeightsError: ``weights.transfer`` where they cannot; ``weights.version`` for weights of another version.
            DeadlineExceeded: naming who has not come.
        """
        if self.context.side == "rollout":
            await self._enter(request)
        elif self.context.rank == 0:
            await self._admit(request)

    async def _admit(self, request: ConnectRequest) -> None:
        meeting, workers = self._meeting, request.arguments["workers"]
        if meeting is None:
            raise WeightsError("the sender was not prepared", expected="prepare, connect, send_weights")
        self._store = self._make_store(meeting)
        await meeting.admit(workers, request.version)
        if workers:
            meeting.tell({"form": True})
            await self._form(meeting, self._backend(), 0, workers + 1, self.context.host)
            # a member that left, after a transfer of nothing, say, would break off those that are still connecting
            await meeting.until(lambda peer: "formed" in peer.said, "join the broadcast group")

    async def _enter(self, request: ConnectRequest) -> None:
        place = request.arguments
        if place["backend"] == "nccl" and torch.device(self.context.device).type != "cuda":
            raise WeightsError(
                "an inference worker without a GPU cannot join an NCCL broadcast",
                where=f"worker {place['worker']}",
                expected="a CUDA device",
                found=self.context.device,
                fix="set backend: gloo",
            )
        self._forget()
        meeting = self._meeting = Meeting(self.context.deadline_seconds, self._heard)
        self._store = self._make_store(meeting)
        await meeting.enter(place["host"], place["port"], place["secret"], place["worker"], request.version)
        await meeting.until(lambda peer: "form" in peer.said, "meet all inference workers")
        await self._form(meeting, place["backend"], place["worker"] + 1, place["workers"] + 1, meeting.local_host)
        meeting.tell({"formed": True})

    def _make_store(self, meeting: Meeting) -> MeetingStore:
        loop = asyncio.get_running_loop()

        def publish(key: str, value: str) -> None:
            loop.call_soon_threadsafe(meeting.tell, {"store": [key, value]})

        return MeetingStore(self.context.deadline_seconds, publish)

    async def _form(self, meeting: Meeting, backend: str, rank: int, size: int, host: str) -> None:
        assert self._store is not None
        self._group = Group(backend, rank, size, host, self._store, meeting.remaining())
        await finished(meeting, self._group.made, "everybody to join the broadcast group")

    def _heard(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """An address for the group, or a bucket: its broadcast is joined at once, for there is room for it."""
        if "store" in message and self._store is not None:
            self._store.put(*message["store"])
            if self.context.side == "trainer" and self._meeting is not None:
                self._meeting.tell({"store": message["store"]})
        if "bucket" in message and self._group is not None:
            number, size = message["bucket"], message["bytes"]
            buffer = grown(self._slots, number % SLOTS, size, self._buffer_device())[:size]
            done = self._group.broadcast(buffer)
            self._arriving.append(_Arriving(number, buffer, message["tensors"], done))

    def _buffer_device(self) -> str:
        return self.context.device if self._group is not None and self._group.backend == "nccl" else "cpu"

    # -- the transfer

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Every tensor in a bucket to all workers; then wait until all have taken all.

        Raises:
            WeightsError: ``weights.transfer`` when a worker breaks off.
            DeadlineExceeded: naming the workers that are late.
        """
        if self.context.rank != 0:
            for _ in weights:  # gathering a tensor needs every rank
                pass
            return
        meeting = self._meeting
        if meeting is None:
            raise WeightsError("the sender is not connected", expected="prepare, connect, send_weights")
        try:
            sending = Sending(meeting, self._group, self._slots, self.config.bucket_bytes, self._buffer_device())
            for name, tensor in weights:
                await sending.add(name, tensor)
            await sending.end()
            self._whole = True
            meeting.tell({"done": True})
            await meeting.until(lambda peer: "done" in peer.said, "take everything")
        except BaseException as error:
            meeting.tell({"broken": reason_of(error)})
            raise

    async def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield tensors out of one bucket while the next one arrives.

        Raises:
            WeightsError: ``weights.transfer`` when the sender, or with it a worker, breaks off.
            DeadlineExceeded: naming the sender.
        """
        meeting = self._meeting
        if meeting is None or self._group is None:
            raise WeightsError("the receiver is not connected", expected="connect, receive_weights")
        room = SLOTS
        meeting.tell({"room": room})
        while True:
            await meeting.until(lambda peer: bool(self._arriving) or "done" in peer.said, "send")
            if not self._arriving:
                break
            bucket = self._arriving.popleft()
            await finished(meeting, bucket.done, f"the sender to send bucket {bucket.number}")
            meeting.tell({"got": bucket.number})
            for item in views(bucket.buffer, bucket.entries):
                yield item
            room += 1
            meeting.tell({"room": room})
        self._whole = True
        meeting.tell({"done": True})

    async def finalize(self) -> None:
        """Leave meeting and group; whoever still needs this end is told so. Whoever asks again waits for the same."""
        if self._meeting is not None or self._group is not None or self._store is not None:
            self._closing = asyncio.ensure_future(self._close(self._closing))
        closing = self._closing
        if closing is None:
            return
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            if not closing.done():
                await closing  # a caller that is cancelled must not leave it half done
            raise
        self._closing = None

    async def _close(self, before: asyncio.Future[None] | None) -> None:
        meeting, self._meeting = self._meeting, None
        group, self._group = self._group, None
        store, self._store = self._store, None
        self._arriving.clear()
        if before is not None:
            await before
        if store is not None:
            store.close()
        if meeting is not None:
            await meeting.close(None if self._whole else "left before everything was taken")
        if group is not None:
            await group.close()
