"""What every role of a run has: its configuration, clock, workers, queue and replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs

from jackfield.clock import Clock
from jackfield.cluster.control import serve_control
from jackfield.cluster.device import DeviceLease
from jackfield.cluster.metrics import ReplicaMetrics
from jackfield.cluster.pool import ReplicaPool
from jackfield.compose.controller import address_file, local_queue
from jackfield.compose.crew import Crew, MakeCrew
from jackfield.compose.inputs import Tasks
from jackfield.compose.recipe import Recipe
from jackfield.compose.stopping import Stop
from jackfield.compose.workers import Needs
from jackfield.config import RunConfig
from jackfield.plugins import HookManager
from jackfield.queue import TransferQueue
from jackfield.queue.remote import connect_queue
from jackfield.trainer import Progress, Schedule, Stages

__all__ = ["Prepared", "Role", "RoleParts"]

#: What of a run this process does.
Role: TypeAlias = Literal["all", "train", "explore", "reward"]

#: What a role is called at the queue's controller, before the run's name.
_CLIENTS = {"all": "the run", "train": "the trainer of", "explore": "the explorer", "reward": "the role"}


@attrs.frozen(kw_only=True)
class Prepared:
    """What a run has before it begins: everything that can be refused has been checked."""

    config: RunConfig
    role: Role
    hooks: HookManager
    recipe: Recipe
    tasks: Tasks
    clock: Clock
    stop: Stop


class RoleParts:
    """The parts that every role of a run has. Its workers, queue and replicas are there once it has begun."""

    stack: AsyncExitStack  #: closes what was started, in reverse order
    crew: Crew
    queue: TransferQueue
    rollout_placement: DeviceLease

    def __init__(self, prepared: Prepared, make_crew: MakeCrew) -> None:
        """
        Args:
            prepared: the run, checked.
            make_crew: starts workers.
        """
        self.config = config = prepared.config
        self.role, self.recipe, self.tasks = prepared.role, prepared.recipe, prepared.tasks
        self.clock, self.stop = prepared.clock, prepared.stop
        self.make_crew = make_crew
        self.explores = config.mode == "online"
        self.trains = self.role in ("all", "train")
        self.scores = self.role == "reward" or (self.trains and config.queue.rewards == "train")
        self.stages = Stages(self.clock, prepared.hooks.hook)
        self.version, self.done = Progress(self.clock), Progress(self.clock)
        self.schedule = Schedule(
            steps=config.schedule.steps,
            sync_interval=config.schedule.sync_interval,
            sync_offset=config.schedule.sync_offset,
            explores=self.explores,
        )
        self.finished = False  #: whether the role has done its work
        self._tasks: asyncio.TaskGroup
        self._background: list[asyncio.Task[None]] = []

    @property
    def progress(self) -> Progress:
        """Return what the role counts: completed steps, an explorer's weight versions, or scored groups."""
        return self.version if self.role == "explore" else self.done

    def background(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a loop until the role has ended; its error ends the role."""
        self._background.append(self._tasks.create_task(loop()))

    async def begin(self) -> None:
        """Start the workers of this role and its queue."""
        config, recipe = self.config, self.recipe
        evaluates = bool(config.evaluation.every) and self.trains
        needs = Needs(
            engines=self.trains,
            replicas=(self.explores and self.role in ("all", "explore")) or evaluates,
            rewards=(self.scores and self.explores) or evaluates,
            reference=recipe.reference and config.model.lora is None and self.trains,
            critic=recipe.critic and self.trains,
            loss_columns=recipe.loss_columns,
            renamed=recipe.renamed,
            plan=recipe.plan,
        )
        self.crew = await self.make_crew(needs, self.stack)
        if config.queue.address is None:
            self.queue = local_queue(config, self.crew.backend, self.clock)
            self.stack.push_async_callback(self.queue.close)
            await self.queue.start()
        else:
            self.stack.push_async_callback(self.crew.backend.close)
            await self.crew.backend.start()
            name = f"{_CLIENTS[self.role]} {config.name}"
            self.queue, connection = await connect_queue(address_file(config), name, self.clock)
            self.stack.push_async_callback(lambda: connection.close(early=not self.finished))

    async def start_replicas(self) -> ReplicaPool | None:
        """Start the rollout servers; None where this role has none."""
        if not self.crew.replicas:
            return None
        config = self.config
        pool = ReplicaPool(
            self.crew.places,
            self.clock,
            name=config.rollout.name,
            restarts=config.cluster.replica_restarts,
            start_seconds=config.deadlines.start,
            drain_seconds=config.deadlines.drain,
        )
        self.stack.push_async_callback(pool.close)
        await pool.start(self.crew.replicas)
        return pool

    async def open_control(self, replicas: ReplicaPool) -> None:
        """Let other processes list and change the replicas."""
        addresses, port = {}, self.config.cluster.metrics_port
        if port is not None:
            metrics = ReplicaMetrics(replicas, port)
            self.stack.push_async_callback(metrics.close)
            addresses["metrics"] = await metrics.open()
        folder, silence = Path(self.config.folder), self.config.deadlines.heartbeat
        await self.stack.enter_async_context(serve_control(folder, replicas, self.clock, silence, **addresses))
