"""A role of a run: its state, progress and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeAlias

import attrs

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.cluster.pool import DeviceLease, Places
from jackfield.config import RunConfig
from jackfield.config.schedule import ScheduleConfig
from jackfield.data.tasks import TaskSet
from jackfield.errors import QueueError, RunError
from jackfield.plugins.hooks import HookManager, SampleRecord, StageEnded
from jackfield.queue import BatchMeta, TransferQueue
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine import EngineRank
from jackfield.runtime.rewards import RewardWorker
from jackfield.runtime.samples import AdvantageWorker
from jackfield.runtime.workers import Workers, is_lost, resubmitted
from jackfield.trainer.curriculum import RunCurriculum
from jackfield.trainer.gpu_use import GpuUse

#: Topics of the queue: the settings that all processes share, the newest weights, and the end of the last step.
SHARED, WEIGHTS, FINISHED = "shared", "weights", "finished"

#: The part of a run that this process executes.
RoleName: TypeAlias = Literal["all", "train", "explore", "reward"]


@attrs.frozen(kw_only=True)
class Schedule(ScheduleConfig):
    """Decides when a batch may start and when weights are published, in every mode.

    A *weight version* counts the training steps whose result is in the weights: 0 is the initial model. Batches are
    numbered from 0; step ``t`` trains on batch ``t`` and makes version ``t + 1``. Weights are published every
    ``k = sync_interval`` steps, and explorers run ``o = sync_offset`` batches ahead. In ``mode: async`` a step trains
    on any complete groups, as many as a batch has; the same rule, with another bound, paces the explorers.
    """

    explores: bool = True  #: False: the run trains on answers or samples from elsewhere; no replica needs new weights
    trains: bool = True  #: False: no weights are ever newer than those of the replicas

    @property
    def is_async(self) -> bool:
        """Return whether a step trains on any complete groups."""
        return self.explores and self.mode == "async"

    @property
    def staleness_bound(self) -> int:
        """The maximum steps between a token's weights and the step that trains on it."""
        if not self.trains:
            return self.steps
        if self.is_async:
            return self.sync_interval if self.max_staleness is None else self.max_staleness
        return self.sync_interval - 1 + self.sync_offset

    def may_start(self, batch: int, version: int) -> bool:
        """Return whether an explorer that has ``version`` loaded may start ``batch``.

        Without rollouts, ``version`` is the number of completed steps, and answers are copied one batch ahead.
        """
        return batch - version <= (self.staleness_bound if self.explores else 1)

    def syncs_after(self, step: int) -> bool:
        """Return whether weights are published after ``step`` (from 0)."""
        return self.explores and (step + 1) % self.sync_interval == 0

    def is_due(self, every: int, steps_done: int) -> bool:
        """Return whether an action for every ``every`` steps is due; 0 means never.

        With explorers, the action waits for the first weight sync at or after its step.
        """
        interval = self.sync_interval if self.explores else 1
        if not every or not steps_done or steps_done % interval:
            return False
        return steps_done // every > (steps_done - interval) // every

    def check(self, step: int, oldest_version: int) -> int:
        """Return the staleness of a batch, in steps, or refuse more than :attr:`staleness_bound`."""
        staleness = step - oldest_version
        if staleness > self.staleness_bound and not (self.is_async and self.on_stale == "train_corrected"):
            what, where = "a batch is staler than the schedule allows", f"step {step}"
            rule = "max_staleness" if self.is_async else "sync_interval - 1 + sync_offset"
            expected = f"at most {self.staleness_bound} steps ({rule})"
            found = f"weight version {oldest_version}, {staleness} steps"
            raise RunError(what, code="schedule.staleness", where=where, expected=expected, found=found)
        return staleness


