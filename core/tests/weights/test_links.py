"""Every rank sends what it has, and each worker gets its own parts, proved piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import aclosing
from typing import Any

import attrs
import pytest

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.engine import Box
from jackfield.abc.rollout import ServerInfo, UpdateWeightsRequest, WeightReceipt, WorkerReceipt
from jackfield.clock import Clock
from jackfield.sdk.slices import SliceReceiver, part_of, reopen_slice_receiver
from jackfield.weights import Replica, WeightSender, WeightsSynced, WeightSynchronizer
from jackfield.weights.in_process import InProcessCheckpointEngine, InProcessConfig
from jackfield_testing import in_loop, refused

torch = pytest.importorskip("torch")

NAMES = {"up": 0, "down": 1, "norm": None, "bias": None}  #: the dimension that workers share out
SHAPES = {"up": (8, 6), "down": (8, 6), "norm": (8,), "bias": ()}


def model(version: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def box(name: str, dim: int | None, number: int, shape: tuple[int, ...] = ()) -> Box:
    """One of two halves along a dimension; None: all."""
    shape = shape or SHAPES[name]
    length = tuple(size // 2 if at == dim else size for at, size in enumerate(shape))
    start = tuple(number * (size // 2) if at == dim else 0 for at, size in enumerate(shape))
    return Box(name=name, shape=shape, start=start, length=length)


def rows(rank: int) -> tuple[Box, ...]:
    """What a sharded engine's rank has: rows; of a scalar, all."""
    return tuple(box(name, 0 if shape else None, rank) for name, shape in SHAPES.items())


def parallel(worker: int) -> tuple[Box, ...]:
    return tuple(box(name, dim, worker) for name, dim in NAMES.items())


Pieces = Generator[tuple[Box, Any], None, None]


@attrs.define(eq=False)
class Rank:
    """What a rank of a training engine has, with a fault."""

    number: int
    fault: Callable[[Box, Any], list[tuple[Box, Any]]] = lambda own, tensor: [(own, tensor)]
    sharded: bool = True
    version: int = 1

    def get_local_param(self) -> Pieces | None:
        return self.local() if self.sharded else None

    def local(self) -> Pieces:
        for own in rows(self.number):
            tensor = model(self.version)[own.name]
            yield from self.fault(own, part_of(tensor, box(own.name, None, 0), own).clone())

    def get_per_tensor_param(self) -> tuple[Generator[tuple[str, Any], None, None], None]:
        return (item for item in model(self.version).items()), None

    def sender(self) -> WeightSender:
        def make(source: Any = None, **more: Any) -> WeightSender:
            rank = 0 if not more else self.number
            context = CheckpointEngineContext(end="sender", rank=rank, deadline_seconds=20.0)
            return WeightSender(InProcessCheckpointEngine(InProcessConfig(), context), source, **more)

        return make(self.get_per_tensor_param, local=self.get_local_param, make=make)


@attrs.define(eq=False)
class SlicedReplica:
    """Workers that hold parts of tensors."""

    layouts: tuple[tuple[Box, ...], ...]
    declares: bool = True
    #: changes what has been loaded before it is proved
    edit: Callable[[dict[str, Any]], None] = lambda _: None
    loaded: list[dict[str, Any]] = attrs.field(factory=lambda: [{}, {}, {}])
    kept: dict[int, SliceReceiver] = attrs.field(factory=dict)
    links: list[int] = attrs.field(factory=list)  #: in how many transfers workers took part

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        receipts = await asyncio.gather(*(self.load(worker, request) for worker in range(len(self.layouts))))
        return WeightReceipt(version=request.version, replica=0, workers=tuple(receipts))

    async def load(self, worker: int, request: UpdateWeightsRequest) -> WorkerReceipt:
        self.links.append(len(request.connect[worker].get("links", ())))
        before, layout = self.kept.get(worker), self.layouts[worker]
        receiver = self.kept[worker] = reopen_slice_receiver(before, request, layout, worker)
        loaded = self.loaded[worker]
        async with aclosing(receiver.tensors(request.version)) as stream:
            async for name, tensor in stream:
                loaded[name] = tensor.clone()
        self.edit(loaded)
        proofs: dict[str, str] = {}
        for name, tensor in loaded.items():
            proofs |= receiver.prove(name, tensor)
        return WorkerReceipt(worker=worker, digests=proofs)

    def started(self) -> Replica:
        layouts = self.layouts if self.declares else ()
        info = ServerInfo(replica=0, workers=len(self.layouts), weight_layouts=layouts)
        return Replica(self, info)  # type: ignore[arg-type]


