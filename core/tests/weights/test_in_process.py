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

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, ConnectRequest, TopologyRequest
from jackfield.clock import VirtualClock
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.weights import WeightReceiver, WeightSender, digest, in_process
from jackfield.weights.in_process import InProcessCheckpointEngine, InProcessConfig

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Whatever happens in a test: its rendezvous are gone afterwards."""
    yield
    assert {} == in_process._MEETINGS


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


async def meet(sender: WeightSender, receivers: int, version: int = 1) -> tuple[Any, ...]:
    metadata = sender.prepare().metadata
    request = TopologyRequest(trainer_metadata=(metadata,), rollout_workers=receivers)
    topology = InProcessCheckpointEngine.build_topology(request)
    await sender.connect(topology.trainer[0], version)
    return topology.rollout


def run(test: Coroutine[Any, Any, None]) -> None:
    VirtualClock().run(test)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 800), st.lists(st.sampled_from([0.0, 0.5, 2.0]), max_size=3), st.integers(0, 12))
def test_every_tensor_arrives_once_and_bit_exact(bucket: int, slowness: list[float], count: int) -> None:
    """Any bucket size, tensors larger than a bucket, any number of receivers of any speed; and again."""

    async def test() -> None:
        sender, tensors = WeightSender(engine("sender", bucket=bucket)), model(count)
        for version in (1, 2):
            places = await meet(sender, len(slowness), version)
            receivers = [WeightReceiver(engine("receiver", rank, bucket)) for rank in range(len(slowness))]
            sent, *received = await asyncio.gather(
                sender.send(reusing(tensors)),
                *(
                    receive(receiver, place, version, slow)
                    for receiver, place, slow in zip(receivers, places, slowness, strict=True)
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


def test_by_reference_the_next_tensor_is_drawn_when_all_receivers_are_done_with_the_last() -> None:
    async def test() -> None:
        sender, drawn = WeightSender(engine("sender")), []

        def weights() -> Generator[tuple[str, Any], None, None]:
            for index in range(3):
                drawn.append(index)
                yield str(index), torch.tensor(index)

        places = await meet(sender, 2)
        streams = [WeightReceiver(engine("receiver", rank)).tensors(place, 1) for rank, place in enumerate(places)]
        sending = asyncio.ensure_future(sender.send(weights()))
        await anext(streams[0])
        await anext(streams[1])
        await asyncio.sleep(1)
        assert [0] == drawn
        first = asyncio.ensure_future(anext(streams[0]))
        await asyncio.sleep(1)
        assert [0] == drawn  # the other one still holds tensor 0
        assert "1" == (await anext(streams[1]))[0] == (await first)[0]
        for stream in streams:
            await stream.aclose()
        with pytest.raises(WeightsError, match="receiver 0 left before it had taken everything"):
            await sending
        await sender.finalize()

    run(test())


def test_sending_ends_when_everything_is_taken_however_large_the_bucket() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender", bucket=1 << 20))
        (place,) = await meet(sender, 1)
        receiving = asyncio.ensure_future(receive(WeightReceiver(engine("receiver", bucket=1 << 20)), place, slow=1))
        await sender.send(reusing(model()))
        assert len(model()) == asyncio.get_running_loop().time()
        await sender.finalize()
        assert list(model()) == list(await receiving)

    run(test())


def test_the_digest_of_a_large_tensor_is_taken_before_its_memory_is_used_again() -> None:
    """It is taken in a thread while the tensor is sent; the thread goes with the transfer, however that ends."""
    tensors = {str(index): torch.full((1 << 19,), float(index)) for index in range(4)}

    async def test() -> None:
        sender = WeightSender(engine("sender", bucket=1 << 30))
        (place,) = await meet(sender, 1)
        receiver = WeightReceiver(engine("receiver", bucket=1 << 30))
        receiving = asyncio.ensure_future(receive(receiver, place))
        assert {name: digest(tensor) for name, tensor in tensors.items()} == await sender.send(reusing(tensors))
        await receiving
        await sender.finalize()
        (place,) = await meet(sender, 1)
        with pytest.raises(DeadlineExceeded):
            await sender.send(reusing(tensors))
        await sender.finalize()

    run(test())
    assert [] == [thread.name for thread in threading.enumerate() if thread.name.startswith("weights-digest")]


def test_ranks_that_do_not_send_exhaust_their_weights() -> None:
    async def test() -> None:
        sender, other = WeightSender(engine("sender")), WeightSender(engine("sender", rank=1))
        metadata = (sender.prepare().metadata, other.prepare().metadata)
        topology = InProcessCheckpointEngine.build_topology(
            TopologyRequest(trainer_metadata=metadata, rollout_workers=1)
        )
        for each, arguments in zip((sender, other), topology.trainer, strict=True):
            await each.connect(arguments, 1)
        receiver = WeightReceiver(engine("receiver"))
        sent, dropped, _ = await asyncio.gather(
            sender.send(reusing(model())), other.send(reusing(model())), receive(receiver, topology.rollout[0])
        )
        assert sent == dropped
        await sender.finalize()
        await other.finalize()

    run(test())


def test_a_receiver_that_never_comes_is_named_within_the_deadline() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender", seconds=5))
        places = await meet(sender, 2)
        receiving = asyncio.ensure_future(receive(WeightReceiver(engine("receiver")), places[0]))
        with pytest.raises(DeadlineExceeded, match="waited 5 s for receiver 1 to connect"):
            await sender.send(reusing(model()))
        assert 5.0 == asyncio.get_running_loop().time()
        await sender.finalize()
        with pytest.raises(WeightsError, match="the sender broke off: waited 5 s for receiver 1"):
            await receiving

    run(test())


@pytest.mark.parametrize("bucket", [0, 100])
def test_a_receiver_that_is_too_slow_is_named(bucket: int) -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender", bucket=bucket, seconds=5))
        (place,) = await meet(sender, 1)
        receiving = asyncio.ensure_future(receive(WeightReceiver(engine("receiver", bucket=bucket)), place, slow=2))
        with pytest.raises(DeadlineExceeded, match="receiver 0 to take a tensor"):
            await sender.send(reusing(model()))
        await sender.finalize()
        with pytest.raises(WeightsError) as caught:
            await receiving
        assert "weights.transfer" == caught.value.code

    run(test())


def test_a_receiver_that_raises_breaks_the_transfer_off() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender"))
        (place,) = await meet(sender, 1)

        async def load() -> None:
            async with aclosing(WeightReceiver(engine("receiver")).tensors(place, 1)) as stream:
                async for _ in stream:
                    raise OSError("disk")

        loading = asyncio.ensure_future(load())
        with pytest.raises(WeightsError, match="receiver 0 left before it had taken everything"):
            await sender.send(reusing(model()))
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
        places = await meet(sender, 2)
        receiving = [
            asyncio.ensure_future(receive(WeightReceiver(engine("receiver", rank)), place))
            for rank, place in enumerate(places)
        ]
        if end == "raises":
            with pytest.raises(RuntimeError, match="out of memory"):
                await sender.send(weights())
            assert [True] == closed
        await asyncio.sleep(0)
        await sender.finalize()
        expected = "RuntimeError: out of memory" if end == "raises" else "the sender left"
        for task in receiving:
            with pytest.raises(WeightsError, match=expected) as caught:
                await task
            assert caught.value.code == "weights.transfer"
        assert 0 == asyncio.get_running_loop().time()

    run(test())


def test_a_sender_that_never_sends_is_waited_for_no_longer_than_the_deadline() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender"))
        (place,) = await meet(sender, 1)
        with pytest.raises(DeadlineExceeded, match="waited 7 s for the sender"):
            await receive(WeightReceiver(engine("receiver", seconds=7)), place)
        await sender.finalize()

    run(test())


def test_versions_and_rendezvous_have_to_match() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender"))
        (place,) = await meet(sender, 1, version=4)
        sending = asyncio.ensure_future(sender.send(reusing(model())))
        with pytest.raises(WeightsError) as caught:
            await receive(WeightReceiver(engine("receiver")), place, version=5)
        assert ("weights.version", 5, 4) == (caught.value.code, caught.value.expected, caught.value.found)
        with pytest.raises(WeightsError):
            await sending
        await sender.finalize()
        with pytest.raises(WeightsError) as caught:
            await receive(WeightReceiver(engine("receiver")), place, version=4)
        with pytest.raises(WeightsError) as caught:
            await sender.connect({"rendezvous": place["rendezvous"], "receivers": 1}, 5)
        assert "weights.transfer" == caught.value.code
        with pytest.raises(WeightsError) as caught:
            await engine("receiver").receive_weights().__anext__()
        with pytest.raises(WeightsError) as caught:
            await sender.send()
        assert "weights.transfer" == caught.value.code

    run(test())


def test_two_receivers_cannot_take_one_place() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender"))
        (place,) = await meet(sender, 1)
        receivers = [engine("receiver") for _ in range(2)]
        await receivers[0].connect(ConnectRequest(arguments=place, version=1))
        with pytest.raises(WeightsError, match=r"receiver 0 .* connected already"):
            await receivers[1].connect(ConnectRequest(arguments=place, version=1))
        await receivers[0].finalize()
        await receivers[1].finalize()
        await sender.finalize()

    run(test())


def test_a_name_that_the_engine_exports_twice_is_refused() -> None:
    async def test() -> None:
        sender = WeightSender(engine("sender"))
        (place,) = await meet(sender, 1)
        receiving = asyncio.ensure_future(receive(WeightReceiver(engine("receiver")), place))
        with pytest.raises(WeightsError, match="exports tensor 'a' twice") as caught:
            await sender.send((name, torch.zeros(1)) for name in ("a", "b", "a"))
        assert caught.value.code == "weights.missing"
        await sender.finalize()
        with pytest.raises(WeightsError):
            await receiving

    run(test())
