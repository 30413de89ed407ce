"""For the suite of rollout servers: servers and requests, readers of streams, and weight updates."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import attrs
import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, TopologyRequest
from jackfield.abc.engine import Box, ModelSpec
from jackfield.abc.rollout import (
    BaseRolloutServer,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    RolloutContext,
    SamplingParams,
    ServerInfo,
    UpdateWeightsRequest,
    WeightReceipt,
)
from jackfield.plugins import load_plugin
from jackfield.weights import WeightSender
from jackfield_conformance.registry import Subject
from jackfield_conformance.support.expecting import settled, within
from jackfield_conformance.support.rollout_model import (
    PEFT_CONFIG,
    Weights,
    Which,
    assert_greedy,
    assert_log_probs,
    model_folder,
    named_weights,
)

PAGE = "docs/plugins/rollout.md#"

PATIENCE_SECONDS = 10.0  #: for what must happen at once
BREATH_BYTES = 1 << 22  #: hashed while a server is given time: longer than a few decode steps of a tiny model
LONG = 300  #: tokens of a request that is not meant to end by itself
PROMPT = (31, 7, 47, 56, 54, 24, 53)

T = TypeVar("T")

_STARTED: dict[int, ServerInfo] = {}  #: what servers that run said at their start, by ``id``


@contextlib.asynccontextmanager
async def started(
    subject: Subject,
    *,
    dtype: str = "float32",
    settings: Mapping[str, Any] = MappingProxyType({}),
    folder: str | None = None,
    router_replay: bool = False,
    **context: Any,
) -> AsyncIterator[tuple[BaseRolloutServer, ServerInfo]]:
    """Start a server of the tiny model, or of the model in a folder, and stop it at the end."""
    model = ModelSpec(path=folder or model_folder(), dtype=dtype, router_replay=router_replay)
    context = {"device": subject.fixture.get("device", "cpu"), **context}
    server: BaseRolloutServer = subject.make(RolloutContext(model=model, **context), **settings)
    info = _STARTED[id(server)] = await server.start()
    try:
        yield server, info
    finally:
        del _STARTED[id(server)]
        await server.stop()


@contextlib.asynccontextmanager
async def serving(subject: Subject, **options: Any) -> AsyncIterator[BaseRolloutServer]:
    """Start a server of the tiny model, and stop it at the end."""
    async with started(subject, **options) as (server, _):
        yield server


def request(
    name: str, prompt: Sequence[int] = PROMPT, *, minimum: int | None = None, **sampling: Any
) -> GenerateRequest:
    """Make a request. By default it ignores end tokens, so that its length is known."""
    settings = {"ignore_eos": True, **sampling}
    return GenerateRequest(
        request_id=name, prompt_ids=tuple(prompt), sampling=SamplingParams(**settings), minimum_weight_version=minimum
    )


def greedy(name: str, count: int, prompt: Sequence[int] = PROMPT, **sampling: Any) -> GenerateRequest:
    """Make a greedy request of ``count`` tokens with raw log-probabilities."""
    return request(name, prompt, temperature=0, max_new_tokens=count, log_probs="raw", **sampling)


def spawn(coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task. Its error reaches only its awaiter, if there is one."""
    task = asyncio.create_task(coroutine, name=name)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class Reader:
    """A reader of a stream, which keeps the chunks so far."""

    def __init__(self, server: BaseRolloutServer, sent: GenerateRequest) -> None:
        self.sent = sent
        self.chunks: list[GenerateChunk] = []
        self._changed = asyncio.Event()
        self._task = spawn(self._read(server.generate_stream(sent)), f"reader of {sent.request_id}")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all tokens so far."""
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)

    async def at_least(self, count: int) -> None:
        """Wait for this number of tokens, or for the end."""
        while len(self.token_ids) < count and not self._task.done():
            self._changed.clear()
            await self._changed.wait()

    async def drained(self, server: BaseRolloutServer) -> int:
        """Read the tokens that a paused server made before the pause, and return how many there are.

        Calls of ``health`` take the same way as the stream, which counts as empty when three in a row bring nothing. A
        server that does not stop reaches the end of the request instead.
        """
        count, unchanged = len(self.token_ids), 0
        while unchanged < 3 and not self._task.done():
            await server.health()
            await breathe()
            unchanged = unchanged + 1 if count == len(self.token_ids) else 0
            count = len(self.token_ids)
        return count

    async def result(self) -> GenerateResult:
        """Wait for the end; raise what the stream raised."""
        await self._task
        return GenerateResult(
            request_id=self.sent.request_id,
            token_ids=self.token_ids,
            log_probs=tuple(value for chunk in self.chunks for value in chunk.log_probs),
            weight_versions=tuple(version for chunk in self.chunks for version in chunk.weight_versions),
            finish_reason=self.chunks[-1].finish_reason or "length",
        )

    async def _read(self, stream: AsyncIterator[GenerateChunk]) -> None:
        try:
            async for chunk in stream:
                self.chunks.append(chunk)
                self._changed.set()
        finally:
            self._changed.set()


async def reading(server: BaseRolloutServer, sent: GenerateRequest, tokens: int = 2) -> Reader:
    """Start to read a stream, and wait for its first tokens."""
    reader = Reader(server, sent)
    await reader.at_least(tokens)
    return reader


@contextlib.contextmanager
def standing_still(otherwise: str) -> Iterator[None]:
    """Require that no module runs in this process inside the block. Other processes are not watched."""
    seen: list[str] = []

    def note(module: torch.nn.Module, _: Any) -> None:
        seen.append(type(module).__name__)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
    assert [] == seen[:1], otherwise


def calling(server: BaseRolloutServer, sent: GenerateRequest) -> asyncio.Task[GenerateResult]:
    """Start a call of ``generate``."""
    return spawn(server.generate(sent), f"caller of {sent.request_id}")


async def assert_counted(server: BaseRolloutServer, running: int, waiting: int, why: str) -> None:
    """Require that ``health`` reports these numbers of running and waiting requests."""
    health = await server.health()
    assert (running, waiting) == (health.running, health.waiting), f"{why}, health says {health}"


async def ended(awaitable: Awaitable[T], what: str) -> T:
    """Await what must end at once."""
    return await within(PATIENCE_SECONDS, awaitable, what)


async def assert_served(waited: Awaitable[GenerateResult], sent: GenerateRequest) -> None:
    """Require that a request which had to wait gets its tokens now."""
    result = await ended(waited, f"the waiting request {sent.request_id!r}")
    assert sent.sampling.max_new_tokens == len(result.token_ids), f"{sent.request_id!r} was cut short"
    assert_greedy(sent, result)


async def checked(
    subject: Subject, server: BaseRolloutServer, sent: GenerateRequest, which: Which = "base"
) -> GenerateResult:
    """Generate, and require the tokens (of a greedy request) and log-probabilities of this model."""
    result = await server.generate(sent)
    if sent.sampling.temperature == 0:
        assert_greedy(sent, result, which)
    assert_log_probs(subject, sent, result, which)
    return result


async def breathe() -> None:
    """Give tasks and threads the time for a few decode steps of the tiny model."""
    for _ in range(40):
        await asyncio.sleep(0)
    await asyncio.to_thread(lambda: hashlib.sha256(bytes(BREATH_BYTES)).digest())
    for _ in range(10):
        await asyncio.sleep(0)


@attrs.frozen(eq=False)
class Pushed:
    """The result of an update."""

    receipt: WeightReceipt
    digests: Mapping[str, str]  #: of what was sent; empty if the receiver did not take it


def checkpoint_engine(subject: Subject) -> tuple[str, Mapping[str, Any]]:
    """Return name and settings of the checkpoint engine: the fixture's, by default ``in_process``."""
    return subject.fixture.get("checkpoint_engine", "in_process"), subject.fixture.get("checkpoint_engine_config", {})


