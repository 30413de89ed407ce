"""Helpers for the suite of checkpoint engines: tensors, both ends, and transfers that succeed or break off.

All transfers use the ends that a run uses, with their checks of names and digests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import attrs
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngine, CheckpointEngineContext, Topology, TopologyRequest
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import HeldWeights, WeightReceiver
from jackfield.weights import WeightSender
from jackfield_conformance.registry import Subject
from jackfield_conformance.support.expecting import assert_names, within

#: The errors of an end whose transfer broke off.
BREAKS = (WeightsError, DeadlineExceeded)

PATIENCE_SECONDS = 20.0  #: the deadline of transfers that succeed
BREAK_SECONDS = 3.0  #: the deadline of transfers that break off although all ends are there
GRACE_SECONDS = 4.0  #: beyond a deadline; a longer wait counts as endless

Tensors = Mapping[str, torch.Tensor]
Received = dict[str, torch.Tensor]
Weights = Generator[tuple[str, torch.Tensor], None, None]
Meanwhile = Callable[[str], Awaitable[None]]
T = TypeVar("T")


def numbers(count: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make float32 tensors of small and medium size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = itertools.cycle(((3, 2), (40, 8), (5,), (17, 3)))
    return {f"layer.{index}.weight": torch.randn(next(sizes), generator=generator) for index in range(count)}


def source(tensors: Tensors) -> Weights:
    """Yield named tensors, as a training engine exports them."""
    yield from tensors.items()


def bucket_settings(subject: Subject) -> list[dict[str, Any]]:
    """Return settings with tiny, small and default buckets: the fixture's, or those of a setting ``bucket_bytes``."""
    if "bucket_settings" in subject.fixture:
        return [dict(each) for each in subject.fixture["bucket_settings"]]
    names = {field.name for field in attrs.fields(subject.config_class)}
    sizes = (64, 1000, 1 << 20) if "bucket_bytes" in names else ()
    return [{}, *({"bucket_bytes": size} for size in sizes)]


def silence_seconds(subject: Subject) -> float:
    """Return the deadline of transfers with a silent peer: the fixture's ``silence_seconds``, or half a second."""
    return float(subject.fixture.get("silence_seconds", 0.5))


