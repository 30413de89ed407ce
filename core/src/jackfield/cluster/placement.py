"""The devices of each process of a run: a function of sizes alone, which needs neither torch nor a cluster.

A *device* is a GPU. On a CPU it is the room for one rank or replica, of which a node has as many as its CPUs allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import attrs

from jackfield.errors import RunError

#: By role, the parts of an engine's memory that it needs: one that trains has gradients and two moments beside weights.
_PARTS: Mapping[str, int] = {"actor": 4, "critic": 4, "reference": 1}
_HALF = 0.5  #: of a shared device's memory for the replica, unless the run sets another fraction


@attrs.frozen(kw_only=True)
class PlacementRequest:
    """The processes of a run, and how many devices each needs."""

    roles: tuple[str, ...] = ()  #: the engines, each with ``ranks`` ranks; rank i of all is on the same device
    ranks: int = 1
    group: int = 1  #: ranks of a tensor-parallel group, which stay on one node
    replicas: int = 0
    width: int = 1  #: devices of a replica, all on one node
    shared: bool = False  #: whether replicas use the devices of the ranks
    offload: bool = False  #: whether the idle side releases the memory of shared devices
    memory_fraction: float | None = None  #: the replicas' own setting, if the run gives one
    splits_memory: bool = True  #: whether the devices have memory of their own that processes could use up
    device: str = "GPU"  #: name of a device in errors
    where: str = "the cluster"  #: name of all nodes in errors

    @property
    def replica_fraction(self) -> float | None:
        """The part of a shared device's memory for its replica; None: the replica's own setting, or its default."""
        splits = self.shared and not self.offload and self.splits_memory and self.roles and self.replicas
        return (self.memory_fraction or _HALF) if splits else None

    def needs(self) -> str:
        """Return the arithmetic of the devices: ``8 ranks + 2 replicas x 4 GPUs = 16 GPUs``."""
        ranks, replicas = self.ranks if self.roles else 0, self.replicas * self.width
        parts = [_counted(ranks, "rank")] * bool(ranks)
        if self.replicas:
            wide = "" if self.width == 1 else f" x {_counted(self.width, self.device)}"
            parts.append(f"{_counted(self.replicas, 'replica')}{wide}")
        total = _counted(max(ranks, replicas) if self.shared else ranks + replicas, self.device)
        joined = " + ".join(parts)
        return f"max({', '.join(parts)}) = {total}" if self.shared and len(parts) > 1 else f"{joined} = {total}"


@attrs.frozen(kw_only=True)
class PlacedProcess:
    """The devices of one process, by their indexes on its node."""

    role: str  #: ``actor``, ``reference``, ``critic`` or ``rollout``
    number: int  #: the rank, or the replica's number
    node: int  #: index of the node
    devices: tuple[int, ...]
    memory_fraction: float | None = None  #: of each device's memory; None: no limit, or a replica's own setting


@attrs.frozen(kw_only=True)
class Placement:
    """The devices of all processes."""

    processes: tuple[PlacedProcess, ...]
    #: by node: how many devices to reserve. They are the first ones: indexes 0 to n - 1
    reserved: tuple[int, ...]
    spare: tuple[PlacedProcess, ...] = ()  #: places of further replicas, on devices that are reserved

    def of(self, role: str, number: int) -> PlacedProcess | None:
        """Return a process, also one of a replica that may be added, or None if nothing is reserved for it."""
        wanted = role, number
        return next((each for each in (*self.processes, *self.spare) if (each.role, each.number) == wanted), None)

    @property
    def nodes(self) -> int:
        """The number of nodes with reserved devices."""
        return sum(map(bool, self.reserved))


def place(request: PlacementRequest, nodes: Sequence[int]) -> Placement:
    """Place ranks and replicas on nodes, of which each has so many devices.

    Each rank has a device of its own, the ranks of a tensor-parallel group are on one node, and each replica has its
    devices on one node. Larger nodes are filled first. If there is any placement of the ranks and replicas, one is
    found; otherwise ``cluster.placement`` has the arithmetic.
    """
    order = sorted(range(len(nodes)), key=lambda node: -nodes[node])
    groups = request.ranks // request.group if request.roles else 0
    fill = _share if request.shared else _separate
    counts = fill([nodes[node] for node in order], (groups, request.group), (request.replicas, request.width))
    if counts is None:
        raise _refusal(request, nodes)
    reserved, replica = [0] * len(nodes), 0
    ranks, replicas, free = list[tuple[int, int]](), list[PlacedProcess](), list[tuple[int, int]]()
    for node, (engine, servers) in zip(order, counts, strict=True):
        used, wide = engine * request.group, servers * request.width
        ranks += [(node, device) for device in range(used)]
        reserved[node] = max(used, wide) if request.shared else used + wide
        first = 0 if request.shared else used
        fraction = request.replica_fraction
        for start in range(first, first + wide, request.width):
            shares = fraction if start < used else None
            replicas.append(_replica(request, replica, node, start, shares))
            replica += 1
        free += [(node, start) for start in _starts(wide, reserved[node], request)]
    spare = enumerate(free, replica)
    found = [
        PlacedProcess(role=role, number=rank, node=node, devices=(device,), memory_fraction=_fraction(request, role))
        for role in request.roles
        for rank, (node, device) in enumerate(ranks)
    ]
    further = (_replica(request, number, *where, request.replica_fraction) for number, where in spare)
    return Placement(processes=(*found, *replicas), reserved=tuple(reserved), spare=tuple(further))


def _starts(used: int, reserved: int, request: PlacementRequest) -> range:
    """Return where further replicas may begin on a node, beside ranks alone."""
    count = (reserved - used) // request.width if request.shared and request.replicas else 0
    return range(used, used + count * request.width, request.width)


def _replica(request: PlacementRequest, number: int, node: int, start: int, fraction: float | None) -> PlacedProcess:
    devices = tuple(range(start, start + request.width))
    return PlacedProcess(role="rollout", number=number, node=node, devices=devices, memory_fraction=fraction)


def _share(nodes: Sequence[int], ranks: tuple[int, int], replicas: tuple[int, int]) -> list[tuple[int, int]] | None:
    """Return how many groups and replicas each node has, each filled from the first device; None: they do not fit."""
    counts, (groups, group), (servers, width) = [], ranks, replicas
    for devices in nodes:
        counts.append((min(groups, devices // group), min(servers, devices // width)))
        groups, servers = groups - counts[-1][0], servers - counts[-1][1]
    return None if groups or servers else counts


def _separate(nodes: Sequence[int], ranks: tuple[int, int], replicas: tuple[int, int]) -> list[tuple[int, int]] | None:
    """Return how many groups and replicas each node has, which have no device in common; None: they do not fit."""
    (groups, group), (servers, width) = ranks, replicas
    never = -1
    #: by number of nodes from the end, and of groups there: the most replicas that fit beside them
    most = [[0] + [never] * groups]
    for devices in reversed(nodes):
        row = [
            max(
                (most[-1][count - own] + (devices - own * group) // width) if most[-1][count - own] > never else never
                for own in range(min(count, devices // group) + 1)
            )
            for count in range(groups + 1)
        ]
        most.append(row)
    if most.pop()[groups] < servers:
        return None
    counts = []
    for devices in nodes:
        rest = most.pop()
        for own in range(min(groups, devices // group), -1, -1):
            beside = min(servers, (devices - own * group) // width)
            if rest[groups - own] >= servers - beside:
                break
        counts.append((own, beside))
        groups, servers = groups - own, servers - beside
    return counts


def _fraction(request: PlacementRequest, role: str) -> float | None:
    """Return a rank's part of its device; the engines share what a replica leaves."""
    taken = request.replica_fraction
    whole = sum(_PARTS.get(each, 1) for each in request.roles)
    return None if taken is None else (1.0 - taken) * _PARTS.get(role, 1) / whole