async def synchronize(replica: SlicedReplica, *ranks: Rank, versions: int = 1) -> WeightsSynced:
    senders = [rank.sender() for rank in ranks]
    synchronizer = WeightSynchronizer(senders, [replica.started()], "in_process", Clock(), deadline_seconds=20.0)
    for version in range(1, versions + 1):
        for rank in ranks:
            rank.version = version
        report = await synchronizer.sync(version)
    return report


def assert_loaded(replica: SlicedReplica, version: int) -> None:
    for worker, layout in enumerate(replica.layouts):
        wanted = {own.name: part_of(model(version)[own.name], box(own.name, None, 0), own) for own in layout}
        assert wanted.keys() == replica.loaded[worker].keys()
        assert all(torch.equal(tensor, replica.loaded[worker][name]) for name, tensor in wanted.items())


@in_loop
async def test_each_worker_gets_its_parts_from_every_rank_in_each_version() -> None:
    replica = SlicedReplica((parallel(0), parallel(1)))
    report = await synchronize(replica, Rank(0), Rank(1), versions=3)
    assert_loaded(replica, 3)
    assert [2] * 6 == replica.links
    up, down, norm, scalar = 4 * 24, 4 * 12, 4 * 4, 4
    of_scalar = {link: scalar * (size % 16 != 0) for link, size in report.link_bytes.items()}
    plain = {"0-0": up + down + norm, "0-1": down + norm, "1-0": down + norm, "1-1": up + down + norm}
    assert plain == {link: size - of_scalar[link] for link, size in report.link_bytes.items()}
    assert 2 * scalar == sum(of_scalar.values())  # each worker gets it from one rank
    assert "up[0:4, 0:6]" in report.digests


@in_loop
async def test_workers_with_the_same_parts_share_transfers() -> None:
    replica = SlicedReplica((parallel(0), parallel(0), parallel(1)))
    report = await synchronize(replica, Rank(0), Rank(1))
    assert_loaded(replica, 1)
    assert report.link_bytes["0-0"] == report.link_bytes["0-1"]
    assert report.sent_bytes == sum(size for link, size in report.link_bytes.items() if not link.endswith("-1"))


@pytest.mark.parametrize(("declares", "sharded"), [(False, True), (True, False)])
@in_loop
async def test_whole_tensors_come_from_rank_0_if_one_side_has_no_parts(declares: bool, sharded: bool) -> None:
    replica = SlicedReplica((parallel(0), parallel(1)), declares=declares)
    report = await synchronize(replica, Rank(0), Rank(1, sharded=sharded))
    assert_loaded(replica, 1)
    assert [0, 0] == replica.links
    assert {} == report.link_bytes
    assert set(SHAPES) == set(report.digests)


@in_loop
async def test_a_single_rank_sends_whole_tensors_to_workers_that_have_the_same() -> None:
    """One link would carry the same, under other names."""
    everything = tuple(box(name, None, 0) for name in SHAPES)
    replica = SlicedReplica((everything, everything))
    report = await synchronize(replica, Rank(0))
    assert [0, 0] == replica.links
    assert set(SHAPES) == set(report.digests)
    assert_loaded(replica, 1)


def broken(own: Box, tensor: Any) -> list[tuple[Box, Any]]:
    raise ValueError(f"{own.name} is on no rank")


@in_loop
async def test_what_the_engine_raises_names_its_method() -> None:
    with refused("engine.failed", "actor engine", "get_local_param", "ValueError: up is on no rank"):
        await synchronize(SlicedReplica((parallel(0), parallel(1))), Rank(0), Rank(1, broken))


def dropped(own: Box, tensor: Any) -> list[tuple[Box, Any]]:
    return [] if own.name == "down" else [(own, tensor)]


def doubled(own: Box, tensor: Any) -> list[tuple[Box, Any]]:
    return [(own, tensor)] * (2 if own.name == "down" else 1)


