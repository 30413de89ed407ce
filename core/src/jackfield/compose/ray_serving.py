"""What makes a worker of a run in an actor of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Literal

import attrs

from jackfield.abc import KINDS
from jackfield.abc.rollout import BaseRolloutServer
from jackfield.algorithms import register_part
from jackfield.algorithms.resolved import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.compose.inputs import check_tokens, read_tasks
from jackfield.compose.resolve import resolve_algorithm
from jackfield.compose.workers import RankPlace, WorkerFactory
from jackfield.config import RunConfig
from jackfield.plugins import hook_manager, installed
from jackfield.queue import Values
from jackfield.rpc import Address, Connection, Contract, Service, stub
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.process import ROLLOUT
from jackfield.runtime.ray import connect_worker, remote_backend, rollout_service, store_services
from jackfield.runtime.ray.host import interface_of, node_address
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.weights import WeightSender

STORE = "the queue's storage worker"


class Routes:
    """The replicas on which an agent worker generates, by their addresses."""

    def __init__(self, worker: AgentWorker, name: str, seconds: float) -> None:
        self._worker, self._name, self._seconds = worker, name, seconds
        self._connections: dict[int, Connection] = {}

    async def route(self, replicas: dict[int, Address], seconds: float) -> int:
        """Use these replicas from now on: :meth:`~jackfield.routing.router.Router.route`."""
        for number in replicas.keys() - self._connections.keys():
            name = f"rollout replica {number}"
            self._connections[number] = await connect_worker(replicas[number], name, self._name, Clock())
        removed = [self._connections.pop(number) for number in self._connections.keys() - replicas.keys()]
        moved = await self._worker.route({number: self._stub(number) for number in replicas}, seconds)
        for connection in removed:
            await connection.close()
        return moved

    def _stub(self, number: int) -> BaseRolloutServer:
        return stub(self._connections[number], "worker", ROLLOUT, BaseRolloutServer, self._seconds)  # type: ignore[type-abstract]

    async def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            await connection.close()


CONTRACTS: Mapping[type, Contract] = {
    EngineRank: Contract(EngineRank),
    WeightSender: Contract(WeightSender, without=("send",)),
    AgentWorker: Contract(AgentWorker, without=("route",)),
    Routes: Contract(Routes, ["route"]),
    RewardWorker: Contract(RewardWorker),
    AdvantageWorker: Contract(AdvantageWorker),
    BaseRolloutServer: ROLLOUT,
}


def longest(config: RunConfig) -> float:
    """Return the longest that a call of a worker may take, in seconds."""
    deadlines = config.deadlines
    return max(deadlines.rollout, deadlines.start, deadlines.sync, deadlines.reward)


@attrs.frozen(kw_only=True)
class WorkerMaker:
    """Makes one worker in its process. It is all that is sent there."""

    config: RunConfig
    algorithm: ResolvedAlgorithm
    name: str
    kind: Literal["store", "engine", "rollout", "agent", "reward"]
    number: int = 0
    store: Address | None = None  #: where values are; None: the worker needs none
    generates: bool = False  #: whether the run has replicas
    role: str = ""  #: of an engine
    place: RankPlace = attrs.field(factory=RankPlace)  #: of a rank

    async def __call__(self, stack: AsyncExitStack) -> Mapping[str, Service]:
        """Make the worker and return what is served of it; the stack closes what it has opened."""
        if self.config.cluster.threads is not None:
            import torch

            torch.set_num_threads(self.config.cluster.threads)
        registry = installed()  # an interpreter of a worker's own need not have the plugins of the others
        chosen = {kind: getattr(self.config, kind).name for kind in KINDS}
        here = [record.manifest for record in registry.records() if record.name == chosen[record.kind]]
        hooks = hook_manager([], [manifest for manifest in here if manifest is not None]).hook
        hooks.register_parts(register=register_part)
        factory = WorkerFactory(config=self.config, registry=registry, clock=Clock())
        services: Mapping[str, Service] = await getattr(self, f"_{self.kind}")(factory, stack)
        return services

    async def _values(self, stack: AsyncExitStack) -> Values:
        assert self.store is not None
        connection = await connect_worker(self.store, STORE, self.name, Clock())
        stack.push_async_callback(connection.close)
        return Values(remote_backend(connection, self.config.deadlines.batch))

    async def _store(self, factory: WorkerFactory, stack: AsyncExitStack) -> Mapping[str, Service]:
        """The queue's backend, and the advantage worker beside it."""
        import torch  # noqa: F401, now rather than at the first sample

        backend = factory.backend()
        stack.push_async_callback(backend.close)
        return {**store_services(backend), **_services(AdvantageWorker(Values(backend), self.algorithm))}

    async def _engine(self, factory: WorkerFactory, stack: AsyncExitStack) -> Mapping[str, Service]:
        """A rank of actor, reference or critic, with its end of the weight plane."""
        if interface := interface_of(self.place.host):  # gloo would take the address of the machine's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        rank = factory.engine_rank(await self._values(stack), self.role, self.algorithm, self.place)
        stack.push_async_callback(rank.close)
        return _services(rank) if rank.sender is None else _services(rank, rank.sender)

    async def _rollout(self, factory: WorkerFactory, stack: AsyncExitStack) -> Mapping[str, Service]:
        """A replica, whose server is not started."""
        server = factory.rollout_server(self.number, host=node_address())
        stack.push_async_callback(server.stop)
        return {"worker": rollout_service(server, self.name)}

    async def _agent(self, factory: WorkerFactory, stack: AsyncExitStack) -> Mapping[str, Service]:
        """A worker that runs agents; the first one checks whether data, tokenizer and model fit."""
        config = self.config
        if self.number == 0:
            algorithm = resolve_algorithm(config, factory.registry.find("rollout", config.rollout.name))
            check_tokens(config, read_tasks(config, algorithm))
        values, prefix = await self._values(stack), f"{config.name}-{self.number}"
        worker = factory.agent_worker(values, self.generates, request_prefix=prefix)
        routes = Routes(worker, self.name, longest(config))
        stack.push_async_callback(routes.close)
        return _services(worker, routes)

    async def _reward(self, factory: WorkerFactory, stack: AsyncExitStack) -> Mapping[str, Service]:
        """A worker with a started reward agent."""
        worker = await factory.reward_worker(await self._values(stack), self.number)
        stack.push_async_callback(worker.close)
        return _services(worker)


def _services(*targets: Any) -> dict[str, Service]:
    """Serve objects under the names of their classes."""
    return {type(each).__name__: Service(target=each, contract=CONTRACTS[type(each)]) for each in targets}
