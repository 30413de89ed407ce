"""The in-process checkpoint engine: every tensor once, bit-exact, and no end waits for a dead peer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, ConnectRequest, Topology, TopologyRequest
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import WeightReceiver
from jackfield.weights import WeightSender, in_process
from jackfield.weights.in_process import InProcessCheckpointEngine, InProcessConfig
from jackfield_virtual_clock import VirtualClock

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Whatever happens in a test: its sessions are gone afterwards."""
    yield
    assert {} == in_process._SESSIONS


def engine(end: Any, rank: int = 0, bucket: int = 0, seconds: float = 60.0) -> InProcessCheckpointEngine:
    context = CheckpointEngineContext(end=end, rank=rank, deadline_seconds=seconds)
    return InProcessCheckpointEngine(InProcessConfig(bucket_bytes=bucket), context)


def model(count: int = 5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 0, 300, 1, 40, 7]
    tensors = {f"layer.{index}": torch.randn(sizes[index % 6], 2, generator=generator) for index in range(count)}
    return {**tensors, "half": torch.ones(5, dtype=torch.bfloat16), "scalar": torch.tensor(3)}


def reusing(tensors: dict[str, Any]) -> Generator[tuple[str, Any], None, None]:
    """An engine that reuses its memory as soon as the next tensor is drawn."""
    for name, tensor in tensors.items():
        shared = tensor.clone()
        yield name, shared
        if shared.is_floating_point():
            shared.fill_(float("nan"))


async def receive(receiver: WeightReceiver, arguments: Any, version: int = 1, slow: float = 0.0) -> dict[str, Any]:
    got = {}
    async with aclosing(receiver.tensors(arguments, version)) as stream:
        async for name, tensor in stream:
            await asyncio.sleep(slow)
            got[name] = tensor.clone()
    return got


async def prepared(sender: WeightSender, receivers: int) -> Topology:
    metadata = (await sender.prepare()).metadata
    return await sender.build_topology(TopologyRequest(trainer_metadata=(metadata,), rollout_workers=receivers))


async def send(sender: WeightSender, topology: Topology, weights: Any = None, version: int = 1) -> dict[str, str]:
    await sender.connect(topology.trainer[0], version)
    return await sender.send(reusing(model()) if weights is None else weights)


def run(test: Coroutine[Any, Any, None]) -> None:
    VirtualClock().run(test)


async def code_of(awaitable: Any) -> str:
    with pytest.raises(WeightsError) as caught:
        await awaitable
    return caught.value.code


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 800), st.lists(st.sampled_from([0.0, 0.5, 2.0]), max_size=3), st.integers(0, 12))
def test_every_tensor_arrives_once_and_bit_exact(bucket: int, slowness: list[float], count: int) -> None:
    """Any bucket size, tensors larger than a bucket, any number of receivers of any speed; and again."""

    async def test() -> None:
        sender, tensors = WeightSender(engine("sender", bucket=bucket)), model(count)
        for version in (1, 2):
            topology = await prepared(sender, len(slowness))
            receivers = [WeightReceiver(engine("receiver", rank, bucket)) for rank in range(len(slowness))]
            sent, *received = await asyncio.gather(
                send(sender, topology, reusing(tensors), version),
                *(
                    receive(receiver, place, version, slow)
                    for receiver, place, slow in zip(receivers, topology.rollout, slowness, strict=True)
                ),
            )
            assert {name: digest(tensor) for name, tensor in tensors.items()} == sent
            assert sum(tensor.nbytes for tensor in tensors.values()) == sender.sent_bytes
            for receiver, got in zip(receivers, received, strict=True):
                assert sent == receiver.digests == {name: digest(tensor) for name, tensor in got.items()}
                assert list(tensors) == list(got)
            await sender.finalize()
            await sender.finalize()

    run(test())


def test_names_and_shapes_travel_once_per_model() -> None:
    """A tensor that changes, or a receiver that is new, has them told again."""
    described: list[list[Any]] = []

    class Watching(InProcessCheckpointEngine):
        def heard(self, peer: Any, values: Any) -> None:
            if "bucket" in values:
                described[-1].append(values["bucket"][1])

    async def test() -> None:
        context = CheckpointEngineContext(end="receiver")
        sender, tensors = WeightSender(engine("sender", bucket=100)), model()
        receiver = WeightReceiver(Watching(InProcessConfig(bucket_bytes=100), context))
        for version in range(1, 6):
            if version == 3:
                tensors["layer.4"] = tensors["layer.4"][:20]
            if version == 5:
                receiver = WeightReceiver(Watching(InProcessConfig(bucket_bytes=100), context))
            described.append([])
            topology = await prepared(sender, 1)
            receiving = asyncio.ensure_future(receive(receiver, topology.rollout[0], version))
            assert await send(sender, topology, reusing(tensors), version) == {
                name: digest(tensor) for name, tensor in (await receiving).items()
            }
            await sender.finalize()

    run(test())
    told = [[entry[0] for entries in each if entries is not None for entry in entries] for each in described]
    assert [list(model()), [], ["layer.4"], [], list(model())] == told
    assert 1 == len({len(each) for each in described})


