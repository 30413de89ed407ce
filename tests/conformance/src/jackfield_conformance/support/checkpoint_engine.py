"""For the suite of checkpoint engines: tensors to move, both ends, and transfers that go well or break off.

Everything goes through ``jackfield.weights``: the ends that a run uses, with their checks of names and digests.
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
from jackfield_conformance.subject import Subject

#: What an end of a transfer that broke off raises.
BREAKS = (WeightsError, DeadlineExceeded)

PATIENCE_SECONDS = 20.0  #: the deadline of transfers that go well
BREAK_SECONDS = 3.0  #: the deadline of transfers that break off, with everybody there
GRACE_SECONDS = 4.0  #: beyond a deadline; what waits longer is taken to wait forever

Tensors = Mapping[str, torch.Tensor]
T = TypeVar("T")


def numbers(count: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 tensors of small and of middling size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = itertools.cycle(((3, 2), (40, 8), (5,), (17, 3)))
    return {f"layer.{index}.weight": torch.randn(next(sizes), generator=generator) for index in range(count)}


def source(tensors: Tensors) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Named tensors, as a training engine exports them."""
    yield from tensors.items()


def bucket_settings(subject: Subject) -> list[dict[str, Any]]:
    """Settings under which buckets are tiny, small and as the plugin has them.

    A fixture says which by ``bucket_settings``, a list; a plugin with a setting ``bucket_bytes`` needs to say nothing.
    """
    if "bucket_settings" in subject.fixture:
        return [dict(each) for each in subject.fixture["bucket_settings"]]
    names = {field.name for field in attrs.fields(subject.config_class)}
    sizes = (64, 1000, 1 << 20) if "bucket_bytes" in names else ()
    return [{}, *({"bucket_bytes": size} for size in sizes)]


def silence_seconds(subject: Subject) -> float:
    """The deadline of transfers in which a peer is silent: the fixture's ``silence_seconds``, or half a second."""
    return float(subject.fixture.get("silence_seconds", 0.5))


# -- ends ------------------------------------------------------------------------------------------------------------