@attrs.define
class Ends:
    """The engines of one transfer. Workers finalize by themselves, as a receiver does."""

    cls: type[CheckpointEngine]
    trainers: list[CheckpointEngine]
    workers: list[CheckpointEngine]
    senders: list[WeightSender]
    prepared: bool = False
    topology: Topology = attrs.field(init=False)
    tasks: list[asyncio.Task[Any]] = attrs.field(factory=list)

    def start(self, what: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task, which is cancelled with the transfer at the latest."""
        task = asyncio.ensure_future(what)
        self.tasks.append(task)
        return task

    async def together(self, one: Coroutine[Any, Any, Any], other: Coroutine[Any, Any, T]) -> T:
        """Run both to their end; return the result of the other."""
        return (await asyncio.gather(self.start(one), self.start(other)))[1]

    async def prepare(self) -> Topology:
        """Prepare all trainer ranks, and build the topology."""
        self.prepared = True
        metadata = tuple([(await sender.prepare()).metadata for sender in self.senders])
        request = TopologyRequest(trainer_metadata=metadata, rollout_workers=len(self.workers))
        self.topology = self.cls.build_topology(request)
        return self.topology

    async def send(self, *weights: Tensors | Weights, version: int = 1, base: int | None = None) -> None:
        """Run the sending end on all trainer ranks, each with its own weights or all with the same.

        With ``base``, send a delta to that version.
        """

        async def one(rank: int, tensors: Tensors | Weights) -> None:
            await self.senders[rank].connect(self.topology.trainer[rank], version)
            await self.senders[rank].send(source(tensors) if isinstance(tensors, Mapping) else tensors, base=base)

        await asyncio.gather(*map(one, range(len(self.senders)), itertools.cycle(weights)))

    async def receive(self, worker: int, version: int = 1, meanwhile: Meanwhile | None = None) -> Received:
        """Receive every tensor in one worker."""
        return await receive(self.workers[worker], self.topology.rollout[worker], version, meanwhile)

    def receiving(self) -> list[asyncio.Task[Received]]:
        """Start to receive in every worker."""
        return [self.start(self.receive(worker)) for worker in range(len(self.workers))]

    async def receive_all(self, version: int = 1, meanwhile: Meanwhile | None = None) -> list[Received]:
        """Receive every tensor in every worker."""
        return list(await asyncio.gather(*(self.receive(n, version, meanwhile) for n in range(len(self.workers)))))

    async def sync(self, tensors: Tensors, version: int = 1, meanwhile: Meanwhile | None = None) -> list[Received]:
        """Make one whole transfer; return what each worker received."""
        await self.prepare()
        found = await self.together(self.send(tensors, version=version), self.receive_all(version, meanwhile))
        await self.finalize()
        return found

    async def sync_delta(self, tensors: Tensors, held: Sequence[HeldWeights], version: int) -> list[dict[str, str]]:
        """Transfer what changed since the previous version, or all of version 1; return each worker's digests then."""
        topology, base = await self.prepare(), version - 1 or None

        async def take(worker: int) -> dict[str, str]:
            receiver = WeightReceiver(self.workers[worker], held[worker])
            if base is None:
                async with aclosing(receiver.tensors(topology.rollout[worker], version)) as stream:
                    async for _ in stream:
                        pass
                return receiver.digests
            changes = await receiver.changes(topology.rollout[worker], version, base)
            digests = held[worker].unchanged(changes)
            for _ in held[worker].apply(changes, version, digests):
                pass
            return digests

        async def take_all() -> list[dict[str, str]]:
            return list(await asyncio.gather(*map(take, range(len(held)))))

        found = await self.together(self.send(tensors, version=version, base=base), take_all())
        await self.finalize()
        return found

    async def finalize(self) -> None:
        """Finalize all trainer ranks, if they are prepared."""
        if self.prepared:
            self.prepared = False
            for sender in self.senders:
                await sender.finalize()


@contextlib.asynccontextmanager
async def ends(
    subject: Subject,
    workers: int = 1,
    ranks: int = 1,
    seconds: float | None = None,
    worker_seconds: float | None = None,
    **settings: Any,
) -> AsyncIterator[Ends]:
    """Make both ends, with their deadlines (default: long), and finalize them afterwards."""

    def make(end: Any, rank: int, size: int) -> CheckpointEngine:
        own = seconds if end == "sender" else worker_seconds
        deadline = PATIENCE_SECONDS if own is None else own
        context = CheckpointEngineContext(end=end, rank=rank, world_size=size, deadline_seconds=deadline)
        engine: CheckpointEngine = subject.make(context, **settings)
        return engine

    trainers = [make("sender", rank, ranks) for rank in range(ranks)]
    receivers = [make("receiver", rank, workers) for rank in range(workers)]
    made = Ends(subject.cls, trainers, receivers, [WeightSender(engine) for engine in trainers])
    try:
        yield made
    finally:
        try:
            await within(GRACE_SECONDS, made.finalize(), "finalize")
        finally:
            await ended(made.tasks)


def impatient_ends(subject: Subject, workers: int = 1, **settings: Any) -> contextlib.AbstractAsyncContextManager[Ends]:
    """Make both ends of a transfer that breaks off."""
    return ends(subject, workers, seconds=BREAK_SECONDS, worker_seconds=BREAK_SECONDS, **settings)


async def receive(
    engine: CheckpointEngine, arguments: Mapping[str, Any], version: int = 1, meanwhile: Meanwhile | None = None
) -> Received:
    """Receive and copy every tensor; require that none changes before the next one is drawn."""
    found: Received = {}
    async with aclosing(WeightReceiver(engine).tensors(arguments, version)) as stream:
        async for name, tensor in stream:
            found[name] = tensor.clone()
            if meanwhile is not None:
                await meanwhile(name)
                assert digest(found[name]) == digest(tensor), f"{name} changed while the receiver held it"
    return found


def assert_received(wanted: Tensors, found: Tensors, what: str = "received") -> None:
    """Require the same names, dtypes, shapes and bits."""
    assert_names(wanted, found, f"tensors {what}")
    for name, tensor in wanted.items():
        other = found[name]
        assert tensor.dtype == other.dtype, f"{what}: {name} is {other.dtype}, expected {tensor.dtype}"
        assert tensor.shape == other.shape, f"{what}: {name} is {tuple(other.shape)}, expected {tuple(tensor.shape)}"
        assert digest(tensor) == digest(other), f"{what}: {name} ({tensor.dtype}) has arrived with other bits"


async def ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks that still run, and retrieve the errors of the others."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE_SECONDS)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


async def broken(
    awaitable: Awaitable[Any],
    what: str,
    kinds: type[Exception] | tuple[type[Exception], ...] = BREAKS,
    seconds: float = BREAK_SECONDS,
) -> Exception:
    """Await what must break off within the deadline; return its error, which must be of one of these kinds."""
    try:
        await within(seconds + GRACE_SECONDS, awaitable, what)
    except AssertionError:
        raise
    except Exception as error:
        if isinstance(error, kinds):
            return error
        raise AssertionError(f"{what} raised {error!r}, expected a WeightsError, or DeadlineExceeded") from error
    raise AssertionError(f"{what} ended as if nothing had happened")
