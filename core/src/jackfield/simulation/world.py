"""The world around a simulated run: its clock, its faults, and workers that only take time."""

from __future__ import annotations

import asyncio
import json
import random
import selectors
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import attrs

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.abc.reward import RewardAgent, ScoreRequest, ScoreResult
from jackfield.abc.transfer_queue import GetRequest, GetResult, PutRequest, PutResult, TransferQueueContext
from jackfield.clock import Clock
from jackfield.errors import QueueError, RunError, WorkerLost
from jackfield.plugins.hooks import WeightsSynced
from jackfield.queue.meta import BatchMeta, Written, partition_of
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.runtime.samples import trained
from jackfield.runtime.workers import RolloutJob
from jackfield.simulation.settings import Fault, SimulationSettings
from jackfield.trainer.role import Role

T = TypeVar("T")
Who = tuple[str, int]  #: a role and its number
RANK: Who = ("engine rank", 0)
_DETECTION = 0.5  #: seconds until a death is found, in which a worker may still do something
_CELL = ('["jagged","float32",[]]', b"")  #: a value that a worker has written


class VirtualClock(Clock):
    """A clock that jumps to the next deadline as soon as every task waits. Work in threads does not stop it.

    Use :meth:`run` instead of :func:`asyncio.run`; ``asyncio.sleep`` and ``asyncio.timeout`` also use virtual time.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        """Return the virtual seconds since the clock was created."""
        return self.now

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` to its end on virtual time and return its result."""
        with asyncio.Runner(loop_factory=self.make_loop) as runner:
            return runner.run(main)

    def make_loop(self) -> asyncio.AbstractEventLoop:
        """Create an event loop that runs on virtual time."""
        selector: Any = selectors.DefaultSelector()
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            self.now += max(timeout or 0.0, 0.0)
            return select(None if timeout is None else 0)

        selector.select = jump
        loop: Any = asyncio.SelectorEventLoop(selector)
        loop.time = self.time
        return loop  # type: ignore[no-any-return]


@attrs.define(eq=False)
class Condition:
    """The condition of a worker or process, until another one replaces it."""

    stopped: asyncio.Future[None] = attrs.field(factory=asyncio.Future)
    lost: asyncio.Future[None] = attrs.field(factory=asyncio.Future)  #: it is found dead
    late: float = 0.0  #: seconds by which its next answer is late
    twice: bool = False  #: whether its next answer is repeated


@attrs.define(eq=False)
class World:
    """Time, faults, and a record of what happened."""

    settings: SimulationSettings
    seed: int = 0
    clock: VirtualClock = attrs.field(factory=VirtualClock)
    heartbeat: float = 30.0  #: seconds until a frozen process is found
    loaded: int = 0  #: the weight version of the replicas
    slots: AbstractAsyncContextManager[Any] = nullcontext()  #: of the replicas
    places: dict[int, tuple[int, int, int, str]] = attrs.field(factory=dict)  #: of rollouts, by sampling seed
    begun: Counter[str] = attrs.field(factory=Counter)  #: by phase
    struck: list[Fault] = attrs.field(factory=list)
    spans: list[tuple[str, float, float, int]] = attrs.field(factory=list)  #: stage, start, end and batch of all work
    trace: list[tuple[float, str]] = attrs.field(factory=list)
    restarts: dict[Who, Callable[[], None]] = attrs.field(factory=dict)  #: called when a worker is found dead
    _conditions: dict[Who, Condition] = attrs.field(factory=dict)

    def condition(self, who: Who) -> Condition:
        """Return the condition of a worker or process."""
        return self._conditions.get(who) or self._conditions.setdefault(who, Condition())

    def note(self, text: str) -> None:
        """Add an event to the trace."""
        self.trace.append((self.clock.now, text))

    def begin(self, phase: str) -> None:
        """Begin a phase, in which faults may strike."""
        self.begun[phase] += 1
        for fault in self.settings.faults:
            if fault.phase == phase and fault.at == self.begun[phase]:
                self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        of = self.settings
        counts = {"explorer": of.explorers, "store unit": of.units, "agent worker": of.workers, "reward worker": of.workers}
        who = fault.role, fault.number % counts.get(fault.role, 1)
        self.note(f"{who[0]} {who[1]} {fault.kind}, when {fault.phase} {fault.at} begins")
        self.struck.append(fault)
        condition = self.condition(who)
        if fault.kind == "answers twice":
            condition.twice = True
        elif fault.kind == "answers late" and fault.role in ("trainer", "explorer", "controller"):
            self.clock.now += fault.seconds
        elif fault.kind == "answers late":
            condition.late += fault.seconds
        elif not condition.stopped.done():
            condition.stopped.set_result(None)
            found = _DETECTION if fault.kind == "dies" else self.heartbeat
            asyncio.get_running_loop().call_later(found, self._lose, who)

    def _lose(self, who: Who) -> None:
        self.note(f"{who[0]} {who[1]} is found dead")
        self._conditions.pop(who).lost.set_result(None)
        self.restarts.get(who, lambda: None)()

    async def guard(self, who: Who, work: Awaitable[T]) -> T:
        """Return what a worker answers, late if a fault says so, or raise WorkerLost when it is found dead."""
        condition, task = self.condition(who), asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, condition.stopped], return_when=asyncio.FIRST_COMPLETED)
            late, condition.late = condition.late, 0.0
            await asyncio.wait([condition.stopped], timeout=late)
            if condition.stopped.done():
                await asyncio.wait([condition.lost], timeout=_DETECTION)
                task.cancel()
                await asyncio.wait([condition.lost])
                raise WorkerLost(f"the {who[0]} {who[1]} died")
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])

    def repeats(self, who: Who) -> bool:
        """Return whether a worker's answer is to be repeated now."""
        condition = self.condition(who)
        twice, condition.twice = condition.twice, False
        return twice

    async def spend(self, stage: str, batch: int, group: int = 0, rollout: int = 0, again: str = "") -> None:
        """Take the time of a stage."""
        self.begin(stage)
        start = self.clock.now
        await self.clock.sleep(self.settings.times.draw(stage, self.seed, batch, group, rollout, again))
        self.spans.append((stage, start, self.clock.now, batch))

    async def sync(self, version: int) -> WeightsSynced:
        """Bring a weight version to the replicas."""
        await self.guard(RANK, self.spend("sync", version))
        self.note(f"weights {version} are published")
        self.loaded = version
        return WeightsSynced(version=version)