def check_sizes(ranks: int, sizes: Mapping[str, int], where: str = "engine") -> None:
    """Refuse an engine whose number of ranks its parallel sizes do not divide (``cluster.placement``).

    ``sizes`` are the settings ``tensor_parallel``, ``pipeline_parallel``, ``context_parallel``, ``expert_parallel``.
    """
    kinds = ("tensor_parallel", "pipeline_parallel", "context_parallel"), ("pipeline_parallel", "expert_parallel")
    for names in kinds:
        used = {name: sizes.get(name, 1) for name in names if sizes.get(name, 1) > 1}
        product = 1
        for size in used.values():
            product *= size
        if ranks % product:
            raise RunError(
                f"{_counted(ranks, 'rank')} cannot be divided into parts of {product}",
                code="cluster.placement",
                where=where,
                expected=f"a multiple of {' x '.join(f'{name} {size}' for name, size in used.items())} = {product}",
                found=_counted(ranks, "rank"),
                fix=f"set cluster.ray.engine_ranks to a multiple of {product}, or lower the sizes",
            )


def check_memory(request: PlacementRequest) -> None:
    """Refuse a replica that leaves the engines on its devices no memory."""
    fraction = request.replica_fraction
    if fraction is not None and fraction >= 1.0:
        raise RunError(
            f"replicas with {fraction:g} of the memory leave the engines on the same devices {1 - fraction:g}",
            code="cluster.placement",
            where="rollout.memory_fraction",
            expected=f"less than 1; {_HALF:g} if it is not set",
            found=fraction,
            fix="lower it, or set cluster.offload: true, with which each side has the whole memory in turns",
        )


