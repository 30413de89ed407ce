"""Builds the objects of a run, or of one of its roles, and runs their loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

from jackfield.cluster.device import DeviceLease
from jackfield.compose.export import export_model
from jackfield.compose.mixing import mixed_samples
from jackfield.compose.resume import StartingPoint, mark_finished
from jackfield.compose.role_builder import RoleBuilder
from jackfield.compose.training import TrainerBuilder
from jackfield.data.tasks import SeededOrder, Task
from jackfield.queue import GroupKey, Values
from jackfield.runtime.engine_group import EngineGroup
from jackfield.trainer import (
    Answers,
    Explorer,
    RewardPipeline,
    WeightSubscriber,
    publish_end,
    trainer_begun,
    trainer_finished,
)
from jackfield.weights import Replica


class RunBuilder(RoleBuilder):
    """Builds the objects of one role from the configuration, and runs its loops."""

    async def execute(self, start: StartingPoint) -> int:
        """Run the role to its end, and close everything in reverse order, whatever happens.

        Returns:
            what :attr:`~jackfield.trainer.Role.progress` counts.
        """
        async with AsyncExitStack() as self.stack, asyncio.TaskGroup() as self._tasks:
            if self.role.trains:
                count = await self.train(start)
            else:
                count = await (self.explore() if self.role.name == "explore" else self.reward())
            for task in self._background:
                task.cancel()
        return count

    # -- roles

    async def train(self, start: StartingPoint) -> int:
        """Train until the schedule ends or a stop is requested. Returns the number of completed steps.

        Raises:
            JackfieldError: the first part that does not work.
        """
        await self.begin()
        built = TrainerBuilder(self)
        trainer = await built.build(start.store)
        if self.role.workers.watch is not None:
            self.background(self.role.workers.watch)
        restored, mixed = None, mixed_samples(self.config.mixing, self.role.queue, Values(self.role.workers.backend))
        if start.checkpoint is None:
            await self.role.queue.clear()
            for samples in mixed:
                await samples.put()
        else:
            assert trainer.checkpoints is not None
            restored = await trainer.checkpoints.load(start.checkpoint)
        await trainer.begin(start.step, restored)
        if built.pool is not None:
            await self.open_control(built.pool)
        for loop in (*await self._producers(), *(samples.keep for samples in mixed)):
            self.background(loop)
        with self.stop.boundary("with a checkpoint after this step"):
            steps = await trainer.run(start.step)
            if steps == self.config.schedule.steps:
                await self._finish(built.actor, steps)
        return steps

    async def explore(self) -> int:
        """Explore for a trainer in another process until it has all batches. Returns its newest weight version."""
        config, seconds = self.config, self.config.deadlines.batch
        await self.begin()
        pool = await self.start_replicas()
        assert pool is not None
        self.rollout_placement = DeviceLease(self.role.clock, seconds)
        weights = WeightSubscriber(role=self.role, replicas=pool.members)
        pool.connect(*following(weights, self.rollout_placement))
        self.stop.begun()
        self.background(pool.keep)
        self.background(weights.run)
        await weights.first(seconds)
        await self.open_control(pool)
        await self._explorer(config.name).run()
        self.finished = True
        return self.role.version.value

    async def reward(self) -> int:
        """Score samples for a trainer in another process until its last step. Returns the number of groups."""
        seconds = self.config.deadlines.batch + self.config.deadlines.engine
        await self.begin()
        await trainer_begun(self.role.queue, self.config.deadlines.batch)
        pipeline = await self._rewards()
        self.stop.begun()
        self.background(pipeline.run)
        await trainer_finished(self.role.queue, lambda: pipeline.groups, seconds)
        self.finished = True
        await self.role.steps_done.advance(pipeline.groups)
        return pipeline.groups

    async def _finish(self, actor: EngineGroup, steps: int) -> None:
        """Write the model, and tell everybody that the last step is done."""
        folder = Path(self.config.folder)
        await export_model(actor, folder / "model")
        if self.role.name == "train":
            await publish_end(self.role.queue, steps)
        mark_finished(folder, steps)
        self.finished = True

    # -- producers

    async def _producers(self) -> Sequence[Callable[[], Coroutine[Any, Any, None]]]:
        """The loops that make and score samples beside the trainer, in this process."""
        explorers = [] if self.role.name == "train" else [self._explorer("explorer-0").run]
        return [*explorers, *([(await self._rewards()).run] if self.role.scores else [])]

    def _explorer(self, name: str) -> Explorer:
        return Explorer(
            role=self.role,
            name=name,
            placement=self.rollout_placement,
            task_for=self._task_order(),
            answers=self._answers(),
        )

    def _answers(self) -> Answers | None:
        """Answers of the data: all groups of an offline run, or those of an expert beside the rollouts."""
        groups, tasks = self.config.data.groups_per_batch, self.tasks.expert
        if not self.role.explores:
            return Answers(groups=groups, task_for=self._task_order())
        if tasks is None:
            return None
        experts, order = self.role.algorithm.experts, SeededOrder(size=len(tasks), seed=self.config.seed)
        return Answers(
            groups=experts,
            task_for=lambda key: cast(Task, tasks[order.index(key.batch * experts + key.index - groups)]),
        )

    def _task_order(self) -> Callable[[GroupKey], Task]:
        """Order tasks by group: the same for any number of explorers, and for a run that resumes."""
        tasks, seed = self.tasks.train, self.config.seed
        order, retries = (SeededOrder(size=len(tasks), seed=each) for each in (seed, seed + 1))
        groups, attempts = self.config.data.groups_per_batch, self.config.schedule.max_retries + 1

        def task_for(key: GroupKey) -> Task:
            position = key.batch * groups + key.index
            if key.retry:
                return cast(Task, tasks[retries.index(position * attempts + key.retry)])
            return cast(Task, tasks[order.index(position)])

        return task_for

    async def _rewards(self) -> RewardPipeline:
        pipeline = RewardPipeline(role=self.role)
        await pipeline.register()
        return pipeline


def following(
    subscriber: WeightSubscriber, placement: DeviceLease
) -> tuple[Callable[[Replica], Awaitable[None]], Callable[[], AbstractAsyncContextManager[None]]]:
    """Return how later replicas of an explorer get the newest weights, and what holds newer ones back meanwhile."""

    @asynccontextmanager
    async def hold() -> AsyncIterator[None]:
        async with placement.hold("rollout", joins=True), subscriber.loading:
            yield

    async def load(replica: Replica) -> None:
        version = 0 if subscriber.newest is None else subscriber.newest.version
        async with subscriber.role.stages.measure("load_weights", "weights", version):
            await subscriber.load(replica)

    return load, hold
