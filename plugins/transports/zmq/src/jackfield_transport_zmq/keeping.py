"""The contents of a storage unit: cells, and the shared memory of its host's producers with large cells."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from jackfield_transport_zmq.arenas import ForeignArena, has_ended
from jackfield_transport_zmq.wire import Buffer, CellEntry, Packer, bytes_of

_OWN = 1 << 16  #: bytes; smaller values are copied out of their message, which they would keep alive


@attrs.define(eq=False)
class Shared:
    """A block of shared memory."""

    arena: ForeignArena
    start: int
    producer: bytes  #: identity
    uses: int = 0  #: by cells, checkpoints and readers


@attrs.frozen(eq=False)
class Kept:
    """One cell, here or in shared memory."""

    type: str
    size: int  #: bytes
    content: Buffer  #: where it is not in shared memory
    block: Shared | None = None
    offset: int = 0  #: in the arena


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

    def kept(self, entry: CellEntry, buffers: Sequence[Buffer], blocks: Sequence[Shared]) -> Kept:
        """Return a cell of a message; ``ValueError`` if it points beyond its message or arena."""
        text, source, offset, size = entry
        if source < 0:
            block = blocks[-1 - source]
            if offset < block.start or size < 0 or offset + size > block.arena.size:
                raise ValueError("a cell lies outside of its block")
            return Kept(text, size, b"", block, offset)
        content = bytes_of(entry, buffers)
        return Kept(text, size, bytes(content) if size < _OWN else content)

    def use(self, cells: Iterable[Kept]) -> None:
        """Note that a reader needs these cells."""
        for cell in cells:
            if cell.block is not None:
                cell.block.uses += 1

    def let_go(self, cells: Iterable[Kept]) -> int:
        """Note that a reader does not need them any more; return their bytes."""
        size = 0
        for cell in cells:
            size += cell.size
            if cell.block is not None:
                self.drop((cell.block,))
        return size

    def drop(self, blocks: Iterable[Shared]) -> None:
        """Count one use less of each block."""
        for block in blocks:
            block.uses -= 1
            if block.uses:
                continue
            arena = block.arena
            del self._blocks[arena.inode, block.start]
            self.freed[block.producer].append((arena.inode, block.start))
            arena.blocks -= 1
            if not arena.blocks:
                del self._arenas[arena.device, arena.inode]
                arena.close()

    def packed(self, cells: Iterable[Kept], client: Client | None) -> tuple[dict[str, Any], list[Buffer]]:
        """Return the fields ``cells``, ``blocks`` and ``lease`` of a reply, and its buffers."""
        packer, entries = Packer(), []
        blocks: dict[Shared, int] = {}
        for cell in cells:
            if cell.block is not None and client is not None and client.shares:
                source, offset = -1 - blocks.setdefault(cell.block, len(blocks)), cell.offset
            elif cell.block is not None:  # a copy: the producer may use the block again before this has left
                source, offset = packer.add(bytes(cell.block.arena.view[cell.offset : cell.offset + cell.size]))
            else:
                source, offset = packer.add(cell.content)
            entries.append([cell.type, source, offset, cell.size])
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
