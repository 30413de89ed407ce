"""A role of a run: its configuration, its schedule, and what all its parts share, count and measure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeAlias

import attrs

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.cluster.pool import Places
from jackfield.config import RunConfig
from jackfield.config.sections import ScheduleConfig
from jackfield.errors import ScheduleError
from jackfield.plugins.hooks import SampleRecord, StageEnded
from jackfield.queue import TransferQueue
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.runtime.workers import Workers, resubmitted, suppress_lost

#: What of a run this process does.
RoleName: TypeAlias = Literal["all", "train", "explore", "reward"]


@attrs.frozen(kw_only=True)
class Schedule(ScheduleConfig):
    """When a batch may be started and when weights are published: every synchronous and off-by-n mode as numbers.

    A *weight version* counts the trainer steps whose result is loaded: 0 is the initial model. Batches are numbered
    from 0; step ``t`` trains on batch ``t`` and makes version ``t + 1``. There are ``k = sync_interval`` steps between
    synchronisations, and explorers run ``o = sync_offset`` batches ahead.
    """

    explores: bool = True  #: False: steps train on the data's own answers, and no replica needs new weights

    @property
    def max_staleness(self) -> int:
        """The most steps by which the weights that made a token may lag behind the step that trains on it."""
        return self.sync_interval - 1 + self.sync_offset

    def may_start(self, batch: int, version: int) -> bool:
        """Return whether an explorer that has ``version`` loaded may start ``batch``.

        Without rollouts ``version`` is the number of completed steps, and answers are copied for one further batch.
        """
        return batch - version <= (self.max_staleness if self.explores else 1)

    def syncs_after(self, step: int) -> bool:
        """Return whether weights are published after ``step`` (from 0)."""
        return self.explores and (step + 1) % self.sync_interval == 0

    def is_due(self, every: int, steps_done: int) -> bool:
        """Return whether what happens every so many steps happens after ``steps_done``.

        With explorers it happens at weight syncs only: at the first one when or after its step has come. 0: never.
        """
        interval = self.sync_interval if self.explores else 1
        if not every or not steps_done or steps_done % interval:
            return False
        return steps_done // every > (steps_done - interval) // every

    def check(self, step: int, oldest_version: int) -> int:
        """Return the staleness of a batch, in steps.

        Raises:
            ScheduleError: ``schedule.staleness`` when it is beyond the bound.
        """
        staleness = step - oldest_version
        if staleness > self.max_staleness:
            raise ScheduleError(
                "a batch is staler than the schedule allows",
                code="schedule.staleness",
                where=f"step {step}",
                expected=f"at most {self.max_staleness} steps (sync_interval - 1 + sync_offset)",
                found=f"weight version {oldest_version}, {staleness} steps",
            )
        return staleness


class Progress:
    """A number that only grows, and tasks that wait for it to be large enough."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.value = clock, -1  #: -1: nothing has begun
        self._changed = asyncio.Condition()

    async def advance(self, value: int) -> None:
        """Raise the number and wake its waiters."""
        async with self._changed:
            self.value = max(self.value, value)
            self._changed.notify_all()

    async def until(self, enough: Callable[[int], bool], seconds: float, waiting_for: str) -> int:
        """Wait until ``enough(value)``; a ``DeadlineExceeded`` names ``waiting_for``."""

        async def wait() -> int:
            async with self._changed:
                await self._changed.wait_for(lambda: enough(self.value))
            return self.value

        return await self.clock.wait_for(wait(), seconds, waiting_for)


@attrs.frozen(kw_only=True)
class RunWorkers:
    """The workers of one role, or what stands for them in this process. Engines and replicas are not started yet."""

    backend: TransferQueueBackend
    ranks: Mapping[str, Sequence[EngineRank]] = attrs.field(factory=dict)  #: by engine: actor, reference, critic
    agents: Workers[AgentWorker]
    rewards: Workers[RewardWorker] | None = None
    estimator: AdvantageWorker
    replicas: int = 0  #: that the role begins with
    places: Places  #: of the replicas
    shares_devices: bool = True  #: whether engine and replicas take turns
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None  #: raises as soon as a rank or the storage dies


