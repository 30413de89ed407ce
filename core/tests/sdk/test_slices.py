"""A plan of slices brings every element to every worker once; a receiver puts pieces together and proves them."""

from __future__ import annotations

import math
from collections import Counter

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.abc.engine import Box
from jackfield.sdk.slices import Link, plan_links
from jackfield_testing import refused


def whole(name: str, *shape: int) -> Box:
    return Box(name=name, shape=shape, start=(0,) * len(shape), length=shape)


def half(name: str, shape: tuple[int, ...], dim: int, number: int) -> Box:
    length = tuple(size // 2 if at == dim else size for at, size in enumerate(shape))
    start = tuple(number * (size // 2) if at == dim else 0 for at, size in enumerate(shape))
    return Box(name=name, shape=shape, start=start, length=length)


def elements(box: Box) -> Counter[tuple[str, tuple[int, ...]]]:
    """Every index of a box, counted by loops that share nothing with the plan."""
    found: list[tuple[int, ...]] = [()]
    for start, length in zip(box.start, box.length, strict=True):
        found = [(*index, start + step) for index in found for step in range(length)]
    return Counter((box.name, index) for index in found)


def numbers(links: tuple[Link, ...], worker: int) -> Counter[tuple[str, tuple[int, ...]]]:
    total: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for link in links:
        for piece in link.pieces:
            total += elements(piece) if worker in link.workers else Counter()
    return total


SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def tiles(draw: st.DrawFn, name: str, shape: tuple[int, ...], most: int = 4) -> list[Box]:
    """Cut a tensor into boxes that cover it once, along random dimensions."""
    boxes = [whole(name, *shape)]
    for _ in range(draw(st.integers(0, most - 1))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, length in enumerate(box.length) if length > 1]
        if not dims:
            boxes.append(box)
            break
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, box.length[dim] - 1))
        for start, length in ((box.start[dim], cut), (box.start[dim] + cut, box.length[dim] - cut)):
            starts, lengths = list(box.start), list(box.length)
            starts[dim], lengths[dim] = start, length
            boxes.append(Box(name=name, shape=shape, start=tuple(starts), length=tuple(lengths)))
    return boxes


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[Box]], list[list[Box]]]:
    """Ranks that have every tensor, in tiles that overlap between replicas, and workers with any tiles."""
    ranks: list[list[Box]] = [[] for _ in range(8)]
    workers: list[list[Box]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
        shape = draw(SHAPES)
        for replica in range(draw(st.integers(1, 2))):
            for number, box in enumerate(draw(tiles(name, shape))):
                ranks[replica * 4 + number].append(box)
        for boxes in workers:
            boxes.append(draw(st.sampled_from(draw(tiles(name, shape)))))
    return ranks, workers


@given(layouts())
def test_each_worker_gets_each_of_its_elements_once_from_a_rank_that_has_it(
    given_layouts: tuple[list[list[Box]], list[list[Box]]],
) -> None:
    ranks, workers = given_layouts
    links = plan_links(ranks, workers)
    for number, boxes in enumerate(workers):
        wanted: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for box in boxes:
            wanted += elements(box)
        assert wanted == numbers(links, number)
    for link in links:
        theirs = {box.name: elements(box) for box in ranks[link.rank]}
        for piece in link.pieces:
            assert elements(piece) <= theirs[piece.name] or 0 in piece.length


@given(layouts())
def test_workers_with_the_same_parts_share_a_link(given_layouts: tuple[list[list[Box]], list[list[Box]]]) -> None:
    ranks, workers = given_layouts
    for link in plan_links(ranks, [*workers, *workers]):
        assert {number % len(workers) for number in link.workers} == set(link.workers) & set(range(len(workers)))
        assert 1 == len({tuple(([*workers, *workers])[number]) for number in link.workers})


def test_halves_of_rows_and_columns_cross_the_links_of_the_design() -> None:
    """A column-parallel tensor crosses only the links 0-0 and 1-1, half of it each; a row-parallel one all four."""
    shape = (8, 4)
    ranks = [[half("up", shape, 0, rank), half("down", shape, 0, rank)] for rank in range(2)]
    workers = [[half("up", shape, 0, worker), half("down", shape, 1, worker)] for worker in range(2)]
    found = {
        (link.rank, link.workers): [(str(piece), math.prod(piece.length)) for piece in link.pieces]
        for link in plan_links(ranks, workers)
    }
    assert found == {
        (0, (0,)): [("up[0:4, 0:4]", 16), ("down[0:4, 0:2]", 8)],
        (0, (1,)): [("down[0:4, 2:4]", 8)],
        (1, (0,)): [("down[4:8, 0:2]", 8)],
        (1, (1,)): [("up[4:8, 0:4]", 16), ("down[4:8, 2:4]", 8)],
    }


def test_ranks_with_the_same_values_share_the_load() -> None:
    boxes = [whole(f"norm.{number}", 10) for number in range(6)]
    links = plan_links([boxes, boxes, boxes], [boxes])
    assert [2, 2, 2] == [len(link.pieces) for link in links]


COLUMNS = Box(name="up", shape=(8, 4), start=(0, 1), length=(8, 3))


@pytest.mark.parametrize("rank", [[], [half("up", (8, 4), 0, 1)], [COLUMNS]], ids=["none", "half", "columns"])
def test_a_plan_that_lacks_elements_is_refused_with_the_tensor(rank: list[Box]) -> None:
    with refused("weights.missing", "up"):
        plan_links([rank], [[whole("up", 8, 4)]])


def test_another_shape_is_refused() -> None:
    with refused("weights.transfer", "up"):
        plan_links([[whole("up", 8, 5)]], [[whole("up", 8, 4)]])


UP = whole("up", 8, 4)


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([attrs.evolve(UP, length=(9, 4))], "a part that is not in it"),
        ([attrs.evolve(UP, start=(-1, 0))], "a part that is not in it"),
        ([attrs.evolve(UP, start=(0,), length=(8,))], "a part that is not in it"),
        ([half("up", (8, 4), 0, 0), half("up", (8, 4), 0, 1)], "twice"),
    ],
    ids=["beyond", "negative", "dimensions", "twice"],
)
def test_a_layout_that_cannot_be_is_refused_with_its_side_and_tensor(boxes: list[Box], why: str) -> None:
    with refused("weights.transfer", "engine rank 1", "'up'", why):
        plan_links([[UP], boxes], [[UP]])
    with refused("weights.transfer", "server worker 1", "'up'", why):
        plan_links([[UP]], [[UP], boxes])
