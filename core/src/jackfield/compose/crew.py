"""The workers of one run, wherever they live."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import attrs

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.compose.workers import WorkerFactory
from jackfield.queue import Rows
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.runtime.workers import Workers

__all__ = ["AdvantageOptions", "Crew", "Needs", "inline_crew"]


@attrs.frozen
class AdvantageOptions:
    """A registered estimator, with its options."""

    name: str
    options: dict[str, object]


@attrs.frozen(kw_only=True)
class Needs:
    """What a run asks of its crew."""

    replicas: bool  #: whether anybody generates
    reference: bool  #: whether there is a reference model of its own
    loss_columns: tuple[str, ...]
    advantages: AdvantageOptions | None


@attrs.frozen(kw_only=True)
class Crew:
    """Workers, or what stands for them in this process. Engines and servers are not started yet."""

    backend: TransferQueueBackend
    actor: Sequence[EngineRank]
    reference: Sequence[EngineRank]  #: empty: no model of its own
    servers: Sequence[BaseRolloutServer]
    agents: Workers[AgentWorker]
    rewards: Workers[RewardWorker] | None
    estimator: AdvantageWorker | None
    shares_devices: bool  #: whether engine and replicas take turns


async def inline_crew(make: WorkerFactory, needs: Needs, stack: AsyncExitStack) -> Crew:
    """One worker of each kind in this process; what was started is ended by ``stack``."""
    backend = make.backend()
    rows = Rows(backend)
    replicas = make.config.runtime.rollout_replicas if needs.replicas else 0
    servers = [make.rollout_server(replica) for replica in range(replicas)]
    agents = Workers([make.agent_worker(rows, servers, run_id=make.config.name)])
    rewards = None
    if needs.replicas:
        worker = await make.reward_worker(rows)
        stack.push_async_callback(worker.close)
        rewards = Workers([worker])
    chosen = needs.advantages
    return Crew(
        backend=backend,
        actor=[make.engine_rank(rows, "actor", loss_columns=needs.loss_columns)],
        reference=[make.engine_rank(rows, "reference")] if needs.reference else [],
        servers=servers,
        agents=agents,
        rewards=rewards,
        estimator=None if chosen is None else AdvantageWorker(rows, chosen.name, chosen.options),
        shares_devices=True,
    )
