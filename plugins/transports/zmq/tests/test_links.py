"""Two ranks that have rows of each tensor send to two workers that keep halves, each in a process of its own.

Proxies in the test's process count what passes each link.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import attrs
import pytest
import torch
from proxies import Proxy

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.engine import Box
from jackfield.abc.rollout import ServerInfo, UpdateWeightsRequest, WeightReceipt, WorkerReceipt
from jackfield.clock import Clock
from jackfield.sdk.slices import SliceReceiver, part_of, reopen_slice_receiver
from jackfield.weights import Replica, WeightSender, WeightSynchronizer
from jackfield.weights.links import LinkSender
from jackfield_testing import in_loop
from jackfield_transport_zmq.config import EngineConfig
from jackfield_transport_zmq.engine import ZMQCheckpointEngine

pytestmark = pytest.mark.timeout(180)

SETTINGS = {"transport": "tcp", "encrypted": False, "bucket_bytes": 1 << 18}
SECONDS = 60.0
#: the shape of each tensor, and the dimension that workers share out: up is column-parallel, down row-parallel
MODEL: dict[str, tuple[tuple[int, ...], int | None]] = {
    **{f"layer.{number}.up": ((1024, 512), 0) for number in range(4)},
    **{f"layer.{number}.down": ((512, 1024), 1) for number in range(4)},
    "norm": ((512,), None),
}


def tensor(name: str, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(version * 100 + len(name) * 10 + sum(map(ord, name)))
    return torch.randn(MODEL[name][0], generator=generator).to(torch.bfloat16)


def half(name: str, dim: int | None, number: int) -> Box:
    shape = MODEL[name][0]
    length = tuple(size // 2 if at == dim else size for at, size in enumerate(shape))
    return Box(name, shape, tuple(number * (size // 2) if at == dim else 0 for at, size in enumerate(shape)), length)


def whole(name: str) -> Box:
    return half(name, None, 0)


def parallel(worker: int) -> tuple[Box, ...]:
    return tuple(half(name, dim, worker) for name, (_, dim) in MODEL.items())


class RankEnd:
    """A rank of a sharded engine, with the sender of its links."""

    def __init__(self, rank: int) -> None:
        self.rank, self.version = rank, 0
        self.sender = self.make(lambda: (iter(()), None), links=LinkSender(self.make, self.local))  # type: ignore[arg-type, return-value]

    def make(self, source: Any, **more: Any) -> WeightSender:
        context = CheckpointEngineContext(end="sender", deadline_seconds=SECONDS)
        return WeightSender(ZMQCheckpointEngine(EngineConfig(**SETTINGS), context), source, **more)  # type: ignore[arg-type]

    def local(self) -> Generator[tuple[Box, torch.Tensor], None, None]:
        for name in MODEL:
            own = half(name, 0, self.rank)
            yield own, part_of(tensor(name, self.version), whole(name), own)

    async def do(self, what: str, *details: Any) -> Any:
        if what == "transfer_links":
            (self.version,) = details
        return await getattr(self.sender, what)(*details)


class WorkerEnd:
    """An inference worker with tensor parallelism."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.receiver: SliceReceiver | None = None

    async def do(self, what: str, request: UpdateWeightsRequest) -> tuple[WorkerReceipt, dict[str, torch.Tensor]]:
        layout = parallel(self.worker)
        receiver = self.receiver = reopen_slice_receiver(self.receiver, request, layout, self.worker)
        loaded: dict[str, torch.Tensor] = {}
        async with aclosing(receiver.tensors(request.version)) as stream:
            async for name, part in stream:
                loaded[name] = part.clone()
        proofs: dict[str, str] = {}
        for name, part in loaded.items():
            proofs |= receiver.prove(name, part)
        return WorkerReceipt(worker=self.worker, digests=proofs), loaded


