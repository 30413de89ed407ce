"""Shared memory: pieces of arenas, for their maker and for readers."""

from __future__ import annotations

from jackfield_transport_zmq.arenas import Arenas, ForeignArena

_MB = 2**20
_HUGE = 2 * _MB


def test_a_block_that_is_given_memory_leaves_its_neighbour_alone() -> None:
    """Both lie on one huge page, and the page was made for the first of them."""
    arenas = Arenas(128 * _MB)
    blocks = [arenas.take(size * _MB) for size in (1, 5)]
    first, second = (block for block in blocks if block is not None)
    assert (first.arena, first.size) == (second.arena, second.start)
    first.back()
    memory = first.arena.memory
    memory[: first.size] = b"\7" * first.size
    second.back()
    memory[second.start : second.start + second.size] = b"\5" * second.size
    foreign = ForeignArena(second.entry)
    assert b"\7" * first.size + b"\5" * second.size == foreign.view[: first.size + second.size]
    assert foreign.view.readonly


def test_maker_and_reader_see_an_arena_where_huge_pages_fit() -> None:
    block = Arenas(128 * _MB).take(_MB)
    assert block is not None
    assert [0, 0] == [address % _HUGE for address in (block.arena.address, ForeignArena(block.entry).address)]


def test_an_arena_that_is_no_multiple_of_a_huge_page_is_used_to_its_end() -> None:
    block = Arenas(3 * _MB).take(3 * _MB)
    assert block is not None
    block.back()
    block.arena.memory[:] = b"\7" * block.size
    assert (3 * _MB, 7) == (block.arena.size, ForeignArena(block.entry).view[-1])
