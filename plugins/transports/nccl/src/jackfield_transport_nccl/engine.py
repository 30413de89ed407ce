"""Broadcast weights in buckets from the trainer's rank 0 to every inference worker."""

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
from jackfield.sdk.buckets import Entry, views
from jackfield.sdk.one_sender import OneSenderEngine
from jackfield.sdk.transfer import Peer, TransferSession
from jackfield_transport_nccl.config import Config
from jackfield_transport_nccl.sending import SLOTS, Group, Sending, SessionStore, finished, grown


@attrs.frozen(eq=False)
class _Arriving:
    """A bucket whose broadcast a worker has joined."""

    number: int
    buffer: torch.Tensor  #: uint8
    entries: list[Entry]
    done: Future[None]


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
        self._slots: list[torch.Tensor] = []  #: uint8; kept from one transfer to the next
        self._arriving: deque[_Arriving] = deque()
        self._closing: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Reset the state of the previous transfer."""
        self._arriving.clear()
        self._store = None

    def listen(self, secret: str) -> Mapping[str, Any]:
        """Return the backend, which the trainer chooses."""
        return {"backend": self._backend()}

    def _backend(self) -> str:
        if self.config.backend != "auto":
            return self.config.backend
        return "nccl" if torch.device(self.context.device).type == "cuda" else "gloo"

    async def met_workers(self, session: TransferSession, workers: int) -> None:
        """Form a group with the workers."""
        self._store = self._make_store(session)
        if workers:
            session.tell({"form": True})
            await self._form(session, self._backend(), 0, workers + 1, self.context.host)
            # a member that leaves early (say, after an empty transfer) would break those that are still connecting
            await session.until(lambda peer: "formed" in peer.said, "join the broadcast group")

    async def enter(self, session: TransferSession, place: Mapping[str, Any], version: int) -> None:
        """Connect to the sender, and form a group with all others."""
        if place["backend"] == "nccl" and torch.device(self.context.device).type != "cuda":
            raise WeightsError(
                "an inference worker without a GPU cannot join an NCCL broadcast",
                where=f"worker {place['worker']}",
                expected="a CUDA device",
                found=self.context.device,
                fix="set backend: gloo",
            )
        self._store = self._make_store(session)
        await super().enter(session, place, version)
        await session.until(lambda peer: "form" in peer.said, "meet all inference workers")
        host = session.peers[0].connection.local_host
        await self._form(session, place["backend"], place["worker"] + 1, place["workers"] + 1, host)
        session.tell({"formed": True})

    def _make_store(self, session: TransferSession) -> SessionStore:
        loop = asyncio.get_running_loop()

        def publish(key: str, value: str) -> None:
            loop.call_soon_threadsafe(session.tell, {"store": [key, value]})

        return SessionStore(self.context.deadline_seconds, publish)

    async def _form(self, session: TransferSession, backend: str, rank: int, size: int, host: str) -> None:
        assert self._store is not None
        self._group = Group(backend, rank, size, host, self._store, session.remaining())
        await finished(session, self._group.made, "everybody to join the broadcast group")

    def heard(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Handle an address for the group, or a bucket, whose broadcast is joined at once."""
        if "store" in message and self._store is not None:
            self._store.put(*message["store"])
            if self.context.end == "sender" and self.session is not None:
                self.session.tell({"store": message["store"]})
        if "bucket" in message and self._group is not None:
            number, size = message["bucket"], message["bytes"]
            buffer = grown(self._slots, number % SLOTS, size, self._buffer_device())[:size]
            done = self._group.broadcast(buffer)
            self._arriving.append(_Arriving(number, buffer, message["tensors"], done))

    def _buffer_device(self) -> str:
        return self.context.device if self._group is not None and self._group.backend == "nccl" else "cpu"

    async def send(
        self, session: TransferSession, weights: Generator[tuple[str, torch.Tensor], None, None]
    ) -> Mapping[str, Any]:
        """Send the tensors in buckets."""
        sending = Sending(session, self._group, self._slots, self.config.bucket_bytes, self._buffer_device())
        for name, tensor in weights:
            await sending.add(name, tensor)
        await sending.end()
        return {}

    async def receive(self, session: TransferSession) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield tensors out of one bucket while the next one arrives."""
        room = SLOTS
        session.tell({"room": room})
        while True:
            await session.until(lambda peer: bool(self._arriving) or "done" in peer.said, "send")
            if not self._arriving:
                return
            bucket = self._arriving.popleft()
            await finished(session, bucket.done, f"the sender to send bucket {bucket.number}")
            session.tell({"got": bucket.number, "room": room})
            for item in views(bucket.buffer, bucket.entries):
                yield item
            room += 1
            if self._arriving:  # else said with the next one, before which the sender needs no more
                session.tell({"room": room})

    async def close(self) -> None:
        """Leave the group, even if the caller is cancelled. A second call waits for the first."""
        self._arriving.clear()
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
