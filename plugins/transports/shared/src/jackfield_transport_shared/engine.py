"""Transfer weights from the trainer's rank 0 to the workers of its host through shared memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.sdk.buckets import Entry, aligned, entry_of, put, views
from jackfield.sdk.one_sender import OneSenderEngine
from jackfield.sdk.transfer import Peer, TransferSession
from jackfield_transport_shared.config import Config
from jackfield_transport_shared.segments import Pool, Segment, mapped


class SharedCheckpointEngine(OneSenderEngine):
    """One end of the transfer. Rank 0 copies each tensor once into a segment, and all workers read it there.

    Publishing waits for workers only when ``max_bytes`` are in use. A segment is reused once all workers have read it.
    """

    config: Config

    def __init__(self, config: Config, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._pool = Pool(config.max_bytes)  #: stays from one transfer to the next
        self._segment: Segment | None = None  #: that is filled
        self._entries: list[Entry] = []  #: of the tensors in it
        self._used = 0  #: bytes of it
        self._bucket = 0  #: its number in this transfer
        self._announced: deque[Mapping[str, Any]] = deque()  #: buckets that a worker has not read
        self._mapped: dict[int, torch.Tensor] = {}  #: a worker's views of segments

    def begin(self) -> None:
        """Begin a transfer: free all segments, and drop announcements."""
        self._pool.begin()
        self._segment, self._entries, self._used, self._bucket = None, [], 0, 0
        self._announced.clear()
        self._mapped.clear()

    def heard(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Handle the announcement of a bucket."""
        if "bucket" in message:
            self._announced.append(message)

    async def send(
        self, session: TransferSession, weights: Generator[tuple[str, torch.Tensor], None, None]
    ) -> Mapping[str, Any]:
        """Copy every tensor into shared memory, once."""
        for name, tensor in weights:
            if session.peers:
                await self._add(session, name, tensor)
        await self._announce(session)
        return {}

    async def _add(self, session: TransferSession, name: str, tensor: torch.Tensor) -> None:
        size = tensor.nbytes
        if self._segment is not None and self._used + size > self.config.bucket_bytes:
            await self._announce(session)
        if self._segment is None:
            self._segment = await self._room(session, max(size, self.config.bucket_bytes))
        entry = entry_of(name, tensor, self._used)
        put(self._segment.buffer, entry, tensor)
        self._entries.append(entry)
        self._used = aligned(self._used + size)

    async def _announce(self, session: TransferSession) -> None:
        """Announce the contents of the filled segment to the workers."""
        segment, entries = self._segment, self._entries
        self._segment, self._entries, self._used = None, [], 0
        if segment is None:
            return
        segment.bucket = self._bucket
        self._bucket += 1
        session.tell({"bucket": segment.bucket, "place": segment.place(), "tensors": entries})
        await asyncio.sleep(0)  # to hear of workers that broke off
        await session.until(lambda _: True, "")

    async def _room(self, session: TransferSession, size: int) -> Segment:
        """Wait for a segment without readers."""

        def has_read(peer: Peer, bucket: int | None) -> bool:
            return bucket is None or peer.said.get("read", -1) >= bucket

        def free(segment: Segment) -> bool:
            return all(has_read(peer, segment.bucket) for peer in session.peers.values())

        while (segment := self._pool.take(size, free)) is None:
            oldest = self._pool.oldest()
            await session.until(lambda peer: has_read(peer, oldest), f"read bucket {oldest}")  # noqa: B023
        return segment

    async def receive(self, session: TransferSession) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield views of the tensors in shared memory, which must not be written to."""
        while True:
            await session.until(lambda peer: bool(self._announced) or "done" in peer.said, "publish")
            if not self._announced:
                return
            bucket = self._announced.popleft()
            place = bucket["place"]
            if place["segment"] not in self._mapped:
                self._mapped[place["segment"]] = mapped(place)
            for item in views(self._mapped[place["segment"]], bucket["tensors"]):
                yield item
            session.tell({"read": bucket["bucket"]})

    async def close(self) -> None:
        """End the transfer. The sender keeps its segments for the next one if this one was complete."""
        if not self.whole:
            self._pool.drop()  # a worker may still read there
        self.begin()
