"""Weights from the trainer's rank 0 to every inference worker of its host, through shared memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

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
from jackfield.weights.buckets import Entry, aligned, entry_of, put, views
from jackfield.weights.meeting import Meeting, Peer, reason_of
from jackfield_transport_shared.config import Config
from jackfield_transport_shared.segments import Pool, Segment, mapped

__all__ = ["SharedCheckpointEngine"]


class SharedCheckpointEngine(CheckpointEngine):
    """One end. The trainer's rank 0 copies each tensor once, into a segment; all workers read it there.

    Publishing does not wait for workers until ``max_bytes`` are in use. A segment is filled again once all workers have
    read it.
    """

    config: Config

    def __init__(self, config: Config, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._meeting: Meeting | None = None
        self._connected = False
        self._pool = Pool(config.max_bytes)  #: stays from one transfer to the next
        self._segment: Segment | None = None  #: that is filled
        self._entries: list[Entry] = []  #: of the tensors in it
        self._used = 0  #: bytes of it
        self._bucket = 0  #: its number in this transfer
        self._announced: deque[Mapping[str, Any]] = deque()  #: buckets that a worker has not read
        self._mapped: dict[int, torch.Tensor] = {}  #: a worker's views of segments
        self._whole = False  #: everything was published, or read

    # -- before the transfer

    def prepare(self) -> PrepareResult:
        """Rank 0 listens, on loopback unless the context names another interface.

        Raises:
            WeightsError: the port is taken.
        """
        if self.context.rank != 0:
            return PrepareResult()
        if self._meeting is not None:
            self._meeting.abandon()
        self._begin()
        self._meeting = Meeting(self.context.deadline_seconds)
        return PrepareResult(metadata=self._meeting.open(self.context.host, self.config.port))

    def _begin(self) -> None:
        self._whole = self._connected = False
        self._pool.begin()
        self._segment, self._entries, self._used, self._bucket = None, [], 0, 0
        self._announced.clear()
        self._mapped.clear()

    @classmethod
    def build_topology(cls, request: TopologyRequest) -> Topology:
        """Rank 0 sends to every worker."""
        sender, workers = request.trainer_metadata[0], request.rollout_workers
        return Topology(
            trainer=tuple({"workers": workers} for _ in request.trainer_metadata),
            rollout=tuple({**sender, "worker": number} for number in range(workers)),
        )

    async def connect(self, request: ConnectRequest) -> None:
        """Rank 0 waits for every worker; a worker comes to rank 0.

        Raises:
            WeightsError: ``weights.transfer`` where they cannot; ``weights.version`` for weights of another version.
            DeadlineExceeded: naming who has not come.
        """
        if self.context.side == "rollout":
            self._begin()
            self._meeting = Meeting(self.context.deadline_seconds, self._heard)
            await self._meeting.enter(**request.arguments, version=request.version)
        elif self.context.rank == 0:
            if self._meeting is None:
                raise WeightsError("the sender was not prepared", expected="prepare, connect, send_weights")
            await self._meeting.admit(request.arguments["workers"], request.version)
        self._connected = True

    def _heard(self, _: Peer, message: Mapping[str, Any]) -> None:
        if "bucket" in message:
            self._announced.append(message)

    # -- the trainer's side

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Every tensor into shared memory, once; then wait until all workers have read all.

        Raises:
            WeightsError: ``weights.transfer`` when a worker breaks off, or there is no memory.
            DeadlineExceeded: naming the workers that are late.
        """
        if self.context.rank != 0:
            for _ in weights:  # gathering a tensor needs every rank
                pass
            return
        meeting = self._meeting
        if meeting is None or not self._connected:
            raise WeightsError("the sender is not connected", expected="prepare, connect, send_weights")
        try:
            for name, tensor in weights:
                if meeting.peers:
                    await self._add(meeting, name, tensor)
            await self._announce(meeting)
            meeting.tell({"done": True})
            await meeting.until(lambda peer: "done" in peer.said, "take everything")
            self._whole = True
        except BaseException as error:
            meeting.tell({"broken": reason_of(error)})
            raise

    async def _add(self, meeting: Meeting, name: str, tensor: torch.Tensor) -> None:
        size = tensor.nbytes
        if self._segment is not None and self._used + size > self.config.bucket_bytes:
            await self._announce(meeting)
        if self._segment is None:
            self._segment = await self._room(meeting, max(size, self.config.bucket_bytes))
        entry = entry_of(name, tensor, self._used)
        put(self._segment.buffer, entry, tensor)
        self._entries.append(entry)
        self._used = aligned(self._used + size)

    async def _announce(self, meeting: Meeting) -> None:
        """Tell the workers what lies in the segment that was filled."""
        segment, entries = self._segment, self._entries
        self._segment, self._entries, self._used = None, [], 0
        if segment is None:
            return
        segment.bucket = self._bucket
        self._bucket += 1
        meeting.tell({"bucket": segment.bucket, "place": segment.place(), "tensors": entries})
        await asyncio.sleep(0)  # to hear of workers that broke off
        await meeting.until(lambda _: True, "")

    async def _room(self, meeting: Meeting, size: int) -> Segment:
        """A segment that nobody reads."""

        def has_read(peer: Peer, bucket: int | None) -> bool:
            return bucket is None or peer.said.get("read", -1) >= bucket

        def free(segment: Segment) -> bool:
            return all(has_read(peer, segment.bucket) for peer in meeting.peers.values())

        while (segment := self._pool.take(size, free)) is None:
            oldest = self._pool.oldest()
            await meeting.until(lambda peer: has_read(peer, oldest), f"read bucket {oldest}")  # noqa: B023
        return segment

    # -- the rollout's side

    async def receive_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield tensors where they lie, which are to be read only.

        Raises:
            WeightsError: ``weights.transfer`` when the sender breaks off, or is not on this host.
            DeadlineExceeded: naming the sender.
        """
        meeting = self._meeting
        if meeting is None or not self._connected:
            raise WeightsError("the receiver is not connected", expected="connect, receive_weights")
        while True:
            await meeting.until(lambda peer: bool(self._announced) or "done" in peer.said, "publish")
            if not self._announced:
                break
            bucket = self._announced.popleft()
            place = bucket["place"]
            if place["segment"] not in self._mapped:
                self._mapped[place["segment"]] = mapped(place)
            for item in views(self._mapped[place["segment"]], bucket["tensors"]):
                yield item
            meeting.tell({"read": bucket["bucket"]})
        self._whole = True
        meeting.tell({"done": True})

    async def finalize(self) -> None:
        """Leave the meeting. The sender keeps its segments for the next transfer, if this one was whole."""
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            await meeting.close(None if self._whole else "left before everything was taken")
            if not self._whole:
                self._pool.drop()  # a worker may still read there
        self._begin()
