"""Builds the trainer of a run: engines, weights, devices, evaluation, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from jackfield.cluster.device import DeviceLease, SharedDevice
from jackfield.cluster.pool import ReplicaPool
from jackfield.compose.mixing import make_sources
from jackfield.compose.role import RoleParts
from jackfield.compose.rollout_policy import log_prob_check_options
from jackfield.config import as_plain
from jackfield.data.tasks import Task
from jackfield.runtime.advantages import AdvantageEstimation
from jackfield.runtime.engine_group import EngineGroup
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.workers import resubmitted
from jackfield.settings import unstructure
from jackfield.trainer import (
    BatchSource,
    Checkpointer,
    CheckpointStore,
    Critic,
    Evaluator,
    LogProbCheck,
    PublishedVersion,
    StepReport,
    Trainer,
)
from jackfield.weights import Replica, ReplicaProbe, WeightSynchronizer

__all__ = ["TrainerBuilder"]

_PROBE_PROMPT = 32  #: tokens of the first task's prompt


class TrainerBuilder:
    """Builds a trainer and everything that is its own."""

    def __init__(self, run: RoleParts) -> None:
        """
        Args:
            run: has the configuration, the workers, the queue and the clock.
        """
        self.run = run
        self.config, self.recipe, self.clock, self.stages = run.config, run.recipe, run.clock, run.stages
        self.engines: list[EngineGroup] = []  # every model that is loaded beside the replicas
        self.actor: EngineGroup
        self.pool: ReplicaPool | None = None  # None: nothing is generated in this process

    async def build(self, store: CheckpointStore) -> Trainer:
        """Build the trainer around its engines and replicas; replicas that come later get weights through it.

        Raises:
            JackfieldError: the first part that does not work.
        """
        run, config, recipe = self.run, self.config, self.recipe
        self.actor = actor = await self._engine_group("actor", run.crew.actor)
        self.pool = pool = await run.start_replicas()
        synchronizer = self._synchronizer([] if pool is None else pool.members) if pool or run.role == "train" else None
        if run.role == "train":
            assert synchronizer is not None
            run.version = PublishedVersion(run.clock, run.queue, synchronizer)
        reference, critic = await self._reference(), await self._critic()
        shared = self._device()
        seconds, sources = config.deadlines.batch, make_sources(config.mixing)
        trainer = Trainer(
            schedule=run.schedule,
            batches=BatchSource(
                queue=run.queue,
                schedule=run.schedule,
                seconds=seconds,
                sources=sources,
                stop=run.stop.requested,
            ),
            algorithm=recipe.algorithm,
            loss_options=recipe.loss_options,
            actor=actor,
            critic=critic,
            reference=reference,
            estimator=AdvantageEstimation(run.crew.estimator, run.queue, run.clock, seconds=config.deadlines.engine),
            recompute_old_log_probs=recipe.recompute_old_log_probs,
            mini_batches=config.algorithm.mini_batches,
            epochs=config.algorithm.epochs,
            prepares=recipe.prepares,
            whole_groups=recipe.whole_groups,
            kl=config.algorithm.kl.controller(),
            kl_in_reward=recipe.plan.kl is not None,
            log_prob_check=self._log_prob_check(critic),
            weights=shared or pool or synchronizer,
            evaluator=None if run.tasks.held_out is None else self._evaluator(run.tasks.held_out),
            checkpoints=self._checkpointer(store, critic),
            placement=self.train_placement,
            version=run.version,
            steps_done=run.done,
            clock=run.clock,
            stages=run.stages,
            report=StepReport(
                queue=run.queue,
                schedule=run.schedule,
                stages=run.stages,
                agents=run.crew.agents,
                clock=run.clock,
                seconds=seconds,
                shown=config.observe.samples_per_step,
                mixes=bool(sources),
            ),
        )
        if pool and synchronizer:
            self._connect(pool, synchronizer, shared, trainer)
            run.background(pool.keep)
        await trainer.batches.register()
        return trainer

    async def _engine_group(self, role: str, ranks: Sequence[EngineRank]) -> EngineGroup:
        group = EngineGroup(role, ranks, self.run.queue, self.clock, seconds=self.config.deadlines.engine)
        self.run.stack.push_async_callback(group.close)
        await group.initialize()
        self.engines.append(group)
        return group

    async def _reference(self) -> EngineGroup | None:
        """The initial policy: the actor without its adapter, or a model of its own."""
        if not self.recipe.reference:
            return None
        if self.config.model.lora is not None:
            return self.actor.without_adapter()
        return await self._engine_group("reference", self.run.crew.reference)

    async def _critic(self) -> Critic | None:
        """The value model, trained beside the actor."""
        if not self.recipe.critic:
            return None
        settings, recipe = self.config.critic, self.recipe
        group = await self._engine_group("critic", self.run.crew.critic)
        options = {"clip": settings.clip, "aggregation": recipe.algorithm.aggregation}
        if "length_norm" in recipe.loss_options:
            options["length_norm"] = recipe.loss_options["length_norm"]
        return Critic(engine=group, loss_options=options, warmup_steps=settings.warmup_steps)

    def _checkpointer(self, store: CheckpointStore, critic: Critic | None) -> Checkpointer:
        return Checkpointer(
            store=store,
            engines={"actor": self.actor} if critic is None else {"actor": self.actor, "critic": critic.engine},
            queue=self.run.queue,
            description={"config": as_plain(self.config), "data": self.run.tasks.digests},
            schedule=self.run.schedule,
            every=self.config.checkpoint.every,
            at_end=self.config.checkpoint.at_end,
            stages=self.stages,
        )

    def _evaluator(self, held_out: Sequence[Task]) -> Evaluator:
        config = self.config
        assert self.run.crew.rewards is not None
        sampling = config.evaluation.sampling
        return Evaluator(
            tasks=held_out,
            schedule=self.run.schedule,
            every=config.evaluation.every,
            agents=self.run.crew.agents,
            rewards=self.run.crew.rewards,
            backend=self.run.crew.backend,
            placement=self.run.rollout_placement,
            clock=self.clock,
            stages=self.stages,
            sampling=unstructure(sampling),
            seed=config.seed if sampling.seed is None else sampling.seed,
            rollout_seconds=config.deadlines.rollout,
            score_seconds=config.deadlines.reward * (config.schedule.reward_retries + 1),
            recorded=config.observe.samples_per_evaluation,
        )

    def _log_prob_check(self, critic: Critic | None) -> LogProbCheck | None:
        if not self.config.log_prob_check.every:
            return None
        return LogProbCheck(
            schedule=self.run.schedule,
            note=self.stages.note,
            first_step=0 if critic is None else critic.warmup_steps,
            **log_prob_check_options(self.config),
        )

    # -- weights and devices

    def _synchronizer(self, replicas: Sequence[Replica]) -> WeightSynchronizer:
        section, ranks = self.config.checkpoint_engine, self.run.crew.actor
        return WeightSynchronizer(
            senders=[rank.sender for rank in ranks if rank.sender is not None],
            replicas=replicas,
            name=section.name,
            clock=self.clock,
            settings=section.settings,
            deadline_seconds=self.config.deadlines.sync,
            probe=None if self._takes_turns or not replicas else self._probe(),
            kind=self.config.weights.kind,
            on_missing_base=self.config.weights.on_missing_base,
        )

    @property
    def _takes_turns(self) -> bool:
        """Whether the engine has left the device when replicas generate."""
        return self.run.crew.shares_devices and self.config.cluster.offload

    def _device(self) -> SharedDevice | None:
        """Make the leases on the devices of trainer and explorer: one where engines and replicas share them.

        Returns:
            The device where engines and replicas take turns, if there is one.
        """
        run, seconds, config = self.run, self.config.deadlines.batch, self.config
        if not run.crew.shares_devices:
            self.train_placement, run.rollout_placement = (DeviceLease(self.clock, seconds) for _ in range(2))
            return None
        shared = None
        if self._takes_turns and self.pool:
            shared = SharedDevice(self.engines, self.pool, config.cluster.device, self._probe())
        enter, leave = shared.hand_overs if shared else ({}, {})
        self.train_placement = run.rollout_placement = DeviceLease(self.clock, seconds, enter=enter, leave=leave)
        return shared

    def _connect(
        self, pool: ReplicaPool, synchronizer: WeightSynchronizer, shared: SharedDevice | None, trainer: Trainer
    ) -> None:
        """Register how replicas get weights that join later or were restarted."""

        async def load(replica: Replica) -> None:
            version = trainer.updated
            async with self.stages.measure("load_weights", "weights", version):
                if version:  # else they are those of the model's folder, which it has loaded
                    async with self.actor.reading:
                        await synchronizer.catch_up(replica, version)
                if shared is not None:
                    await shared.ask([replica], version)

        hold = partial(self.train_placement.hold, "rollout", joins=True)
        pool.connect(load, hold, synchronizer.sync, takes_turns=shared is not None, posts=self.run.role == "train")

    def _probe(self) -> ReplicaProbe | None:
        config, recipe = self.config, self.recipe
        if not config.log_prob_check.probe_tokens:
            return None
        agents, task = self.run.crew.agents, cast(Task, self.run.tasks.train[0])
        return ReplicaProbe(
            prompt=lambda: resubmitted(
                lambda: agents.of("probe").prompt_ids(task, _PROBE_PROMPT), "the probe's prompt"
            ),
            score=self.actor.score,
            clock=self.clock,
            tokens=config.log_prob_check.probe_tokens,
            temperature=config.sampling.temperature if self.run.explores else 1.0,
            bound=recipe.rollout_bound,
            stops=config.log_prob_check.on_mismatch == "stop",
            seconds=config.deadlines.rollout,
            report=partial(self.stages.note, "log_prob_check/replica/mean"),
        )
