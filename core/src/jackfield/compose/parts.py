"""The control loops of a run, made from the configuration around its workers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import attrs

from jackfield.algorithms import AdaptiveKLController, FixedKLController
from jackfield.clock import Clock
from jackfield.compose.controller import local_queue, remote_queue
from jackfield.compose.crew import MakeCrew, Needs
from jackfield.compose.inputs import Tasks
from jackfield.compose.joining import following, joining
from jackfield.compose.mixing import make_sources
from jackfield.compose.recipe import Recipe
from jackfield.config import KLConfig, RunConfig, as_plain
from jackfield.data.tasks import SeededOrder, Task, TaskSet
from jackfield.queue import GroupSlot, TransferQueue
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
    Experts,
    Explorer,
    FollowedVersion,
    OfflineProducer,
    PlacementLease,
    PostedVersion,
    Progress,
    RewardPipeline,
    Schedule,
    Stages,
    Trainer,
    trainer_begun,
)
from jackfield.weights import Canary, Replica, WeightFollower, WeightSynchronizer

__all__ = ["Assembly", "Exploration", "Parts", "Role"]

#: What of a run this process does.
Role: TypeAlias = Literal["all", "explore", "reward", "train"]

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


@attrs.frozen(kw_only=True)
class Exploration:
    """Everything that runs where a process explores and nothing else."""

    explorer: Explorer
    weights: FollowedVersion
    replicas: Replicas


class Parts:
    """Makes the parts of one run; what it starts is ended by the exit stack."""

    def __init__(
        self,
        config: RunConfig,
        recipe: Recipe,
        tasks: Tasks,
        make_crew: MakeCrew,
        hooks: Any,
        clock: Clock,
        store: CheckpointStore | None = None,
        role: Role = "all",
    ) -> None:
        self.config = config
        self.role = role
        self.recipe = recipe
        self.tasks = tasks
        self.make_crew = make_crew
        self.hooks = hooks
        self.clock = clock
        self.store = store
        self.stages = Stages(clock, hooks)
        self.version: Progress = Progress(clock)
        self.steps_done = Progress(clock)
        self.engines: list[EngineGroup] = []  # every model that is loaded beside the replicas
        self.explores = config.mode == "both"
        self.trains = role in ("all", "train")
        self.rewards = role == "reward" or (self.trains and config.queue.controller.rewards == "train")
        self.evaluates = bool(config.evaluation.every) and self.trains
        self.generates = (self.explores and role in ("all", "explore")) or self.evaluates
        self.schedule = Schedule(
            steps=config.schedule.steps,
            sync_interval=config.schedule.sync_interval,
            sync_offset=config.schedule.sync_offset,
        )

    async def build(self, stack: AsyncExitStack) -> Assembly:
        """Make, connect and start everything.

        Raises:
            JackfieldError: the first part that does not work.
        """
        self.crew = crew = await self.make_crew(self._needs(), stack)
        self.queue = await self._queue(stack)
        actor = await self._engine_group(stack, "actor", crew.actor)
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
        watch = [] if crew.watch is None else [crew.watch]
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

    async def build_rewards(self, stack: AsyncExitStack) -> RewardPipeline:
        """The same for rewards by themselves, once the trainer has begun."""
        self.crew = await self.make_crew(self._needs(), stack)
        self.queue = await self._queue(stack)
        await trainer_begun(self.queue, self.config.deadlines.batch)
        return await self._rewards()

    async def build_explorer(self, stack: AsyncExitStack) -> Exploration:
        """The same for an explorer by itself: replicas that follow the weights of a trainer elsewhere."""
        config = self.config
        self.crew = await self.make_crew(self._needs(), stack)
        self.queue = await self._queue(stack)
        replicas = await self._replicas(stack)
        assert replicas is not None
        self.rollout_placement = PlacementLease(self.clock, config.deadlines.batch)
        engine, seconds = config.checkpoint_engine, config.deadlines.sync
        follower = WeightFollower(replicas.members, engine.name, engine.settings, self.clock, seconds)
        replicas.connect(following(follower, self.rollout_placement, self.stages))
        return Exploration(
            explorer=self._explorer(config.name, self._task_order(self.tasks.train)),
            weights=FollowedVersion(
                queue=self.queue,
                follower=follower,
                version=self.version,
                clock=self.clock,
                stages=self.stages,
                idle_seconds=config.deadlines.batch,
            ),
            replicas=replicas,
        )

    def _checkpointer(self, actor: EngineGroup, critic: Critic | None) -> Checkpointer:
        assert self.store is not None
        return Checkpointer(
            store=self.store,
            engines={"actor": actor} if critic is None else {"actor": actor, "critic": critic.engine},
            queue=self.queue,
            description={"config": as_plain(self.config), "data": self.tasks.digests},
            stages=self.stages,
            hooks=self.hooks,
        )

    def _needs(self) -> Needs:
        recipe = self.recipe
        return Needs(
            engines=self.trains,
            replicas=self.generates,
            rewards=(self.rewards and self.explores) or self.evaluates,
            reference=recipe.reference and self.config.model.lora is None and self.trains,
            critic=recipe.critic and self.trains,
            loss_columns=recipe.loss_columns,
            renamed=recipe.renamed,
            plan=recipe.plan,
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
            kl=_kl_controller(config.algorithm.kl),
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
        )

    def _explorer(self, name: str, task_for: Callable[[GroupSlot], Task]) -> Explorer:
        config = self.config
        return Explorer(
            name=name,
            queue=self.queue,
            schedule=self.schedule,
            version=self.version,
            placement=self.rollout_placement,
            clock=self.clock,
            stages=self.stages,
            task_for=task_for,
            agents=self.crew.agents,
            sampling=unstructure(config.sampling),
            groups=config.data.prompts_per_step,
            runs=config.data.runs_per_prompt,
            seed=config.seed,
            run_seconds=config.deadlines.generate,
            batch_seconds=config.deadlines.batch,
            greedy_baseline=self.recipe.greedy_baseline,
            experts=None if self.tasks.expert is None else self._experts(self.tasks.expert),
        )

    def _experts(self, tasks: TaskSet) -> Experts:
        """An expert's answers beside the groups that are explored."""
        rows, groups = self.recipe.experts, self.config.data.prompts_per_step
        order = SeededOrder(size=len(tasks), seed=self.config.seed)
        return Experts(
            rows=rows,
            task_for=lambda slot: cast(Task, tasks[order.index(slot.ticket * rows + slot.index - groups)]),
        )

    async def _rewards(self) -> RewardPipeline:
        assert self.crew.rewards is not None
        pipeline = RewardPipeline(
            queue=self.queue,
            workers=self.crew.rewards,
            clock=self.clock,
            stages=self.stages,
            score_seconds=self.config.deadlines.reward * self.config.schedule.reward_attempts,
            idle_seconds=self.config.deadlines.batch,
            max_failed_groups=self.config.schedule.max_refills,
            equal_groups_replaced=self.config.schedule.max_refills if self.recipe.dynamic_sampling else 0,
        )
        await pipeline.register()
        return pipeline

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
        return Evaluator(
            tasks=held_out,
            agents=self.crew.agents,
            rewards=self.crew.rewards,
            backend=self.crew.backend,
            placement=self.rollout_placement,
            clock=self.clock,
            stages=self.stages,
            hooks=self.hooks,
            sampling=unstructure(self.config.evaluation.sampling),
            seed=self.config.seed,
            run_seconds=self.config.deadlines.generate,
            score_seconds=self.config.deadlines.reward * self.config.schedule.reward_attempts,
            recorded=self.config.observe.samples_per_evaluation,
        )

    async def _queue(self, stack: AsyncExitStack) -> TransferQueue:
        config, backend = self.config, self.crew.backend
        queue: TransferQueue
        if config.queue.controller.address is None:
            queue = local_queue(config, backend, self.clock)
        else:
            queue = remote_queue(config, backend, self.clock, config.name)
        stack.push_async_callback(queue.close)
        await queue.start()
        return queue

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

    async def _replicas(self, stack: AsyncExitStack) -> Replicas | None:
        if not self.crew.servers:
            return None
        config = self.config
        replicas = Replicas(
            self.crew.fleet,
            self.clock,
            name=config.rollout.name,
            start_seconds=config.deadlines.start,
            drain_seconds=config.deadlines.drain,
        )
        stack.push_async_callback(replicas.close)
        await replicas.start(self.crew.servers)
        return replicas

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
            prompt=lambda: resubmitted(lambda: agents.of("canary").prompt_ids(task, _CANARY_PROMPT)),
            scorer=actor,
            clock=self.clock,
            tokens=config.canary.tokens,
            temperature=config.sampling.temperature if self.explores else 1.0,
            bound=recipe.canary_bound,
            stops=config.canary.beyond == "stop",
            seconds=config.deadlines.generate,
            report=partial(self.stages.note, "canary/distance"),
        )

    def _task_order(self, tasks: TaskSet) -> Callable[[GroupSlot], Task]:
        """Tasks by slot: the same for any number of explorers, and for a run that resumes."""
        order = SeededOrder(size=len(tasks), seed=self.config.seed)
        refills = SeededOrder(size=len(tasks), seed=self.config.seed + 1)
        groups, attempts = self.config.data.prompts_per_step, self.config.schedule.max_refills + 1

        def task_for(slot: GroupSlot) -> Task:
            position = slot.ticket * groups + slot.index
            if slot.attempt:
                return cast(Task, tasks[refills.index(position * attempts + slot.attempt)])
            return cast(Task, tasks[order.index(position)])

        return task_for


def _kl_controller(kl: KLConfig) -> FixedKLController | AdaptiveKLController:
    if kl.target is None:
        return FixedKLController(coefficient=kl.coefficient)
    return AdaptiveKLController(coefficient=kl.coefficient, target=kl.target, horizon=kl.horizon)
