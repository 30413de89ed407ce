"""Values on their way: from tensors into messages or shared memory, and back."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import attrs

from jackfield.abc.transfer_queue import Column
from jackfield.errors import QueueError
from jackfield.sdk.buckets import aligned
from jackfield.sdk.cells import Buffer, Cell, column_of, tensor_of
from jackfield_transport_zmq.arenas import Arenas, Block, ForeignArena, Held
from jackfield_transport_zmq.wire import Cells, Message, Packer, back_to_back, packed, unpacked

COPIERS = min(4, os.cpu_count() or 1)  #: threads; one alone does not use all of the memory's rate
_IN_THREADS = 1 << 23  #: bytes; copying so much would hold the event loop up for milliseconds
_PIECE = 1 << 22  #: bytes that a thread copies at a time
_SHOWN = 1 << 16  #: bytes; smaller columns are copied rather than shown where they lie
_MAPPINGS = 64  #: arenas of others that are kept open


class Outgoing:
    """The columns of a put, and the block of shared memory that they are copied into, if there is one."""

    def __init__(self, columns: Mapping[str, tuple[str, memoryview, list[int]]]) -> None:
        """``columns`` are those of :func:`jackfield.sdk.cells.layouts`."""
        self._columns = list(columns.values())
        self._block: Block | None = None
        self._begins = [0] * len(columns)  #: of the columns in the block's arena
        self.bytes = sum(len(content) for _, content, _ in self._columns)

    @property
    def room(self) -> int:
        """Return the bytes that all columns need in shared memory."""
        return sum(aligned(len(content)) for _, content, _ in self._columns)

    def message(self, rows: Sequence[int]) -> tuple[dict[str, Any], list[Buffer]]:
        """Fields ``cells`` and ``blocks`` for these rows, and buffers."""
        packer, entries = Packer(), list[Cells]()
        for (text, content, bounds), begin in zip(self._columns, self._begins, strict=True):
            places = [(bounds[row], bounds[row + 1]) for row in rows]
            if self._block is None:
                entries.append(packer.cells([text], [content[start:end] for start, end in places]))
            else:
                offsets, sizes = [begin + start for start, _ in places], [end - start for start, end in places]
                entries.append(packed([text], [-1], offsets, sizes))
        blocks = [] if self._block is None else [self._block.entry]
        return {"cells": entries, "blocks": blocks}, packer.buffers()

    async def copy(self, block: Block, threads: ThreadPoolExecutor) -> None:
        """Copy all values into a block of shared memory, column after column."""
        import numpy as np

        self._block, start, jobs = block, block.start, list[tuple[int, int, int]]()
        for number, (_, content, _) in enumerate(self._columns):
            self._begins[number] = start
            if content:
                jobs.append((block.arena.address + start, np.frombuffer(content, np.uint8).ctypes.data, len(content)))
            start = aligned(start + len(content))
        pieces = iter(
            [
                (target + done, source + done, min(_PIECE, size - done))
                for target, source, size in jobs
                for done in range(0, size, _PIECE)
            ]
        )

        def work() -> None:
            for piece in pieces:
                ctypes.memmove(*piece)

        if self.bytes < _IN_THREADS:
            block.back()
            work()
            return
        await asyncio.wrap_future(threads.submit(block.back))
        workers = [threads.submit(work) for _ in range(COPIERS)]
        try:
            await asyncio.gather(*map(asyncio.wrap_future, workers))
        finally:
            deque(pieces, maxlen=0)  # where nobody wants them any more
            wait(workers)  # those that are under way still end before the block does


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
class Source:
    """Where cells of a reply lie: in a buffer of its own, or in shared memory."""

    view: memoryview
    mapping: ForeignArena | None = None
    lease: Lease | None = None


@attrs.frozen(eq=False)
class Found:
    """Cells of a column that were read: one item of each list for each of them."""

    types: list[str] = attrs.field(factory=list)
    sources: list[Source] = attrs.field(factory=list)
    offsets: list[int] = attrs.field(factory=list)
    sizes: list[int] = attrs.field(factory=list)

    def add(self, other: Found) -> None:
        """Append further cells."""
        for ours, theirs in zip(self._lists, other._lists, strict=True):
            ours += theirs

    def chosen(self, numbers: Sequence[int]) -> Found:
        """Return the cells of these numbers, in this order."""
        return Found(*([each[number] for number in numbers] for each in self._lists))

    def cells(self) -> list[Cell]:
        """Return types and bytes."""
        places = zip(*self._lists, strict=True)
        return [(text, source.view[offset : offset + size]) for text, source, offset, size in places]

    @property
    def _lists(self) -> tuple[list[Any], ...]:
        return self.types, self.sources, self.offsets, self.sizes

    @property
    def together(self) -> bool:
        """Return whether cells lie back to back in one mapping, or in one buffer."""
        places = {source.mapping or source for source in set(self.sources)}
        return len(places) == 1 and self.offsets == back_to_back(self.offsets[0], self.sizes)


class Reader:
    """Makes columns of what units answer."""

    def __init__(self, gathered_max_bytes: int) -> None:
        """So much memory at most is used again for columns whose rows do not lie together."""
        self._mappings: OrderedDict[tuple[int, int], ForeignArena] = OrderedDict()
        self._own = Arenas(gathered_max_bytes)

    def found(self, reply: Message, count: int, lease: Lease | None) -> list[Found]:
        """The cells of a reply, ``count`` of each entry.

        Raises ``queue.store`` where they are damaged, or their memory cannot be opened.
        """
        try:
            sources = {number: Source(memoryview(buffer)) for number, buffer in enumerate(reply.buffers)}
            for number, block in enumerate(reply["blocks"]):
                mapping = self._mapping(block)
                sources[-1 - number] = Source(mapping.view, mapping, lease)

            def room(number: int) -> tuple[int, int]:
                return 0, len(sources[number].view)

            cells = [unpacked(entry, count, room) for entry in reply["cells"]]
            return [
                Found(types, [sources[number] for number in numbers], offsets, sizes)
                for types, numbers, offsets, sizes in cells
            ]
        except (ValueError, KeyError, OSError) as error:
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

    def column(self, name: str, found: Found) -> Column:
        """Rows as one column: shown where they lie in shared memory, if they are large and lie together."""
        total, together = sum(found.sizes), found.together
        if together and total >= _SHOWN and found.sources[0].mapping is not None:
            content = self._shown(found, total)
        elif together:
            start = found.offsets[0]
            content = self._gathered([found.sources[0].view[start : start + total]], total)
        else:
            content = self._gathered([content for _, content in found.cells()], total)
        return column_of(name, found.types, found.sizes, content)

    @staticmethod
    def _shown(found: Found, size: int) -> Any:
        mapping = found.sources[0].mapping
        assert mapping is not None
        leases = {source.lease for source in found.sources}
        readers = [lease.reader() for lease in leases if lease is not None]
        gone = readers[0] if len(readers) == 1 else lambda: [done() for done in readers]
        return Held(mapping, mapping.address + found.offsets[0], size, gone).tensor()

    def _gathered(self, contents: Sequence[Buffer], size: int) -> Any:
        block = self._own.take(size) if size >= _SHOWN else None
        if block is None:
            return tensor_of(bytearray().join(contents))
        block.back()
        target, start = block.arena.memory, block.start
        for content in contents:
            end = start + len(content)
            target[start:end] = content
            start = end
        own = self._own
        return Held(block, block.address, size, lambda: own.give(block)).tensor()

    def close(self) -> None:
        """Let go of the memory of others; tensors that show it keep it."""
        self._mappings.clear()
