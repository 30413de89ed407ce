"""A sharded engine and workers with tensor parallelism, for tests of transfers over links: each end in a process.

Ranks have rows of each tensor; workers have halves of rows or columns, or a whole tensor.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import attrs
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.engine import Box
from jackfield.abc.rollout import UpdateWeightsRequest, WorkerReceipt
from jackfield.plugins import load_plugin
from jackfield.sdk.slices import SliceReceiver, part_of, reopen_slice_receiver
from jackfield.weights import WeightSender

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
    start = tuple(number * (size // 2) if at == dim else 0 for at, size in enumerate(shape))
    return Box(name=name, shape=shape, start=start, length=length)


def whole(name: str) -> Box:
    return half(name, None, 0)


def parallel(worker: int) -> tuple[Box, ...]:
    return tuple(half(name, dim, worker) for name, (_, dim) in MODEL.items())


class RankEnd:
    """A rank of a sharded engine, with the sender of its links."""

    def __init__(self, rank: int, plugin: str, settings: Mapping[str, Any]) -> None:
        self.rank, self.version, self.plugin, self.settings = rank, 0, plugin, settings
        self.sender = self.make(None, local=self.local, make=self.make)

    def make(self, source: Any, **more: Any) -> WeightSender:
        context = CheckpointEngineContext(end="sender", deadline_seconds=SECONDS)
        engine: Any = load_plugin("checkpoint_engine", self.plugin).build(dict(self.settings), context)
        return WeightSender(engine, source, **more)

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

    def __init__(self, worker: int, plugin: str, settings: Mapping[str, Any]) -> None:
        self.worker = worker  # what its request names is what it builds
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


def serve(connection: Connection[Any, Any], kind: type[Any], *details: Any) -> None:
    """Be one end until the test closes the connection."""

    async def run() -> None:
        torch.set_num_threads(1)
        end, thread = kind(*details), ThreadPoolExecutor(1)
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
    def spawn(cls, kind: type[Any], *details: Any) -> Remote:
        """Start an end; ``details``: its number, the plugin and its settings."""
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, kind, *details), daemon=True)
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
