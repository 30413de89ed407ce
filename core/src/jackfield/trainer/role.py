"""A role of a run: its configuration, and what all its parts share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.algorithms.resolved import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.cluster.pool import Places
from jackfield.config import RunConfig
from jackfield.queue import TransferQueue
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.runtime.workers import Workers
from jackfield.trainer.schedule import Progress, Schedule
from jackfield.trainer.stages import Stages

#: What of a run this process does.
RoleName: TypeAlias = Literal["all", "train", "explore", "reward"]


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
    schedule: Schedule = attrs.field(init=False)
    stages: Stages = attrs.field(init=False)
    version: Progress = attrs.field(init=False)  #: of the weights that explorers may use
    steps_done: Progress = attrs.field(init=False)
    workers: RunWorkers = attrs.field(init=False)  #: once they have been made
    queue: TransferQueue = attrs.field(init=False)  #: once it has been opened

    def __attrs_post_init__(self) -> None:
        """Make what a role counts and measures."""
        chosen = self.config.schedule
        self.schedule = Schedule(
            steps=chosen.steps,
            sync_interval=chosen.sync_interval,
            sync_offset=chosen.sync_offset,
            explores=self.explores,
        )
        self.stages = Stages(self.clock, self.hooks)
        self.version, self.steps_done = Progress(self.clock), Progress(self.clock)

    @property
    def explores(self) -> bool:
        """Return whether the run trains on responses of its own."""
        return self.config.mode == "online"

    @property
    def trains(self) -> bool:
        """Return whether this role trains."""
        return self.name in ("all", "train")

    @property
    def evaluates(self) -> bool:
        """Return whether this role evaluates."""
        return self.trains and bool(self.config.evaluation.every)

    @property
    def generates(self) -> bool:
        """Return whether this role has replicas."""
        return self.evaluates or (self.explores and self.name in ("all", "explore"))

    @property
    def scores(self) -> bool:
        """Return whether this role scores the samples of the training batches."""
        return self.explores and (self.name == "reward" or (self.trains and self.config.queue.rewards == "train"))

    @property
    def engines(self) -> list[str]:
        """List the engines of this role: the models that are trained, and a reference model of its own."""
        if not self.trains:
            return []
        own_reference = self.algorithm.reference and self.config.model.lora is None
        return ["actor", *(["reference"] if own_reference else []), *(["critic"] if self.algorithm.critic else [])]

    @property
    def score_seconds(self) -> float:
        """Return the longest that a score takes, retries included."""
        return self.config.deadlines.reward * (self.config.schedule.reward_retries + 1)

    @property
    def progress(self) -> Progress:
        """Return what the role counts: completed steps, an explorer's weight versions, or scored groups."""
        return self.version if self.name == "explore" else self.steps_done
