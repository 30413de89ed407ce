"""Values on their way: from tensors into messages or shared memory, and back."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import attrs

from jackfield.abc.transfer_queue import Column, PutRequest
from jackfield.errors import QueueError
from jackfield.sdk.buckets import aligned
from jackfield.sdk.cells import Buffer, Cell, content_of, join
from jackfield_transport_zmq.arenas import Arenas, Block, ForeignArena, Held
from jackfield_transport_zmq.wire import Packer, bytes_of

COPIERS = min(4, os.cpu_count() or 1)  #: threads; one alone does not use all of the memory's rate
_IN_THREADS = 1 << 23  #: bytes; copying so much would hold the event loop up for milliseconds
_PIECE = 1 << 22  #: bytes that a thread copies at a time
_SHOWN = 1 << 16  #: bytes; smaller columns are copied rather than shown where they lie
_MAPPINGS = 64  #: arenas of others that are kept open


@attrs.frozen(eq=False)
class Outgoing:
    """The cells of a put, by row and column."""

    rows: list[list[Cell]]
    block: Block | None = None
    offsets: list[list[int]] = attrs.field(factory=list)  #: in the block's arena

    def message(self, numbers: Sequence[int]) -> tuple[dict[str, Any], list[Buffer]]:
        """Fields ``cells`` and ``blocks`` for these rows, and buffers."""
        if self.block is not None:
            entries = [
                [text, -1, offset, len(content)]
                for number in numbers
                for (text, content), offset in zip(self.rows[number], self.offsets[number], strict=True)
            ]
            return {"cells": entries, "blocks": [self.block.entry]}, []
        return packed_cells([cell for number in numbers for cell in self.rows[number]])


def packed_cells(cells: Sequence[Cell]) -> tuple[dict[str, Any], list[Buffer]]:
    """Fields ``cells`` and ``blocks`` with the values in the message's buffers."""
    packer = Packer()
    entries = [[text, *packer.add(content), len(content)] for text, content in cells]
    return {"cells": entries, "blocks": []}, packer.buffers()


async def copied_columns(request: PutRequest, made: Outgoing, block: Block, threads: ThreadPoolExecutor) -> Outgoing:
    """Return the same with all values in a block of shared memory, column after column."""
    import torch

    start, jobs = block.start, list[tuple[int, Any, int]]()
    offsets: list[list[int]] = [[] for _ in made.rows]
    for number, column in enumerate(request.columns.values()):
        size = 0
        for row, cells in enumerate(made.rows):
            offsets[row].append(start + size)
            size += len(cells[number][1])
        values = torch.frombuffer(content_of(column), dtype=torch.uint8) if size else torch.empty(0)
        jobs.append((block.arena.address + start, values, size))
        start = aligned(start + size)

    if block.size < _IN_THREADS:
        for address, values, size in jobs:
            ctypes.memmove(address, values.data_ptr(), size)
    else:
        pieces = [
            threads.submit(ctypes.memmove, address + done, values.data_ptr() + done, min(_PIECE, size - done))
            for address, values, size in jobs
            for done in range(0, size, _PIECE)
        ]
        try:
            await asyncio.gather(*map(asyncio.wrap_future, pieces))
        finally:
            wait(pieces)  # where nobody wants them any more, those that are under way still end before the block does
    return Outgoing(made.rows, block, offsets)


class Lease:
    """What a unit lets this client read in shared memory; given back when it has no readers any more."""

    def __init__(self, give_back: Callable[[], object]) -> None:
        self._give_back = give_back
        self._readers = 1
        self._lock = threading.Lock()

    def reader(self) -> Callable[[], None]:
        """One more who reads; call it when they are done, from any thread."""
        with self._lock:
            self._readers += 1
        return self.done

    def done(self) -> None:
        """One reader less."""
        with self._lock:
            self._readers -= 1
            over = not self._readers
        if over:
            self._give_back()


@attrs.frozen(eq=False)
class Slot:
    """A cell that was read, and where it lies."""

    cell: Cell
    mapping: ForeignArena | None = None
    offset: int = 0
    lease: Lease | None = None


class Reader:
    """Makes columns of what units answer."""

    def __init__(self, gathered_max_bytes: int) -> None:
        """So much memory at most is used again for columns whose rows do not lie together."""
        self._mappings: OrderedDict[tuple[int, int], ForeignArena] = OrderedDict()
        self._own = Arenas(gathered_max_bytes)

    def slots(
        self, cells: Sequence[Any], blocks: Sequence[Any], buffers: Sequence[Buffer], lease: Lease | None
    ) -> list[Slot]:
        """The cells of a reply; ``queue.store`` where they are damaged, or their memory cannot be opened."""
        try:
            mappings = [self._mapping(block) for block in blocks]
            return [self._slot(entry, mappings, buffers, lease) for entry in cells]
        except (ValueError, IndexError, OSError) as error:
            raise QueueError(f"values cannot be read: {error}", code="queue.store") from error

    def _mapping(self, block: Sequence[int]) -> ForeignArena:
        name = block[3], block[4]
        mapping = self._mappings.get(name)
        if mapping is None:
            mapping = self._mappings[name] = ForeignArena(block)
            if len(self._mappings) > _MAPPINGS:
                self._mappings.popitem(last=False)
        self._mappings.move_to_end(name)
        return mapping

    @staticmethod
    def _slot(entry: Any, mappings: Sequence[ForeignArena], buffers: Sequence[Buffer], lease: Lease | None) -> Slot:
        text, source, offset, size = entry
        if source >= 0:
            return Slot((text, bytes_of(entry, buffers)))
        mapping = mappings[-1 - source]
        return Slot((text, mapping.view[offset : offset + size]), mapping, offset, lease)

    def column(self, name: str, slots: Sequence[Slot]) -> Column:
        """Rows as one column: shown where they lie in shared memory, if they are large and lie together."""

        def memory(size: int) -> Any:
            if size < _SHOWN:
                return None
            return self._shown(slots, size) if _together(slots) else self._gathered(slots, size)

        return join(name, [slot.cell for slot in slots], memory)

    @staticmethod
    def _shown(slots: Sequence[Slot], size: int) -> Any:
        first = slots[0]
        assert first.mapping is not None
        leases = {id(slot.lease): slot.lease for slot in slots if slot.lease is not None}
        readers = [lease.reader() for lease in leases.values()]
        gone = readers[0] if len(readers) == 1 else lambda: [done() for done in readers]
        return Held(first.mapping, first.mapping.address + first.offset, size, gone).tensor()

    def _gathered(self, slots: Sequence[Slot], size: int) -> Any:
        block = self._own.take(size)
        if block is None:
            return None
        target, start = memoryview(block.arena.memory), block.start
        for slot in slots:
            end = start + len(slot.cell[1])
            target[start:end] = slot.cell[1]
            start = end
        own = self._own
        return Held(block, block.address, size, lambda: own.give(block)).tensor()

    def close(self) -> None:
        """Let go of the memory of others; tensors that show it keep it."""
        self._mappings.clear()


def _together(slots: Sequence[Slot]) -> bool:
    mapping, end = slots[0].mapping, slots[0].offset
    for slot in slots:
        if slot.mapping is not mapping or slot.offset != end:
            return False
        end += len(slot.cell[1])
    return mapping is not None
