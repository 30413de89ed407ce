"""The processes of benchmarks/weights.py: a sender and its receivers, which do what they are told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import _weights_raw

BLOCK = 4096  #: bytes of a block of a delta
LARGE = 1 << 20  #: bytes from which tensors are moved one by one
SECONDS = 300.0  #: for everything


class End:
    """A sender or a receiver."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.tensors: list[tuple[str, Any]] = []
        self.own: list[Any] = []  #: where a receiver loads to
        self.bytes = 0
        self.engine: Any = None
        self.raw: Any = None
        self.runner: Any = None
        self.delta_sender: Any = None
        self.held: Any = None

    @classmethod
    def run(cls, connection: Connection) -> None:
        """Do what is ordered until killed."""
        import torch

        torch.set_num_threads(1)
        end = cls(connection)
        while True:
            what, *details = connection.recv()
            try:
                connection.send(getattr(end, f"do_{what}")(*details))
            except Exception as error:
                connection.send(RuntimeError(f"{what}: {error}"))

    def do_weights(self, count: int, size: int, sends: bool) -> None:
        """The model, and a place to copy it to: touched."""
        import torch

        self.tensors, self.own, self.bytes = [], [], count * size
        self.own = [torch.zeros(size // 2, dtype=torch.bfloat16) for _ in range(count)]
        if sends:
            self.tensors = [(f"layer.{n}.weight", torch.full_like(own, n % 97)) for n, own in enumerate(self.own)]

    def do_memcpy(self) -> float:
        """GB/s of copying the model within this process."""
        return self.timed(lambda: [own.copy_(tensor) for own, (_, tensor) in zip(self.own, self.tensors, strict=True)])

    def timed(self, what: Callable[[], Any]) -> float:
        start = time.perf_counter()
        what()
        return self.bytes / (time.perf_counter() - start) / 1e9

    def do_raw_make(self, engine: str, *details: Any) -> Any:
        """An end of the engine's own transport: what the others have to know of it."""
        self.raw = _weights_raw.KINDS[engine](self.places(), SECONDS, *details)
        return self.raw.place

    def places(self) -> list[Any]:
        """The memory of the model's tensors, uint8; of small ones, as much memory in one piece."""
        import torch

        tensors = [tensor.view(torch.uint8) for _, tensor in self.tensors] or [
            own.view(torch.uint8) for own in self.own
        ]
        return tensors if len(tensors[0]) >= LARGE else [torch.cat(tensors)]

    def do_raw_meet(self, place: Any) -> None:
        """The end of a receiver knows the sender's."""
        self.raw.meet(place)

    def do_raw(self, way: Any) -> float:
        """GB/s of moving the model by it."""
        return self.timed(lambda: self.raw.move(way))

    def do_forget(self) -> None:
        """Let the group, the socket and the engine go."""
        if self.raw is not None:
            self.raw.close()
        if self.runner is not None:
            self.runner.close()
        self.delta_sender = self.held = self.engine = self.raw = self.runner = None

    def do_make(self, name: str, settings: dict[str, Any], end: Any) -> None:
        """One end of an engine."""
        from jackfield.abc.checkpoint_engine import CheckpointEngineContext
        from jackfield.plugins import load_plugin
        from jackfield.weights import WeightSender

        context = CheckpointEngineContext(end=end, deadline_seconds=SECONDS)
        self.engine = load_plugin("checkpoint_engine", name).build(settings, context)
        self.runner = asyncio.Runner()
        self.delta_sender, self.held = WeightSender(self.engine, block_bytes=BLOCK), None

    def do_prepare(self, workers: int) -> tuple[Any, Any]:
        """Return what the sender and the receivers get of the topology for so many workers."""
        from jackfield.abc.checkpoint_engine import TopologyRequest

        metadata = self.runner.run(self.engine.prepare()).metadata
        topology = self.engine.build_topology(TopologyRequest(trainer_metadata=(metadata,), rollout_workers=workers))
        return topology.trainer[0], topology.rollout

    def do_change(self, fraction: float) -> None:
        """A number in each of so many of the model's blocks."""
        import torch

        step = BLOCK // 2  # numbers of a block
        per_tensor = self.tensors[0][1].numel() // step
        chosen = torch.randperm(per_tensor * len(self.tensors))[: round(fraction * per_tensor * len(self.tensors))]
        for place in chosen.tolist():
            tensor = self.tensors[place // per_tensor][1]
            tensor[place % per_tensor * step] = 1 - tensor[place % per_tensor * step]

    def do_send_delta(self, share: Any, version: int, base: int | None) -> tuple[int, dict[str, str]]:
        """Bytes sent, and digests of all tensors."""

        async def send() -> dict[str, str]:
            await self.delta_sender.connect(share, version)
            digests: dict[str, str] = await self.delta_sender.send((item for item in self.tensors), base=base)
            return digests

        digests = self.runner.run(send())
        return self.delta_sender.sent_bytes, digests

    def do_receive_delta(self, share: Any, version: int, base: int | None) -> tuple[float, dict[str, str]]:
        """Seconds until all is loaded and proved, and digests."""
        found: tuple[float, dict[str, str]] = self.runner.run(self._receive_delta(share, version, base))
        return found

    async def _receive_delta(self, share: Any, version: int, base: int | None) -> tuple[float, dict[str, str]]:
        from jackfield.sdk.buckets import digest
        from jackfield.sdk.receiver import HeldWeights, WeightReceiver

        own = {f"layer.{n}.weight": tensor for n, tensor in enumerate(self.own)}
        held = self.held = self.held or HeldWeights(own.get)
        receiver = WeightReceiver(self.engine, held)
        start = time.perf_counter()
        if base is None:
            async for name, tensor in receiver.tensors(share, version):
                own[name].copy_(tensor)
            digests = {name: digest(tensor) for name, tensor in own.items()}
        else:
            changes = await receiver.changes(share, version, base)
            digests = held.unchanged(changes)
            for name, tensor in held.apply(changes, version, digests):
                own[name].copy_(tensor)
        return time.perf_counter() - start, digests

    def do_finalize(self) -> None:
        """After a transfer."""
        self.runner.run(self.engine.finalize())

    def do_send(self, share: Any, version: int, digests: bool) -> float:
        """Seconds of everything; those of publishing are answered before."""
        seconds: float = self.runner.run(self._send(share, version, digests))
        return seconds

    async def _send(self, share: Any, version: int, digests: bool) -> float:
        from jackfield.abc.checkpoint_engine import ConnectRequest
        from jackfield.weights import WeightSender

        def weights() -> Any:
            start = time.perf_counter()
            yield from self.tensors
            self.connection.send(time.perf_counter() - start)

        await self.engine.connect(ConnectRequest(arguments=share, version=version))
        start = time.perf_counter()
        if digests:
            await WeightSender(self.engine).send(weights())
        else:
            await self.engine.send_weights(weights())
        return time.perf_counter() - start

    def do_receive(self, share: Any, version: int, digests: bool, hold: bool, load: bool) -> int:
        """Bytes that came."""
        count: int = self.runner.run(self._receive(share, version, digests, hold, load))
        return count

    async def _receive(self, share: Any, version: int, digests: bool, hold: bool, load: bool) -> int:
        from jackfield.sdk.receiver import WeightReceiver

        if hold:
            inner = self.engine.receive_weights

            async def later() -> Any:
                await asyncio.to_thread(self.connection.recv)
                async for pair in inner():
                    yield pair

            self.engine.receive_weights = later
        received, count = 0, 0
        receiver = WeightReceiver(self.engine)
        stream = receiver.tensors(share, version) if digests else self._bare(share, version)
        try:
            async for _, tensor in stream:
                if load:
                    self.own[count].copy_(tensor)
                received += tensor.nbytes
                count += 1
        finally:
            self.engine.__dict__.pop("receive_weights", None)
        return received

    async def _bare(self, share: Any, version: int) -> Any:
        from jackfield.abc.checkpoint_engine import ConnectRequest

        try:
            await self.engine.connect(ConnectRequest(arguments=share, version=version))
            async for pair in self.engine.receive_weights():
                yield pair
        finally:
            await self.engine.finalize()
