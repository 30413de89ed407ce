"""The sender's half: tensors into buckets, buckets into broadcasts."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import torch

from jackfield.errors import WeightsError
from jackfield.sdk.buckets import Entry, aligned, entry_of, put, raw
from jackfield.sdk.transfer import TransferSession
from jackfield_transport_nccl.group import Group

#: Tensors of this part of a bucket, or larger, leave from where they lie: a copy would cost more than waiting.
_DIRECT = 4
SLOTS = 2  #: buckets of one end: one is filled or read while the other is on its way


class Sending:
    """What one transfer sends. The tensor before the last has been copied, or has left, when :meth:`add` returns."""

    def __init__(
        self, session: TransferSession, group: Group | None, slots: list[torch.Tensor], bucket_bytes: int, device: str
    ) -> None:
        """
        Args:
            session: with every worker.
            group: None where there is no worker.
            slots: buffers, kept by the caller.
            bucket_bytes: of a bucket.
            device: of the buffers.
        """
        self._session = session
        self._group = group
        self._slots = slots
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._number = 0  #: of the bucket that is filled
        self._used = 0  #: bytes of it
        self._entries: list[Entry] = []
        self._flights: list[Future[None] | None] = [None] * SLOTS  #: by slot
        self._lent: int | None = None  #: slot from which the tensor that came last leaves; None: it was copied

    async def add(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor into a bucket; send a large one alone."""
        if self._group is None:
            return
        before, self._lent = self._lent, None
        await self._add(name, tensor)
        if before is not None:
            await self._landed(before)

    async def _add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.nbytes * _DIRECT >= self._bucket_bytes:
            await self._flush()
            content = raw(tensor.detach().to(self._device))
            self._lent = await self._launch(content, [entry_of(name, tensor)])
            return
        if self._used + tensor.nbytes > self._bucket_bytes:
            await self._flush()
        if not self._entries:
            await self._landed(self._number % SLOTS)
        entry = entry_of(name, tensor, self._used)
        put(grown(self._slots, self._number % SLOTS, self._bucket_bytes, self._device), entry, tensor)
        self._entries.append(entry)
        self._used = aligned(self._used + tensor.nbytes)

    async def end(self) -> None:
        """Send what is left, and wait until every bucket has arrived."""
        await self._flush()
        for slot in range(SLOTS):
            await self._landed(slot)

    async def _flush(self) -> None:
        entries, size = self._entries, min(self._used, self._bucket_bytes)
        self._entries, self._used = [], 0
        if entries:
            await self._launch(self._slots[self._number % SLOTS][:size], entries)

    async def _launch(self, content: torch.Tensor, entries: list[Entry]) -> int:
        """Broadcast a bucket, uint8 ``[bytes]``, once all have room for it; returns its slot."""
        assert self._group is not None
        number = self._number
        await self._session.until(lambda peer: peer.said.get("room", 0) > number, f"have room for bucket {number}")
        await self._landed(number % SLOTS)
        self._session.tell({"bucket": number, "bytes": content.numel(), "tensors": entries})
        self._flights[number % SLOTS] = self._group.broadcast(content)
        self._number += 1
        return number % SLOTS

    async def _landed(self, slot: int) -> None:
        """Wait until the bucket that was sent from a slot has arrived."""
        flight, self._flights[slot] = self._flights[slot], None
        if flight is None:
            return
        number = self._number - 1 - (self._number - 1 - slot) % SLOTS

        def late() -> str:
            peers = self._session.peers.values()
            return " and ".join(peer.name for peer in peers if peer.said.get("got", -1) < number)

        await finished(self._session, flight, f"{late() or 'the inference workers'} to take a bucket")


async def finished(session: TransferSession, flight: Future[None], who: str) -> None:
    """Wait for something that all members of the group do together.

    Raises:
        WeightsError: it failed, with the peer that is to blame, if one is.
        DeadlineExceeded: naming ``who``.
    """
    try:
        await session.wait_for(asyncio.wrap_future(flight), who)
    except RuntimeError as error:
        await session.cause()
        raise WeightsError(f"the broadcast broke off: {error}") from error


def grown(slots: list[torch.Tensor], slot: int, size: int, device: str) -> torch.Tensor:
    """A slot's buffer, uint8 with at least ``size`` bytes. Touching fresh memory is slow, so it is kept."""
    while len(slots) <= slot:
        slots.append(torch.empty(0, dtype=torch.uint8, device=device))
    if slots[slot].numel() < size or slots[slot].device.type != torch.device(device).type:
        slots[slot] = torch.empty(size, dtype=torch.uint8, device=device)
    return slots[slot]