def test_by_reference_the_next_tensor_is_drawn_when_all_receivers_are_done_with_the_last() -> None:
    async def test() -> None:
        sender, drawn = WeightSender(engine("sender")), []

        def weights() -> Generator[tuple[str, Any], None, None]:
            for index in range(3):
                drawn.append(index)
                yield str(index), torch.tensor(index)

        topology = await prepared(sender, 2)
        streams = [WeightReceiver(engine("receiver", rank)).tensors(topology.rollout[rank], 1) for rank in range(2)]
        sending = asyncio.ensure_future(send(sender, topology, weights()))
        await asyncio.gather(*map(anext, streams))
        await asyncio.sleep(1)
        assert [0] == drawn
        first = asyncio.ensure_future(anext(streams[0]))
        await asyncio.sleep(1)
        assert [0] == drawn  # the other one still holds tensor 0
        assert "1" == (await anext(streams[1]))[0] == (await first)[0]
        for stream in streams:
            await stream.aclose()
        assert "weights.transfer" == await code_of(sending)
        await sender.finalize()

    run(test())


def test_sending_ends_when_everything_is_taken_however_large_the_bucket() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender", bucket=1 << 20))
        topology = await prepared(sender, 1)
        receiver = WeightReceiver(engine("receiver", bucket=1 << 20))
        receiving = asyncio.ensure_future(receive(receiver, topology.rollout[0], slow=1))
        await send(sender, topology)
        assert len(model()) == asyncio.get_running_loop().time()
        await sender.finalize()
        assert list(model()) == list(await receiving)

    run(test())


def test_the_digest_of_a_large_tensor_is_taken_before_its_memory_is_used_again() -> None:
    """It is taken in a thread while the tensor is sent; the thread goes with the transfer, however that ends."""
    tensors = {str(index): torch.full((1 << 19,), float(index)) for index in range(4)}

    async def test() -> None:
        sender = WeightSender(engine("sender", bucket=1 << 30))
        topology = await prepared(sender, 1)
        receiving = asyncio.ensure_future(
            receive(WeightReceiver(engine("receiver", bucket=1 << 30)), topology.rollout[0])
        )
        wanted = {name: digest(tensor) for name, tensor in tensors.items()}
        assert wanted == await send(sender, topology, reusing(tensors))
        await receiving
        await sender.finalize()
        topology = await prepared(sender, 1)
        stream = WeightReceiver(engine("receiver", bucket=1 << 30)).tensors(topology.rollout[0], 1)
        drawing = asyncio.ensure_future(anext(stream))
        with pytest.raises(DeadlineExceeded):
            await send(sender, topology, reusing(tensors))
        await drawing
        await stream.aclose()
        await sender.finalize()

    run(test())
    assert [] == [thread.name for thread in threading.enumerate() if thread.name.startswith("weights-digest")]


def test_ranks_that_do_not_send_exhaust_their_weights() -> None:
    async def test() -> None:
        sender, other = WeightSender(engine("sender")), WeightSender(engine("sender", rank=1))
        metadata = ((await sender.prepare()).metadata, (await other.prepare()).metadata)
        topology = await sender.build_topology(TopologyRequest(trainer_metadata=metadata, rollout_workers=1))
        sent, dropped, _ = await asyncio.gather(
            send(sender, topology),
            send(other, topology),
            receive(WeightReceiver(engine("receiver")), topology.rollout[0]),
        )
        assert sent == dropped
        await sender.finalize()
        await other.finalize()

    run(test())


def test_a_receiver_that_never_comes_is_named_within_the_deadline() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender", seconds=5))
        topology = await prepared(sender, 2)
        receiving = asyncio.ensure_future(receive(WeightReceiver(engine("receiver")), topology.rollout[0]))
        with pytest.raises(DeadlineExceeded) as caught:
            await send(sender, topology)
        assert "worker 1" in str(caught.value)
        assert "worker 0" not in str(caught.value)
        assert 5.0 == asyncio.get_running_loop().time()
        await sender.finalize()
        assert "weights.transfer" == await code_of(receiving)

    run(test())


