"""The parts of a run, each made from its section of the configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import attrs

from jackfield.abc.agent import AgentContext, AgentLoopBase
from jackfield.abc.checkpoint_engine import CheckpointEngine, CheckpointEngineContext
from jackfield.abc.engine import BaseEngine, EngineContext
from jackfield.abc.reward import RewardAgent, RewardContext
from jackfield.abc.rollout import BaseRolloutServer, RolloutContext
from jackfield.abc.transfer_queue import TransferQueueBackend, TransferQueueContext
from jackfield.algorithms import Algorithm, algorithm
from jackfield.clock import Clock
from jackfield.config import PluginSection, RunConfig
from jackfield.data.tasks import SeededOrder, Task, TaskSet
from jackfield.data.tokens import HuggingFaceChatTokenizer, check_vocabulary
from jackfield.errors import ConfigError, DataError
from jackfield.plugins import Registry, require_capability
from jackfield.queue import GroupSlot, TransferQueue
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.engine_group import InlineEngineGroup
from jackfield.runtime.router import ReplicaRouter
from jackfield.runtime.shared_device import SharedDevice
from jackfield.structuring import unstructure
from jackfield.trainer import (
    Evaluator,
    Explorer,
    OfflineProducer,
    PlacementLease,
    Progress,
    RewardPipeline,
    Schedule,
    Stages,
    Trainer,
)
from jackfield.weights import Replica, WeightSender, WeightSynchronizer

__all__ = ["Assembly", "Parts"]

_SUPPLIED = frozenset({"rollout_log_probs"})  #: beyond samples and rewards, what a run can give to an algorithm

LedgerWriter = Callable[[dict[str, Any]], None]


@attrs.frozen(kw_only=True)
class Assembly:
    """Everything that runs."""

    trainer: Trainer
    actor: InlineEngineGroup
    background: tuple[Any, ...]  #: each has ``run()``: explorer and reward pipeline, or the offline producer


class Parts:
    """Makes the parts of one run; what it starts is ended by the exit stack."""

    def __init__(self, config: RunConfig, registry: Registry, hooks: Any, clock: Clock) -> None:
        self.config = config
        self.registry = registry
        self.hooks = hooks
        self.clock = clock
        self.stages = Stages(clock, hooks)
        self.version, self.steps_done = Progress(clock), Progress(clock)
        self.algorithm = _algorithm(config)
        self.explores = config.mode == "both"
        self.schedule = Schedule(
            steps=config.schedule.steps,
            sync_interval=config.schedule.sync_interval,
            sync_offset=config.schedule.sync_offset,
        )
        _check_mode(config, self.algorithm)

    async def build(self, stack: AsyncExitStack, ledger: LedgerWriter) -> Assembly:
        """Make, connect and start everything.

        Raises:
            JackfieldError: the first thing in the configuration, the data or a plugin that does not work.
        """
        config = self.config
        tasks = self._tasks("train")
        held_out = self._tasks("eval") if config.evaluation.every else []
        self.tokenizer = HuggingFaceChatTokenizer.load(
            config.model.path,
            chat_template=config.data.chat_template,
            trust_remote_code=config.model.trust_remote_code,
        )
        self._check_model()
        self.queue = await self._queue(stack, ledger)
        engine = self._engine("actor")
        actor = await self._engine_group(stack, engine)
        replicas = await self._replicas(stack) if self.explores or config.evaluation.every else []
        self.weights: WeightSynchronizer | SharedDevice | None = self._weights(engine, replicas) if replicas else None
        self.placement = self._placement(actor, replicas)
        self.make_agent = self._agents(ReplicaRouter([replica.server for replica in replicas]))
        self.reward = await self._reward(stack) if replicas else None
        trainer = await self._trainer(stack, engine, actor, held_out)
        trainer.register()
        task_for = self._task_order(tasks)
        background = (self._explorer(task_for), self._rewards()) if self.explores else (self._producer(task_for),)
        return Assembly(trainer=trainer, actor=actor, background=background)

    async def _trainer(
        self,
        stack: AsyncExitStack,
        engine: BaseEngine,
        actor: InlineEngineGroup,
        held_out: Sequence[Task],
    ) -> Trainer:
        config, chosen = self.config, self.algorithm
        estimator = None
        if chosen.advantages:
            estimator = AdvantageWorker(self.queue, chosen.advantages, chosen.advantages_options)
        return Trainer(
            queue=self.queue,
            schedule=self.schedule,
            algorithm=chosen,
            loss_options=_loss_options(config, chosen),
            actor=actor,
            estimator=estimator,
            reference=await self._reference(stack, engine),
            recompute_old_log_probs=estimator is not None and config.algorithm.old_log_probs == "engine",
            mini_batches=config.algorithm.mini_batches,
            epochs=config.algorithm.epochs,
            weights=self.weights,
            evaluator=self._evaluator(held_out) if config.evaluation.every else None,
            evaluate_every=config.evaluation.every,
            explores=self.explores,
            placement=self.placement,
            version=self.version,
            steps_done=self.steps_done,
            clock=self.clock,
            stages=self.stages,
            hooks=self.hooks,
            tokenizer=self.tokenizer,
            batch_seconds=config.deadlines.batch,
            recorded=config.observe.samples_per_step,
        )

    def _explorer(self, task_for: Callable[[GroupSlot], Task]) -> Explorer:
        config = self.config
        return Explorer(
            name="explorer-0",
            queue=self.queue,
            schedule=self.schedule,
            version=self.version,
            placement=self.placement,
            clock=self.clock,
            stages=self.stages,
            task_for=task_for,
            make_agent=self.make_agent,
            sampling=unstructure(config.sampling),
            groups=config.data.prompts_per_step,
            runs=config.data.runs_per_prompt,
            seed=config.seed,
            run_seconds=config.deadlines.generate,
            batch_seconds=config.deadlines.batch,
        )

    def _rewards(self) -> RewardPipeline:
        assert self.reward is not None
        pipeline = RewardPipeline(
            queue=self.queue,
            agent=self.reward,
            tokenizer=self.tokenizer,
            clock=self.clock,
            stages=self.stages,
            score_seconds=self.config.deadlines.reward,
            idle_seconds=self.config.deadlines.batch,
        )
        pipeline.register()
        return pipeline

    def _producer(self, task_for: Callable[[GroupSlot], Task]) -> OfflineProducer:
        return OfflineProducer(
            queue=self.queue,
            schedule=self.schedule,
            steps_done=self.steps_done,
            task_for=task_for,
            encode=self._encode_supervised,
            groups=self.config.data.prompts_per_step,
            batch_seconds=self.config.deadlines.batch,
        )

    def _evaluator(self, held_out: Sequence[Task]) -> Evaluator:
        assert self.reward is not None
        return Evaluator(
            tasks=held_out,
            make_agent=self.make_agent,
            reward=self.reward,
            tokenizer=self.tokenizer,
            placement=self.placement,
            clock=self.clock,
            stages=self.stages,
            hooks=self.hooks,
            sampling=unstructure(self.config.evaluation.sampling),
            run_seconds=self.config.deadlines.generate,
            score_seconds=self.config.deadlines.reward,
            recorded=self.config.observe.samples_per_evaluation,
        )

    def _check_model(self) -> None:
        """What can be refused before anything is loaded."""
        described = Path(self.config.model.path) / "config.json"
        size = json.loads(described.read_text(encoding="utf-8")).get("vocab_size") if described.is_file() else None
        if size is not None:
            check_vocabulary(self.tokenizer, size)
        if self.config.model.lora is not None:
            require_capability(self.registry.find("engine", self.config.engine.name), "lora", "model.lora is set")
            rollout = self.registry.find("rollout", self.config.rollout.name)
            require_capability(rollout, "weights_adapter", "model.lora is set")

    def _plugin(self, kind: str, section: str, context: Any) -> Any:
        chosen: PluginSection = getattr(self.config, section)
        return self.registry.load(kind, chosen.name).build(chosen.settings, context, section)

    async def _queue(self, stack: AsyncExitStack, ledger: LedgerWriter) -> TransferQueue:
        context = TransferQueueContext(folder=str(Path(self.config.folder) / "queue"))
        backend: TransferQueueBackend = self._plugin("transfer_queue", "transfer_queue", context)

        def write(entry: dict[str, Any]) -> None:
            ledger(entry)
            queue.ledger.clear()  # it is in the file

        queue = TransferQueue(backend, self.clock, max_refills=self.config.schedule.max_refills, on_ledger=write)
        stack.push_async_callback(queue.close)
        await queue.start()
        return queue

    def _engine(self, role: str) -> BaseEngine:
        config = self.config
        context = EngineContext(
            role=role,  # type: ignore[arg-type]
            model=config.model if role == "actor" else attrs.evolve(config.model, lora=None),
            optimizer=config.optimizer if role == "actor" else None,
            device=config.runtime.device,
            seed=config.seed,
            temperature=config.sampling.temperature if self.explores else 1.0,
            micro_batch_tokens=config.runtime.micro_batch_tokens,
        )
        return cast(BaseEngine, self._plugin("engine", "engine", context))

    async def _engine_group(self, stack: AsyncExitStack, engine: BaseEngine) -> InlineEngineGroup:
        group = InlineEngineGroup(
            engine,
            self.queue,
            self.clock,
            seconds=self.config.deadlines.engine,
            loss_columns=_loss_columns(self.config, self.algorithm),
            renamed={"old_log_probs": "rollout_log_probs"} if self.config.algorithm.old_log_probs == "rollout" else {},
        )
        stack.push_async_callback(group.close)
        await group.initialize()
        return group

    async def _reference(self, stack: AsyncExitStack, actor: BaseEngine) -> InlineEngineGroup | None:
        """The initial policy: the actor without its adapter, or a model of its own."""
        if not self.config.algorithm.kl.coefficient:
            return None
        if self.config.model.lora is not None:
            seconds = self.config.deadlines.engine
            return InlineEngineGroup(actor, self.queue, self.clock, seconds=seconds, adapter_off=True)
        return await self._engine_group(stack, self._engine("reference"))

    async def _replicas(self, stack: AsyncExitStack) -> list[Replica]:
        config = self.config
        replicas: list[Replica] = []
        for replica in range(config.runtime.rollout_replicas):
            context = RolloutContext(
                model=config.model,
                replica=replica,
                device=config.runtime.device,
                seed=config.seed + replica,
                clock=self.clock,
            )
            server: BaseRolloutServer = self._plugin("rollout", "rollout", context)
            stack.push_async_callback(server.stop)
            name = f"rollout replica {replica} ({config.rollout.name}) to start"
            info = await self.clock.wait_for(server.start(), config.deadlines.start, name)
            replicas.append(Replica(server, info))
        return replicas

    def _placement(self, actor: InlineEngineGroup, replicas: Sequence[Replica]) -> PlacementLease:
        """One lease: engine and replicas share this process's device."""
        config = self.config
        if not (config.runtime.offload and isinstance(self.weights, WeightSynchronizer)):
            return PlacementLease(self.clock, config.deadlines.batch)
        self.weights = shared = SharedDevice(actor, replicas, config.runtime.device, self.weights)
        return PlacementLease(
            self.clock,
            config.deadlines.batch,
            enter={"rollout": shared.enter_rollout, "train": shared.enter_train},
            leave={"rollout": shared.leave_rollout, "train": shared.leave_train},
        )

    def _agents(self, router: ReplicaRouter) -> Callable[[], AgentLoopBase]:
        config = self.config
        loaded = self.registry.load("agent", config.agent.name)
        context = AgentContext(
            generate=router.generate,
            tokenizer=self.tokenizer,
            clock=self.clock,
            run_id=config.name,
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
        return lambda: cast(AgentLoopBase, loaded.build(config.agent.settings, context, "agent"))

    async def _reward(self, stack: AsyncExitStack) -> RewardAgent:
        agent: RewardAgent = self._plugin("reward", "reward", RewardContext(clock=self.clock, seed=self.config.seed))
        stack.push_async_callback(agent.close)
        name = f"the reward agent {self.config.reward.name} to start"
        await self.clock.wait_for(agent.start(), self.config.deadlines.start, name)
        return agent

    def _weights(self, engine: BaseEngine, replicas: Sequence[Replica]) -> WeightSynchronizer:
        section = self.config.checkpoint_engine
        context = CheckpointEngineContext(side="trainer", deadline_seconds=self.config.deadlines.sync)
        loaded = self.registry.load("checkpoint_engine", section.name)
        transport: CheckpointEngine = loaded.build(section.settings, context, "checkpoint_engine")
        return WeightSynchronizer(
            senders=[WeightSender(transport, engine.get_per_tensor_param)],
            replicas=replicas,
            name=section.name,
            engine_class=loaded.cls,
            clock=self.clock,
            settings=section.settings,
            deadline_seconds=self.config.deadlines.sync,
        )

    def _tasks(self, which: str) -> TaskSet:
        file = getattr(self.config.data, which)
        if file is None:
            raise ConfigError(
                f"no {which} data is given", code="config.missing-key", where=f"data.{which}", fix="name a JSONL file"
            )
        limit = self.config.evaluation.tasks if which == "eval" else None
        return TaskSet.load(file, self.config.data.format, limit=limit)

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

    def _encode_supervised(self, task: Task) -> tuple[Sequence[int], Sequence[int]]:
        if task.response is None:
            raise DataError("a task has no answer to learn from", where=f"task {task.id}", fix="set data.format")
        return self.tokenizer.encode_chat(task.messages), self.tokenizer.encode_response(task.response)


def _algorithm(config: RunConfig) -> Algorithm:
    """The bundle with what the configuration replaces."""
    chosen, settings = algorithm(config.algorithm.name), config.algorithm
    if settings.loss is not None:
        chosen = attrs.evolve(chosen, loss=settings.loss.name, loss_options=settings.loss.options)
    if settings.advantages is not None:
        options = settings.advantages.options
        chosen = attrs.evolve(chosen, advantages=settings.advantages.name, advantages_options=options)
    if settings.aggregation is not None:
        chosen = attrs.evolve(chosen, aggregation=settings.aggregation)
    assert chosen.parts  # looks every name up
    return chosen


def _check_mode(config: RunConfig, chosen: Algorithm) -> None:
    missing = sorted(set(chosen.needs) - _SUPPLIED)
    if missing:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} needs what a run cannot supply yet: {', '.join(missing)}",
            where="algorithm.name",
            expected="an algorithm that needs nothing beyond samples, rewards and rollout log-probs",
            fix="choose grpo, dr_grpo, rloo, gspo, cispo or another one; `jackfield algorithms list` shows them",
        )
    if config.mode == "train" and chosen.advantages is not None:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} needs rewards, and mode 'train' has none",
            where="mode",
            expected="mode: both, or an algorithm that learns from the data's own answers (sft)",
        )
    if config.mode == "both" and chosen.advantages is None:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} learns from the data's own answers",
            where="mode",
            expected="mode: train",
            found="mode: both",
        )


def _loss_options(config: RunConfig, chosen: Algorithm) -> dict[str, Any]:
    options = {**chosen.loss_options, "aggregation": chosen.aggregation}
    if config.algorithm.kl.coefficient:
        options |= {"kl": config.algorithm.kl.name, "kl_coefficient": config.algorithm.kl.coefficient}
    if config.algorithm.entropy_coefficient:
        options["entropy_coefficient"] = config.algorithm.entropy_coefficient
    return options


def _loss_columns(config: RunConfig, chosen: Algorithm) -> tuple[str, ...]:
    """What the loss reads beside the sample."""
    columns = ("advantages", "old_log_probs") if chosen.advantages else ()
    return (*columns, "ref_log_probs") if config.algorithm.kl.coefficient else columns
