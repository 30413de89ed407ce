"""Every process gets its devices: all small clusters against rules that are written here once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.cluster.placement import Placement, PlacementRequest, check_memory, check_sizes, describe, place
from jackfield.errors import RunError
from jackfield_testing import refused

ROLES = ("actor", "reference")


@cache
def fits(nodes: tuple[int, ...], groups: int, group: int, replicas: int, width: int, shared: bool) -> bool:
    """Whether there is a placement, found by trying all of them node by node."""
    if shared:
        return sum(n // group for n in nodes) >= groups and sum(n // width for n in nodes) >= replicas
    if not nodes:
        return groups == replicas == 0
    return any(
        fits(nodes[1:], groups - own, group, replicas - beside, width, shared)
        for own in range(groups + 1)
        for beside in range(replicas + 1)
        if own * group + beside * width <= nodes[0]
    )


def check(request: PlacementRequest, nodes: Sequence[int], found: Placement) -> None:
    """Assert all rules of a placement."""
    sized = dict.fromkeys(request.roles, request.ranks) | {"rollout": request.replicas}
    names = {(role, number) for role, count in sized.items() for number in range(count)}
    assert names == {(each.role, each.number) for each in found.processes}
    assert len(names) == len(found.processes)
    everything = (*found.processes, *found.spare)
    for each in everything:
        assert all(0 <= device < found.reserved[each.node] for device in each.devices)
        wide = request.width if each.role == "rollout" else 1
        first = each.devices[0]
        assert tuple(range(first, first + wide)) == each.devices
    assert all(0 <= reserved <= has for reserved, has in zip(found.reserved, nodes, strict=True))
    users: dict[tuple[int, int], list[str]] = {}
    for each in everything:
        for device in each.devices:
            users.setdefault((each.node, device), []).append(each.role)
    for on_device in users.values():
        assert 1 == max(Counter(on_device).values()), "two processes of a role share a device"
        assert request.shared or not ("rollout" in on_device and len(on_device) > 1), "separate roles share a device"
    used = {(each.node, device) for each in found.processes for device in each.devices}
    assert sum(found.reserved) == len(used), "a device is reserved in vain"
    assert sum(found.reserved) >= len(users)
    where = {(each.role, each.number): (each.node, each.devices) for each in found.processes}
    for number in range(request.ranks if request.roles else 0):
        assert 1 == len({where[role, number] for role in request.roles}), "rank i of all engines is on one device"
        first = number // request.group * request.group
        assert where["actor", number][0] == where["actor", first][0], "a tensor-parallel group is on one node"
    engine, rollout = ({at for at, on in users.items() if kind in on} for kind in ("actor", "rollout"))
    if request.shared and request.roles and len(set(nodes)) == 1 and nodes[0] % request.width == 0:
        smaller = min(request.ranks, request.replicas * request.width)
        if nodes[0] % request.group == 0:
            assert len(engine & rollout) >= smaller, "colocated roles do not share"
    for at, on in users.items():
        parts = [
            each.memory_fraction
            for each in found.processes
            if at[0] == each.node and at[1] in each.devices and each.memory_fraction is not None
        ]
        assert sum(parts) <= 1 + 1e-9
        split = request.shared and not request.offload and {"actor", "rollout"} <= set(on)
        together = [each for each in found.processes if at[0] == each.node and at[1] in each.devices]
        assert not split or all(each.memory_fraction for each in together)
    if not request.shared or request.offload:
        assert {None} == {each.memory_fraction for each in everything} or not everything


def test_every_small_cluster() -> None:
    """Ranks 1 to 8, parallel sizes 1, 2, 4, replicas 0 to 4, up to three nodes of up to eight devices."""
    clusters = [nodes for count in (1, 2, 3) for nodes in combinations_with_replacement((1, 2, 3, 4, 6, 8), count)]
    tried, placed = 0, 0
    for nodes, ranks, group, replicas, width, shared in product(
        clusters, range(1, 9), (1, 2, 4), range(5), (1, 2, 4), (True, False)
    ):
        if ranks % group:
            continue
        sizes = {"ranks": ranks, "group": group, "replicas": replicas, "width": width}
        request = PlacementRequest(roles=ROLES, shared=shared, offload=bool(ranks % 2), **sizes)
        tried += 1
        try:
            found = place(request, nodes)
        except RunError:
            assert not fits(nodes, ranks // group, group, replicas, width, shared), (request, nodes)
            continue
        placed += 1
        assert fits(nodes, ranks // group, group, replicas, width, shared)
        check(request, nodes, found)
    assert tried - placed > 1000
    assert placed > 1000


@given(
    nodes=st.lists(st.integers(0, 16), max_size=6),
    groups=st.integers(0, 12),
    group=st.sampled_from((1, 2, 3, 4, 8)),
    replicas=st.integers(0, 8),
    width=st.sampled_from((1, 2, 3, 4, 8)),
    shared=st.booleans(),
    offload=st.booleans(),
    fraction=st.one_of(st.none(), st.floats(0.05, 0.95)),
)
def test_any_cluster(
    nodes: list[int],
    groups: int,
    group: int,
    replicas: int,
    width: int,
    shared: bool,
    offload: bool,
    fraction: float | None,
) -> None:
    """Also nodes of any sizes, without ranks or replicas, and with a fraction of the memory."""
    sizes = {"ranks": groups * group, "group": group, "replicas": replicas, "width": width}
    chosen = {"shared": shared, "offload": offload, "memory_fraction": fraction}
    request = PlacementRequest(roles=ROLES if groups else (), **sizes, **chosen)  # type: ignore[arg-type]
    possible = fits(tuple(nodes), groups, group, replicas, width, shared)
    try:
        found = place(request, nodes)
    except RunError:
        assert not possible
        return
    assert possible
    check(request, nodes, found)


def test_large_nodes_first_and_the_larger_replica_is_not_shut_out() -> None:
    """Ranks first on the large node would leave no node for the replica."""
    request = PlacementRequest(roles=("actor",), ranks=4, replicas=1, width=6)
    found = place(request, [4, 6])
    assert [0] * 4 == [found.of("actor", rank).node for rank in range(4)]  # type: ignore[union-attr]
    replica = found.of("rollout", 0)
    assert replica is not None
    assert (1, tuple(range(6))) == (replica.node, replica.devices)
    assert (4, 6) == found.reserved


def test_a_further_replica_goes_beside_ranks_while_there_are_any() -> None:
    found = place(PlacementRequest(roles=("actor",), ranks=4, replicas=1, width=2, shared=True), [8])
    assert (4,) == found.reserved
    spare = found.of("rollout", 1)
    assert spare is not None
    assert (2, 3) == spare.devices
    assert 0.5 == spare.memory_fraction
    assert found.of("rollout", 2) is None


def test_memory_adds_up() -> None:
    """By default half is the replica's; an engine that trains has four times as much of the rest as the reference."""
    request = PlacementRequest(roles=("actor", "reference", "critic"), replicas=1, shared=True)
    fractions = {each.role: each.memory_fraction for each in place(request, [1]).processes}
    assert pytest.approx({"rollout": 0.5, "actor": 2 / 9, "critic": 2 / 9, "reference": 0.5 / 9}) == fractions
    chosen = PlacementRequest(roles=("actor",), replicas=1, shared=True, memory_fraction=0.75)
    assert {"actor": 0.25, "rollout": 0.75} == {
        each.role: each.memory_fraction for each in place(chosen, [1]).processes
    }
    check_memory(chosen)
    with refused("cluster.placement", "leave the engines"):
        check_memory(PlacementRequest(roles=("actor",), replicas=1, shared=True, memory_fraction=1.0))
    check_memory(PlacementRequest(roles=("actor",), replicas=1, shared=True, offload=True, memory_fraction=1.0))


