"""Transfer weights from the trainer's rank 0 to the workers of its host through shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.sdk.buckets import Bucket, Entry
from jackfield.sdk.devices import gpu_identity
from jackfield.sdk.transfer import OneSenderEngine
from jackfield_transport_shared import gpu
from jackfield_transport_shared.config import Config
from jackfield_transport_shared.segments import Pool, Segment, mapped


class SharedCheckpointEngine(OneSenderEngine):
    """One end of the transfer. Rank 0 copies each tensor once into a segment, and all workers read it there.

    Segments are memory of the GPU if the sender and all workers compute on the same one, otherwise of the host.
    Publishing waits for workers only when ``max_bytes`` (``gpu_max_bytes``) are in use. A segment is reused once all
    workers have read it.
    """

    config: Config

    def __init__(self, config: Config, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._host = Pool(config.max_bytes)  #: stays from one transfer to the next
        self._pool = self._host  #: of this transfer
        self._driver: gpu.Driver | None = None  #: of the GPU that both ends use
        self._segment: Segment | None = None  #: the segment that is filled
        self._mapped: dict[int, torch.Tensor] = {}  #: a worker's views of segments
        self._opened: list[int] = []  #: a worker's addresses of segments of a GPU

    async def meet_workers(self, workers: int) -> None:
        """Choose where segments are."""
        await self.until(lambda peer: "gpu" in peer.said, "say which GPU it has")
        own = gpu_identity(self.context.device)
        if workers and own is not None and all(peer.said["gpu"] == own for peer in self.peers.values()):
            self._driver = self._driver or gpu.Driver(self.context.device)
            self._pool = Pool(self.config.gpu_max_bytes, partial(gpu.gpu_segment, self._driver))

    async def meet_sender(self, place: Mapping[str, Any]) -> None:
        """Tell the sender which GPU this worker has."""
        self.tell({"gpu": gpu_identity(self.context.device)})

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
        if self._pool is not self._host and self._driver is not None:
            self._driver.wait()
        self.announce(entries, self._segment.place())
        self._segment.bucket = self.made
        await asyncio.sleep(0)  # to hear of workers that broke off
        await self.taken(0)

    async def content(self, bucket: Bucket) -> torch.Tensor:
        """Return a view of the shared memory, which must not be written to."""
        number = bucket.place["segment"]
        if number not in self._mapped:
            self._mapped[number] = self._map(bucket.place)
        return self._mapped[number]

    def _map(self, place: Mapping[str, Any]) -> torch.Tensor:
        if "handle" not in place:
            return mapped(place)
        self._driver = self._driver or gpu.Driver(self.context.device)
        pointer, content = gpu.gpu_mapped(self._driver, place)
        self._opened.append(pointer)
        return content

    def was_read(self, bucket: Bucket) -> None:
        """Tell the sender that the memory may be reused. That of a GPU it may also free, so it is not mapped here."""
        self._unmap()
        super().was_read(bucket)

    def _unmap(self) -> None:
        if self._opened and self._driver is not None:
            self._driver.wait()  # for copies of what was read
            self._mapped.clear()
            while self._opened:
                self._driver.close(self._opened.pop())

    async def close(self) -> None:
        """End the transfer. The sender keeps segments of the host for the next one if this one was complete.

        A GPU's memory is needed elsewhere.
        """
        self._unmap()
        self._mapped.clear()
        self._segment = None
        if self._pool is not self._host:
            self._pool.drop()
            self._pool = self._host
        if not self.whole:
            self._host.drop()  # a worker may still read there
        self._host.begin()
