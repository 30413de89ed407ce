"""Both halves of a weight transfer: tensors into buckets that are read, and readings into tensors."""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs
import torch

from jackfield.errors import WeightsError
from jackfield.sdk.buckets import Entry, aligned, entry_of, put, raw
from jackfield.sdk.transfer import Peer, TransferSession
from jackfield_transport_nixl.agents import Agent, Place, place_of

T = TypeVar("T")

_SENDER_SLOTS = 3  #: buckets: one is filled while others are read
_WORKER_SLOTS = 2  #: one is read by the worker while the next one arrives


async def finished(session: TransferSession, future: Future[T], who: str, where: str | None = None) -> T:
    """Wait for an agent; raises who is to blame, if anyone is, and at the deadline an error that names ``who``."""
    try:
        return await session.wait_for(asyncio.wrap_future(future), who)
    except OSError as error:
        await session.cause()
        raise WeightsError(f"NIXL failed: {error}", where=where) from error


# -- the sender --------------------------------------------------------------------------------------------------------


class Sending:
    """What one transfer sends. The tensor before the last has been copied or read when :meth:`add` returns."""

    def __init__(self, session: TransferSession, agent: Agent, slots: Sequence[torch.Tensor], in_place: bool) -> None:
        """``slots`` come from :meth:`slots`; ``in_place``, tensors larger than a bucket are read where they lie."""
        self._in_place = in_place
        self._session = session
        self._agent = agent
        self._slots = slots
        self._bucket_bytes = slots[0].numel()
        self._made = 0  #: pieces so far; piece n lies in slot n modulo their number
        self._used = 0  #: bytes of the bucket that is filled
        self._entries: list[Entry] = []
        self._lent: tuple[torch.Tensor, int] | None = None  #: a tensor that is read where it lies, as which piece

    @staticmethod
    def slots(kept: list[torch.Tensor], bucket_bytes: int, device: str) -> list[torch.Tensor]:
        """Buffers of the sender, uint8; kept ones if they fit. Touching fresh memory is slow."""
        fitting = [slot for slot in kept if slot.numel() == bucket_bytes and slot.device == torch.device(device)]
        while len(fitting) < _SENDER_SLOTS:
            fitting.append(torch.empty(bucket_bytes, dtype=torch.uint8, device=device))
        return fitting

    async def begin(self) -> None:
        """Show workers the memory."""
        for slot in self._slots:
            await finished(self._session, self._agent.register(slot), "memory to be registered")
        metadata = await finished(self._session, self._agent.metadata(), "the sender's agent")
        places = [attrs.astuple(place_of(slot)) for slot in self._slots]
        self._agent.progress()
        self._session.tell({"agent": b64encode(metadata).decode(), "slots": places})
        await self._session.until(lambda peer: "ready" in peer.said, "read the sender's memory")

    async def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into a bucket, or a large one into several, or have it read where it lies."""
        before, self._lent = self._lent, None
        await self._add(name, tensor)
        await self._take_back(before)

    async def _add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.nbytes
        if size > self._bucket_bytes:
            await self._flush()
            content, entry = raw(tensor), entry_of(name, tensor)
            if self._in_place and content.device == self._slots[0].device:
                await self._lend(content, entry)
                return
            for start in range(0, size, self._bucket_bytes):
                piece = content[start : start + self._bucket_bytes]
                (await self._slot())[: len(piece)].copy_(piece)
                self._show(len(piece), start, size, [entry])
            return
        if self._used + size > self._bucket_bytes:
            await self._flush()
        entry = entry_of(name, tensor, self._used)
        slot = self._slots[self._made % len(self._slots)] if self._entries else await self._slot()
        put(slot, entry, tensor)
        self._entries.append(entry)
        self._used = aligned(self._used + size)

    async def _lend(self, content: torch.Tensor, entry: Entry) -> None:
        """Have a tensor read where it lies, uint8 ``[bytes]``."""
        agent, size = self._agent, content.numel()

        def registered() -> bytes:
            agent.register_now(content)
            return agent.metadata_now()

        metadata = await finished(self._session, agent.run(registered), "memory to be registered")
        lent = {"agent": b64encode(metadata).decode(), "place": attrs.astuple(place_of(content))}
        self._lent = content, self._made
        self._show(size, 0, size, [entry], lent)

    async def _take_back(self, lent: tuple[torch.Tensor, int] | None) -> None:
        """Wait until a tensor has been read: its owner may write there again."""
        if lent is not None:
            content, piece = lent
            await self._session.until(lambda peer: peer.said.get("got", 0) > piece, f"read bucket {piece}")
            if self._lent is None or self._lent[0].data_ptr() != content.data_ptr():  # else the same by another name
                self._agent.release(content)

    async def end(self) -> None:
        """Show what is left."""
        await self._flush()
        await self._take_back(self._lent)

    async def _slot(self) -> torch.Tensor:
        """The buffer that is to be filled, once everybody has read what was in it."""
        await asyncio.sleep(0)  # to hear of workers
        needed = self._made - len(self._slots)
        await self._session.until(lambda peer: peer.said.get("got", 0) > needed, f"read bucket {needed}")
        return self._slots[self._made % len(self._slots)]

    async def _flush(self) -> None:
        entries, size = self._entries, min(self._used, self._bucket_bytes)
        self._entries, self._used = [], 0
        if entries:
            self._show(size, 0, size, entries)
            await asyncio.sleep(0)

    def _show(
        self, length: int, start: int, size: int, entries: Sequence[Entry], lent: Mapping[str, Any] | None = None
    ) -> None:
        """A piece of ``size`` bytes of tensors may be read, in its bucket or where it lies."""
        if self._slots[0].device.type == "cuda":
            torch.cuda.current_stream(self._slots[0].device).synchronize()
        shown = {"piece": self._made, "length": length, "start": start, "size": size, "lent": lent}
        self._session.tell({**shown, "tensors": [] if start else list(entries)})
        self._made += 1

    @property
    def made(self) -> int:
        """Pieces so far."""
        return self._made


# -- a worker ----------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Slot:
    """A buffer of a worker."""

    buffer: torch.Tensor  #: uint8
    free: bool = True


@attrs.frozen(eq=False)
class Arrived:
    """Tensors that have been read together."""

    content: torch.Tensor  #: uint8 ``[bytes]``
    entries: Sequence[Entry]
    slot: _Slot


class Receiving:
    """What a worker reads, as soon as it is shown and there is room for it."""

    def __init__(self, session: TransferSession, agent: Agent, kept: list[torch.Tensor], device: str) -> None:
        """The caller keeps the buffers ``kept`` from transfer to transfer."""
        self._session = session
        self._agent = agent
        self._kept = kept
        while len(kept) < _WORKER_SLOTS:
            kept.append(torch.empty(0, dtype=torch.uint8, device=device))
        self._slots = [_Slot(buffer) for buffer in kept]
        self._filling: _Slot | None = None  #: with the pieces of a tensor
        self._entries: Sequence[Entry] = ()
        self._shown: deque[Mapping[str, Any]] = deque()
        self._name = ""  #: of the sender's agent
        self._places: list[Place] = []
        self.failure: BaseException | None = None
        self.arrived: deque[Arrived] = deque()
        self.pieces = 0  #: that have been read

    async def begin(self) -> None:
        """Know the sender's memory."""
        await self._session.until(lambda peer: "agent" in peer.said, "show its memory")
        said = self._session.peers[0].said
        self._name = await finished(self._session, self._agent.meet(b64decode(said["agent"])), "the sender's agent")
        places = [Place(*place) for place in said["slots"]]
        await finished(
            self._session, self._agent.run(lambda: self._first(places)), "the sender to have its memory read"
        )
        self._places = places
        self._session.tell({"ready": True})
        self._pump()

    def _first(self, places: Sequence[Place]) -> None:
        """Have room for buckets, and read a byte: it makes the connection, which takes a while."""
        for slot in self._slots:
            self._fit(slot, places[0].size)
        self._agent.read_now(self._name, places[0].part(0, 1), place_of(self._slots[0].buffer).part(0, 1))

    def heard(self, message: Mapping[str, Any]) -> None:
        """The sender has said something."""
        if "piece" in message:
            self._shown.append(message)
            self._pump()

    def _pump(self) -> None:
        """Read what there is room for."""
        while self._shown and self._places:
            slot = self._filling or next((slot for slot in self._slots if slot.free), None)
            if slot is None:
                return
            piece = self._shown.popleft()
            if piece["start"] == 0:
                slot.free, self._filling, self._entries = False, slot, piece["tensors"]
            whole = piece["start"] + piece["length"] == piece["size"]
            entries = self._entries
            if whole:
                self._filling = None
            job = asyncio.wrap_future(self._agent.run(self._reading(slot, piece)))
            job.add_done_callback(self._ended(slot, piece["size"] if whole else None, entries))

    def _reading(self, slot: _Slot, piece: Mapping[str, Any]) -> Callable[[], None]:
        lent = piece["lent"]
        bucket = self._places[piece["piece"] % len(self._places)] if lent is None else Place(*lent["place"])
        theirs = bucket.part(0, piece["length"])

        def read() -> None:
            self._fit(slot, piece["size"])
            if lent is not None:
                self._agent.meet_now(b64decode(lent["agent"]))
            self._agent.read_now(self._name, theirs, place_of(slot.buffer).part(piece["start"], piece["length"]))

        return read

    def _fit(self, slot: _Slot, size: int) -> None:
        """Let a buffer be registered and have so many bytes; in the agent's thread."""
        if slot.buffer.numel() < size:
            self._agent.release_now(slot.buffer)
            slot.buffer = torch.empty(size, dtype=torch.uint8, device=slot.buffer.device)
            self._kept[self._slots.index(slot)] = slot.buffer
        self._agent.register_now(slot.buffer)

    def _ended(self, slot: _Slot, size: int | None, entries: Sequence[Entry]) -> Callable[[asyncio.Future[None]], None]:
        """What follows a reading; ``size`` of all that was read together with its last piece."""

        def ended(job: asyncio.Future[None]) -> None:
            if job.cancelled():
                return
            error = job.exception()
            self.failure = self.failure or error
            if self.failure is None:
                self.pieces += 1
                self._session.tell({"got": self.pieces})
                if size is not None:
                    self.arrived.append(Arrived(slot.buffer[:size], entries, slot))
            self._session.notify()

        return ended

    def read(self, arrived: Arrived) -> None:
        """Tensors that have come were used; there is room for more."""
        arrived.slot.free = True
        self._pump()

    async def ready(self) -> None:
        """Wait until something has come, or everything has been read."""

        def goes_on(sender: Peer) -> bool:
            return bool(self.failure or self.arrived) or sender.said.get("pieces") == self.pieces

        await self._session.until(goes_on, f"have bucket {self.pieces} read")
        if self.failure is not None:
            await self._session.cause()
            raise WeightsError(f"the sender's memory cannot be read: {self.failure}")