class Progress:
    """A number that only grows and that tasks can wait for."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.value = clock, -1  #: -1 before the first :meth:`advance`
        self._changed = asyncio.Condition()

    async def advance(self, value: int) -> None:
        """Raise the number and wake its waiters."""
        async with self._changed:
            self.value = max(self.value, value)
            self._changed.notify_all()

    async def until(self, enough: Callable[[int], bool], seconds: float, waiting_for: str) -> int:
        """Wait until ``enough(value)`` is true; a ``DeadlineExceeded`` names ``waiting_for``."""

        async def wait() -> int:
            async with self._changed:
                await self._changed.wait_for(lambda: enough(self.value))
            return self.value

        return await self.clock.wait_for(wait(), seconds, waiting_for)


@attrs.frozen(kw_only=True)
class RunWorkers:
    """The workers of one role, or their stubs. Engines and replicas are not started yet."""

    backend: TransferQueueBackend
    ranks: Mapping[str, Sequence[EngineRank]] = attrs.field(factory=dict)  #: by engine: actor, reference, critic
    agents: Workers[AgentWorker]
    rewards: Workers[RewardWorker] | None = None
    estimator: AdvantageWorker
    replicas: int = 0  #: initial number of replicas
    places: Places  #: where the replicas run
    replica_devices: int = 1  #: devices of each replica
    shares_devices: bool = True  #: whether the engines and the replicas use the same devices in turns
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None  #: raises as soon as a rank dies

    @property
    def devices(self) -> int:
        """Return the number of devices of the actor and the replicas of this role, at least 1."""
        engines, replicas = len(self.ranks.get("actor", ())), self.replicas * self.replica_devices
        return max(engines, replicas, 1) if self.shares_devices else engines + replicas


@attrs.define(kw_only=True, eq=False)
class Role:
    """The state that a role's components share: configuration, data, queue, workers, devices, hooks."""

    config: RunConfig
    name: RoleName = "all"
    algorithm: ResolvedAlgorithm
    tasks: Mapping[str, TaskSet] = attrs.field(factory=dict)  #: train, and eval and expert if they are used
    clock: Clock
    hooks: HookManager
    arrays: bool = False  #: whether samples have ``multi_modal_inputs``
    explores: bool = attrs.field(init=False)  #: whether the run trains on responses that its policy generates
    trains: bool = attrs.field(init=False)  #: whether it takes the samples, and trains unless it only collects them
    evaluates: bool = attrs.field(init=False)
    generates: bool = attrs.field(init=False)  #: whether this role has replicas
    scores: bool = attrs.field(init=False)  #: whether this role scores the samples of the training batches
    engines: Sequence[str] = attrs.field(default=(), init=False)  #: the trained models, and a separate reference if any
    score_seconds: float = attrs.field(
        init=False
    )  #: the maximum time to score a sample, retries included, once it has its turns
    schedule: Schedule = attrs.field(init=False)
    curriculum: RunCurriculum | None = attrs.field(default=None, init=False)  #: chooses the training tasks
    version: Progress = attrs.field(init=False)  #: the weight version that explorers may use
    steps_done: Progress = attrs.field(init=False)  #: for the role reward: scored groups
    workers: RunWorkers = attrs.field(init=False)  #: set when they have been created
    queue: TransferQueue = attrs.field(init=False)  #: set when it has been opened
    rollout_devices: DeviceLease = attrs.field(init=False)  #: of the replicas; set with the workers
    train_devices: DeviceLease = attrs.field(init=False)  #: of the engines; the same lease if they share devices
    updated: int = attrs.field(default=0, init=False)  #: number of steps in the engine's weights
    whole: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)  #: unset between the updates of one step
    _measured: dict[str, float] = attrs.field(factory=dict, init=False)  #: metrics of the step
    _gpus: GpuUse = attrs.field(factory=GpuUse, init=False)

    def __attrs_post_init__(self) -> None:
        """Derive what the role does from its configuration, and create the counters."""
        config, algorithm = self.config, self.algorithm
        self.explores, self.trains = config.mode in ("online", "explore"), self.name in ("all", "train")
        self.evaluates = self.trains and bool(config.evaluation.every)
        self.generates = self.evaluates or (self.explores and self.name in ("all", "explore"))
        scores = self.name == "reward" or (self.trains and config.queue.rewards == "train")
        self.scores = config.mode != "offline" and scores
        self.engines = self.engines_of(config, algorithm, self.name)
        service, own = config.reward_service, config.deadlines.reward
        self.score_seconds = (own + service.longest_backoff_seconds) * (service.retries + 1) + service.outage_seconds
        settings = attrs.asdict(config.schedule, recurse=False)
        self.schedule = Schedule(**settings, explores=self.explores, trains=config.mode != "explore")
        if config.data.curriculum is not None:
            self.curriculum = RunCurriculum.of(config, self.tasks["train"], self.schedule.staleness_bound)
        self.version, self.steps_done = Progress(self.clock), Progress(self.clock)
        self.whole.set()

    @staticmethod
    def engines_of(config: RunConfig, algorithm: ResolvedAlgorithm, name: RoleName) -> tuple[str, ...]:
        """Return the models that a role trains, and a separate reference if there is one."""
        models = {"reference": algorithm.reference and config.model.lora is None, "critic": algorithm.critic}
        trains = name in ("all", "train") and config.mode != "explore"
        return ("actor", *(each for each, wanted in models.items() if wanted)) if trains else ()

    @asynccontextmanager
    async def measure(self, name: str, lane: str, step: int) -> AsyncIterator[None]:
        """Time the enclosed stage, for the timeline and as the step's metric ``seconds/NAME``."""
        start = self.clock.time()
        try:
            yield
        finally:
            self.ended(name, lane, step, start)

    def ended(self, name: str, lane: str, step: int, start: float) -> None:
        """Record a stage that began at ``start`` and has ended, like :meth:`measure`."""
        end = self.clock.time()
        self._gpus.sample(end - start)
        self.note(f"seconds/{name}", self._measured.get(f"seconds/{name}", 0.0) + end - start)
        self.hooks.emit(StageEnded(name=name, lane=lane, start=start, end=end, step=step))

    def note(self, name: str, value: float) -> None:
        """Set a metric of the step; the last value of a name counts."""
        self._measured[name] = value

    def drain(self) -> dict[str, float]:
        """Return the metrics that were measured and set since the last call."""
        drained, self._measured = self._measured, {}
        return drained | self._gpus.drain()

    async def give_back_lost(self, batch: BatchMeta, error: QueueError) -> bool:
        """Fail the lost samples that an error names; return whether the batch was released."""
        keys = tuple(map(str, error.found)) if is_lost(error) and isinstance(error.found, list | tuple) else ()
        if not set(await self.queue.fail_lost(batch, keys)) & set(batch.keys):
            return False
        await self.queue.release(batch)
        return True

    async def records(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], *, with_reward: bool = False
    ) -> tuple[SampleRecord, ...]:
        """Read samples for display; return none if some of them were lost with a storage unit."""
        seconds, who = self.config.deadlines.batch, f"an agent worker to read {len(keys)} samples, {keys[:1]} first"

        def read() -> Awaitable[tuple[SampleRecord, ...]]:
            reading = self.workers.agents.of(0).records(partition, keys, tags, with_reward=with_reward)
            return self.clock.wait_for(reading, seconds, who)

        try:
            return await resubmitted(read, "a table of samples is read") if keys else ()
        except QueueError as error:
            if not is_lost(error):
                raise
            return ()
