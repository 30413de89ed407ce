"""The workers of one run, wherever they live."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import attrs

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.cluster.pool import Places
from jackfield.cluster.replica import Replica, Worker
from jackfield.compose.controller import address_file
from jackfield.compose.workers import Needs, WorkerFactory
from jackfield.queue import Values
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.runtime.workers import Workers

__all__ = ["Crew", "MakeCrew", "crew_maker"]


@attrs.frozen(kw_only=True)
class Crew:
    """Workers, or what stands for them in this process. Engines and replicas are not started yet."""

    backend: TransferQueueBackend
    actor: Sequence[EngineRank]  #: empty: nobody trains here
    reference: Sequence[EngineRank]  #: empty: no model of its own
    critic: Sequence[EngineRank]  #: empty: there is none
    replicas: int  #: that the run begins with
    agents: Workers[AgentWorker]
    rewards: Workers[RewardWorker] | None
    estimator: AdvantageWorker
    shares_devices: bool  #: whether engine and replicas take turns
    places: Places  #: of the replicas
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None  #: raises as soon as a rank or the storage dies


MakeCrew = Callable[[Needs, AsyncExitStack], Awaitable[Crew]]


def crew_maker(make: WorkerFactory, processes: AsyncExitStack) -> MakeCrew:
    """Return what makes the workers of a run, again after each recovery; ``processes`` ends what stays in between."""
    if make.config.cluster.name == "inline":
        return partial(_inline_crew, make)
    from jackfield.compose.ray_crew import RayCrews

    crews = RayCrews(make)
    processes.push_async_callback(crews.close)
    return crews.make


async def _inline_crew(make: WorkerFactory, needs: Needs, stack: AsyncExitStack) -> Crew:
    """One worker of each kind in this process; what was started is ended by ``stack``."""
    served = make.config.queue.address is not None
    backend = make.joined_backend(address_file(make.config).parent) if served else make.backend()
    values = Values(backend)
    replicas = make.config.cluster.replicas if needs.replicas else 0
    agent = make.agent_worker(values, {} if replicas else None, request_prefix=make.config.name)
    rewards = None
    if needs.rewards:
        worker = await make.reward_worker(values)
        stack.push_async_callback(worker.close)
        rewards = Workers([worker])
    return Crew(
        backend=backend,
        actor=[make.engine_rank(values, "actor", needs)] if needs.engines else [],
        reference=[make.engine_rank(values, "reference", needs)] if needs.reference else [],
        critic=[make.engine_rank(values, "critic", needs)] if needs.critic else [],
        replicas=replicas,
        agents=Workers([agent]),
        rewards=rewards,
        estimator=AdvantageWorker(values, needs.plan),
        shares_devices=True,
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
