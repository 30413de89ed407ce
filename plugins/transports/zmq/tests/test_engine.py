"""What one process can show of the checkpoint engine: connections that break, ports that are taken, strangers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
import zmq

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, TopologyRequest
from jackfield.errors import WeightsError
from jackfield.weights import WeightReceiver, WeightSender
from jackfield_testing import in_loop
from jackfield_transport_zmq.config import EngineConfig
from jackfield_transport_zmq.engine import ZMQCheckpointEngine

TENSORS = {
    **{f"layer.{number}": torch.full((5000,), float(number)) for number in range(8)},
    "large": torch.arange(100_000.0),
    "last": torch.ones(3, dtype=torch.bfloat16),
}


def engine(side: Any, rank: int = 0, **settings: Any) -> ZMQCheckpointEngine:
    return ZMQCheckpointEngine(
        EngineConfig(**settings), CheckpointEngineContext(side=side, rank=rank, deadline_seconds=20)
    )


async def moved(settings: dict[str, Any], data: list[str | None]) -> list[dict[str, str]]:
    """One transfer to as many workers, each of which finds the data at its address, if that is another one.

    Returns the digests of what was sent and of what each has received.
    """
    sender = WeightSender(engine("trainer", **settings))
    request = TopologyRequest(trainer_metadata=(sender.prepare().metadata,), rollout_workers=len(data))
    topology = ZMQCheckpointEngine.build_topology(request)
    receivers = [WeightReceiver(engine("rollout", rank, **settings)) for rank in range(len(data))]

    async def send() -> dict[str, str]:
        await sender.connect(topology.trainer[0], 1)
        return await sender.send(pair for pair in TENSORS.items())

    async def receive(number: int) -> None:
        arguments = dict(topology.rollout[number])
        if data[number] is not None:
            PLACES[data[number]] = arguments["data"]
            arguments["data"] = data[number]
        async for _ in receivers[number].tensors(arguments, 1):
            pass

    sent, *_ = await asyncio.gather(send(), *(receive(number) for number in range(len(data))))
    await sender.finalize()
    return [sent, *(receiver.digests for receiver in receivers)]


#: A proxy's address to the one behind it.
PLACES: dict[str | None, str] = {}


@contextlib.asynccontextmanager
async def breaking(after_bytes: int, times: int) -> AsyncIterator[tuple[str, list[int]]]:
    """A TCP proxy that cuts its first connections after so many bytes from the sender; and what each has carried."""
    carried: list[int] = []
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int | None) -> None:
        while content := await reader.read(1 << 14):
            if number is not None:
                carried[number] += len(content)
                if number < times and carried[number] > after_bytes:
                    break
            writer.write(content)
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        host, _, port = PLACES[address].removeprefix("tcp://").rpartition(":")
        back, forth = await asyncio.open_connection(host, int(port))
        carried.append(0)
        ways = [
            asyncio.ensure_future(pump(back, writer, len(carried) - 1)),
            asyncio.ensure_future(pump(reader, forth, None)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (writer, forth):
                each.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield address, carried
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@in_loop
async def test_a_broken_connection_is_taken_up_where_it_broke(encrypted: bool) -> None:
    """Twice; another worker notices nothing. What had come does not come again."""
    settings = {"transport": "tcp", "encrypted": encrypted, "bucket_bytes": 1 << 14}
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    async with breaking(after_bytes=150_000, times=2) as (address, carried):
        sent, *received = await moved(settings, [None, address])
    assert [sent, sent] == received
    assert 3 == len(carried)
    assert carried[2] < total - 100_000
    assert sum(carried) < total + 2 * 12 * (1 << 14)  # and no more than was under way is lost


@in_loop
async def test_within_a_host_and_by_tcp(unused_port: int) -> None:
    for settings in ({"transport": "ipc"}, {"transport": "tcp", "data_port": unused_port}):
        sent, *received = await moved(settings, [None] * 3)
        assert [sent] * 3 == received


@pytest.mark.parametrize("name", ["port", "data_port"])
def test_a_taken_port_is_refused_by_name(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sender = engine("trainer", transport="tcp", **{name: port})
        with pytest.raises(WeightsError, match=rf"(?s)cannot listen.*127\.0\.0\.1:{port}"):
            sender.prepare()
    sender.prepare()
    sender.prepare()  # as after a synchronisation that failed before anybody came
    asyncio.run(sender.finalize())


@in_loop
async def test_strangers_at_the_data_port_change_nothing(unused_port: int) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://127.0.0.1:{unused_port}")
        for content in (b"", b"noise", b"JKF\x01" + bytes(99)):
            stranger.send_multipart([content, b"more"])
        sent, *received = await moved({"transport": "tcp", "data_port": unused_port}, [None])
        assert [sent] == received
