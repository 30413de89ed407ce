"""What one process can show of the checkpoint engine: connections that break, ports that are taken, strangers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import torch
import zmq

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, ConnectRequest, TopologyRequest
from jackfield.errors import WeightsError
from jackfield.sdk.receiver import WeightReceiver
from jackfield.weights import WeightSender
from jackfield_proxy import Proxy
from jackfield_testing import in_loop
from jackfield_transport_zmq.config import EngineConfig
from jackfield_transport_zmq.engine import ZMQCheckpointEngine
from jackfield_transport_zmq.sockets import Gate, listening

TENSORS = {
    **{f"layer.{number}": torch.full((5000,), float(number)) for number in range(8)},
    "large": torch.arange(100_000.0),
    "last": torch.ones(3, dtype=torch.bfloat16),
}


def engine(end: Any, rank: int = 0, **settings: Any) -> ZMQCheckpointEngine:
    return ZMQCheckpointEngine(
        EngineConfig(**settings), CheckpointEngineContext(end=end, rank=rank, deadline_seconds=20)
    )


async def moved(settings: dict[str, Any], proxies: list[Proxy | None]) -> list[dict[str, str]]:
    """One transfer to as many workers, each of which goes through its proxy, if it has one.

    Returns the digests of what was sent and of what each has received.
    """
    sender = WeightSender(engine("sender", **settings))
    request = TopologyRequest(trainer_metadata=((await sender.prepare()).metadata,), rollout_workers=len(proxies))
    topology = ZMQCheckpointEngine.build_topology(request)
    receivers = [WeightReceiver(engine("receiver", rank, **settings)) for rank in range(len(proxies))]

    async def send() -> dict[str, str]:
        await sender.connect(topology.trainer[0], 1)
        return await sender.send(pair for pair in TENSORS.items())

    async def receive(number: int) -> None:
        arguments = dict(topology.rollout[number])
        proxy = proxies[number]
        if proxy is not None:
            arguments |= await proxy.before(arguments)
        async for _ in receivers[number].tensors(arguments, 1):
            pass

    sent, *_ = await asyncio.gather(send(), *(receive(number) for number in range(len(proxies))))
    await sender.finalize()
    return [sent, *(receiver.digests for receiver in receivers)]


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@in_loop
async def test_a_broken_connection_is_taken_up_where_it_broke(encrypted: bool) -> None:
    """Twice; another worker notices nothing. What had come does not come again."""
    settings = {"transport": "tcp", "encrypted": encrypted, "bucket_bytes": 1 << 14}
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    proxy = Proxy(after_bytes=150_000, times=2)
    try:
        sent, *received = await moved(settings, [None, proxy])
    finally:
        await proxy.close()
    assert [sent, sent] == received
    assert 3 == len(proxy.carried)
    assert proxy.carried[2] < total - 100_000
    assert sum(proxy.carried) < total + 2 * 12 * (1 << 14)  # and no more than was under way is lost


@in_loop
async def test_within_a_host_and_by_tcp(unused_port: int) -> None:
    for settings in ({"transport": "ipc"}, {"transport": "tcp", "data_port": unused_port}):
        sent, *received = await moved(settings, [None] * 3)
        assert [sent] * 3 == received


@pytest.mark.parametrize("name", ["port", "data_port"])
@in_loop
async def test_a_taken_port_is_refused_by_name(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sender = engine("sender", transport="tcp", **{name: port})
        with pytest.raises(WeightsError) as caught:
            await sender.prepare()
        assert ("weights.transfer", f"127.0.0.1:{port}") == (caught.value.code, caught.value.where)
    await sender.prepare()
    await sender.prepare()  # as after a synchronisation that failed before a worker came
    await sender.finalize()


@in_loop
async def test_strangers_at_the_data_port_change_nothing(unused_port: int) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://127.0.0.1:{unused_port}")
        for content in (b"", b"noise", b"JKF\x01" + bytes(99)):
            stranger.send_multipart([content, b"more"])
        sent, *received = await moved({"transport": "tcp", "data_port": unused_port}, [None])
        assert [sent] == received


@in_loop
async def test_a_stranger_in_the_place_of_the_sender_cannot_fill_a_workers_memory() -> None:
    """It gets the worker's connection and sends a frame above the largest message: the worker closes the connection."""
    settings = {"transport": "tcp", "bucket_bytes": 1 << 14}
    sender, worker = engine("sender", **settings), engine("receiver", **settings)
    metadata = (await sender.prepare()).metadata
    topology = ZMQCheckpointEngine.build_topology(TopologyRequest(trainer_metadata=(metadata,), rollout_workers=1))
    with zmq.Context() as context:
        gate, place = Gate(context, None, bytes.fromhex(metadata["session"]["secret"])), dict(topology.rollout[0])
        stranger, place["data"] = listening(context, "127.0.0.1", None, tcp=True)
        connecting = [
            asyncio.ensure_future(end.connect(ConnectRequest(arguments=arguments, version=1)))
            for end, arguments in ((sender, topology.trainer[0]), (worker, place))
        ]
        try:
            assert await asyncio.to_thread(gate.socket.poll, 20_000)
            gate.answer()
            assert await asyncio.to_thread(stranger.poll, 20_000)
            identity, *_ = stranger.recv_multipart()
            with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                stranger.send_multipart([identity, bytes(place["largest"] + 1)])
                assert await asyncio.to_thread(monitor.poll, 20_000)
        finally:
            for end in connecting:
                end.cancel()
            await asyncio.gather(*connecting, return_exceptions=True)
            stranger.close(0)
            gate.socket.close(0)
            await worker.finalize()
            await sender.finalize()
