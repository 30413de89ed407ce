"""The parts of a run that several of its roles have, made from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Literal, TypeAlias, cast

from jackfield.clock import Clock
from jackfield.compose.controller import local_queue, remote_queue
from jackfield.compose.crew import MakeCrew, Needs
from jackfield.compose.inputs import Tasks
from jackfield.compose.recipe import Recipe
from jackfield.config import RunConfig
from jackfield.data.tasks import SeededOrder, Task, TaskSet
from jackfield.queue import GroupSlot, TransferQueue
from jackfield.runtime.replicas import Replicas
from jackfield.settings import unstructure
from jackfield.trainer import (
    Experts,
    Explorer,
    PlacementLease,
    Progress,
    RewardPipeline,
    Schedule,
    Stages,
)

__all__ = ["Parts", "Role"]

#: What of a run this process does.
Role: TypeAlias = Literal["all", "explore", "reward", "train"]


#: What a role is called, before the run's name.
_CLIENTS = {"all": "the run", "explore": "the explorer", "reward": "the role", "train": "the trainer of"}


class Parts:
    """Makes the parts of one role; what it starts is ended by the exit stack."""

    rollout_placement: PlacementLease  #: of who generates; made by a role that does

    def __init__(
        self,
        config: RunConfig,
        recipe: Recipe,
        tasks: Tasks,
        make_crew: MakeCrew,
        hooks: Any,
        clock: Clock,
        role: Role,
    ) -> None:
        self.config = config
        self.role = role
        self.recipe = recipe
        self.tasks = tasks
        self.make_crew = make_crew
        self.hooks = hooks
        self.clock = clock
        self.stages = Stages(clock, hooks)
        self.version: Progress = Progress(clock)
        self.steps_done = Progress(clock)
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

    async def _queue(self, stack: AsyncExitStack) -> TransferQueue:
        config, backend = self.config, self.crew.backend
        queue: TransferQueue
        if config.queue.controller.address is None:
            queue = local_queue(config, backend, self.clock)
        else:
            queue = remote_queue(config, backend, self.clock, f"{_CLIENTS[self.role]} {config.name}")
        stack.push_async_callback(queue.close)
        await queue.start()
        queue.done = False
        return queue

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
            seed=config.seed if config.sampling.seed is None else config.sampling.seed,
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

    async def _begin(self, stack: AsyncExitStack) -> None:
        """The workers of this role, and the queue."""
        self.crew = await self.make_crew(self._needs(), stack)
        self.queue = await self._queue(stack)
