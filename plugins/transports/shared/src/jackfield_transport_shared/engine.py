"""Transfer weights from the trainer's rank 0 to the workers of its host through shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.sdk.buckets import Bucket, Entry
from jackfield.sdk.transfer import OneSenderEngine
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
        self._segment: Segment | None = None  #: the segment that is filled
        self._mapped: dict[int, torch.Tensor] = {}  #: a worker's views of segments

    async def room(self, size: int) -> torch.Tensor:
        """Return a segment without readers. A large tensor has one of its own."""
        size, peers = max(size, self.config.bucket_bytes), self.peers.values()
        while (segment := self._pool.take(size, min(peer.got for peer in peers))) is None:
            await self.taken(self._pool.oldest())
        self._segment = segment
        return segment.buffer

    async def launch(self, content: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Announce the filled segment to the workers."""
        assert self._segment is not None, "it was filled"
        self.announce(entries, self._segment.place())
        self._segment.bucket = self.made
        await asyncio.sleep(0)  # to hear of workers that broke off
        await self.taken(0)

    async def content(self, bucket: Bucket) -> torch.Tensor:
        """Return a view of the shared memory, which must not be written to."""
        number = bucket.place["segment"]
        if number not in self._mapped:
            self._mapped[number] = mapped(bucket.place)
        return self._mapped[number]

    async def close(self) -> None:
        """End the transfer. The sender keeps its segments for the next one if this one was complete."""
        if not self.whole:
            self._pool.drop()  # a worker may still read there
        self._pool.begin()
        self._segment = None
        self._mapped.clear()
