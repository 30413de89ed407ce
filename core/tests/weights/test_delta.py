"""Deltas: what has changed travels alone, the result is exact, and nobody takes one that he cannot apply."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, TopologyRequest
from jackfield.abc.rollout import HealthReport, ServerInfo, UpdateWeightsRequest, WeightReceipt, WorkerReceipt
from jackfield.errors import WeightsError
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import PREFIX, Blocks, HeldWeights, WeightReceiver, check_base, delta_of
from jackfield.weights import Replica, WeightSender, WeightSynchronizer
from jackfield.weights.in_process import InProcessCheckpointEngine, InProcessConfig
from jackfield_testing import refused
from jackfield_virtual_clock import VirtualClock

torch = pytest.importorskip("torch")

BLOCK = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float8_e4m3fn)


def tensors() -> dict[str, Any]:
    """12 blocks and a short one; one block; an empty one; a scalar."""
    generator = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(7, 7, generator=generator), "b": torch.randn(2, 2, generator=generator)}
    return {**weights, "none": torch.empty(0, 3), "one": torch.tensor(2.0)}


def change(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What is sent after ``before`` was."""
    known = {name: Blocks.of(tensor, BLOCK) for name, tensor in before.items()}
    pairs = ((name, tensor, known.get(name)) for name, tensor in after.items())
    found = (delta_of(name, tensor, old, Blocks.of(tensor, BLOCK), BLOCK) for name, tensor, old in pairs)
    return dict(each for each in found if each is not None)


def holding(weights: dict[str, Any], in_place: bool = False) -> HeldWeights:
    held = HeldWeights(weights.get) if in_place else HeldWeights()
    for name, tensor in weights.items():
        held.keep(name, tensor)
    held.version = 1
    return held


def test_only_changed_blocks_travel() -> None:
    before, after = tensors(), tensors()
    after["a"][0, 0] += 1
    after["a"][-1, -1] += 1  # in the short block
    sent = change(before, after)
    assert [PREFIX + "a"] == list(sent)
    assert 4 * 8 + BLOCK + 4 == sent[PREFIX + "a"].nbytes
    assert {} == change(before, before)


def test_what_has_nothing_in_common_travels_whole() -> None:
    """Another shape, another dtype, another name, and a tensor of which every block has changed."""
    before = {"shape": torch.ones(9), "dtype": torch.ones(9), "all": torch.ones(9)}
    after = {"shape": torch.ones(3, 3), "dtype": torch.ones(9).int(), "all": torch.zeros(9), "new": torch.ones(1)}
    sent = change(before, after)
    assert list(after) == list(sent)
    assert all(torch.equal(after[name], tensor) for name, tensor in sent.items())


