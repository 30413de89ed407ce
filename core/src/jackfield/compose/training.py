"""The control loops of a run, made around its workers: with a trainer, and with all that is not launched apart."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal, cast

import attrs

from jackfield.clock import Clock
from jackfield.compose.crew import MakeCrew
from jackfield.compose.inputs import Tasks
from jackfield.compose.joining import joining
from jackfield.compose.mixing import make_sources
from jackfield.compose.parts import Parts
from jackfield.compose.recipe import Recipe
from jackfield.compose.rollout_policy import log_prob_check_options
from jackfield.compose.stopping import Stop
from jackfield.config import RunConfig, as_plain
from jackfield.data.tasks import Task
from jackfield.queue import GroupSlot
from jackfield.runtime.advantages import AdvantageEstimation
from jackfield.runtime.engine_group import EngineGroup
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.replicas import Replicas
from jackfield.runtime.revival import LastingServer, LastingWeights
from jackfield.runtime.shared_device import SharedDevice
from jackfield.runtime.workers import resubmitted
from jackfield.structuring import unstructure
from jackfield.trainer import (
    Checkpointer,
    CheckpointStore,
    Critic,
    Evaluator,
    Explorer,
    LogProbCheck,
    OfflineProducer,
    PlacementLease,
    PostedVersion,
    RewardPipeline,
    Trainer,
)
from jackfield.weights import Canary, Replica, WeightSynchronizer

__all__ = ["Assembly", "TrainerParts"]

_CANARY_PROMPT = 32  #: tokens of the first task's prompt


@attrs.frozen(kw_only=True)
class Assembly:
    """Everything that runs."""

    trainer: Trainer
    actor: EngineGroup
    checkpointer: Checkpointer
    replicas: Replicas | None  #: None: nobody generates
    watch: tuple[Callable[[], Coroutine[Any, Any, None]], ...]  #: raise when a worker dies that cannot be made anew
    background: tuple[Callable[[], Coroutine[Any, Any, None]], ...]  #: explorer and rewards, or the offline producer


class TrainerParts(Parts):
    """Makes the parts of a whole run, or of its trainer."""

    def __init__(
        self,
        config: RunConfig,
        recipe: Recipe,
        tasks: Tasks,
        make_crew: MakeCrew,
        hooks: Any,
        clock: Clock,
        store: CheckpointStore,
        stop: Stop,
        role: Literal["all", "train"],
    ) -> None:
        super().__init__(config, recipe, tasks, make_crew, hooks, clock, role)
        self.store = store
        self.stop = stop
        self.engines: list[EngineGroup] = []  # every model that is loaded beside the replicas

    async def build(self, stack: AsyncExitStack) -> Assembly:
        """Make, connect and start everything.

        Raises:
            JackfieldError: the first part that does not work.
        """
        await self._begin(stack)
        actor = await self._engine_group(stack, "actor", self.crew.actor)
        replicas = await self._replicas(stack)
        synchronizer = None
        if replicas or self.role == "train":
            synchronizer = self._weights([] if replicas is None else replicas.members, actor)
        if self.role == "train":
            assert synchronizer is not None
            self.version = PostedVersion(self.clock, self.queue, synchronizer)
        self.weights: WeightSynchronizer | SharedDevice | LastingWeights | None = synchronizer
        reference = await self._reference(stack, actor)
        critic = await self._critic(stack)
        shared = self._placements([] if replicas is None else replicas.members, actor)
        if replicas and self.weights and any(isinstance(each.server, LastingServer) for each in replicas.members):
            self.weights = LastingWeights(self.weights, replicas.members)
        checkpointer = self._checkpointer(actor, critic)
        trainer = self._trainer(actor, reference, critic, checkpointer)
        watch = [] if self.crew.watch is None else [self.crew.watch]
        if replicas and synchronizer:
            replicas.connect(joining(synchronizer, shared, trainer, actor, self.train_placement, self.stages))
            watch.append(replicas.keep)
        await trainer.register()
        return Assembly(
            trainer=trainer,
            actor=actor,
            checkpointer=checkpointer,
            replicas=replicas,
            watch=tuple(watch),
            background=tuple([loop.run for loop in await self._loops()]),
        )

    async def _loops(self) -> Sequence[Explorer | RewardPipeline | OfflineProducer]:
        """What goes on beside the trainer, in this process."""
        task_for = self._task_order(self.tasks.train)
        if not self.explores:
            return [self._producer(task_for)]
        explorers = [self._explorer("explorer-0", task_for)] if self.role == "all" else []
        return [*explorers, *([await self._rewards()] if self.rewards else [])]

    def _checkpointer(self, actor: EngineGroup, critic: Critic | None) -> Checkpointer:
        return Checkpointer(
            store=self.store,
            engines={"actor": actor} if critic is None else {"actor": actor, "critic": critic.engine},
            queue=self.queue,
            description={"config": as_plain(self.config), "data": self.tasks.digests},
            stages=self.stages,
            hooks=self.hooks,
        )

    def _trainer(
        self, actor: EngineGroup, reference: EngineGroup | None, critic: Critic | None, checkpointer: Checkpointer
    ) -> Trainer:
        config, crew, recipe = self.config, self.crew, self.recipe
        seconds = config.deadlines.engine
        return Trainer(
            queue=self.queue,
            schedule=self.schedule,
            algorithm=recipe.algorithm,
            loss_options=recipe.loss_options,
            actor=actor,
            estimator=AdvantageEstimation(crew.estimator, self.queue, self.clock, seconds=seconds),
            reference=reference,
            recompute_old_log_probs=recipe.recompute_old_log_probs,
            critic=critic,
            log_prob_check=self._log_prob_check(critic),
            kl=config.algorithm.kl.controller(),
            kl_in_reward=recipe.plan.kl is not None,
            prepares=recipe.prepares,
            whole_groups=recipe.whole_groups,
            sources=make_sources(config.queue),
            mini_batches=config.algorithm.mini_batches,
            epochs=config.algorithm.epochs,
            weights=self.weights,
            checkpoints=checkpointer,
            checkpoint_every=config.checkpoint.every,
            checkpoint_at_end=config.checkpoint.at_end,
            evaluator=None if self.tasks.held_out is None else self._evaluator(self.tasks.held_out),
            evaluate_every=config.evaluation.every,
            explores=self.explores,
            placement=self.train_placement,
            version=self.version,
            steps_done=self.steps_done,
            clock=self.clock,
            stages=self.stages,
            hooks=self.hooks,
            agents=crew.agents,
            batch_seconds=config.deadlines.batch,
            recorded=config.observe.samples_per_step,
            stop=self.stop.requested,
        )

    def _log_prob_check(self, critic: Critic | None) -> LogProbCheck | None:
        if not self.config.log_prob_check.every:
            return None
        return LogProbCheck(
            schedule=self.schedule,
            note=self.stages.note,
            first_step=0 if critic is None else critic.warmup_steps,
            **log_prob_check_options(self.config),
        )

    def _producer(self, task_for: Callable[[GroupSlot], Task]) -> OfflineProducer:
        return OfflineProducer(
            queue=self.queue,
            schedule=self.schedule,
            steps_done=self.steps_done,
            task_for=task_for,
            agents=self.crew.agents,
            groups=self.config.data.prompts_per_step,
            clock=self.clock,
            batch_seconds=self.config.deadlines.batch,
        )

    def _evaluator(self, held_out: Sequence[Task]) -> Evaluator:
        assert self.crew.rewards is not None
        sampling = self.config.evaluation.sampling
        return Evaluator(
            tasks=held_out,
            agents=self.crew.agents,
            rewards=self.crew.rewards,
            backend=self.crew.backend,
            placement=self.rollout_placement,
            clock=self.clock,
            stages=self.stages,
            hooks=self.hooks,
            sampling=unstructure(sampling),
            seed=self.config.seed if sampling.seed is None else sampling.seed,
            run_seconds=self.config.deadlines.generate,
            score_seconds=self.config.deadlines.reward * self.config.schedule.reward_attempts,
            recorded=self.config.observe.samples_per_evaluation,
        )

    async def _engine_group(self, stack: AsyncExitStack, role: str, ranks: Sequence[EngineRank]) -> EngineGroup:
        group = EngineGroup(role, ranks, self.queue, self.clock, seconds=self.config.deadlines.engine)
        stack.push_async_callback(group.close)
        await group.initialize()
        self.engines.append(group)
        return group

    async def _reference(self, stack: AsyncExitStack, actor: EngineGroup) -> EngineGroup | None:
        """The initial policy: the actor without its adapter, or a model of its own."""
        if not self.recipe.reference:
            return None
        if self.config.model.lora is not None:
            return actor.without_adapter()
        return await self._engine_group(stack, "reference", self.crew.reference)

    async def _critic(self, stack: AsyncExitStack) -> Critic | None:
        """The value model, trained beside the actor."""
        if not self.recipe.critic:
            return None
        settings, recipe = self.config.critic, self.recipe
        group = await self._engine_group(stack, "critic", self.crew.critic)
        options = {"clip": settings.clip, "aggregation": recipe.algorithm.aggregation}
        if "length_norm" in recipe.loss_options:
            options["length_norm"] = recipe.loss_options["length_norm"]
        return Critic(engine=group, loss_options=options, warmup_steps=settings.warmup_steps)

    def _placements(self, replicas: Sequence[Replica], actor: EngineGroup) -> SharedDevice | None:
        """Leases on the devices of trainer and explorer: one and the same where engines and replicas share them.

        Returns:
            what they share where they take turns.
        """
        config, seconds, shared = self.config, self.config.deadlines.batch, None
        if not self.crew.shares_devices:
            self.train_placement, self.rollout_placement = (PlacementLease(self.clock, seconds) for _ in range(2))
            return None
        enter, leave = {}, {}
        if self._takes_turns and replicas and isinstance(self.weights, WeightSynchronizer):
            self.weights = shared = SharedDevice(
                self.engines, replicas, config.runtime.device, self.weights, self._canary(actor)
            )
            enter = {"rollout": shared.enter_rollout, "train": shared.enter_train}
            leave = {"rollout": shared.leave_rollout, "train": shared.leave_train}
        self.train_placement = PlacementLease(self.clock, seconds, enter=enter, leave=leave)
        self.rollout_placement = self.train_placement
        return shared

    def _weights(self, replicas: Sequence[Replica], actor: EngineGroup) -> WeightSynchronizer:
        section, ranks = self.config.checkpoint_engine, self.crew.actor
        return WeightSynchronizer(
            senders=[rank.sender for rank in ranks if rank.sender is not None],
            replicas=replicas,
            name=section.name,
            engine_class=ranks[0],
            clock=self.clock,
            settings=section.settings,
            deadline_seconds=self.config.deadlines.sync,
            canary=None if self._takes_turns or not replicas else self._canary(actor),
            kind=self.config.weights.kind,
            without_base=self.config.weights.without_base,
        )

    @property
    def _takes_turns(self) -> bool:
        """Whether the engine has left the device when replicas generate."""
        return self.crew.shares_devices and self.config.runtime.offload

    def _canary(self, actor: EngineGroup) -> Canary | None:
        config, recipe = self.config, self.recipe
        if not config.canary.tokens:
            return None
        agents, task = self.crew.agents, cast(Task, self.tasks.train[0])
        return Canary(
            prompt=lambda: resubmitted(
                lambda: agents.of("canary").prompt_ids(task, _CANARY_PROMPT), "the canary's prompt"
            ),
            scorer=actor,
            clock=self.clock,
            tokens=config.canary.tokens,
            temperature=config.sampling.temperature if self.explores else 1.0,
            bound=recipe.canary_bound,
            stops=config.canary.beyond == "stop",
            seconds=config.deadlines.generate,
            report=partial(self.stages.note, "canary/distance"),
        )
