"""Broadcast weights in buckets from the trainer's rank 0 to every inference worker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, ConnectRequest
from jackfield.errors import WeightsError
from jackfield.sdk.buckets import Bucket, Entry, entry_of, kept_buffer, raw
from jackfield.sdk.transfer import OneSenderEngine, Peer
from jackfield_transport_nccl.config import Config
from jackfield_transport_nccl.group import Group, SessionStore

_DIRECT = 4  #: a tensor of this part of a bucket, or larger, is sent without a copy, which would cost more than waiting


class NCCLCheckpointEngine(OneSenderEngine):
    """One end of a broadcast. The trainer's rank 0 sends; other ranks only exhaust their generators.

    The sender announces each bucket through the session once every worker has room for it, and all then join the
    broadcast. So a slow or silent worker is named there, and no broadcast begins that a worker would not join.
    """

    config: Config

    def __init__(self, config: Config, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._store: SessionStore | None = None
        self._group: Group | None = None
        self._flights: deque[tuple[int, Future[None]]] = deque()  #: broadcasts of the sender by number of the bucket
        self._closing: asyncio.Future[None] | None = None

    def listen(self, secret: str) -> Mapping[str, Any]:
        """Return the backend, which the trainer chooses."""
        return {"backend": self._backend()}

    def _backend(self) -> str:
        if self.config.backend != "auto":
            return self.config.backend
        return "nccl" if torch.device(self.context.device).type == "cuda" else "gloo"

    async def connect(self, request: ConnectRequest) -> None:
        """Connect to the sender, and form a group with all others."""
        place = request.arguments
        if place.get("backend") == "nccl" and torch.device(self.context.device).type != "cuda":
            raise WeightsError(
                "an inference worker without a GPU cannot join an NCCL broadcast",
                where=f"worker {place['worker']}",
                expected="a CUDA device",
                found=self.context.device,
                fix="set backend: gloo",
            )
        await super().connect(request)

    async def meet_workers(self, workers: int) -> None:
        """Form a group with the workers."""
        if workers:
            self._store = self._make_store()
            self.tell({"form": True})
            await self._form(self._backend(), 0, workers + 1, self.context.host)
            # a member that leaves early (say, after an empty transfer) would break those that are still connecting
            await self.until(lambda peer: "formed" in peer.said, "join the broadcast group")

    async def meet_sender(self, place: Mapping[str, Any]) -> None:
        """Form a group with all others."""
        await self.until(lambda peer: "form" in peer.said, "meet all inference workers")
        host = self.peers[0].connection.local_host
        await self._form(place["backend"], place["worker"] + 1, place["workers"] + 1, host)
        self.tell({"formed": True, "room": self.slots})

    def _make_store(self) -> SessionStore:
        loop = asyncio.get_running_loop()

        def publish(key: str, value: str) -> None:
            loop.call_soon_threadsafe(self.tell, {"store": [key, value]})

        return SessionStore(self.context.deadline_seconds, publish)

    async def _form(self, backend: str, rank: int, size: int, host: str) -> None:
        if self._store is None:
            self._store = self._make_store()
        self._group = Group(backend, rank, size, host, self._store, self.remaining())
        self.device = self.context.device if backend == "nccl" else "cpu"
        await self.finished(self._group.made, "everybody to join the broadcast group")

    def heard(self, peer: Peer, values: Mapping[str, Any]) -> None:
        """Handle an address for the group, or a bucket, whose broadcast is joined at once."""
        if "store" in values:
            if self._store is None:
                self._store = self._make_store()
            self._store.put(*values["store"])
            if self.context.end == "sender":
                self.tell({"store": values["store"]})
        if "bucket" in values and self._group is not None:
            bucket = self.arrived[-1]
            size: int = bucket.place
            content = kept_buffer(self.buffers, bucket.number % self.slots, size, self.device)[:size]
            bucket.place = content, self._group.broadcast(content)

    async def send_alone(self, name: str, tensor: torch.Tensor) -> bool:
        """Send a large tensor without a copy."""
        if tensor.nbytes * _DIRECT < self.config.bucket_bytes:
            return False
        await self.flush()
        await self.launch(raw(tensor.detach().to(self.device)), [entry_of(name, tensor)])
        self.lent = self.made
        return True

    async def launch(self, content: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Broadcast a bucket, once all workers have room for it."""
        assert self._group is not None, "there are workers"
        number = self.made + 1
        await self.until(lambda peer: peer.said["room"] >= number, f"have room for bucket {number - 1}")
        self.announce(entries, content.numel())
        self._flights.append((number, self._group.broadcast(content)))

    async def taken(self, count: int) -> None:
        """Wait until the broadcasts of ``count`` buckets have ended."""
        while self._flights and self._flights[0][0] <= count:
            number, flight = self._flights.popleft()
            late = [peer.name for peer in self.peers.values() if peer.got < number]
            await self.finished(flight, f"{' and '.join(late) or 'the inference workers'} to take a bucket")

    async def content(self, bucket: Bucket) -> torch.Tensor:
        """Return the buffer of a bucket after its broadcast."""
        content, flight = bucket.place
        await self.finished(flight, f"the sender to send bucket {bucket.number - 1}")
        self.tell({"got": bucket.number})
        result: torch.Tensor = content
        return result

    def was_read(self, bucket: Bucket) -> None:
        """Tell the sender that there is room for another bucket."""
        self.tell({"room": bucket.number + self.slots})

    async def close(self) -> None:
        """Leave the group, even if the caller is cancelled. A second call waits for the first."""
        self._flights.clear()
        store, self._store = self._store, None
        group, self._group = self._group, None
        if store is not None:
            store.close()
        if group is not None:
            self._closing = asyncio.ensure_future(group.close())
        closing = self._closing
        if closing is None:
            return
        try:
            await asyncio.shield(closing)
        finally:
            if not closing.done():
                await closing
            self._closing = None