@pytest.mark.parametrize(
    ("request_", "nodes", "expected", "found"),
    [
        (
            PlacementRequest(roles=("actor",), ranks=8, replicas=2, width=4),
            [4, 4],
            "8 ranks + 2 replicas x 4 GPUs = 16 GPUs; a replica has its 4 GPUs on one node",
            "8 GPUs on 2 nodes of 4",
        ),
        (
            PlacementRequest(roles=("actor",), ranks=4, group=4, replicas=2, width=1, shared=True),
            [2, 3],
            "max(4 ranks, 2 replicas) = 4 GPUs; a tensor-parallel group has its 4 GPUs on one node",
            "5 GPUs on 2 nodes of 2, 3",
        ),
        (PlacementRequest(roles=("actor",)), [0], "1 rank = 1 GPU", "0 GPUs"),
    ],
)
def test_a_refusal_has_the_arithmetic(request_: PlacementRequest, nodes: list[int], expected: str, found: str) -> None:
    with pytest.raises(RunError) as caught:
        place(request_, nodes)
    assert ("cluster.placement", expected, found) == (caught.value.code, caught.value.expected, caught.value.found)


def test_parallel_sizes_divide_the_ranks() -> None:
    check_sizes(8, {"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 2, "expert_parallel": 4})
    for ranks, sizes in (
        (6, {"tensor_parallel": 4}),
        (4, {"tensor_parallel": 2, "context_parallel": 4}),
        (4, {"pipeline_parallel": 2, "expert_parallel": 4}),
        (1, {"expert_parallel": 2}),
    ):
        with refused("cluster.placement", "cannot be divided"):
            check_sizes(ranks, sizes)


def test_a_placement_in_sentences() -> None:
    request = PlacementRequest(roles=("actor", "reference"), ranks=4, group=2, replicas=2, width=2, shared=True)
    assert [
        "The actor and the reference have 4 ranks each, with one GPU per rank.",
        "Tensor-parallel groups of 2 ranks stay on one node.",
        "2 replicas have 2 GPUs each, on one node.",
        "In all: max(4 ranks, 2 replicas x 2 GPUs) = 4 GPUs.",
        "Of each shared GPU's memory a replica has 0.5, the engines 0.5.",
        "Weights go from the engine to replicas by shared.",
    ] == describe(request, "shared")
