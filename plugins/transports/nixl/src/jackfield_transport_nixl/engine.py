"""Transfer weights: every inference worker reads them from the memory of the trainer's rank 0."""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.errors import WeightsError
from jackfield.sdk.buckets import Bucket, Entry, entry_of, kept_buffer, raw
from jackfield.sdk.transfer import OneSenderEngine, Peer
from jackfield_transport_nixl.agents import Agent, Place, devices_of, place_of
from jackfield_transport_nixl.config import EngineConfig

_WORKER_SLOTS = 2  #: one is read by the worker while the next one arrives


@attrs.define(eq=False)
class _Slot:
    number: int  #: of a buffer of a worker
    free: bool = True


class NIXLCheckpointEngine(OneSenderEngine):
    """One end of the transfer. Rank 0 fills buckets in registered memory; other ranks only exhaust.

    A worker reads a bucket when it has room for it, so the sender notices and names a slow or silent worker.
    """

    config: EngineConfig
    slots = 3

    def __init__(self, config: EngineConfig, context: CheckpointEngineContext) -> None:
        super().__init__(config, context)
        self.device = context.device
        self._agent: Agent | None = None  #: kept with its registered memory from one transfer to the next
        self._known = ""  #: name of the last sender's agent
        self._forget()

    def _forget(self) -> None:
        self._in_place = False  #: whether workers read large tensors where they are
        self._lent: deque[tuple[int, torch.Tensor]] = deque()  #: such tensors, with the number of their bucket
        self._name = ""  #: of the sender's agent; empty: a worker cannot read yet
        self._slots = [_Slot(number) for number in range(_WORKER_SLOTS)]
        self._filling: _Slot | None = None  #: the slot with pieces of a tensor
        self._shown: deque[Mapping[str, Any]] = deque()  #: buckets that this worker has not begun to read
        self._last: Future[None] | None = None  #: the newest reading
        self._read = 0  #: buckets that this worker has read
        self._described: Sequence[Entry] = []  #: entries of the bucket that is read

    async def _open(self, host: str) -> Agent:
        devices = devices_of(self.config.devices, host)
        if self._agent is not None and self._agent.devices == devices:
            return self._agent
        await self._drop()
        agent = self._agent = Agent(devices)
        try:
            await self.finished(agent.start(), "NIXL to start")
        except WeightsError as error:
            error.where = error.where or f"UCX on {agent.devices or 'all devices'}"
            raise
        return agent

    async def meet_workers(self, workers: int) -> None:
        """Register buffers for the workers to read."""
        if not workers:
            return
        agent = await self._open(self.context.host)
        near = agent.devices == "lo"  # else a network card would have to pin the memory of each tensor
        self._in_place = near if self.config.in_place is None else self.config.in_place
        for slot in range(self.slots):
            buffer = kept_buffer(self.buffers, slot, self.config.bucket_bytes, self.device)
            await self.finished(agent.run(agent.register, buffer), "memory to be registered")
        metadata = await self.finished(agent.run(agent.metadata), "the sender's agent")
        agent.progress()
        self.tell({"agent": b64encode(metadata).decode(), "slot": attrs.astuple(place_of(buffer))})
        await self.until(lambda peer: "ready" in peer.said, "read the sender's memory")

    async def meet_sender(self, place: Mapping[str, Any]) -> None:
        """Learn the sender's memory, and read a byte: this makes the connection, which takes a while."""
        agent = await self._open(place["host"])
        await self.until(lambda peer: "agent" in peer.said, "show its memory")
        said = self.peers[0].said
        name = await self.finished(agent.run(agent.meet, b64decode(said["agent"])), "the sender's agent")
        if self._known not in ("", name):
            await self.finished(agent.run(agent.forget, self._known), "the last sender's agent to be forgotten")
        self._known, theirs = name, Place(*said["slot"])

        def first() -> None:
            for slot in self._slots:
                self._fit(agent, slot, theirs.size)
            agent.move("READ", name, [theirs.part(0, 1)], [place_of(self.buffers[0]).part(0, 1)])

        await self.finished(agent.run(first), "the sender to have its memory read")
        self._name = name
        self.tell({"ready": True})
        self._pump()

    def heard(self, peer: Peer, values: Mapping[str, Any]) -> None:
        """Handle the announcement of a bucket."""
        if "piece" in values:
            self._shown.append(values)
            self._pump()

    async def send_alone(self, name: str, tensor: torch.Tensor) -> bool:
        """Let workers read a large tensor where it is, or copy it into several buckets."""
        size, limit = tensor.nbytes, self.config.bucket_bytes
        if size <= limit:
            return False
        await self.flush()
        content, entry = raw(tensor), entry_of(name, tensor)
        if self._in_place and content.device == self.buffers[0].device:
            await self._lend(content, entry)
            return True
        for start in range(0, size, limit):
            piece = content[start : start + limit]
            bucket = (await self.room(limit))[: len(piece)]
            bucket.copy_(piece)
            self._show(place_of(bucket), None if start else [entry], start, size)
        return True

    async def _lend(self, content: torch.Tensor, entry: Entry) -> None:
        agent = self._agent
        assert agent is not None, "there are workers"

        def registered() -> bytes:
            agent.register(content)
            return agent.metadata()

        metadata = await self.finished(agent.run(registered), "memory to be registered")
        self._show(place_of(content), [entry], 0, content.numel(), b64encode(metadata).decode())
        self._lent.append((self.made, content))
        self.lent = self.made

    async def taken(self, count: int) -> None:
        """Wait until every worker has read ``count`` buckets, and release tensors that were read."""
        await super().taken(count)
        while self._lent and self._lent[0][0] <= count:
            _, content = self._lent.popleft()
            again = any(content.data_ptr() == other.data_ptr() for _, other in self._lent)  # by another name
            if self._agent is not None and not again:
                self._agent.run(self._agent.release, content)

    async def launch(self, content: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Announce a bucket to the workers."""
        self._show(place_of(content), entries, 0, content.numel())
        await asyncio.sleep(0)

    def _show(
        self, place: Place, entries: Sequence[Entry] | None, start: int, size: int, agent: str | None = None
    ) -> None:
        """Announce a piece of ``size`` bytes; ``agent`` has the metadata of newly registered memory."""
        if place.memory == "VRAM":
            torch.cuda.current_stream(place.device).synchronize()
        self.made += 1
        shown = {"piece": self.made, "place": attrs.astuple(place), "start": start, "size": size, "agent": agent}
        self.tell({**shown, "tensors": None if entries is None else self.layout.announced(entries)})

    def _pump(self) -> None:
        while self._shown and self._name:
            slot = self._filling or next((slot for slot in self._slots if slot.free), None)
            if slot is None or self._agent is None:
                return
            piece = self._shown.popleft()
            slot.free, self._filling = False, slot
            if not piece["start"]:
                self._described = self.layout.learned(piece["tensors"])
            self._last = self._agent.run(self._reading(self._agent, slot, piece, self._last))
            asyncio.wrap_future(self._last).add_done_callback(self._was_received)
            if piece["start"] + piece["place"][1] == piece["size"]:
                self._filling = None
                self.arrived.append(Bucket(piece["piece"], self._described, (slot, piece["size"], self._last)))

    def _reading(
        self, agent: Agent, slot: _Slot, piece: Mapping[str, Any], last: Future[None] | None
    ) -> Callable[[], None]:
        theirs, name = Place(*piece["place"]), self._name

        def read() -> None:
            if last is not None:
                last.result()  # after a failure nothing is read
            self._fit(agent, slot, piece["size"])
            if piece["agent"] is not None:
                agent.meet(b64decode(piece["agent"]))
            ours = place_of(self.buffers[slot.number]).part(piece["start"], theirs.size)
            agent.move("READ", name, [theirs], [ours])

        return read

    def _fit(self, agent: Agent, slot: _Slot, size: int) -> None:
        """Let a buffer be registered and have ``size`` bytes; in the agent's thread."""
        if slot.number < len(self.buffers) and self.buffers[slot.number].numel() < size:
            agent.release(self.buffers[slot.number])
        agent.register(kept_buffer(self.buffers, slot.number, size, self.device))

    def _was_received(self, job: asyncio.Future[None]) -> None:
        if not job.cancelled() and job.exception() is None:
            self._read += 1
            self.tell({"got": self._read})

    async def content(self, bucket: Bucket) -> torch.Tensor:
        """Return the buffer of a bucket once it was read from the sender's memory."""
        slot: _Slot = bucket.place[0]
        size, reading = bucket.place[1:]
        await self.finished(reading, f"the sender to have bucket {bucket.number - 1} read")
        return self.buffers[slot.number][:size]

    def was_read(self, bucket: Bucket) -> None:
        """Read the next bucket into the buffer."""
        bucket.place[0].free = True
        self._pump()

    async def close(self) -> None:
        """Close the agent after a transfer that broke off; otherwise it stays for the next one."""
        self._forget()
        if not self.whole:
            await self._drop()
        elif self._agent is not None:
            self._agent.progress(False)

    async def _drop(self) -> None:
        agent, self._agent, self._known = self._agent, None, ""
        if agent is not None:
            await asyncio.to_thread(agent.close)