def shifted(own: Box, tensor: Any) -> list[tuple[Box, Any]]:
    return [(own, tensor[1:] if own.name == "down" else tensor)]


def larger(own: Box, tensor: Any) -> list[tuple[Box, Any]]:
    return [(own, torch.cat([tensor, tensor]) if own.name == "down" else tensor)]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (dropped, "weights.missing"),
        (doubled, "weights.missing"),
        (shifted, "weights.transfer"),
        (larger, "weights.transfer"),
    ],
)
@in_loop
async def test_a_rank_that_does_not_send_the_plan_is_an_error(fault: Any, code: str) -> None:
    bad, replica = Rank(1), SlicedReplica((parallel(0), parallel(1)))
    senders = [Rank(0).sender(), bad.sender()]
    synchronizer = WeightSynchronizer(senders, [replica.started()], "in_process", Clock(), deadline_seconds=20.0)
    synchronizer._layouts = [rows(0), rows(1)]  # the fault comes after the layout
    bad.fault = fault
    with refused(code, "down"):
        await synchronizer.sync(1)


@in_loop
async def test_a_part_that_is_not_what_was_sent_is_named_by_its_piece() -> None:
    def edit(loaded: dict[str, Any]) -> None:
        loaded["down"][5, 1] += 1

    with refused("weights.digest", "down[4:8, 0:3]"):
        await synchronize(SlicedReplica((parallel(0), parallel(1)), edit=edit), Rank(0), Rank(1))


@in_loop
async def test_a_worker_refuses_what_it_has_no_place_for() -> None:
    replica = SlicedReplica((parallel(0)[:2], parallel(1)))
    started = SlicedReplica((parallel(0), parallel(1))).started()
    started.server = replica  # type: ignore[assignment]
    synchronizer = WeightSynchronizer([Rank(0).sender()], [started], "in_process", Clock(), deadline_seconds=20.0)
    synchronizer._layouts = [tuple(box(name, None, 0) for name in SHAPES)]
    with refused(("weights.missing", "weights.transfer")):
        await synchronizer.sync(1)


def short(own: Box) -> Box:
    return attrs.evolve(own, length=(own.length[0] - 1, *own.length[1:])) if own.name == "up" else own


HOLE = (parallel(0), tuple(map(short, parallel(1))))
HALF = (parallel(0), parallel(0))
NAMELESS = (parallel(0)[1:], parallel(1)[1:])


@pytest.mark.parametrize(
    ("layouts", "workers", "lacking"),
    [
        (HOLE, 2, "replica 0 workers lack up[7:8, 0:6]"),
        (HALF, 2, "replica 0 workers lack up[4:8, 0:6]"),
        (NAMELESS, 2, "replica 0 workers lack up[0:8, 0:6]"),
        (HALF[:1], 1, "replica 0 workers lack up[4:8, 0:6]"),
        (HALF[:1], 2, "there are 1 layouts of 2 replica 0 workers"),
    ],
    ids=["a row", "a half", "a tensor", "one worker", "count"],
)
@pytest.mark.parametrize("sharded", [True, False])
@in_loop
async def test_workers_that_lack_weights_are_refused_before_anything_is_sent(
    layouts: tuple[tuple[Box, ...], ...], workers: int, lacking: str, sharded: bool
) -> None:
    replica = SlicedReplica(layouts)
    started = replica.started()
    started.info = attrs.evolve(started.info, workers=workers)
    senders = [Rank(number, sharded=sharded).sender() for number in range(2)]
    synchronizer = WeightSynchronizer(senders, [started], "in_process", Clock(), deadline_seconds=20.0)
    if layouts is NAMELESS and not sharded:
        lacking = "of which this worker has nothing"  # ranks have not said what they have: it has been sent
    with refused(("weights.missing", "weights.transfer"), lacking):
        await synchronizer.sync(1)
    assert replica.links == [] or layouts is NAMELESS


def test_a_worker_that_an_update_does_not_have_is_named() -> None:
    request = UpdateWeightsRequest(version=1, checkpoint_engine="in_process", connect=({},))
    with refused("weights.transfer", "worker 1"):
        reopen_slice_receiver(None, request, parallel(1), 1)
