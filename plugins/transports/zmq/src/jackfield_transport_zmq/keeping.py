"""The contents of a storage unit: cells, and the shared memory of its host's producers with large cells."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import attrs

from jackfield_transport_zmq.arenas import ForeignArena, has_ended
from jackfield_transport_zmq.wire import Buffer, Cells, Packer, packed, unpacked

_OWN = 1 << 16  #: bytes; smaller values are copied out of their message, which they would keep alive


@attrs.define(eq=False)
class Shared:
    """A block of shared memory."""

    arena: ForeignArena
    start: int
    producer: bytes  #: identity
    uses: int = 0  #: by cells, checkpoints and readers


#: One cell: its type, size in bytes, block in shared memory and offset in the arena, and otherwise its bytes. There are
#: many, which are made, counted and sent column by column: a plain tuple takes a tenth of an object's time.
Kept: TypeAlias = tuple[str, int, Shared | None, int, Buffer]


def size_of(cells: Iterable[Kept]) -> int:
    """Return the bytes of cells."""
    return sum([cell[1] for cell in cells])


@attrs.define(eq=False)
class Client:
    """A process that puts or reads."""

    process: int | None  #: a descriptor that tells of its end; None where it runs elsewhere
    leases: dict[int, list[Shared]] = attrs.field(factory=dict)  #: what it reads in shared memory

    @classmethod
    def watched(cls, pid: int | None) -> Client:
        """A client in a process of this host, or elsewhere."""
        try:
            return cls(None if pid is None else os.pidfd_open(pid))
        except OSError:
            return cls(None)

    @property
    def shares(self) -> bool:
        """Return whether it can open this process's memory, and its end is noticed."""
        return self.process is not None

    @property
    def has_ended(self) -> bool:
        """Return whether its process has ended, where that can be noticed."""
        return self.process is not None and has_ended(self.process)

    def close(self) -> None:
        """Stop watching its process."""
        if self.process is not None:
            os.close(self.process)


class Memory:
    """Blocks by name, with who needs them."""

    def __init__(self) -> None:
        self._arenas: dict[tuple[int, int], ForeignArena] = {}
        self._blocks: dict[tuple[int, int], Shared] = {}
        self._leases = 0
        self.freed: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)  #: by producer, to be told

    def opened(self, producer: bytes, entries: Sequence[Sequence[int]]) -> list[Shared]:
        """Open the blocks of a message with one use each; ``OSError`` if the producer's memory is gone."""
        found: list[Shared] = []
        try:
            for entry in entries:
                inode, start = entry[4], entry[5]
                block = self._blocks.get((inode, start))
                if block is None:
                    arena = self._arenas.get((entry[3], inode))
                    if arena is None:
                        arena = self._arenas[entry[3], inode] = ForeignArena(entry)
                    arena.blocks += 1
                    block = self._blocks[inode, start] = Shared(arena, start, producer)
                block.uses += 1
                found.append(block)
        except OSError:
            self.drop(found)
            raise
        return found

    @staticmethod
    def kept(entry: Cells, count: int, buffers: Sequence[Buffer], blocks: Sequence[Shared]) -> list[Kept]:
        """Return the cells of a message; ``ValueError`` if one lies beyond its message or arena."""
        views = [memoryview(buffer) for buffer in buffers]

        def room(source: int) -> tuple[int, int]:
            if source >= 0:
                return 0, len(views[source]) if source < len(views) else 0
            block = blocks[-1 - source]
            return block.start, block.arena.size

        kept = list[Kept]()
        for text, source, offset, size in zip(*unpacked(entry, count, room), strict=True):
            if source < 0:
                kept.append((text, size, blocks[-1 - source], offset, b""))
            else:
                content = views[source][offset : offset + size]
                kept.append((text, size, None, 0, bytes(content) if size < _OWN else content))
        return kept

    def use(self, cells: Iterable[Kept]) -> None:
        """Note that a reader needs these cells."""
        for block, count in _blocks_of(cells).items():
            block.uses += count

    def let_go(self, cells: Collection[Kept]) -> int:
        """Note that a reader does not need them any more; return their bytes."""
        for block, count in _blocks_of(cells).items():
            self._drop(block, count)
        return size_of(cells)

    def drop(self, blocks: Iterable[Shared]) -> None:
        """Count one use less of each block."""
        for block in blocks:
            self._drop(block, 1)

    def _drop(self, block: Shared, count: int) -> None:
        block.uses -= count
        if block.uses:
            return
        arena = block.arena
        del self._blocks[arena.inode, block.start]
        self.freed[block.producer].append((arena.inode, block.start))
        arena.blocks -= 1
        if not arena.blocks:
            del self._arenas[arena.device, arena.inode]
            arena.close()

    def packed(self, columns: Iterable[Sequence[Kept]], client: Client | None) -> tuple[dict[str, Any], list[Buffer]]:
        """Return the fields ``cells``, ``blocks`` and ``lease`` of a reply, and its buffers."""
        packer, entries = Packer(), list[Cells]()
        blocks: dict[Shared, int] = {}  #: their sources
        for cells in columns:
            places = [cell[2] for cell in cells]
            if client is not None and client.shares:
                for shared in {place for place in places if place is not None}:
                    blocks.setdefault(shared, -1 - len(blocks))
            sources = [0 if block is None else blocks.get(block, 0) for block in places]
            offsets = [cell[3] for cell in cells]
            own = [number for number, source in enumerate(sources) if not source]
            for number, source, offset in zip(
                own, *packer.add([_content(cells[number]) for number in own]), strict=True
            ):
                sources[number], offsets[number] = source, offset
            entries.append(packed([cell[0] for cell in cells], sources, offsets, [cell[1] for cell in cells]))
        lease = 0
        if blocks and client is not None:
            self._leases += 1
            lease, client.leases[self._leases] = self._leases, list(blocks)
            for block in blocks:
                block.uses += 1
        return (
            {"cells": entries, "blocks": [block.arena.entry(block.start) for block in blocks], "lease": lease},
            packer.buffers(),
        )

    def give_back(self, client: Client, lease: int) -> None:
        """End a client's lease."""
        self.drop(client.leases.pop(lease, ()))


def _content(cell: Kept) -> Buffer:
    """Return the bytes of a cell. Those in shared memory are copied: their producer may use it again before they have
    left."""
    _, size, block, offset, content = cell
    return content if block is None else bytes(block.arena.view[offset : offset + size])


def _blocks_of(cells: Iterable[Kept]) -> Counter[Shared]:
    return Counter([cell[2] for cell in cells if cell[2] is not None])