def serve(kind: type[Any], number: int, connection: Connection[Any, Any]) -> None:
    """Be one end until the test closes the connection."""

    async def run() -> None:
        torch.set_num_threads(1)
        end, thread = kind(number), ThreadPoolExecutor(1)
        while True:
            try:
                order = await asyncio.get_running_loop().run_in_executor(thread, connection.recv)
            except EOFError:
                return
            try:
                connection.send(await end.do(*order))
            except Exception as error:
                connection.send(error)

    asyncio.run(run())


@attrs.define(eq=False)
class Remote:
    """An end in another process; it has all methods of a sender."""

    connection: Connection[Any, Any]
    process: Any

    @classmethod
    def spawn(cls, kind: type[Any], number: int) -> Remote:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(kind, number, theirs), daemon=True)
        process.start()
        theirs.close()
        return cls(ours, process)

    async def ask(self, what: str, *details: Any) -> Any:
        def asked() -> Any:
            self.connection.send((what, *details))
            assert self.connection.poll(SECONDS), f"no answer to {what}"
            return self.connection.recv()

        answer = await asyncio.to_thread(asked)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __getattr__(self, name: str) -> Any:
        return partial(self.ask, name)

    def close(self) -> None:
        self.connection.close()
        self.process.join(SECONDS)


@attrs.define(eq=False)
class Replica2:
    """A replica of two workers, whose connections pass proxies that count."""

    workers: Sequence[Remote]
    proxies: dict[tuple[str, int], Proxy] = attrs.field(factory=dict)  #: by address of the sender, and worker
    loaded: list[dict[str, torch.Tensor]] = attrs.field(factory=list)

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        connect = [await self.proxied(worker, place) for worker, place in enumerate(request.connect)]
        behind = attrs.evolve(request, connect=tuple(connect))
        found = await asyncio.gather(*(worker.ask("update", behind) for worker in self.workers))
        self.loaded = [loaded for _, loaded in found]
        return WeightReceipt(version=request.version, replica=0, workers=tuple(receipt for receipt, _ in found))

    async def proxied(self, worker: int, place: Any) -> dict[str, Any]:
        links = []
        for link in place["links"]:
            proxy = self.proxies[link["arguments"]["data"], worker] = Proxy()
            links.append({**link, "arguments": {**link["arguments"], **await proxy.before(link["arguments"])}})
        return {**place, "links": links}

    async def carried(self) -> list[int]:
        """Bytes by link, of the last transfer."""
        found = sorted(sum(proxy.carried) for proxy in self.proxies.values())
        for proxy in self.proxies.values():
            await proxy.close()
        self.proxies.clear()
        return found


@in_loop
async def test_bytes_per_link_are_those_of_the_plan() -> None:
    """Each worker has exactly its halves; a link carries its pieces and nothing else, in a second version, too."""
    ranks = [Remote.spawn(RankEnd, number) for number in range(2)]
    workers = [Remote.spawn(WorkerEnd, number) for number in range(2)]
    try:
        replica = Replica2(workers)
        info = ServerInfo(replica=0, workers=2, weight_layouts=(parallel(0), parallel(1)))
        started: Any = Replica(replica, info)  # type: ignore[arg-type]
        senders: Any = ranks
        synchronizer = WeightSynchronizer(senders, [started], "zmq", Clock(), SETTINGS, deadline_seconds=SECONDS)
        up, down, norm = 4 * 2 * 1024 * 512, 4 * 2 * 512 * 1024, 2 * 512
        near, far = up // 2 + down // 4 + norm // 2, down // 4 + norm // 2
        for version in (1, 2):
            report = await synchronizer.sync(version)
            for worker, loaded in enumerate(replica.loaded):
                for own in parallel(worker):
                    wanted = part_of(tensor(own.name, version), whole(own.name), own)
                    assert torch.equal(wanted, loaded[own.name])
            wanted_bytes = {"0-0": near, "0-1": far, "1-0": far, "1-1": near}
            assert wanted_bytes == report.link_bytes
            for planned, carried in zip(sorted(wanted_bytes.values()), await replica.carried(), strict=True):
                assert planned <= carried < planned * 1.02 + 4096
    finally:
        for end in (*ranks, *workers):
            end.close()
