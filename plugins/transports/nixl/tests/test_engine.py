"""What one process can show of the checkpoint engine: where UCX listens, ports that are taken, devices that are not."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, TopologyRequest
from jackfield.errors import WeightsError
from jackfield.sdk.receiver import WeightReceiver
from jackfield.weights import WeightSender
from jackfield_testing import in_loop
from jackfield_transport_nixl.config import EngineConfig
from jackfield_transport_nixl.engine import NIXLCheckpointEngine

TENSORS = {"a": torch.arange(40_000.0), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.zeros(0, 4)}


def engine(end: Any, **settings: Any) -> NIXLCheckpointEngine:
    return NIXLCheckpointEngine(EngineConfig(**settings), CheckpointEngineContext(end=end, deadline_seconds=20))


def listening() -> set[str]:
    """Addresses at which this process listens, as the system writes them."""
    sockets = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            sockets.add(os.readlink(f"/proc/self/fd/{entry}").removeprefix("socket:[").removesuffix("]"))
        except OSError:  # the listing's own descriptor
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if inode in sockets and state == "0A":
                found.add(local.partition(":")[0])
    return found


@in_loop
async def test_within_a_host_nobody_listens_beyond_loopback() -> None:
    """While tensors are taken; what arrives is what was sent."""
    sender, receiver = WeightSender(engine("sender", bucket_bytes=1 << 16)), WeightReceiver(engine("receiver"))
    request = TopologyRequest(trainer_metadata=((await sender.prepare()).metadata,), rollout_workers=1)
    topology = NIXLCheckpointEngine.build_topology(request)

    async def send() -> dict[str, str]:
        await sender.connect(topology.trainer[0], 1)
        return await sender.send(pair for pair in TENSORS.items())

    sending = asyncio.ensure_future(send())
    places: set[str] = set()
    async for _ in receiver.tensors(topology.rollout[0], 1):
        places |= listening()
    assert await sending == receiver.digests
    assert {"0100007F"} == places
    await sender.finalize()


@in_loop
async def test_devices_that_are_not_there_are_named() -> None:
    sender, receiver = WeightSender(engine("sender", devices="nowhere0")), WeightReceiver(engine("receiver"))
    request = TopologyRequest(trainer_metadata=((await sender.prepare()).metadata,), rollout_workers=1)
    topology = NIXLCheckpointEngine.build_topology(request)

    async def receive() -> None:
        async for _ in receiver.tensors(topology.rollout[0], 1):
            pass

    receiving = asyncio.ensure_future(receive())
    with pytest.raises(WeightsError) as caught:
        await sender.connect(topology.trainer[0], 1)
    assert "nowhere0" in str(caught.value.where)
    await sender.finalize()
    with pytest.raises(WeightsError) as caught:
        await receiving
    assert "weights.transfer" == caught.value.code


@in_loop
async def test_a_taken_port_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sender = engine("sender", port=port)
        with pytest.raises(WeightsError) as caught:
            await sender.prepare()
        assert ("weights.transfer", f"127.0.0.1:{port}") == (caught.value.code, caught.value.where)
    await sender.prepare()
    await sender.prepare()  # as after a synchronisation that failed before a worker came
    await sender.finalize()


@in_loop
async def test_agents_are_kept_until_a_transfer_breaks_off() -> None:
    """With their registered memory; a worker that is new meets the sender's agent."""
    sender, receiver, agents = engine("sender", bucket_bytes=1 << 16), engine("receiver"), []
    for version in range(1, 5):
        if version == 3:
            receiver = engine("receiver")
        sending, receiving = WeightSender(sender), WeightReceiver(receiver)
        request = TopologyRequest(trainer_metadata=((await sending.prepare()).metadata,), rollout_workers=1)
        topology = NIXLCheckpointEngine.build_topology(request)

        async def send(sending: WeightSender = sending, topology: Any = topology, version: int = version) -> Any:
            await sending.connect(topology.trainer[0], version)
            return await sending.send(pair for pair in TENSORS.items())

        task = asyncio.ensure_future(send())
        if version == 4:
            stream = receiving.tensors(topology.rollout[0], version)
            await anext(stream)
            await stream.aclose()  # before everything has come
            with pytest.raises(WeightsError):
                await task
        else:
            async for _ in receiving.tensors(topology.rollout[0], version):
                pass
            assert await task == receiving.digests
        await sending.finalize()
        agents.append((sender._agent, receiver._agent))
    assert agents[0] == agents[1]
    assert (agents[0][0], True) == (agents[2][0], agents[2][1] is not agents[0][1])
    assert (None, None) == agents[3]