def make_sender(subject: Subject, block_bytes: int = 64, source: Any = None, **more: Any) -> WeightSender:
    """Make a sender, by default one of deltas: keep it for several updates."""
    name, settings = checkpoint_engine(subject)
    context = CheckpointEngineContext(end="sender", deadline_seconds=20.0)
    engine: Any = load_plugin("checkpoint_engine", name).build(settings, context)
    return WeightSender(engine, source, block_bytes=block_bytes, **more)


def make_rank(subject: Subject, rank: int, ranks: int) -> WeightSender:
    """Make the sender of a rank that has rows of each of the other model's tensors."""

    def local() -> Generator[tuple[Box, torch.Tensor], None, None]:
        for name, tensor in named_weights().items():
            rows, shape = tensor.shape[0], tuple(tensor.shape)
            start, end = rows * rank // ranks, rows * (rank + 1) // ranks
            box = Box(name=name, shape=shape, start=(start, *[0] * (len(shape) - 1)), length=(end - start, *shape[1:]))
            yield box, tensor[start:end]

    return make_sender(subject, 0, local=local, make=lambda source: make_sender(subject, 0, source))


async def push(
    subject: Subject,
    server: BaseRolloutServer,
    version: int,
    weights: Weights | None = None,
    *,
    kind: Literal["full", "adapter", "delta"] = "full",
    breaks_after: int | None = None,
    never_comes: bool = False,
    deadline_seconds: float = 20.0,
    sender: WeightSender | None = None,
    base: int | None = None,
) -> Pushed:
    """Send weights (default: the other model's) to a server of :func:`started`; raise what ``update_weights`` raises.

    The receipt is returned unverified. The sender (if deltas follow, one of :func:`make_sender`) raises after
    ``breaks_after`` tensors, or does not connect. ``base`` is the version that a delta changes.
    """
    weights = named_weights() if weights is None else weights
    name, settings = checkpoint_engine(subject)
    cls: Any = load_plugin("checkpoint_engine", name).cls
    deltas_follow = sender is not None
    sender = sender or make_sender(subject, 0)
    metadata = (await sender.prepare()).metadata
    workers = _STARTED[id(server)].workers
    topology = cls.build_topology(TopologyRequest(trainer_metadata=(metadata,), rollout_workers=workers))
    update = UpdateWeightsRequest(
        version=version,
        checkpoint_engine=name,
        checkpoint_engine_config=settings,
        connect=topology.rollout,
        total_workers=workers,
        kind=kind,
        peft_config=PEFT_CONFIG if kind == "adapter" else None,
        deadline_seconds=deadline_seconds,
        base_version=base,
        deltas_follow=deltas_follow,
    )

    async def send() -> dict[str, str]:
        await sender.connect(topology.trainer[0], version)
        return await sender.send(_tensors(weights, breaks_after), base=base if await sender.knows(base or 0) else None)

    updating = spawn(server.update_weights(update), "update")
    sending: asyncio.Task[Any] = spawn(asyncio.Event().wait() if never_comes else send(), "sender")
    try:
        await settled({updating, sending}, deadline_seconds + PATIENCE_SECONDS)
        if sending.done():
            await settled({updating}, PATIENCE_SECONDS)
        assert updating.done(), "update_weights did not end, although the sender has, or its deadline has passed"
        receipt = await updating
        await settled({sending}, 1.0)
        sent = sending.done() and not sending.cancelled() and sending.exception() is None
        return Pushed(receipt, sending.result() if sent else {})
    finally:
        for task in (updating, sending):
            task.cancel()
        await asyncio.gather(updating, sending, return_exceptions=True)
        await sender.finalize()


def _tensors(weights: Weights, breaks_after: int | None) -> Generator[tuple[str, torch.Tensor], None, None]:
    for count, (name, tensor) in enumerate(weights.items()):
        if count == breaks_after:
            raise OSError("the trainer died")
        yield name, tensor
