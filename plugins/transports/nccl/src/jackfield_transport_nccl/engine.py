"""Weights from the trainer's rank 0 to every inference worker, by broadcast in buckets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator, Mapping
from concurrent.futures import Future
from typing import Any

import attrs
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.errors import WeightsError
from jackfield.weights.buckets import Entry, views
from jackfield.weights.meeting import Meeting, Peer
from jackfield.weights.one_sender import LEFT, OneSenderEngine
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


class NCCLCheckpointEngine(OneSenderEngine):
    """One end of a broadcast. The trainer's rank 0 is the group's rank 0; its other ranks only exhaust.

    The sender announces each bucket through the meeting once every worker has room for it, and all then join the
    broadcast: so who is slow or silent is noticed and named there, and no broadcast begins that somebody will not join.
    """

    config: Config

    def __init__(self, config: Config, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._store: MeetingStore | None = None
        self._group: Group | None = None
        self._slots: list[torch.Tensor] = []  #: uint8; kept from one transfer to the next
        self._arriving: deque[_Arriving] = deque()
        self._closing: asyncio.Future[None] | None = None

    # -- before the transfer

    def begin(self) -> None:
        """Nothing is arriving."""
        self._arriving.clear()

    def listen(self, address: Mapping[str, Any]) -> Mapping[str, Any]:
        """The backend, which is the trainer's to choose."""
        return {"backend": self._backend()}

    def _backend(self) -> str:
        if self.config.backend != "auto":
            return self.config.backend
        return "nccl" if torch.device(self.context.device).type == "cuda" else "gloo"

    def make_meeting(self, place: Mapping[str, Any] | None) -> Meeting:
        """One through which the group's members exchange addresses."""
        meeting = super().make_meeting(place)
        self._store = None if place is None else self._make_store(meeting)
        return meeting

    async def met_workers(self, meeting: Meeting, workers: int) -> None:
        """Form a group with them."""
        self._store = self._make_store(meeting)
        if workers:
            meeting.tell({"form": True})
            await self._form(meeting, self._backend(), 0, workers + 1, self.context.host)
            # a member that left, after a transfer of nothing, say, would break off those that are still connecting
            await meeting.until(lambda peer: "formed" in peer.said, "join the broadcast group")

    async def enter(self, meeting: Meeting, place: Mapping[str, Any], version: int) -> None:
        """Come to the sender, and form a group with all others."""
        if place["backend"] == "nccl" and torch.device(self.context.device).type != "cuda":
            raise WeightsError(
                "an inference worker without a GPU cannot join an NCCL broadcast",
                where=f"worker {place['worker']}",
                expected="a CUDA device",
                found=self.context.device,
                fix="set backend: gloo",
            )
        await super().enter(meeting, place, version)
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

    def heard(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """An address for the group, or a bucket: its broadcast is joined at once, for there is room for it."""
        if "store" in message and self._store is not None:
            self._store.put(*message["store"])
            if self.context.end == "sender" and self.meeting is not None:
                self.meeting.tell({"store": message["store"]})
        if "bucket" in message and self._group is not None:
            number, size = message["bucket"], message["bytes"]
            buffer = grown(self._slots, number % SLOTS, size, self._buffer_device())[:size]
            done = self._group.broadcast(buffer)
            self._arriving.append(_Arriving(number, buffer, message["tensors"], done))

    def _buffer_device(self) -> str:
        return self.context.device if self._group is not None and self._group.backend == "nccl" else "cpu"

    # -- the transfer

    async def send(
        self, meeting: Meeting, weights: Generator[tuple[str, torch.Tensor], None, None]
    ) -> Mapping[str, Any]:
        """In buckets."""
        sending = Sending(meeting, self._group, self._slots, self.config.bucket_bytes, self._buffer_device())
        for name, tensor in weights:
            await sending.add(name, tensor)
        await sending.end()
        return {}

    async def receive(self, meeting: Meeting) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield tensors out of one bucket while the next one arrives."""
        room = SLOTS
        meeting.tell({"room": room})
        while True:
            await meeting.until(lambda peer: bool(self._arriving) or "done" in peer.said, "send")
            if not self._arriving:
                return
            bucket = self._arriving.popleft()
            await finished(meeting, bucket.done, f"the sender to send bucket {bucket.number}")
            meeting.tell({"got": bucket.number, "room": room})
            for item in views(bucket.buffer, bucket.entries):
                yield item
            room += 1
            if self._arriving:  # else said with the next one, before which the sender needs no more
                meeting.tell({"room": room})

    async def finalize(self) -> None:
        """Leave meeting and group; whoever still needs this end is told so. Whoever asks again waits for the same."""
        if self.meeting is not None or self._group is not None or self._store is not None:
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
        meeting, self.meeting = self.meeting, None
        self.connected = False
        group, self._group = self._group, None
        store, self._store = self._store, None
        self._arriving.clear()
        if before is not None:
            await before
        if store is not None:
            store.close()
        if meeting is not None:
            await meeting.close(None if self.whole else LEFT)
        if group is not None:
            await group.close()
