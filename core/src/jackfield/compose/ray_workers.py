"""The workers of a run in a Ray cluster, each made in its own process.

Processes receive only the configuration and the addresses of other workers from the controller's process.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias, TypeVar, cast

import attrs

from jackfield.abc import KINDS
from jackfield.abc.rollout import BaseRolloutServer
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.compose.checks import check_tokens, interpreters, read_tasks, register_any
from jackfield.compose.resolve import resolve_algorithm
from jackfield.compose.workers import RankPlace, WorkerFactory
from jackfield.config import RunConfig
from jackfield.errors import WorkerLost
from jackfield.files import replace_file
from jackfield.plugins import HookManager, Registry, installed
from jackfield.queue import Values
from jackfield.routing import Replica, Router
from jackfield.runtime.engine import EngineRank
from jackfield.runtime.process import ROLLOUT
from jackfield.runtime.ray_actor import (
    connect_worker,
    death,
    interface_of,
    node_address,
    remote_backend,
    rollout_service,
    store_services,
)
from jackfield.runtime.ray_cluster import Actor, Cluster, WorkerSpec, check_interpreter
from jackfield.runtime.samples import AdvantageWorker
from jackfield.runtime.workers import AgentWorker, RewardWorker, Workers
from jackfield.sdk.rpc import Address, Connection, Contract, Service, stub
from jackfield.trainer.role import Role, RunWorkers
from jackfield.weights import WeightSender

T = TypeVar("T")

_ROLES = 4  #: one place holds an actor, a reference, a critic and a replica

Kind: TypeAlias = Literal["store", "engine", "rollout", "agent", "reward"]

#: The name of each kind of worker, and the plugins that it loads.
_KINDS: Mapping[Kind, tuple[str, tuple[str, ...]]] = {
    "store": ("the queue's storage worker", ("transfer_queue",)),
    "engine": ("the {role} engine, rank {number}", ("engine", "checkpoint_engine")),
    "rollout": ("rollout replica {number}", ("rollout",)),
    "agent": ("agent worker {number}", ("agent",)),
    "reward": ("reward worker {number}", ("reward",)),
}


def worker_name(kind: Kind, number: int = 0, role: str = "") -> str:
    """Return the name of a worker. ``role`` is the role of an engine."""
    return _KINDS[kind][0].format(number=number, role=role)


@attrs.define(eq=False)
class Routes:
    """An agent worker's connections to the replicas on which it generates."""

    _router: Router
    _name: str  #: name of the worker
    _seconds: float  #: deadline of a call of a replica
    _connections: dict[Replica, Connection] = attrs.field(factory=dict, init=False)

    async def route(self, addresses: dict[int, Address], seconds: float) -> int:
        """Use these replicas from now on (see :meth:`~jackfield.routing.Router.route`)."""
        replicas = {each.number: each for each in self._connections if each.number in addresses}
        for number in addresses.keys() - replicas.keys():
            connection = await connect_worker(addresses[number], worker_name("rollout", number), self._name, Clock())
            server = stub(connection, "worker", ROLLOUT, cast(Any, BaseRolloutServer), self._seconds)
            replicas[number] = Replica(server, number=number, place="cluster")
            self._connections[replicas[number]] = connection
        removed = [self._connections.pop(each) for each in self._connections.keys() - replicas.values()]
        moved = await self._router.route(replicas, seconds)
        await asyncio.gather(*(connection.close() for connection in removed))
        return moved

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))


CONTRACTS: Mapping[type, Contract] = {
    EngineRank: Contract(EngineRank),
    WeightSender: Contract(WeightSender, without=("send",)),
    AgentWorker: Contract(AgentWorker),
    Routes: Contract(Routes, ["route"]),
    RewardWorker: Contract(RewardWorker),
    AdvantageWorker: Contract(AdvantageWorker),
}


def longest(config: RunConfig) -> float:
    """Return the maximum duration of a call of a worker, in seconds."""
    deadlines = config.deadlines
    return max(deadlines.rollout, deadlines.start, deadlines.sync, deadlines.reward)