@pytest.mark.parametrize("bucket", [0, 100])
def test_a_receiver_that_is_too_slow_is_named(bucket: int) -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender", bucket=bucket, seconds=5))
        topology = await prepared(sender, 1)
        receiver = WeightReceiver(engine("receiver", bucket=bucket))
        receiving = asyncio.ensure_future(receive(receiver, topology.rollout[0], slow=2))
        with pytest.raises(DeadlineExceeded) as caught:
            await send(sender, topology)
        assert "worker 0" in str(caught.value)
        await sender.finalize()
        assert "weights.transfer" == await code_of(receiving)

    run(test())


def test_a_receiver_that_raises_breaks_the_transfer_off() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender"))
        topology = await prepared(sender, 1)

        async def load() -> None:
            async with aclosing(WeightReceiver(engine("receiver")).tensors(topology.rollout[0], 1)) as stream:
                async for _ in stream:
                    raise OSError("disk")

        loading = asyncio.ensure_future(load())
        assert "weights.transfer" == await code_of(send(sender, topology))
        with pytest.raises(OSError, match="disk"):
            await loading
        assert 0 == asyncio.get_running_loop().time()
        await sender.finalize()

    run(test())


@pytest.mark.parametrize("end", ["raises", "leaves"])
def test_a_sender_that_breaks_off_ends_its_receivers(end: str) -> None:
    async def test() -> None:
        closed = []

        def weights() -> Generator[tuple[str, Any], None, None]:
            try:
                yield "a", torch.zeros(1)
                raise RuntimeError("out of memory")
            finally:
                closed.append(True)

        sender = WeightSender(engine("sender"))
        topology = await prepared(sender, 2)
        receiving = [
            asyncio.ensure_future(receive(WeightReceiver(engine("receiver", rank)), place))
            for rank, place in enumerate(topology.rollout)
        ]
        await sender.connect(topology.trainer[0], 1)
        if end == "raises":
            with pytest.raises(RuntimeError, match="out of memory"):
                await sender.send(weights())
            assert [True] == closed
        await sender.finalize()
        for task in receiving:
            with pytest.raises(WeightsError) as caught:
                await task
            assert "weights.transfer" == caught.value.code
            assert ("out of memory" in caught.value.message) == (end == "raises")
        assert 0 == asyncio.get_running_loop().time()

    run(test())


def test_a_sender_that_never_sends_is_waited_for_no_longer_than_the_deadline() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender"))
        topology = await prepared(sender, 1)
        with pytest.raises(DeadlineExceeded) as caught:
            await receive(WeightReceiver(engine("receiver", seconds=7)), topology.rollout[0])
        assert "sender" in str(caught.value)
        assert 7.0 == asyncio.get_running_loop().time()
        await sender.finalize()

    run(test())


def test_versions_and_sessions_have_to_match() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender"))
        topology = await prepared(sender, 1)
        (place,) = topology.rollout
        sending = asyncio.ensure_future(send(sender, topology, version=4))
        with pytest.raises(WeightsError) as caught:
            await receive(WeightReceiver(engine("receiver")), place, version=5)
        assert ("weights.version", 5, 4) == (caught.value.code, caught.value.expected, caught.value.found)
        assert "weights.transfer" == await code_of(sending)
        await sender.finalize()
        for late in (
            receive(WeightReceiver(engine("receiver")), place, version=4),
            sender.connect(topology.trainer[0], 5),
            engine("receiver").receive_weights().__anext__(),
            sender.send(),
        ):
            assert "weights.transfer" == await code_of(late)

    run(test())


def test_two_receivers_cannot_take_one_place() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender"))
        topology = await prepared(sender, 1)
        receivers = [engine("receiver") for _ in range(2)]
        request = ConnectRequest(arguments=topology.rollout[0], version=1)
        await asyncio.gather(sender.connect(topology.trainer[0], 1), receivers[0].connect(request))
        assert "weights.transfer" == await code_of(receivers[1].connect(request))
        await receivers[0].finalize()
        await receivers[1].finalize()
        await sender.finalize()

    run(test())


def test_a_name_that_the_engine_exports_twice_is_refused() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender"))
        topology = await prepared(sender, 1)
        receiving = asyncio.ensure_future(receive(WeightReceiver(engine("receiver")), topology.rollout[0]))
        weights = ((name, torch.zeros(1)) for name in ("a", "b", "a"))
        assert "weights.missing" == await code_of(send(sender, topology, weights))
        await sender.finalize()
        assert "weights.transfer" == await code_of(receiving)

    run(test())
