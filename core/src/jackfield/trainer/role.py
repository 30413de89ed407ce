"""A role of a run: its state, progress and metrics, and weights for other processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, TypeAlias

import attrs

from jackfield.abc.rollout import UpdateWeightsRequest
from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.cluster.pool import Places
from jackfield.config import RunConfig
from jackfield.config.sections import ScheduleConfig
from jackfield.errors import DeadlineExceeded, QueueError, ScheduleError, WeightsError
from jackfield.plugins.hooks import SampleRecord, StageEnded
from jackfield.queue import BatchMeta, TransferQueue
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine import EngineRank
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.runtime.workers import Workers, is_lost, lost_keys, resubmitted
from jackfield.settings import structure
from jackfield.weights import Replica, SyncReport, verify

WEIGHTS, FINISHED = "weights", "finished"  #: topics of the queue: the newest weights, and the end of the last step

_NOTHING = SyncReport(version=-1, receipts=(), seconds=0.0, paused_seconds=0.0, bytes=0)

#: The part of a run that this process executes.
RoleName: TypeAlias = Literal["all", "train", "explore", "reward"]


@attrs.frozen(kw_only=True)
class Schedule(ScheduleConfig):
    """Decides when a batch may start and when weights are published, in every mode.

    A *weight version* counts the training steps whose result is in the weights: 0 is the initial model. Batches are
    numbered from 0; step ``t`` trains on batch ``t`` and makes version ``t + 1``. Weights are published every
    ``k = sync_interval`` steps, and explorers run ``o = sync_offset`` batches ahead.
    """

    explores: bool = True  #: False: the run trains on answers from the data, and no replica needs new weights

    @property
    def max_staleness(self) -> int:
        """The maximum steps between a token's weights and the step that trains on it."""
        return self.sync_interval - 1 + self.sync_offset

    def may_start(self, batch: int, version: int) -> bool:
        """Return whether an explorer that has ``version`` loaded may start ``batch``.

        Without rollouts, ``version`` is the number of completed steps, and answers are copied one batch ahead.
        """
        return batch - version <= (self.max_staleness if self.explores else 1)

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
        """Return the staleness of a batch, in steps, or refuse more than :attr:`max_staleness`."""
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
    shares_devices: bool = True  #: whether the engines and the replicas use the same devices in turns
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None  #: raises as soon as a rank or the storage dies


@attrs.define(kw_only=True, eq=False)
class Role:
    """The state that a role's components share: configuration, queue, workers, hooks."""

    config: RunConfig
    name: RoleName = "all"
    algorithm: ResolvedAlgorithm
    clock: Clock
    hooks: Any  #: pluggy's ``HookManager.hook``
    explores: bool = attrs.field(init=False)  #: whether the run trains on responses that its policy generates
    trains: bool = attrs.field(init=False)
    evaluates: bool = attrs.field(init=False)
    generates: bool = attrs.field(init=False)  #: whether this role has replicas
    scores: bool = attrs.field(init=False)  #: whether this role scores the samples of the training batches
    engines: Sequence[str] = attrs.field(default=(), init=False)  #: the trained models, and a separate reference if any
    score_seconds: float = attrs.field(init=False)  #: the maximum time to score a sample, retries included
    schedule: Schedule = attrs.field(init=False)
    version: Progress = attrs.field(init=False)  #: the weight version that explorers may use
    steps_done: Progress = attrs.field(init=False)
    progress: Progress = attrs.field(init=False)  #: completed steps, an explorer's weight versions, or scored groups
    workers: RunWorkers = attrs.field(init=False)  #: set when they have been created
    queue: TransferQueue = attrs.field(init=False)  #: set when it has been opened
    _measured: dict[str, float] = attrs.field(factory=dict, init=False)  #: metrics of the step

    def __attrs_post_init__(self) -> None:
        """Derive what the role does from its configuration, and create the counters."""
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
        """Time the enclosed stage, for the timeline and as the step's metric ``seconds/NAME``."""
        start = self.clock.time()
        try:
            yield
        finally:
            end = self.clock.time()
            self.note(f"seconds/{name}", self._measured.get(f"seconds/{name}", 0.0) + end - start)
            self.hooks.stage_ended(event=StageEnded(name=name, lane=lane, start=start, end=end, step=step))

    def note(self, name: str, value: float) -> None:
        """Set a metric of the step; the last value of a name counts."""
        self._measured[name] = value

    def drain(self) -> dict[str, float]:
        """Return the metrics that were measured and set since the last call."""
        drained, self._measured = self._measured, {}
        return drained

    async def noticed(self, topic: str, seconds: float, who: str) -> None:
        """Wait for another role's notice under a topic; a ``DeadlineExceeded`` names ``who``."""
        await self.clock.wait_for(self.queue.wait_notice(topic, 0, 2 * seconds), seconds, who)

    async def give_back_lost(self, batch: BatchMeta, error: QueueError) -> bool:
        """Fail the lost samples that an error names; return whether the batch was released."""
        if not set(await self.queue.fail_lost(batch, lost_keys(error))) & set(batch.keys):
            return False
        await self.queue.release(batch)
        return True

    async def records(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], *, with_reward: bool = False
    ) -> tuple[SampleRecord, ...]:
        """Read samples for display; return none if some of them were lost with a storage unit."""
        seconds, who = self.config.deadlines.batch, f"an agent worker to read {len(keys)} samples, {keys[:1]} first"

        def read() -> Awaitable[tuple[SampleRecord, ...]]:
            reading = self.workers.agents.of("".join(keys[:1])).records(partition, keys, tags, with_reward=with_reward)
            return self.clock.wait_for(reading, seconds, who)

        try:
            return await resubmitted(read, "a table of samples") if keys else ()
        except QueueError as error:
            if not is_lost(error):
                raise
            return ()


