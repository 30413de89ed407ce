"""The workers of one role: made in this process, or in a Ray cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial

import attrs

from jackfield.cluster.replica import Replica, Worker
from jackfield.compose.controller import address_file
from jackfield.compose.worker_factory import WorkerFactory
from jackfield.queue import Values
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.workers import Workers
from jackfield.trainer import Role, RunWorkers

MakeWorkers = Callable[[Role, AsyncExitStack], Awaitable[RunWorkers]]


def workers_maker(make: WorkerFactory, processes: AsyncExitStack) -> MakeWorkers:
    """Return what makes the workers of a role, again after each recovery; ``processes`` ends what stays in between."""
    if make.config.cluster.name == "inline":
        return partial(_inline_workers, make)
    from jackfield.compose.ray_workers import RayWorkers

    workers = RayWorkers(make)
    processes.push_async_callback(workers.close)
    return workers.make


async def _inline_workers(make: WorkerFactory, role: Role, stack: AsyncExitStack) -> RunWorkers:
    """Make one worker of each kind in this process; what was started is ended by ``stack``."""
    backend = make.backend(None if make.config.queue.address is None else address_file(make.config).parent)
    values = Values(backend)
    agent = make.agent_worker(values, {} if role.generates else None, request_prefix=make.config.name)
    rewards = None
    if role.scores or role.evaluates:
        worker = await make.reward_worker(values)
        stack.push_async_callback(worker.close)
        rewards = Workers([worker])
    return RunWorkers(
        backend=backend,
        ranks={engine: [make.engine_rank(values, engine, role.algorithm)] for engine in role.engines},
        agents=Workers([agent]),
        rewards=rewards,
        estimator=AdvantageWorker(values, role.algorithm),
        replicas=make.config.cluster.replicas if role.generates else 0,
        places=_InlinePlaces(make, agent),
    )


@attrs.frozen
class _InlinePlaces:
    """Replicas in this process, or in processes that it starts."""

    make: WorkerFactory
    agent: AgentWorker

    async def start(self, number: int) -> Worker:
        return self.make.replica(number)

    async def end(self, number: int) -> None:
        return

    async def route(self, replicas: Mapping[int, Replica], seconds: float) -> int:
        return await self.agent.route(replicas, seconds)