@attrs.frozen
class WorkerMaker:
    """Makes one worker in its process. Nothing else is sent there."""

    config: RunConfig
    algorithm: ResolvedAlgorithm
    generates: bool  #: whether the run has replicas
    kind: Kind
    number: int
    role: str  #: role of an engine
    store: Address  #: address of the store
    place: RankPlace  #: place of an engine's rank

    async def __call__(self, stack: AsyncExitStack) -> Mapping[str, Service]:
        """Make the worker and return its services; ``stack`` closes its resources."""
        config, number, name = self.config, self.number, worker_name(self.kind, self.number, self.role)
        registry = installed()  # its interpreter need not have the plugins of other workers
        await asyncio.to_thread(self._load, registry)  # in a thread, so that heartbeats go on
        factory = WorkerFactory(config=config, registry=registry, clock=Clock())
        if self.kind == "store":
            backend = factory.backend()
            stack.push_async_callback(backend.close)
            return {**store_services(backend), **_served(AdvantageWorker(Values(backend), self.algorithm))}
        if self.kind == "rollout":  # the pool starts its server later
            server = factory.rollout_server(number, host=node_address())
            stack.push_async_callback(server.stop)
            return {"worker": rollout_service(server, number)}
        connection = await connect_worker(self.store, worker_name("store"), name, Clock())
        stack.push_async_callback(connection.close)
        values = Values(remote_backend(connection, config.deadlines.batch))
        if self.kind == "engine":
            if interface := interface_of(self.place.host):  # gloo would take the address of the machine's name
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            rank = factory.engine_rank(values, self.role, self.algorithm, stack, self.place)
            return _served(rank) if rank.sender is None else _served(rank, rank.sender)
        if self.kind == "reward":
            return _served(await factory.reward_worker(values, stack, number))
        agents = factory.agent_worker(values, self.generates, request_prefix=f"{config.name}-{number}")
        routes = Routes(factory.router, name, longest(config))
        stack.push_async_callback(routes.close)
        return _served(agents, routes)

    def _load(self, registry: Registry) -> None:
        """Import what the worker needs; the first agent worker checks that data and model fit together."""
        import torch

        config, chosen = self.config, {kind: getattr(self.config, kind).name for kind in KINDS}
        if config.cluster.threads is not None:
            torch.set_num_threads(config.cluster.threads)
        for kind in _KINDS[self.kind][1]:
            registry.load(kind, chosen[kind])
        here = [each.manifest for each in registry.records() if each.manifest and each.name == chosen[each.kind]]
        HookManager([], here).call("register_parts", register=register_any)
        if self.kind == "agent" and self.number == 0:
            algorithm = resolve_algorithm(config, registry.find("rollout", chosen["rollout"]))
            check_tokens(config, read_tasks(config, algorithm))


def _served(*targets: Any) -> dict[str, Service]:
    return {type(each).__name__: Service(target=each, contract=CONTRACTS[type(each)]) for each in targets}


