"""Segments: used again, bounded, given back after a break; and who may not open them."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, TopologyRequest
from jackfield.errors import WeightsError
from jackfield.plugins import discover
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import WeightReceiver
from jackfield.weights import WeightSender
from jackfield_testing import refused
from jackfield_transport_shared.segments import Pool, mapped


def build(end: Any, seconds: float = 20.0, **settings: Any) -> Any:
    context = CheckpointEngineContext(end=end, deadline_seconds=seconds)
    return discover().load("checkpoint_engine", "shared").build(settings, context)


def model(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layers = {f"layer.{index}": torch.randn(256, generator=generator) for index in range(20)}
    return {"empty": torch.empty(0), "larger than a segment": torch.randn(2000, generator=generator), **layers}


class Transfer:
    """One sender, one worker, in one process."""

    def __init__(self, seconds: float = 20.0, **settings: Any) -> None:
        self.engine = build("sender", seconds, **settings)
        self.sender = WeightSender(self.engine)

    async def run(self, version: int, reading: Any = None) -> dict[str, str]:
        """A transfer; ``reading`` in the place of the worker's own iteration."""
        request = TopologyRequest(trainer_metadata=((await self.sender.prepare()).metadata,), rollout_workers=1)
        topology = self.engine.build_topology(request)
        receiver = WeightReceiver(build("receiver"))
        stream = receiver.tensors(topology.rollout[0], version)
        receiving = asyncio.ensure_future(_all(stream) if reading is None else reading(stream))
        try:
            await self.sender.connect(topology.trainer[0], version)
            sent = await self.sender.send(pair for pair in model(version).items())
            await receiving
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            await stream.aclose()
            await self.sender.finalize()
        assert {name: digest(tensor) for name, tensor in model(version).items()} == sent == receiver.digests
        return sent


async def _all(stream: Any) -> None:
    async for _ in stream:
        pass


def run(main: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(main)


def held() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "jackfield-weights" in line]


@pytest.fixture
def no_cycles_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_segments_are_used_again_and_go_with_the_senders_last_reference(no_cycles_collected: None) -> None:
    async def main() -> None:
        transfer = Transfer(bucket_bytes=4096)
        await transfer.run(1)
        first = held()
        assert first
        for version in (2, 3, 4):
            await transfer.run(version)
        assert len(held()) <= len(first)

    run(main())
    assert [] == held()


def test_publishing_goes_on_without_the_workers_up_to_the_limit() -> None:
    """A worker that reads nothing holds publishing back at ``max_bytes``, and is named at the deadline."""

    async def first_only(stream: Any) -> None:
        await anext(stream)
        await asyncio.Event().wait()

    async def main(max_bytes: int) -> Transfer:
        transfer = Transfer(0.5, bucket_bytes=4096, max_bytes=max_bytes)
        with refused("deadline", "worker 0") as caught:
            await transfer.run(1, first_only)
        assert ("take bucket 0" in str(caught.value)) == (max_bytes == 8192)
        return transfer

    for max_bytes in (8192, 1 << 20):
        run(main(max_bytes))


def test_a_slow_worker_gets_everything_through_few_segments() -> None:
    most = 0

    async def slowly(stream: Any) -> None:
        nonlocal most
        async for _ in stream:
            await asyncio.sleep(0)
            most = max(most, len(held()))

    async def main() -> None:
        await Transfer(bucket_bytes=4096, max_bytes=8192).run(1, slowly)

    run(main())
    assert 2 <= most <= 4  # the sender's two, and the worker's views of them


def test_the_pool_takes_the_smallest_free_segment_and_drops_what_does_not_fit() -> None:
    pool = Pool(1000)
    small = pool.take(100, 0)
    assert small is not None
    small.bucket = 1
    large = pool.take(500, 0)
    assert large is not None
    large.bucket = 2
    assert pool.take(60, 2) is small
    assert pool.take(200, 2) is large
    assert pool.take(600, 1) is None  # and small has gone
    assert 500 == pool.bytes
    huge = pool.take(5000, 2)  # larger than the limit, alone
    assert huge is not None
    assert 5000 == pool.bytes


def test_a_worker_sees_what_the_sender_writes_and_the_sender_not_what_the_worker_writes() -> None:
    segment = Pool(4096).take(4096, 0)
    assert segment is not None
    place = segment.place()
    ours = mapped(place)
    segment.buffer.fill_(7)
    assert 7 * 4096 == int(ours.sum())
    ours.fill_(1)
    assert 7 * 4096 == int(segment.buffer.sum())


def test_memory_of_another_process_is_refused_by_name() -> None:
    segment = Pool(4096).take(4096, 0)
    assert segment is not None
    place = segment.place()
    with pytest.raises(WeightsError) as caught:
        mapped({**place, "pid": 0})
    with pytest.raises(WeightsError) as caught:
        mapped({**place, "file": [0, 0]})
    assert "weights.transfer" == caught.value.code


def test_descriptors_are_closed_with_the_pool() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pool = Pool(4096)
    segment = pool.take(4096, 0)
    assert before + 1 == len(os.listdir("/proc/self/fd"))
    del segment
    pool.drop()
    assert before == len(os.listdir("/proc/self/fd"))