@pytest.mark.parametrize("in_place", [True, False])
@given(data=st.data())
def test_the_result_is_exact(in_place: bool, data: st.DataObject) -> None:
    """Any dtype, any size, any bytes changed; in the parameters themselves, and in copies of what was sent."""
    dtype = data.draw(st.sampled_from(DTYPES))
    size = data.draw(st.integers(0, 100))
    content = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)), dtype=torch.uint8)
    content = content[: size // dtype.itemsize * dtype.itemsize]
    before = {"a": content.view(dtype), "b": torch.ones(3)}
    after = {"a": content.clone(), "b": torch.ones(3)}
    for place in data.draw(st.lists(st.integers(0, max(len(content) - 1, 0)), max_size=4)) if len(content) else ():
        after["a"][place] ^= 1
    after["a"] = after["a"].view(dtype)
    parameters = {name: tensor.clone() for name, tensor in before.items()}
    held = holding(parameters, in_place)
    changes, digests = change(before, after), dict[str, str]()
    unchanged = held.unchanged(changes)
    for name, whole in held.apply(changes, 2, digests):
        parameters[name] = whole.clone()
    wanted = {name: digest(tensor) for name, tensor in after.items()}
    assert wanted == {**unchanged, **digests}
    assert wanted == {name: digest(tensor) for name, tensor in parameters.items()}
    assert 2 == held.version


def test_copies_are_kept_of_what_is_loaded_otherwise() -> None:
    """A tensor that is cast, or lies in pieces, has no place where its bytes are."""
    loaded = {"cast": torch.ones(4, dtype=torch.bfloat16), "strided": torch.ones(4, 4).T, "same": torch.ones(4)}
    held = HeldWeights(loaded.get)
    for name, tensor in loaded.items():
        held.keep(name, tensor.float().contiguous())
    assert {"cast", "strided"} == {name for name, copy in held._held.items() if copy is not None}


def packed(*numbers: int, blocks: int) -> Any:
    content = torch.arange(blocks, dtype=torch.uint8)
    return torch.cat((torch.tensor(numbers).view(torch.uint8), content))


@pytest.mark.parametrize(
    "wrong",
    [
        torch.empty(0, dtype=torch.uint8),
        packed(BLOCK, 0, blocks=0),
        packed(0, 1, 0, blocks=16),
        packed(BLOCK, 1, 0, blocks=15),
        packed(BLOCK, 1, 4, blocks=16),
        packed(BLOCK, 1, -1, blocks=16),
        packed(BLOCK, 2, 1, 1, blocks=32),
        packed(BLOCK, 2**40, 1, blocks=16),
    ],
    ids=["nothing", "no block", "no size", "cut off", "beyond the end", "before the beginning", "twice", "too many"],
)
def test_blocks_that_do_not_fit_are_refused(wrong: Any) -> None:
    held = holding({"a": torch.zeros(16)})
    with pytest.raises(WeightsError) as caught:
        list(held.apply({PREFIX + "a": wrong}, 2, {}))
    assert "weights.transfer" == caught.value.code
    assert held.version is None, "half a delta is loaded"


def test_a_delta_to_weights_that_are_not_held_is_refused() -> None:
    held = holding({"a": torch.zeros(16)})
    check_base(held.version, 1)
    for base in (None, 0, 2):
        with pytest.raises(WeightsError) as caught:
            check_base(held.version, base)
        assert "weights.base" == caught.value.code
    with pytest.raises(WeightsError):
        list(held.apply({PREFIX + "b": packed(BLOCK, 1, 0, blocks=16)}, 2, {}))
    held.forget()
    with pytest.raises(WeightsError) as caught:
        check_base(held.version, 1)
    assert "weights.base" == caught.value.code


# -- synchronisations --------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class FakeReplica:
    """Loads full updates and deltas; one that was made anew has lost what it held."""

    number: int
    held: HeldWeights = attrs.field(factory=HeldWeights)
    loaded: dict[str, Any] = attrs.field(factory=dict)
    version: int = 0
    kinds: list[str] = attrs.field(factory=list)
    lies: bool = False  #: health says what it does not hold

    async def health(self) -> HealthReport:
        return HealthReport(healthy=True, weight_version=self.version)

    def dies(self) -> None:
        self.held, self.version = HeldWeights(), self.version if self.lies else 0

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        self.kinds.append(request.kind)
        assert request.deltas_follow
        engine = InProcessCheckpointEngine(InProcessConfig(), CheckpointEngineContext(end="receiver"))
        receiver, digests = WeightReceiver(engine, self.held), dict[str, str]()
        if request.kind == "delta":
            changes = await receiver.changes(request.connect[0], request.version, request.base_version)
            digests = self.held.unchanged(changes)
            self.loaded |= {name: tensor.clone() for name, tensor in self.held.apply(changes, request.version, digests)}
        else:
            async for name, tensor in receiver.tensors(request.connect[0], request.version):
                self.loaded[name] = tensor.clone()
            digests = receiver.digests
        self.version = request.version
        workers = (WorkerReceipt(worker=0, digests=digests),)
        return WeightReceipt(version=request.version, replica=self.number, workers=workers)


@attrs.define(eq=False)
class Run:
    """A trainer and its replicas."""

    replicas: list[FakeReplica]
    on_missing_base: Any = "full"
    weights: dict[str, Any] = attrs.field(factory=tensors)
    sender: WeightSender = attrs.field(init=False)
    synchronizer: WeightSynchronizer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        engine = InProcessCheckpointEngine(InProcessConfig(), CheckpointEngineContext(end="sender"))
        self.sender = WeightSender(engine, lambda: ((item for item in self.weights.items()), None), block_bytes=BLOCK)
        self.synchronizer = WeightSynchronizer(
            [self.sender],
            [Replica(each, ServerInfo(replica=each.number)) for each in self.replicas],  # type: ignore[arg-type]
            "in_process",
            VirtualClock(),
            kind="delta",
            on_missing_base=self.on_missing_base,
        )

    async def step(self, version: int) -> tuple[str, int]:
        """Change one number, and synchronise: the kind of it, and the bytes."""
        self.weights["a"][version % 7, 0] += 1
        report = await self.synchronizer.sync(version)
        for each in self.replicas:
            assert all(torch.equal(tensor, each.loaded[name]) for name, tensor in self.weights.items())
        return report.kind, report.sent_bytes


FULL = 49 * 4 + 4 * 4 + 4
DELTA = 3 * 8 + BLOCK


def play(run: Run, *lost: int) -> list[tuple[str, int]]:
    """Five versions; before some of them the last replica is made anew."""

    async def main() -> list[tuple[str, int]]:
        found = []
        for version in range(1, 6):
            if version in lost:
                run.replicas[-1].dies()
            found.append(await run.step(version))
        return found

    return VirtualClock().run(main())


def test_after_a_full_update_changes_are_sent() -> None:
    run = Run([FakeReplica(0), FakeReplica(1)])
    assert [("full", FULL)] + [("delta", DELTA)] * 4 == play(run)


def test_a_replica_that_lost_the_weights_gets_all_of_them() -> None:
    """It says so before anything is sent, and nobody is refused anything."""
    run = Run([FakeReplica(0), FakeReplica(1)])
    kinds = ["full", "delta", "full", "delta", "delta"]
    assert kinds == [kind for kind, _ in play(run, 3)]
    assert kinds == run.replicas[0].kinds


def test_a_delta_that_is_refused_is_followed_by_everything() -> None:
    run = Run([FakeReplica(0), FakeReplica(1, lies=True)])
    assert ["full", "delta", "full", "delta", "delta"] == [kind for kind, _ in play(run, 3)]
    assert ["full", "delta", "delta", "full", "delta", "delta"] == run.replicas[1].kinds


@pytest.mark.parametrize("lies", [False, True])
def test_where_it_is_to_stop_the_replica_is_named(lies: bool) -> None:
    run = Run([FakeReplica(0), FakeReplica(1, lies=lies)], on_missing_base="stop")
    with pytest.raises(WeightsError) as caught:
        play(run, 3)
    assert "replica 1" in caught.value.message
    assert "weights.base" == caught.value.code


def test_a_replica_that_catches_up_gets_everything_and_then_changes() -> None:
    """Its weights may be newer than those of the others; then the next version is sent whole."""
    run = Run([FakeReplica(0), FakeReplica(1)])

    late = run.replicas[1]

    async def catch_up(version: int) -> None:
        late.dies()
        report = await run.synchronizer.catch_up(Replica(late, ServerInfo(replica=1)), version)  # type: ignore[arg-type]
        assert "full" == report.kind

    async def main() -> None:
        await run.step(1)
        await run.step(2)
        await catch_up(2)
        assert ("delta", DELTA) == await run.step(3)
        run.weights["a"][0, 0] += 1
        await catch_up(4)
        assert ("full", FULL) == await run.step(5)
        assert ("delta", DELTA) == await run.step(6)

    VirtualClock().run(main())


def test_a_sender_refuses_to_change_what_it_does_not_remember() -> None:
    """It remembers two versions, and none without a block size."""

    async def main() -> None:
        for block_bytes, known in ((BLOCK, [2, 3]), (0, [])):
            engine = InProcessCheckpointEngine(InProcessConfig(), CheckpointEngineContext(end="sender"))
            sender = WeightSender(engine, block_bytes=block_bytes)
            for version in (1, 2, 3):
                request = TopologyRequest(trainer_metadata=((await sender.prepare()).metadata,), rollout_workers=0)
                topology = await sender.build_topology(request)
                await sender.connect(topology.trainer[0], version)
                await sender.send(item for item in tensors().items())
                await sender.finalize()
            assert known == [version for version in range(5) if await sender.knows(version)]
            with pytest.raises(WeightsError) as caught:
                await sender.send((item for item in tensors().items()), base=1)
            assert "weights.base" == caught.value.code

    asyncio.run(main())


def test_turns_send_changes_since_the_version_that_all_had() -> None:
    """The version counts once its last turn is over; one that was left out gets everything in its turn."""
    run = Run([FakeReplica(0), FakeReplica(1), FakeReplica(2)])
    both, alone = run.synchronizer.replicas[:2], run.synchronizer.replicas[2:]

    async def turns(version: int) -> list[str]:
        run.weights["a"][version % 7, 0] += 1
        first = await run.synchronizer.sync(version, both, last=False)
        assert version - 1 == (run.synchronizer.version or 0)
        second = await run.synchronizer.sync(version, alone)
        assert version == run.synchronizer.version
        for each in run.replicas:
            assert all(torch.equal(tensor, each.loaded[name]) for name, tensor in run.weights.items())
        return [first.kind, second.kind]

    async def main() -> list[list[str]]:
        found = []
        for version in range(1, 5):
            if version == 3:
                run.replicas[2].dies()
            found.append(await turns(version))
        with refused("weights.version"):
            await run.synchronizer.sync(4, both, last=False)
        return found

    full, delta = ["full", "full"], ["delta", "delta"]
    assert [full, delta, ["delta", "full"], delta] == VirtualClock().run(main())
