"""What one process can show: the gates, the default group, a port that is taken, a worker without a GPU."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, ConnectRequest, TopologyRequest
from jackfield.errors import WeightsError
from jackfield.plugins import discover
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import WeightReceiver
from jackfield.weights import WeightSender
from jackfield_testing import in_loop
from jackfield_transport_nccl import engine


def build(end: Any, **settings: Any) -> Any:
    context = CheckpointEngineContext(end=end, deadline_seconds=20)
    return discover().load("checkpoint_engine", "nccl").build(settings, context)


def test_the_default_group_of_a_training_engine_stays_as_it_is(tmp_path: Path) -> None:
    """A transfer in a process that has a default group: it is the same group afterwards, and works."""
    tensors = {"a": torch.arange(10.0), "b": torch.ones(3, 2, dtype=torch.bfloat16)}

    async def transfer() -> dict[str, str]:
        sender, receiver = WeightSender(build("sender")), WeightReceiver(build("receiver"))
        request = TopologyRequest(trainer_metadata=((await sender.prepare()).metadata,), rollout_workers=1)
        topology = discover().load("checkpoint_engine", "nccl").cls.build_topology(request)

        async def send() -> None:
            await sender.connect(topology.trainer[0], 1)
            await sender.send(pair for pair in tensors.items())

        sending = asyncio.ensure_future(send())
        async for _ in receiver.tensors(topology.rollout[0], 1):
            pass
        await sending
        await sender.finalize()
        return receiver.digests

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        before = distributed.group.WORLD
        assert {name: digest(tensor) for name, tensor in tensors.items()} == asyncio.run(transfer())
        assert distributed.group.WORLD is before
        value = torch.ones(2)
        distributed.all_reduce(value)
        assert [1.0, 1.0] == value.tolist()
    finally:
        distributed.destroy_process_group()


async def moved(sender: Any, receivers: list[Any], version: int) -> None:
    """One transfer, by which each of these ends gets the same tensors."""
    sending, loading = WeightSender(sender), [WeightReceiver(receiver) for receiver in receivers]
    request = TopologyRequest(trainer_metadata=((await sending.prepare()).metadata,), rollout_workers=len(receivers))
    topology = sender.build_topology(request)

    async def send() -> dict[str, str]:
        await sending.connect(topology.trainer[0], version)
        return await sending.send((f"{number}", torch.full((5000,), float(number))) for number in range(4))

    async def load(number: int) -> None:
        async for _ in loading[number].tensors(topology.rollout[number], version):
            pass

    digests, *_ = await asyncio.gather(send(), *map(load, range(len(receivers))))
    await sending.finalize()
    assert [digests] * len(receivers) == [each.digests for each in loading]


@in_loop
async def test_a_group_is_kept_until_its_members_change() -> None:
    sender, receivers = build("sender"), [build("receiver"), build("receiver")]
    groups = []
    for version in range(1, 6):
        if version == 3:
            receivers[1] = build("receiver")  # one of them was started again
        if version == 5:
            receivers.pop()
        await moved(sender, receivers, version)
        groups.append([end._group for end in (sender, *receivers)])
    assert groups[0] == groups[1]
    assert groups[2] == groups[3]
    assert 0 == len(set(groups[0]) & set(groups[2]))
    assert 0 == len(set(groups[3]) & set(groups[4]))


@in_loop
async def test_a_bucket_arrives_while_the_one_before_is_loaded() -> None:
    sender, receiver = build("sender", bucket_bytes=4096), build("receiver")
    request = TopologyRequest(trainer_metadata=((await sender.prepare()).metadata,), rollout_workers=1)
    topology = sender.build_topology(request)
    weights = ((f"{number}", torch.full((1000,), float(number))) for number in range(4))

    async def send() -> None:
        await sender.connect(ConnectRequest(arguments=topology.trainer[0], version=1))
        await sender.send_weights(weights)

    sending = asyncio.ensure_future(send())
    async for name, tensor in WeightReceiver(receiver).tensors(topology.rollout[0], 1):
        if name != "3":
            await receiver.until(lambda _: bool(receiver.arrived), "send the next bucket")
            await asyncio.wrap_future(receiver.arrived[0].place[1])
        assert [float(name)] * 1000 == tensor.tolist()
    await sending
    await sender.finalize()


def test_a_taken_port_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WeightsError) as caught:
            asyncio.run(build("sender", port=port).prepare())
        assert ("weights.transfer", f"127.0.0.1:{port}") == (caught.value.code, caught.value.where)


@in_loop
async def test_a_sender_may_prepare_again_at_the_same_port() -> None:
    """As after a synchronisation that failed before a worker came."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    engine = build("sender", port=port)
    first, second = [(await engine.prepare()).metadata["session"] for _ in range(2)]
    assert port == first["port"] == second["port"]
    assert first["secret"] != second["secret"]
    await engine.finalize()


@pytest.mark.parametrize(
    ("backend", "gpus", "chosen"),
    [
        ("auto", ["a", "b", "c"], "nccl"),
        ("auto", ["a", "b", "a"], "gloo"),  # NCCL refuses two members that share a GPU
        ("auto", ["a", "b", "b"], "gloo"),
        ("auto", [None, None], "gloo"),
        ("auto", ["a", None], "gloo"),
        ("gloo", ["a", "b"], "gloo"),
        ("nccl", ["a", "b"], "nccl"),
    ],
)
def test_nccl_is_used_where_every_member_has_a_gpu(backend: str, gpus: list[str | None], chosen: str) -> None:
    assert chosen == build("sender", backend=backend)._chosen(gpus)


@pytest.mark.parametrize(
    ("gpus", "who"), [(["a", None], "worker 0"), (["a", "b", "a"], "worker 1"), ([None], "sender")]
)
def test_a_member_without_a_gpu_of_its_own_cannot_join_nccl(gpus: list[str | None], who: str) -> None:
    with pytest.raises(WeightsError) as caught:
        build("sender", backend="nccl")._chosen(gpus)
    assert "weights.transfer" == caught.value.code
    assert who in str(caught.value.where)


@in_loop
async def test_workers_that_share_the_senders_gpu_get_weights_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "gpu_identity", lambda device: "GPU-0")
    sender, receivers = build("sender"), [build("receiver"), build("receiver")]
    await moved(sender, receivers, 1)
    assert {"gloo"} == {end._group.backend for end in (sender, *receivers)}