@attrs.define(eq=False)
class FaultyWorker:
    """An agent or reward worker whose answers faults delay, repeat or prevent."""

    world: World
    who: Who
    make: Callable[[], Any]
    _worker: Any = None

    def __attrs_post_init__(self) -> None:
        self.world.restarts[self.who] = self.restart
        self.restart()

    def restart(self) -> None:
        """Start another worker."""
        self._worker = self.make()

    def run(self, jobs: Sequence[RolloutJob]) -> AsyncIterator[Any]:
        """Run rollouts, and note where they belong."""
        for job in jobs:
            key, again = job.group, f"{job.group.retry}/{job.group.reissue}/{job.restart}"
            self.world.places |= {seed: (key.batch, key.index, n, again) for n, seed in job.rollouts.items()}
        return self._each(self._worker.run(jobs))

    async def begin(self, partition: str, keys: Sequence[str]) -> None:
        """Score samples ahead."""
        await self.world.guard(self.who, self._worker.begin(partition, keys))

    def reward(self, partition: str, jobs: Sequence[Any]) -> AsyncIterator[Any]:
        """Score groups."""
        return self._each(self._worker.reward(partition, jobs))

    async def _each(self, answers: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
        async with aclosing(answers):
            while (answer := await self.world.guard(self.who, anext(answers, None))) is not None:
                yield answer
                if self.world.repeats(self.who):
                    yield answer


@attrs.define(eq=False)
class TimedAgent(AgentLoopBase):
    """An agent whose answer only takes time."""

    world: World

    async def run(self, sampling_params: Any, **fields: Any) -> AgentLoopOutput:
        """Return two tokens."""
        async with self.world.slots:
            before = self.world.loaded
            await self.world.spend("generate", *self.world.places[sampling_params["seed"]])
        versions = (before, self.world.loaded)
        tokens: Any = {"prompt_ids": (1,), "response_ids": (1, 2), "response_mask": (1, 1)}
        made = AgentSequence(**tokens, response_log_probs=(-1.0, -1.0), weight_versions=versions)
        return AgentLoopOutput(sequences=(made,))


@attrs.define(eq=False)
class TimedReward(RewardAgent):
    """A reward that only takes time."""

    world: World

    concurrency = None

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Return 0 or 1, or fail."""
        _, batch, group, retry, rollout, _ = request.idempotency_key.rsplit("/", 5)
        await self.world.spend("reward", int(batch), int(group), int(rollout.partition("r")[0]), retry)
        draw = random.Random(f"{self.world.seed}/{request.idempotency_key}")
        if draw.random() < self.world.settings.failing:
            raise ValueError("no score")
        return ScoreResult(score=float(draw.random() < 0.5))


class LosingStore(MemoryBackend):
    """A store in units, which die with their samples."""

    def __init__(self, world: World) -> None:
        super().__init__(MemoryConfig(), TransferQueueContext())
        self.world, self.gone = world, set[str]()
        for unit in range(world.settings.units):
            world.restarts["store unit", unit] = lambda unit=unit: self._lose(unit)  # type: ignore[misc]

    def _lose(self, unit: int) -> None:
        self.gone |= {key for _, key in self._cells if self._unit(key) == unit}
        self._kept = {place: cells for place, cells in self._cells.items() if place[1] not in self.gone}

    def _unit(self, key: str) -> int:
        return zlib.crc32(key.encode()) % self.world.settings.units

    async def reach(self, keys: Sequence[str], *columns: str) -> Written:
        """Write columns, or read; ``queue.lost`` names samples that are gone, or go meanwhile."""
        lost = set[str]() if columns else self.gone.intersection(keys)
        for unit in dict.fromkeys(map(self._unit, keys)):
            condition = self.world.condition(("store unit", unit))
            if condition.late or condition.stopped.done():
                try:
                    await self.world.guard(("store unit", unit), asyncio.sleep(0))
                except WorkerLost:
                    lost |= {key for key in keys if self._unit(key) == unit}
        self.gone = (self.gone - set(keys)) | lost if columns else self.gone
        if lost:
            raise QueueError(f"{len(lost)} samples went with a unit", code="queue.lost", found=sorted(lost))
        return self._write(keys, *columns)

    def _write(self, keys: Sequence[str], *columns: str) -> Written:
        for key in keys if columns else ():
            self._cells.setdefault((partition_of(key), key), {}).update(dict.fromkeys(columns, _CELL))
        return Written(columns=columns, sizes=(8,) * len(keys))

    async def put(self, request: PutRequest) -> PutResult:
        await self.reach(request.keys, "")
        return await super().put(request)

    async def get(self, request: GetRequest) -> GetResult:
        await self.reach(request.keys)
        return await super().get(request)

    async def close(self) -> None:
        return


@attrs.define(eq=False)
class TimedEngine:
    """An engine and an advantage worker that only take time. The model is the list of its updates."""

    world: World
    store: LosingStore
    role: Role
    model: list[tuple[int, Sequence[str]]] = attrs.field(factory=list)  #: step and samples of each update

    async def compute(self, kind: str, batch: BatchMeta, column: str, adapter_off: bool = False) -> None:
        """Write log-probs or values."""
        await self.store.reach(batch.keys)
        await self.world.guard(RANK, self.world.spend("log_probs", self.role.updated))
        await self.role.queue.add_columns(batch, await self.store.reach(batch.keys, column))

    async def estimate(self, batch: BatchMeta, kl_coefficient: float) -> tuple[dict[str, float], Written]:
        """Write advantages."""
        await self.store.reach(batch.keys)
        return {}, await self.store.reach(trained(batch).keys, "advantages", "returns")

    async def prepare(self, batch: BatchMeta) -> Written:
        """Write what a loss prepares."""
        return await self.store.reach(batch.keys, "prepared")

    async def update(self, batch: BatchMeta, loss: Any, comparison: object = None) -> tuple[dict[str, float], Any]:
        """Train on a mini-batch, and check that it is not staler than the schedule allows."""
        step, most = self.role.updated, self.role.schedule.max_staleness
        await self.store.reach(batch.keys)
        await self.world.guard(RANK, self.world.spend("update", step, sum(each == step for each, _ in self.model)))
        stale = [each for each, tags in zip(batch.keys, batch.tags) if step - tags.get("weight_version_min", step) > most]
        if stale and getattr(self.role.schedule, "on_stale", "") != "train_corrected":
            raise broken("staleness", f"step {step}, which may be {most} steps later than its tokens, has {stale[0]}")
        self.model.append((step, batch.keys))
        self.world.note(f"step {step} is updated with {len(batch)} samples, the first is {batch.keys[0]}")
        return {"policy/loss": 0.0, "value/loss": 0.0, "grad_norm": 1.0}, {}

    async def save(self, folder: str, format: str) -> None:
        """Save the model."""
        await self.world.guard(RANK, self.world.spend("checkpoint", self.role.updated))
        Path(folder).mkdir()
        Path(folder, "model.json").write_text(json.dumps(self.model))

    async def load(self, folder: str) -> None:
        """Load a saved model."""
        self.model = [(step, tuple(keys)) for step, keys in json.loads(Path(folder, "model.json").read_text())]


def broken(invariant: str, found: str) -> RunError:
    """Return the error for an invariant that does not hold."""
    return RunError(f"{invariant} is broken", code="run.simulation", where=invariant, found=found)