@attrs.define
class Ends:
    """The engines of one transfer, and how they meet. Workers finalize by themselves, as a receiver does."""

    cls: type[CheckpointEngine]
    trainers: list[CheckpointEngine]
    workers: list[CheckpointEngine]
    senders: list[WeightSender]
    prepared: bool = False
    tasks: list[asyncio.Task[Any]] = attrs.field(factory=list)

    def start(self, what: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something beside the check; it is ended with the transfer at the latest."""
        task = asyncio.ensure_future(what)
        self.tasks.append(task)
        return task

    async def together(self, one: Coroutine[Any, Any, Any], other: Coroutine[Any, Any, T]) -> T:
        """Run both to their end; the result of the other."""
        return (await asyncio.gather(self.start(one), self.start(other)))[1]

    async def prepare(self, workers: int | None = None) -> Topology:
        """All trainer ranks prepare, and anybody builds the topology."""
        self.prepared = True
        prepared = [await sender.prepare() for sender in self.senders]
        count = len(self.workers) if workers is None else workers
        metadata = tuple(result.metadata for result in prepared)
        return self.cls.build_topology(TopologyRequest(trainer_metadata=metadata, rollout_workers=count))

    def receiving(self, topology: Topology) -> list[asyncio.Task[dict[str, torch.Tensor]]]:
        """Let every worker receive, beside the check."""
        return [self.start(receive(*pair)) for pair in zip(self.workers, topology.rollout, strict=True)]

    async def finalize(self) -> None:
        """All trainer ranks release what they took, if they took anything."""
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
    """Both sides, with their deadlines (default: long), finalized at the end."""

    def make(end: Any, rank: int, size: int) -> CheckpointEngine:
        own = seconds if end == "sender" else worker_seconds
        deadline = PATIENCE_SECONDS if own is None else own
        context = CheckpointEngineContext(end=end, rank=rank, world_size=size, deadline_seconds=deadline)
        engine: CheckpointEngine = subject.make(context, **settings)
        return engine

    trainers = [make("sender", rank, ranks) for rank in range(ranks)]
    made = Ends(
        subject.cls,
        trainers,
        [make("receiver", rank, workers) for rank in range(workers)],
        [WeightSender(engine) for engine in trainers],
    )
    try:
        yield made
    finally:
        try:
            await within(GRACE_SECONDS, made.finalize(), "finalize")
        finally:
            await ended(made.tasks)


def impatient_ends(subject: Subject, workers: int = 1, **settings: Any) -> contextlib.AbstractAsyncContextManager[Ends]:
    """Both sides of a transfer that breaks off."""
    return ends(subject, workers, seconds=BREAK_SECONDS, worker_seconds=BREAK_SECONDS, **settings)


async def receive(
    engine: CheckpointEngine,
    arguments: Mapping[str, Any],
    version: int = 1,
    meanwhile: Callable[[str], Awaitable[None]] | None = None,
) -> dict[str, torch.Tensor]:
    """Take every tensor, each copied while it is valid; what was received may not change before the next is drawn."""
    found: dict[str, torch.Tensor] = {}
    receiver = WeightReceiver(engine)
    async with aclosing(receiver.tensors(arguments, version)) as stream:
        async for name, tensor in stream:
            kept = tensor.clone()
            if meanwhile is not None:
                await meanwhile(name)
                assert digest(kept) == digest(tensor), f"{name} changed while the receiver held it"
            found[name] = kept
    return found


async def sync(
    made: Ends, tensors: Tensors, version: int = 1, meanwhile: Callable[[str], Awaitable[None]] | None = None
) -> list[dict[str, torch.Tensor]]:
    """One whole transfer to all workers; what each has received."""
    topology = await made.prepare()
    found = await made.together(
        send(made, topology, [source(tensors) for _ in made.senders], version),
        receive_all(made, topology, version, meanwhile),
    )
    await made.finalize()
    return found


async def sync_delta(made: Ends, tensors: Tensors, held: Sequence[HeldWeights], version: int) -> list[dict[str, str]]:
    """A transfer of what has changed since the version before, which of the first version is everything.

    Returns:
        Digests of what each worker holds then, by name.
    """
    topology, base = await made.prepare(), version - 1 or None

    async def take(worker: int) -> dict[str, str]:
        receiver = WeightReceiver(made.workers[worker], held[worker])
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
        return list(await asyncio.gather(*(take(worker) for worker in range(len(held)))))

    weights = [source(tensors) for _ in made.senders]
    found = await made.together(send(made, topology, weights, version, base), take_all())
    await made.finalize()
    return found


async def receive_all(
    made: Ends, topology: Topology, version: int = 1, meanwhile: Callable[[str], Awaitable[None]] | None = None
) -> list[dict[str, torch.Tensor]]:
    """Return what each worker receives."""
    pairs = zip(made.workers, topology.rollout, strict=True)
    return list(await asyncio.gather(*(receive(*pair, version, meanwhile) for pair in pairs)))


async def send(
    made: Ends,
    topology: Topology,
    weights: Sequence[Generator[tuple[str, torch.Tensor], None, None]],
    version: int = 1,
    base: int | None = None,
) -> None:
    """The trainer's side of a transfer, all ranks; of a delta, where there is a base."""

    async def one(rank: int) -> None:
        await made.senders[rank].connect(topology.trainer[rank], version)
        await made.senders[rank].send(weights[rank], base=base)

    await asyncio.gather(*(one(rank) for rank in range(len(made.senders))))


# -- looking -----------------------------------------------------------------------------------------------------------


def assert_received(wanted: Tensors, found: Tensors, what: str = "received") -> None:
    """Require the same names, dtypes, shapes and bits."""
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    assert not missing, f"{what}: {len(missing)} tensors have not arrived: {missing[:4]}"
    assert not unknown, f"{what}: {len(unknown)} tensors that were not sent: {unknown[:4]}"
    for name, tensor in wanted.items():
        other = found[name]
        assert tensor.dtype == other.dtype, f"{what}: {name} is {other.dtype}, expected {tensor.dtype}"
        assert tensor.shape == other.shape, f"{what}: {name} is {tuple(other.shape)}, expected {tuple(tensor.shape)}"
        assert digest(tensor) == digest(other), f"{what}: {name} ({tensor.dtype}) has arrived with other bits"


async def within(seconds: float, awaitable: Awaitable[Any], what: str) -> Any:
    """Await for a bounded time. Raises ``AssertionError``: time ran out."""
    task = asyncio.ensure_future(awaitable)
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        await ended([task])
        raise AssertionError(f"{what} has not ended after {seconds:g} s")
    return task.result()


async def ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs, and take note of how each has ended."""
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
    """Await what has to break off within the deadline: the error, of one of these kinds."""
    try:
        await within(seconds + GRACE_SECONDS, awaitable, what)
    except AssertionError:
        raise
    except Exception as error:
        if isinstance(error, kinds):
            return error
        raise AssertionError(f"{what} raised {error!r}, expected a WeightsError, or DeadlineExceeded") from error
    raise AssertionError(f"{what} ended as if nothing had happened")