def _refusal(request: PlacementRequest, nodes: Sequence[int]) -> RunError:
    together = [(request.group, "a tensor-parallel group")] * bool(request.roles)
    together += [(request.width, "a replica")] * bool(request.replicas)
    rules = [f"{who} has its {size} {request.device}s on one node" for size, who in together if size > 1]
    sizes = ", ".join(map(str, nodes))
    if len(nodes) > 1 and all(one == other for one, other in pairwise(nodes)):
        sizes = str(nodes[0])
    on = "" if len(nodes) < 2 else f" on {len(nodes)} nodes of {sizes}"
    return RunError(
        f"{request.where} has no room for the ranks and replicas",
        code="cluster.placement",
        where="cluster",
        expected="; ".join([request.needs(), *rules]),
        found=f"{_counted(sum(nodes), request.device)}{on}",
        fix="lower cluster.ray.engine_ranks, cluster.replicas or their parallel sizes, set cluster.placement: shared, "
        "or use more machines",
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def describe(request: PlacementRequest, transport: str) -> list[str]:
    """Return sentences about the devices, the memory and the transport of weights."""
    device, taken, many = request.device, request.replica_fraction, len(request.roles) > 1
    engines = " and ".join(f"the {role}" for role in request.roles).capitalize()
    both = bool(request.roles and request.replicas)
    has = f"{_counted(request.replicas, 'replica')} {'has' if request.replicas == 1 else 'have'}"
    each = f"{_counted(request.width, device)}{' each' if request.replicas > 1 else ''}"
    said = {
        f"{engines} {'have' if many else 'has'} {_counted(request.ranks, 'rank')}{' each' if many else ''}, "
        f"with one {device} per rank.": bool(request.roles),
        f"Tensor-parallel groups of {request.group} ranks stay on one node.": request.roles and request.group > 1,
        f"{has} {each}{', on one node' if request.width > 1 else ''}.": bool(request.replicas),
        f"In all: {request.needs()}.": both,
        f"Of each shared {device}'s memory a replica has {taken or 0:g}, the engines {1 - (taken or 0):g}.": taken,
        f"The idle side releases the memory of its {device}s.": both and request.shared and request.offload,
        f"Weights go from the engine to replicas by {transport}.": both,
    }
    return [sentence for sentence, holds in said.items() if holds]