@attrs.define(kw_only=True, eq=False)
class Role:
    """One role of a run. Its parts read their settings in ``config``, and find each other here."""

    config: RunConfig
    name: RoleName = "all"
    algorithm: ResolvedAlgorithm
    clock: Clock
    hooks: Any  #: of pluggy: ``HookManager.hook``
    explores: bool = attrs.field(init=False)  #: whether the run trains on responses of its own
    trains: bool = attrs.field(init=False)
    evaluates: bool = attrs.field(init=False)
    generates: bool = attrs.field(init=False)  #: whether this role has replicas
    scores: bool = attrs.field(init=False)  #: whether this role scores the samples of the training batches
    engines: Sequence[str] = attrs.field(default=(), init=False)  #: the models that are trained, and an own reference
    score_seconds: float = attrs.field(init=False)  #: the longest that a score takes, retries included
    schedule: Schedule = attrs.field(init=False)
    version: Progress = attrs.field(init=False)  #: of the weights that explorers may use
    steps_done: Progress = attrs.field(init=False)
    progress: Progress = attrs.field(init=False)  #: completed steps, an explorer's weight versions, or scored groups
    workers: RunWorkers = attrs.field(init=False)  #: once they have been made
    queue: TransferQueue = attrs.field(init=False)  #: once it has been opened
    _measured: dict[str, float] = attrs.field(factory=dict, init=False)  #: metrics of the step

    def __attrs_post_init__(self) -> None:
        """Read what the role does, and make what it counts."""
        config, algorithm = self.config, self.algorithm
        self.explores, self.trains = config.mode == "online", self.name in ("all", "train")
        self.evaluates = self.trains and bool(config.evaluation.every)
        self.generates = self.evaluates or (self.explores and self.name in ("all", "explore"))
        scores = self.name == "reward" or (self.trains and config.queue.rewards == "train")
        self.scores = self.explores and scores
        if self.trains:
            models = {"reference": algorithm.reference and config.model.lora is None, "critic": algorithm.critic}
            self.engines = ("actor", *(name for name, wanted in models.items() if wanted))
        self.score_seconds = config.deadlines.reward * (config.schedule.reward_retries + 1)
        self.schedule = Schedule(**attrs.asdict(config.schedule), explores=self.explores)
        self.version, self.steps_done = Progress(self.clock), Progress(self.clock)
        self.progress = self.version if self.name == "explore" else self.steps_done

    @asynccontextmanager
    async def measure(self, name: str, lane: str, step: int) -> AsyncIterator[None]:
        """Measure the stage that runs inside, for the timeline and as the step's metric ``seconds/NAME``."""
        start = self.clock.time()
        try:
            yield
        finally:
            end = self.clock.time()
            self.note(f"seconds/{name}", self._measured.get(f"seconds/{name}", 0.0) + end - start)
            self.hooks.stage_ended(event=StageEnded(name=name, lane=lane, start=start, end=end, step=step))

    def note(self, name: str, value: float) -> None:
        """Note a metric of the step; of several values under one name, the last."""
        self._measured[name] = value

    def drain(self) -> dict[str, float]:
        """Return what was measured and noted since the last call."""
        drained, self._measured = self._measured, {}
        return drained

    async def records(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], *, with_reward: bool = False
    ) -> tuple[SampleRecord, ...]:
        """Read samples that are only to be shown: none where some of them went with a part of the store."""
        seconds, who = self.config.deadlines.batch, f"an agent worker to read {len(keys)} samples, {keys[:1]} first"

        def read() -> Awaitable[tuple[SampleRecord, ...]]:
            reading = self.workers.agents.of("".join(keys[:1])).records(partition, keys, tags, with_reward=with_reward)
            return self.clock.wait_for(reading, seconds, who)

        found: tuple[SampleRecord, ...] = ()
        with suppress_lost():
            found = await resubmitted(read, "a table of samples") if keys else ()
        return found