async def publish(role: Role, report: SyncReport | None, version: int) -> None:
    """Tell explorers in other processes how to load the trainer's weights of ``version``.

    ``report`` comes from the newest weight sync. None means that the weights are those of the model's folder. A
    checkpoint engine that keeps no weights for workers that join later is refused (``weights.transfer``).
    """
    if report is not None and (report.retained is None or report.kind == "delta"):
        raise WeightsError(
            "the checkpoint engine keeps no weights for explorers that come and go",
            where="checkpoint_engine",
            expected="one with the capability 'retains_weights' (file)",
            fix="choose checkpoint_engine: {name: file, folder: …}",
        )
    await role.queue.post(WEIGHTS, attrs.asdict(attrs.evolve(report or _NOTHING, version=version, receipts=())))


@attrs.define(kw_only=True, eq=False)
class WeightSubscriber:
    """Loads each published version into this process's replicas, verifies the receipts, and lets the explorer go on."""

    role: Role
    replicas: Sequence[Replica]  #: the pool's own list, which changes as replicas come and go
    newest: SyncReport = attrs.field(default=_NOTHING, init=False)  #: the newest weights that all replicas have
    loading: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)  #: held while replicas load weights

    async def run(self) -> None:
        """Follow the trainer until cancelled.

        Errors are ``weights.version`` if the trainer's version went back, and those of a weight sync.
        """
        number, queue = 0, self.role.queue
        while True:
            try:
                notice = await queue.wait_notice(WEIGHTS, number, self.role.config.deadlines.batch)
            except DeadlineExceeded:
                continue  # consumers of newer weights have their own deadlines
            number, published = notice.number, structure(SyncReport, notice.value, WEIGHTS, WeightsError)
            try:
                async with self.role.measure("load_weights", "weights", published.version):
                    await self.load_all(published)
            except WeightsError:
                with suppress(DeadlineExceeded):
                    await queue.wait_notice(WEIGHTS, number, 0.0)
                    continue  # newer weights exist, and these may have been removed
                raise
            await self.role.version.advance(published.version)

    async def load_all(self, published: SyncReport) -> None:
        """Load published weights into all replicas. It raises the errors of :meth:`run`."""
        async with self.loading:
            if published.version < self.newest.version:
                raise WeightsError(
                    "the trainer went back to earlier weights, which replicas do not take",
                    code="weights.version",
                    expected=f"at least {self.newest.version}",
                    found=published.version,
                    fix="start this explorer again",
                )
            if published != self.newest:  # a restored trainer may publish a version again
                await asyncio.gather(*(self.load(replica, published) for replica in list(self.replicas)))
            self.newest = published

    async def load(self, replica: Replica, published: SyncReport | None = None) -> None:
        """Load published weights (default: newest) into a replica, under :attr:`loading`."""
        published = published or self.newest
        if published.retained is None:
            return  # the replica has the weights of the model's folder
        engine, seconds = self.role.config.checkpoint_engine, self.role.config.deadlines.sync
        request = UpdateWeightsRequest(
            version=published.version,
            checkpoint_engine=engine.name,
            checkpoint_engine_config=engine.settings,
            connect=(published.retained,) * replica.info.workers,
            first_worker=0,
            total_workers=replica.info.workers,
            kind="full" if published.peft_config is None else "adapter",
            peft_config=published.peft_config,
            deadline_seconds=seconds,
        )
        who = f"replica {replica.number} to take weights {published.version}"
        receipt = await self.role.clock.wait_for(replica.server.update_weights(request), seconds, who)
        verify(replica.info, receipt, published.version, published.digests)
