"""What every role of a run begins with: workers, queue and replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from jackfield.cluster.control import serve_control
from jackfield.cluster.device import DeviceLease
from jackfield.cluster.metrics import ReplicaMetrics
from jackfield.cluster.pool import ReplicaPool
from jackfield.compose.controller import address_file, local_queue
from jackfield.compose.inline_workers import MakeWorkers
from jackfield.compose.inputs import Tasks
from jackfield.compose.stopping import Stop
from jackfield.queue.remote import connect_queue
from jackfield.trainer import Role

#: What a role is called at the queue's controller, before the run's name.
_CLIENTS = {"all": "the run", "train": "the trainer of", "explore": "the explorer", "reward": "the role"}


class RoleBuilder:
    """Starts the workers, the queue and the replicas of one role, and ends them."""

    stack: AsyncExitStack  #: closes what was started, in reverse order
    rollout_placement: DeviceLease

    def __init__(self, role: Role, tasks: Tasks, stop: Stop, make_workers: MakeWorkers) -> None:
        """
        Args:
            role: the run, checked.
            tasks: the data.
            stop: ends the role early.
            make_workers: starts workers.
        """
        self.role, self.tasks, self.stop, self.config = role, tasks, stop, role.config
        self.make_workers = make_workers
        self.finished = False  #: whether the role has done its work
        self._tasks: asyncio.TaskGroup
        self._background: list[asyncio.Task[None]] = []

    def background(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a loop until the role has ended; its error ends the role."""
        self._background.append(self._tasks.create_task(loop()))

    async def begin(self) -> None:
        """Start the workers of this role and its queue."""
        config, role = self.config, self.role
        role.workers = await self.make_workers(role, self.stack)
        backend = role.workers.backend
        if config.queue.address is None:
            role.queue = local_queue(config, backend, role.clock)
            self.stack.push_async_callback(role.queue.close)
            await role.queue.start()
        else:
            self.stack.push_async_callback(backend.close)
            await backend.start()
            name = f"{_CLIENTS[role.name]} {config.name}"
            role.queue, connection = await connect_queue(address_file(config), name, role.clock)
            self.stack.push_async_callback(lambda: connection.close(early=not self.finished))

    async def start_replicas(self) -> ReplicaPool | None:
        """Start the rollout servers; None where this role has none."""
        workers, config = self.role.workers, self.config
        if not workers.replicas:
            return None
        pool = ReplicaPool(
            workers.places,
            self.role.clock,
            name=config.rollout.name,
            restarts=config.cluster.replica_restarts,
            start_seconds=config.deadlines.start,
            drain_seconds=config.deadlines.drain,
        )
        self.stack.push_async_callback(pool.close)
        await pool.start(workers.replicas)
        return pool

    async def open_control(self, replicas: ReplicaPool) -> None:
        """Let other processes list and change the replicas."""
        addresses, port = {}, self.config.cluster.metrics_port
        if port is not None:
            metrics = ReplicaMetrics(replicas, port)
            self.stack.push_async_callback(metrics.close)
            addresses["metrics"] = await metrics.open()
        folder, silence = Path(self.config.folder), self.config.deadlines.heartbeat
        await self.stack.enter_async_context(serve_control(folder, replicas, self.role.clock, silence, **addresses))