class RayWorkers:
    """Makes a run's workers in a cluster; after a recovery it reuses live processes."""

    def __init__(self, make: WorkerFactory) -> None:
        self._registry, self._config, self._deadlines = make.registry, make.config, make.config.deadlines
        self._cluster = Cluster(make.clock, self._deadlines.start, self._deadlines.heartbeat)
        self._interpreters: dict[str, str] | None = None  # None: the cluster is not open
        self._replicas = 0  # how many to make at the start or after a recovery
        self._role: Role
        self._pools: dict[str, int]  # numbers of bundles of the placement groups
        self._rendezvous: str  # folder in which the ranks of an engine find each other

    async def make(self, role: Role, stack: AsyncExitStack) -> RunWorkers:
        """Start or join the cluster, and start every worker in it; ``stack`` ends them."""
        chosen, replicas = self._config.cluster.ray, self._config.cluster.replicas if role.generates else 0
        self._pools = {"engine": chosen.engine_ranks, "rollout": replicas}
        if chosen.placement == "colocated":
            self._pools = {"shared": max(self._pools.values())}
        if self._interpreters is None:
            found = interpreters(self._config, self._registry)
            for kind, python in found.items():
                check_interpreter(python, f"the {kind} worker", min(self._deadlines.start, 60.0))
            await self._cluster.open(chosen, sum(self._pools.values()) * chosen.cpus_per_place)
            self._interpreters, self._replicas = found, replicas
        folder = TemporaryDirectory(prefix="jackfield-ranks-", ignore_cleanup_errors=True)
        self._role, self._rendezvous = role, stack.enter_context(folder)
        stack.push_async_callback(self._cluster.rest)
        self._agents: list[str] = []
        self._routes: Mapping[int, Replica] = {}
        self._made = set(range(self._replicas))  # replicas that are made together and that start() returns first
        replicas, seconds = self._replicas, self._deadlines.engine
        ranks = [(engine, number) for engine in role.engines for number in range(chosen.engine_ranks)]
        specs = [
            await self._spec("store"),
            *[await self._spec("engine", number, engine) for engine, number in ranks],
            *[await self._spec("rollout", number) for number in range(replicas)],
            *[await self._spec("agent", number) for number in range(chosen.agent_workers)],
            *[await self._spec("reward", number) for number in range(chosen.reward_workers if replicas else 0)],
        ]
        # concurrently, because processes need seconds for their imports
        store, *others = await asyncio.gather(*map(self._cluster.start, specs))
        self._note_places()
        await self._cluster.make(store)
        await asyncio.gather(*map(self._cluster.make, others))
        names = [spec.name for spec in specs if spec.restarts]
        self._agents, rewards = names[: chosen.agent_workers], names[chosen.agent_workers :]
        stubs: dict[str, list[EngineRank]] = {engine: [] for engine in role.engines}
        for (engine, _), actor in zip(ranks, others, strict=False):
            rank = self._stub(actor, EngineRank, seconds)
            rank.sender = self._stub(actor, WeightSender, seconds)
            stubs[engine].append(rank)
        return RunWorkers(
            backend=remote_backend(store.connection, self._deadlines.batch),
            ranks=stubs,
            replicas=replicas,
            agents=Workers([self._restarting_stub(name, AgentWorker) for name in self._agents]),
            rewards=Workers([self._restarting_stub(name, RewardWorker) for name in rewards]) if rewards else None,
            estimator=self._stub(store, AdvantageWorker, seconds),
            shares_devices=chosen.placement == "colocated",
            places=self,
            watch=partial(self._cluster.watch, [store, *others[: len(ranks)]]),
        )

    async def close(self) -> None:
        """End the workers' processes and leave the cluster."""
        if self._interpreters is not None:
            await self._cluster.close()

    def _stub(self, actor: Actor, cls: type[T], seconds: float) -> T:
        """Return a stub of the worker in an actor, or raise ``WorkerLost`` while a restart has not made it yet."""
        if not actor.made:
            raise death(actor.spec.name, actor.spec.name, "it was not made")
        return stub(actor.connection, cls.__name__, CONTRACTS[cls], cls, seconds)

    def _restarting_stub(self, name: str, cls: type[T]) -> T:
        async def begin(actor: Actor) -> None:
            self._note_places()
            if name in self._agents:
                await self._routed(actor, 0.0)

        seconds = longest(self._config) + self._deadlines.batch
        stub_of = partial(self._stub, cls=cls, seconds=seconds)
        return self._cluster.restarting_stub(name, stub_of, CONTRACTS[cls], begin)

    # -- replicas

    async def start(self, replica: Replica) -> None:
        """Make a replica's server in a process, in a new place if the first places are full."""
        if replica.number in self._made:
            self._made.discard(replica.number)
        elif replica.name in self._cluster.actors:
            await self._cluster.restart(replica.name)
            self._note_places()
        else:
            self._replicas += 1
            try:
                actor = await self._cluster.start(await self._spec("rollout", replica.number))
                self._note_places()
                await self._cluster.make(actor)
            except BaseException:
                await self.end(replica.number)
                raise
        connection, server = self._cluster.actors[replica.name].connection, cast(Any, BaseRolloutServer)
        replica.server = stub(connection, "worker", ROLLOUT, server, longest(self._config))
        replica.place = "cluster"
        connection.lost.add_done_callback(lambda _: replica.lose(connection.error()))

    async def end(self, number: int) -> None:
        """End a replica's process, and release its place if that was added for it."""
        self._replicas -= 1
        await self._cluster.end(name := worker_name("rollout", number))
        self._cluster.give_back(name)
        self._note_places()

    async def route(self, replicas: Mapping[int, Replica], seconds: float) -> int:
        """Send the routes to every agent worker. One that dies gets them after its restart."""
        self._routes = dict(replicas)
        agents = [self._cluster.actors[name] for name in self._agents]
        return sum(await asyncio.gather(*(self._routed(actor, seconds) for actor in agents)))

    async def _routed(self, agent: Actor, seconds: float) -> int:
        actors = {number: self._cluster.actors[each.name] for number, each in self._routes.items()}
        routes = {number: each.address for number, each in actors.items() if each.lives}
        try:
            return await self._stub(agent, Routes, longest(self._config)).route(routes, seconds)
        except WorkerLost:  # its restart uses the new routes
            return 0

    # -- descriptions of workers

    async def _spec(self, kind: Kind, number: int = 0, role: str = "") -> WorkerSpec:
        """Return the description of a worker; a replica that is added to the run gets a new place."""
        assert self._interpreters is not None
        name, store, state = worker_name(kind, number, role), worker_name("store"), self._role

        def make() -> WorkerMaker:
            address, place = self._cluster.actors[store].address, self._rank_place(role, number)
            return WorkerMaker(
                self._config, state.algorithm, state.generates, kind, number, role, store=address, place=place
            )

        restarts = kind in ("agent", "reward")
        spec = WorkerSpec(name=name, make=make, python=self._interpreters.get(kind), restarts=restarts)
        if kind not in ("engine", "rollout"):
            return spec
        pool: str = "shared" if "shared" in self._pools else kind
        count, bundle = self._pools[pool], number
        if number >= count:
            pool, count, bundle = name, 1, 0
        group = await self._cluster.places(count, self._resources(1), pool)
        return attrs.evolve(spec, group=group, bundle=bundle, resources=self._resources(_ROLES))

    def _rank_place(self, role: str, rank: int) -> RankPlace:
        """Return the rendezvous of an engine's ranks, and the number of one of them on its node."""
        if not role:
            return RankPlace()
        numbers = range(self._config.cluster.ray.engine_ranks)
        places = [self._cluster.actors[worker_name("engine", each, role)].place for each in numbers]
        host, first = places[rank].address, places[0]
        rendezvous = f"file://{self._rendezvous}/{role}"  # torch's TCP store would listen on all interfaces
        if self._config.cluster.ray.address is not None:
            rendezvous = f"tcp://{f'[{first.address}]' if ':' in first.address else first.address}:{first.port}"
        return RankPlace(
            rank=rank,
            world_size=len(places),
            local_rank=sum(place.address == host for place in places[:rank]),
            init_method=rendezvous if len(places) > 1 else None,
            host=host,
        )

    def _note_places(self) -> None:
        found = {name: actor for name, actor in self._cluster.actors.items() if actor.lives}
        lines = {name: {"pid": each.address.process.pid, "node": each.place.address} for name, each in found.items()}
        replace_file(Path(self._config.folder) / "workers.json", json.dumps(lines, indent=1))

    def _resources(self, parts: int) -> dict[str, float]:
        """Return the resources of a place divided by ``parts``; Ray counts in ten-thousandths."""
        chosen = self._config.cluster.ray
        amounts = {"CPU": chosen.cpus_per_place, "GPU": chosen.gpus_per_place}
        shares = {name: int(10_000 * amount / parts) / 10_000 for name, amount in amounts.items()}
        return {name: share for name, share in shares.items() if share} or {"CPU": 0.001 / parts}
