"""Broadcast weights in buckets from the trainer's rank 0 to every inference worker."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.errors import WeightsError
from jackfield.sdk.buckets import Bucket, Entry, entry_of, kept_buffer, raw
from jackfield.sdk.devices import gpu_identity
from jackfield.sdk.transfer import OneSenderEngine, Peer
from jackfield_transport_nccl.config import Config
from jackfield_transport_nccl.group import Group, SessionStore

_ROOM = 3  #: buckets of a worker: one is read, one arrives, and the sender may begin the next without being asked
_DIRECT = 4  #: a tensor of this part of a bucket, or larger, is sent without a copy, which would cost more than waiting


class NCCLCheckpointEngine(OneSenderEngine):
    """One end of a broadcast. The trainer's rank 0 sends; other ranks only exhaust their generators.

    The sender announces each bucket through the session once every worker has room for it, and all then join the
    broadcast. So a slow or silent worker is named there, and no broadcast begins that a worker would not join.
    """

    config: Config

    def __init__(self, config: Config, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self._store: SessionStore | None = None  #: of the group that is formed
        self._group: Group | None = None  #: kept from one transfer to the next
        self._place: tuple[str, int, int] = ("", 0, 0)  #: name and size of the group, and this end's rank there
        self._flights: deque[tuple[int, Future[None]]] = deque()  #: broadcasts of the sender by number of the bucket
        self._closing: asyncio.Future[None] | None = None

    def _chosen(self, gpus: Sequence[str | None]) -> str:
        """Return the backend for the GPUs of all members, the sender's first; refuse NCCL where it cannot work."""
        missing = [self._name(number) for number, each in enumerate(gpus) if each is None]
        shared = [self._name(number) for number, each in enumerate(gpus) if each is not None and each in gpus[:number]]
        if self.config.backend == "gloo" or (self.config.backend == "auto" and (missing or shared)):
            return "gloo"
        if missing or shared:
            raise WeightsError(
                "NCCL needs a GPU of its own for the sender and each inference worker",
                where=", ".join(missing or shared),
                expected="GPUs that no other member has",
                found="none" if missing else "a GPU that another member has, too",
                fix="set backend: auto, or checkpoint_engine: shared for processes that share a GPU",
            )
        return "nccl"

    @staticmethod
    def _name(member: int) -> str:
        return f"worker {member - 1}" if member else "the sender"

    async def meet_workers(self, workers: int) -> None:
        """Form a group with the workers, unless the last one has the same members."""
        if workers:
            await self.until(lambda peer: "member" in peer.said, "say of which group it is a member")
            name, size = self._place[0], workers + 1
            members = [[name, size, number + 1] for number in range(workers)]
            if self._place[1] != size or members != [self.peers[number].said["member"] for number in range(workers)]:
                await self._leave()
                name, self._store = secrets.token_hex(8), self._make_store()
            own = gpu_identity(self.context.device)
            backend = self._chosen([own, *(self.peers[number].said["gpu"] for number in range(workers))])
            self.tell({"form": name, "backend": backend})
            await self._form((name, size, 0), backend, self.context.host)
            # a member that leaves early (say, after an empty transfer) would break those that are still connecting
            await self.until(lambda peer: "formed" in peer.said, "join the broadcast group")

    async def meet_sender(self, place: Mapping[str, Any]) -> None:
        """Form a group with all others, unless the sender keeps the last one."""
        self.tell({"member": self._place, "gpu": gpu_identity(self.context.device)})
        await self.until(lambda peer: "form" in peer.said, "meet all inference workers")
        member = self.peers[0].said["form"], place["workers"] + 1, place["worker"] + 1
        if member != self._place:
            await self._leave()
        await self._form(member, self.peers[0].said["backend"], self.peers[0].connection.local_host)
        self.tell({"formed": True})

    def _make_store(self) -> SessionStore:
        loop = asyncio.get_running_loop()

        def publish(key: str, value: str) -> None:
            loop.call_soon_threadsafe(self.tell, {"store": [key, value]})

        return SessionStore(self.context.deadline_seconds, publish)

    async def _form(self, member: tuple[str, int, int], backend: str, host: str) -> None:
        if self._group is None:
            assert self._store is not None, "it was made before anybody could publish"
            self._group = Group(backend, member[2], member[1], host, self._store, self.remaining())
            self.device = self.context.device if backend == "nccl" else "cpu"
            await self.finished(self._group.made, "everybody to join the broadcast group")
            self._place = member
        self._group.until(self.remaining())

    def heard(self, peer: Peer, values: Mapping[str, Any]) -> None:
        """Handle an address for the group, or a bucket, whose broadcast is joined at once."""
        if values.get("form", self._place[0]) != self._place[0]:
            self._store = self._make_store()  # others may publish before this worker has left its last group
        if "store" in values and self._store is not None:
            self._store.put(*values["store"])
            if self.context.end == "sender":
                self.tell({"store": values["store"]})
        if "bucket" in values and self._group is not None:
            bucket = self.arrived[-1]
            size: int = bucket.place
            content = kept_buffer(self.buffers, bucket.number % _ROOM, size, self.device)[:size]
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
        await self.until(lambda peer: peer.got + _ROOM >= number, f"have room for bucket {number - 1}")
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
        result: torch.Tensor = content
        return result

    async def close(self) -> None:
        """Leave the group after a transfer that broke off."""
        self._flights.clear()
        if self.device != "cpu":
            self.buffers.clear()  # a GPU's memory is needed elsewhere, and can be had again at once
        if not self.whole:
            await self._leave()

    async def _leave(self) -> None:
        """Leave the group, even if the caller is cancelled. A second call waits for the first."""
        self._place, group, self._group = ("", 0, 0), self._group, None
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
