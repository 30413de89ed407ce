"""Builds the trainer of a run: engines, weights, devices, evaluation, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from jackfield.cluster.device import DeviceLease, SharedDevice
from jackfield.cluster.pool import ReplicaPool
from jackfield.compose.mixing import make_sources
from jackfield.compose.role_builder import RoleBuilder
from jackfield.compose.rollout_policy import log_prob_check_options, rollout_bound
from jackfield.config import as_plain
from jackfield.data.tasks import Task
from jackfield.runtime.advantages import AdvantageEstimation
from jackfield.runtime.engine_group import EngineGroup
from jackfield.runtime.workers import resubmitted
from jackfield.trainer import (
    BatchSource,
    Checkpointer,
    CheckpointStore,
    Evaluator,
    LogProbCheck,
    PublishedVersion,
    Trainer,
)
from jackfield.weights import Replica, ReplicaProbe, WeightSynchronizer

_PROBE_PROMPT = 32  #: tokens of the first task's prompt


class TrainerBuilder:
    """Builds a trainer and everything that is its own."""

    def __init__(self, run: RoleBuilder) -> None:
        """
        Args:
            run: builds the role.
        """
        self.run = run
        self.role, self.config = run.role, run.config
        self.engines: list[EngineGroup] = []  # every model that is loaded beside the replicas
        self.actor: EngineGroup
        self.pool: ReplicaPool | None = None  # None: nothing is generated in this process

    async def build(self, store: CheckpointStore) -> Trainer:
        """Build the trainer around its engines and replicas; replicas that come later get weights through it.

        Raises:
            JackfieldError: the first part that does not work.
        """
        run, role, config = self.run, self.role, self.config
        self.actor = actor = await self._engine_group("actor")
        self.pool = pool = await run.start_replicas()
        synchronizer = (
            self._synchronizer([] if pool is None else pool.members) if pool or role.name == "train" else None
        )
        if role.name == "train":
            assert synchronizer is not None
            role.version = PublishedVersion(role.clock, role.queue, synchronizer)
        reference = await self._reference()
        critic = await self._engine_group("critic") if role.algorithm.critic else None
        shared = self._device()
        trainer = Trainer(
            role=role,
            batches=BatchSource(role=role, sources=make_sources(config.mixing), stop=run.stop.requested),
            actor=actor,
            critic=critic,
            reference=reference,
            estimator=AdvantageEstimation(
                role.workers.estimator, role.queue, role.clock, seconds=config.deadlines.engine
            ),
            log_prob_check=self._log_prob_check(critic),
            weights=shared or pool or synchronizer,
            evaluator=self._evaluator(),
            checkpoints=self._checkpointer(store, critic),
            placement=self.train_placement,
        )
        if pool and synchronizer:
            self._connect(pool, synchronizer, shared, trainer)
            run.background(pool.keep)
        await trainer.batches.register()
        return trainer

    async def _engine_group(self, name: str) -> EngineGroup:
        group = EngineGroup(
            name, self.role.workers.ranks[name], self.role.queue, self.role.clock, seconds=self.config.deadlines.engine
        )
        self.run.stack.push_async_callback(group.close)
        await group.initialize()
        self.engines.append(group)
        return group

    async def _reference(self) -> EngineGroup | None:
        """The initial policy: the actor without its adapter, or a model of its own."""
        if not self.role.algorithm.reference:
            return None
        if self.config.model.lora is not None:
            return self.actor.without_adapter()
        return await self._engine_group("reference")

    def _checkpointer(self, store: CheckpointStore, critic: EngineGroup | None) -> Checkpointer:
        return Checkpointer(
            role=self.role,
            store=store,
            engines={"actor": self.actor} if critic is None else {"actor": self.actor, "critic": critic},
            description={"config": as_plain(self.config), "data": self.run.tasks.digests},
        )

    def _evaluator(self) -> Evaluator | None:
        held_out = self.run.tasks.held_out
        if held_out is None:
            return None
        return Evaluator(role=self.role, tasks=held_out, placement=self.run.rollout_placement)

    def _log_prob_check(self, critic: EngineGroup | None) -> LogProbCheck | None:
        if not self.config.log_prob_check.every:
            return None
        return LogProbCheck(
            schedule=self.role.schedule,
            note=self.role.stages.note,
            first_step=0 if critic is None else self.config.critic.warmup_steps,
            **log_prob_check_options(self.config),
        )

    # -- weights and devices

    def _synchronizer(self, replicas: Sequence[Replica]) -> WeightSynchronizer:
        section, ranks = self.config.checkpoint_engine, self.role.workers.ranks["actor"]
        return WeightSynchronizer(
            senders=[rank.sender for rank in ranks if rank.sender is not None],
            replicas=replicas,
            name=section.name,
            clock=self.role.clock,
            settings=section.settings,
            deadline_seconds=self.config.deadlines.sync,
            probe=None if self._takes_turns or not replicas else self._probe(),
            kind=self.config.weights.kind,
            on_missing_base=self.config.weights.on_missing_base,
        )

    @property
    def _takes_turns(self) -> bool:
        """Whether the engine has left the device when replicas generate."""
        return self.role.workers.shares_devices and self.config.cluster.offload

    def _device(self) -> SharedDevice | None:
        """Make the leases on the devices of trainer and explorer: one where engines and replicas share them.

        Returns:
            The device where engines and replicas take turns, if there is one.
        """
        run, seconds, config = self.run, self.config.deadlines.batch, self.config
        if not self.role.workers.shares_devices:
            self.train_placement, run.rollout_placement = (DeviceLease(self.role.clock, seconds) for _ in range(2))
            return None
        shared = None
        if self._takes_turns and self.pool:
            shared = SharedDevice(self.engines, self.pool, config.cluster.device, self._probe())
        enter, leave = shared.hand_overs if shared else ({}, {})
        self.train_placement = run.rollout_placement = DeviceLease(self.role.clock, seconds, enter=enter, leave=leave)
        return shared

    def _connect(
        self, pool: ReplicaPool, synchronizer: WeightSynchronizer, shared: SharedDevice | None, trainer: Trainer
    ) -> None:
        """Register how replicas get weights that join later or were restarted."""

        async def load(replica: Replica) -> None:
            version = trainer.updated
            async with self.role.stages.measure("load_weights", "weights", version):
                if version:  # else they are those of the model's folder, which it has loaded
                    async with self.actor.reading:
                        await synchronizer.catch_up(replica, version)
                if shared is not None:
                    await shared.ask([replica], version)

        hold = partial(self.train_placement.hold, "rollout", joins=True)
        pool.connect(load, hold, synchronizer.sync, takes_turns=shared is not None, posts=self.role.name == "train")

    def _probe(self) -> ReplicaProbe | None:
        config = self.config
        if not config.log_prob_check.probe_tokens:
            return None
        agents, task = self.role.workers.agents, cast(Task, self.run.tasks.train[0])
        return ReplicaProbe(
            prompt=lambda: resubmitted(
                lambda: agents.of("probe").prompt_ids(task, _PROBE_PROMPT), "the probe's prompt"
            ),
            score=self.actor.score,
            clock=self.role.clock,
            tokens=config.log_prob_check.probe_tokens,
            temperature=config.sampling.temperature if self.role.explores else 1.0,
            bound=rollout_bound(config),
            stops=config.log_prob_check.on_mismatch == "stop",
            seconds=config.deadlines.rollout,
            report=partial(self.role.stages.note, "log_prob_check/replica/mean"),
        )
