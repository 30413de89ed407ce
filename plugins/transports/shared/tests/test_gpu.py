"""Segments of a GPU, which shared memory of the host stands for: the same code, without CUDA."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, TopologyRequest
from jackfield.plugins import discover
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import WeightReceiver
from jackfield.weights import WeightSender
from jackfield_testing import refused
from jackfield_transport_shared import engine, gpu


class Memory:
    """A driver whose memory is the host's; it knows what is allocated, and what is mapped."""

    allocated: dict[int, Any]
    mapped: list[int]
    waits = 0

    def __init__(self, device: str) -> None:
        assert device.startswith("cuda")

    def allocate(self, size: int) -> int:
        memory = (ctypes.c_uint8 * size)()
        pointer = ctypes.addressof(memory)
        self.allocated[pointer] = memory
        return pointer

    def free(self, pointer: int) -> None:
        assert pointer not in self.mapped, "a worker has it"
        del self.allocated[pointer]

    def handle(self, pointer: int) -> bytes:
        return pointer.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        assert 64 == len(handle)
        pointer = int.from_bytes(handle, "little")
        assert pointer in self.allocated
        self.mapped.append(pointer)
        return pointer

    def close(self, pointer: int) -> None:
        self.mapped.remove(pointer)

    def tensor(self, pointer: int, size: int) -> torch.Tensor:
        return torch.frombuffer(self.allocated[pointer], dtype=torch.uint8, count=size)

    def wait(self) -> None:
        type(self).waits += 1


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Memory]]:
    Memory.allocated, Memory.mapped, Memory.waits = {}, [], 0
    monkeypatch.setattr(gpu, "Driver", Memory)
    monkeypatch.setattr(engine, "gpu_identity", lambda device: None if device == "cpu" else f"GPU-{device}")
    yield Memory
    assert {} == Memory.allocated
    assert [] == Memory.mapped


def build(end: Any, device: str, rank: int = 0, **settings: Any) -> Any:
    context = CheckpointEngineContext(end=end, deadline_seconds=20.0, device=device, rank=rank)
    return discover().load("checkpoint_engine", "shared").build(settings, context)


def model(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    layers = {f"layer.{index}": torch.randn(256, generator=generator) for index in range(20)}
    return {"empty": torch.empty(0), "larger than a segment": torch.randn(2000, generator=generator), **layers}


async def transfer(version: int, sends: Any, *workers: str, stops: bool = False) -> int:
    """Send a version to workers with these devices, and return the most segments of a GPU that there were."""
    sender, most = WeightSender(sends), 0
    request = TopologyRequest(trainer_metadata=((await sender.prepare()).metadata,), rollout_workers=len(workers))
    topology = sends.build_topology(request)

    async def receive(number: int, device: str) -> None:
        nonlocal most
        receiver = WeightReceiver(build("receiver", device, number))
        stream = receiver.tensors(topology.rollout[number], version)
        try:
            async for name, tensor in stream:
                most = max(most, len(Memory.allocated))
                assert digest(tensor) == digest(model(version)[name])
                if stops:
                    return
        finally:
            await stream.aclose()
        assert len(model(version)) == len(receiver.digests)

    receiving = asyncio.gather(*(receive(number, device) for number, device in enumerate(workers)))
    try:
        await sender.connect(topology.trainer[0], version)
        await sender.send(pair for pair in model(version).items())
        await receiving
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        await sender.finalize()
    return most


def test_a_worker_on_the_senders_gpu_reads_its_memory() -> None:
    """Two versions arrive; memory is reused, waited for, unmapped before it is freed, and freed at the end."""

    async def main() -> None:
        sends = build("sender", "cuda:0", bucket_bytes=4096, gpu_max_bytes=3 * 4096)
        for version in (1, 2):
            assert 1 <= await transfer(version, sends, "cuda:0", "cuda:0") <= 4
            assert {} == Memory.allocated
        assert Memory.waits

    asyncio.run(main())


@pytest.mark.parametrize("others", [("cuda:1",), ("cuda:0", "cuda:1"), ("cpu",)])
def test_workers_elsewhere_read_the_hosts_memory(others: tuple[str, ...]) -> None:
    """A process does not see the GPU of another one, whose memory it could not map."""

    async def main() -> None:
        assert 0 == await transfer(1, build("sender", "cuda:0", bucket_bytes=4096), *others)

    asyncio.run(main())


def test_after_a_break_the_memory_is_free() -> None:
    async def main() -> None:
        sends = build("sender", "cuda:0", bucket_bytes=4096, gpu_max_bytes=8192)
        with refused("weights.transfer", "worker 0"):
            await transfer(1, sends, "cuda:0", stops=True)
        assert {} == Memory.allocated
        assert await transfer(2, sends, "cuda:0")

    asyncio.run(main())
