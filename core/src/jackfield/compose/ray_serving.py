"""What makes the workers of a run in the actors of a Ray cluster, from the run's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.algorithms import register_part
from jackfield.algorithms.resolved import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.compose.inputs import check_tokens, read_tasks
from jackfield.compose.resolve import resolve_algorithm
from jackfield.compose.workers import RankPlace, WorkerFactory
from jackfield.config import RunConfig, plugin_sections
from jackfield.plugins import hook_manager, installed
from jackfield.queue import Values
from jackfield.rpc import Address, Connection, Contract, Service, stub
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.process.host import ROLLOUT
from jackfield.runtime.ray import connect_worker, remote_backend, rollout_service, store_services
from jackfield.runtime.ray.host import interface_of
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.weights import WeightSender

store_name = "the queue's storage worker"


class Routes:
    """The replicas on which an agent worker generates, by their addresses."""

    def __init__(self, worker: AgentWorker, name: str, seconds: float, stack: AsyncExitStack) -> None:
        self._worker, self._name, self._seconds, self._stack = worker, name, seconds, stack
        self._connections: dict[int, tuple[Address, Connection]] = {}

    async def route(self, replicas: dict[int, Address], seconds: float) -> int:
        """Have agents generate on these replicas from now on: :meth:`~jackfield.routing.router.Router.route`."""
        before, self._connections = self._connections, {}
        for number, address in replicas.items():
            known = before.get(number)
            if known is not None and known[0] == address:
                self._connections[number] = before.pop(number)
            else:
                connection = await connect_worker(address, f"rollout replica {number}", self._name, Clock())
                self._stack.push_async_callback(connection.close)
                self._connections[number] = address, connection
        moved = await self._worker.route(
            {
                number: stub(connection, "worker", ROLLOUT, BaseRolloutServer, self._seconds)  # type: ignore[type-abstract]
                for number, (_, connection) in self._connections.items()
            },
            seconds,
        )
        for _, connection in before.values():
            await connection.close()
        return moved


RANK, SENDER = Contract(EngineRank), Contract(WeightSender, without=("send",))
AGENT, ROUTES = Contract(AgentWorker, without=("route",)), Contract(Routes)
REWARD, ADVANTAGES = Contract(RewardWorker, without=("close",)), Contract(AdvantageWorker)


def _factory(config: RunConfig) -> WorkerFactory:
    """An interpreter of a worker's own need not have the plugins of the others."""
    registry = installed()
    chosen = {kind: getattr(config, section).name for section, kind in plugin_sections().items()}
    here = [record.manifest for record in registry.records() if record.name == chosen[record.kind]]
    hook_manager([], [manifest for manifest in here if manifest is not None]).hook.register_parts(
        register=register_part
    )
    return WorkerFactory(config=config, registry=registry, clock=Clock())


def _use_threads(config: RunConfig) -> None:
    import torch

    if config.cluster.threads is not None:
        torch.set_num_threads(config.cluster.threads)


async def _values(config: RunConfig, store: Address, name: str, stack: AsyncExitStack) -> Values:
    connection = await connect_worker(store, store_name, name, Clock())
    stack.push_async_callback(connection.close)
    backend: TransferQueueBackend = remote_backend(connection, config.deadlines.batch)
    return Values(backend)


async def serve_store(config: RunConfig, algorithm: ResolvedAlgorithm, stack: AsyncExitStack) -> Mapping[str, Service]:
    """The queue's backend, and the advantage worker beside it."""
    _use_threads(config)  # and import torch now, rather than at the first row
    backend = _factory(config).backend()
    stack.push_async_callback(backend.close)
    advantages = AdvantageWorker(Values(backend), algorithm)
    return {**store_services(backend), "advantages": Service(target=advantages, contract=ADVANTAGES)}


async def serve_engine_rank(
    config: RunConfig, algorithm: ResolvedAlgorithm, store: Address, role: str, place: RankPlace, stack: AsyncExitStack
) -> Mapping[str, Service]:
    """A rank of actor, reference or critic, with its end of the weight plane."""
    _use_threads(config)
    if interface := interface_of(place.host):  # gloo would take the address of the machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    values = await _values(config, store, f"the {role} engine, rank {place.rank}", stack)
    rank = _factory(config).engine_rank(values, role, algorithm, place)
    stack.push_async_callback(rank.close)
    services = {"worker": Service(target=rank, contract=RANK)}
    if rank.sender is not None:
        services["sender"] = Service(target=rank.sender, contract=SENDER)
    return services


async def serve_replica(config: RunConfig, number: int, host: str, stack: AsyncExitStack) -> Mapping[str, Service]:
    """Make a replica; its server is not started."""
    _use_threads(config)
    server = _factory(config).rollout_server(number, host=host)
    stack.push_async_callback(server.stop)
    return {"worker": rollout_service(server, f"rollout replica {number}")}


async def serve_agent_worker(
    config: RunConfig, store: Address, number: int, generates: bool, stack: AsyncExitStack
) -> Mapping[str, Service]:
    """A worker that runs agents; the first one checks whether data, tokenizer and model fit."""
    factory, name = _factory(config), f"agent worker {number}"
    if number == 0:
        algorithm = resolve_algorithm(config, factory.registry.find("rollout", config.rollout.name))
        check_tokens(config, read_tasks(config, algorithm))
    values = await _values(config, store, name, stack)
    worker = factory.agent_worker(values, {} if generates else None, request_prefix=f"{config.name}-{number}")
    deadlines = config.deadlines
    longest = max(deadlines.rollout, deadlines.start, deadlines.sync, deadlines.reward)
    return {
        "worker": Service(target=worker, contract=AGENT),
        "routes": Service(target=Routes(worker, name, longest, stack), contract=ROUTES),
    }


async def serve_reward_worker(
    config: RunConfig, store: Address, number: int, stack: AsyncExitStack
) -> Mapping[str, Service]:
    """A worker with a started reward agent."""
    values = await _values(config, store, f"reward worker {number}", stack)
    worker = await _factory(config).reward_worker(values, number)
    stack.push_async_callback(worker.close)
    return {"worker": Service(target=worker, contract=REWARD)}
