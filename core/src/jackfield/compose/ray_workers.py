"""The workers of a run in a Ray cluster, each made in its own actor.

Actors receive only the configuration and the addresses of other workers from the controller's process.
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
from jackfield.algorithms import register_part
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.cluster.replica import Replica, Worker
from jackfield.compose.checks import check_tokens, interpreters, read_tasks
from jackfield.compose.resolve import resolve_algorithm
from jackfield.compose.workers import RankPlace, WorkerFactory
from jackfield.config import RunConfig
from jackfield.errors import WorkerLost
from jackfield.files import replace_file
from jackfield.plugins import HookManager, installed
from jackfield.queue import Values
from jackfield.rpc import Address, Connection, Contract, Service, stub
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.process import ROLLOUT
from jackfield.runtime.ray import actors
from jackfield.runtime.ray.cluster import Cluster, check_interpreter
from jackfield.runtime.ray.store import remote_backend, store_services
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.runtime.workers import Workers
from jackfield.trainer.role import Role, RunWorkers
from jackfield.weights import WeightSender

T = TypeVar("T")

_ROLES = 4  #: one place holds an actor, a reference, a critic and a replica


Kind: TypeAlias = Literal["store", "engine", "rollout", "agent", "reward"]

_NAMES = {
    "store": "the queue's storage worker",
    "engine": "the {role} engine, rank {number}",
    "rollout": "rollout replica {number}",
    "agent": "agent worker {number}",
    "reward": "reward worker {number}",
}


def worker_name(kind: Kind, number: int = 0, role: str = "") -> str:
    """Return the name of a worker. ``role`` is the role of an engine."""
    return _NAMES[kind].format(number=number, role=role)


@attrs.define(eq=False)
class Routes:
    """An agent worker's connections to the replicas on which it generates."""

    _worker: AgentWorker
    _name: str  #: name of the worker
    _seconds: float  #: deadline of a call of a replica
    _connections: dict[int, Connection] = attrs.field(factory=dict, init=False)

    async def route(self, replicas: dict[int, Address], seconds: float) -> int:
        """Use these replicas from now on (see :meth:`~jackfield.routing.router.Router.route`)."""
        for number in replicas.keys() - self._connections.keys():
            name = worker_name("rollout", number)
            self._connections[number] = await actors.connect_worker(replicas[number], name, self._name, Clock())
        removed = [self._connections.pop(number) for number in self._connections.keys() - replicas.keys()]
        server: Any = BaseRolloutServer
        made = {
            number: stub(self._connections[number], "worker", ROLLOUT, server, self._seconds) for number in replicas
        }
        moved = await self._worker.route(made, seconds)
        for connection in removed:
            await connection.close()
        return moved

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))


CONTRACTS: Mapping[type, Contract] = {
    EngineRank: Contract(EngineRank),
    WeightSender: Contract(WeightSender, without=("send",)),
    AgentWorker: Contract(AgentWorker, without=("route",)),
    Routes: Contract(Routes, ["route"]),
    RewardWorker: Contract(RewardWorker),
    AdvantageWorker: Contract(AdvantageWorker),
}


def longest(config: RunConfig) -> float:
    """Return the maximum duration of a call of a worker, in seconds."""
    deadlines = config.deadlines
    return max(deadlines.rollout, deadlines.start, deadlines.sync, deadlines.reward)


@attrs.frozen(kw_only=True)
class WorkerMaker:
    """Makes one worker in its process. Nothing else is sent there."""

    config: RunConfig
    algorithm: ResolvedAlgorithm
    generates: bool  #: whether the run has replicas
    kind: Kind
    number: int
    role: str  #: role of an engine
    name: str
    store: Address | None  #: address of the store, once it is known
    place: RankPlace  #: place of an engine's rank

    async def __call__(self, stack: AsyncExitStack) -> Mapping[str, Service]:
        """Make the worker and return its services; ``stack`` closes its resources."""
        if self.config.cluster.threads is not None:
            import torch

            torch.set_num_threads(self.config.cluster.threads)
        registry = installed()  # its interpreter need not have the plugins of other workers
        chosen = {kind: getattr(self.config, kind).name for kind in KINDS}
        here = [each.manifest for each in registry.records() if each.manifest and each.name == chosen[each.kind]]
        HookManager([], here).hook.register_parts(register=register_part)
        return await self._services(WorkerFactory(config=self.config, registry=registry, clock=Clock()), stack)

    async def _services(self, factory: WorkerFactory, stack: AsyncExitStack) -> Mapping[str, Service]:
        if self.kind == "store":
            import torch  # noqa: F401, now rather than at the first sample

            backend = factory.backend()
            stack.push_async_callback(backend.close)
            return {**store_services(backend), **_served(AdvantageWorker(Values(backend), self.algorithm))}
        if self.kind == "rollout":  # the pool starts its server later
            server = factory.rollout_server(self.number, host=actors.node_address())
            stack.push_async_callback(server.stop)
            return {"worker": actors.rollout_service(server, self.name)}
        assert self.store is not None
        connection = await actors.connect_worker(self.store, worker_name("store"), self.name, Clock())
        stack.push_async_callback(connection.close)
        values = Values(remote_backend(connection, self.config.deadlines.batch))
        if self.kind == "engine":
            if interface := actors.interface_of(self.place.host):  # gloo would take the address of the machine's name
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            rank = factory.engine_rank(values, self.role, self.algorithm, stack, self.place)
            return _served(rank) if rank.sender is None else _served(rank, rank.sender)
        if self.kind == "reward":
            return _served(await factory.reward_worker(values, stack, self.number))
        if self.number == 0:  # it checks that data, tokenizer and model fit together
            algorithm = resolve_algorithm(self.config, factory.registry.find("rollout", self.config.rollout.name))
            check_tokens(self.config, read_tasks(self.config, algorithm))
        prefix = f"{self.config.name}-{self.number}"
        agents = factory.agent_worker(values, self.generates, request_prefix=prefix)
        routes = Routes(agents, self.name, longest(self.config))
        stack.push_async_callback(routes.close)
        return _served(agents, routes)


def _served(*targets: Any) -> dict[str, Service]:
    """Serve objects under the names of their classes."""
    return {type(each).__name__: Service(target=each, contract=CONTRACTS[type(each)]) for each in targets}


class RayWorkers:
    """Makes a run's workers in a cluster; after a recovery it reuses live processes."""

    def __init__(self, make: WorkerFactory) -> None:
        self._registry, self._config, self._deadlines = make.registry, make.config, make.config.deadlines
        self._cluster = Cluster(make.clock, self._deadlines.start, self._deadlines.heartbeat)
        self._interpreters: dict[str, str] | None = None  # None: the cluster is not open
        self._replicas: int | None = None  # how many to make at the start or after a recovery
        self._role: Role
        self._groups: dict[str, tuple[Any, int]]  # placement groups with their numbers of bundles
        self._meetings: str

    async def make(self, role: Role, stack: AsyncExitStack) -> RunWorkers:
        """Start or join the cluster, and start every worker in it; ``stack`` ends them.

        Raises:
            JackfieldError: If something is missing or does not respond in time. The first error is raised.
        """
        chosen, replicas = self._config.cluster.ray, self._config.cluster.replicas if role.generates else 0
        pools = {"train": chosen.engine_ranks, "rollout": replicas}
        if chosen.placement == "colocated":
            pools = {"shared": max(pools.values())}
        if self._interpreters is None:
            found = interpreters(self._config, self._registry)
            for kind, python in found.items():
                check_interpreter(python, f"the {kind} worker", min(self._deadlines.start, 60.0))
            await self._cluster.open(chosen, sum(pools.values()) * chosen.cpus_per_place)
            self._interpreters, self._replicas = found, replicas
        folder = TemporaryDirectory(prefix="jackfield-meetings-", ignore_cleanup_errors=True)
        self._role, self._meetings = role, stack.enter_context(folder)
        stack.push_async_callback(self._cluster.rest)
        self._agents: list[str] = []
        self._routes: Mapping[int, Replica] = {}
        self._made = set(range(self._replicas or 0))  # replicas that are made together and that start() returns first
        self._groups = {
            name: (await self._cluster.places(count, self._resources(1), name), count)
            for name, count in pools.items()
            if count
        }
        return await self._workers(self._replicas or 0)

    async def close(self) -> None:
        """End the workers' processes and leave the cluster."""
        if self._interpreters is not None:
            await self._cluster.close()

    async def _workers(self, replicas: int) -> RunWorkers:
        """Start all workers concurrently, because processes need seconds for their imports."""
        chosen, engines, seconds = self._config.cluster.ray, self._role.engines, self._deadlines.engine
        specs = [
            await self._spec("store"),
            *[await self._spec("engine", n, role) for role in engines for n in range(chosen.engine_ranks)],
            *[await self._spec("rollout", number) for number in range(replicas)],
            *[await self._spec("agent", number) for number in range(chosen.agent_workers)],
            *[await self._spec("reward", number) for number in range(chosen.reward_workers if replicas else 0)],
        ]
        store, *others = await asyncio.gather(*map(self._cluster.start, specs))
        self._note_places()
        await store.make()
        await asyncio.gather(*(actor.make() for actor in others))
        names = [spec.name for spec in specs if spec.restarts]
        self._agents, rewards = names[: chosen.agent_workers], names[chosen.agent_workers :]
        ranks = {role: [self._rank(role, n) for n in range(chosen.engine_ranks)] for role in engines}
        fragile = [store, *others[: len(engines) * chosen.engine_ranks]]
        return RunWorkers(
            backend=remote_backend(store.connection, self._deadlines.batch),
            ranks={role: [self._rank_stub(actor) for actor in some] for role, some in ranks.items()},
            replicas=replicas,
            agents=Workers([self._restarting_stub(name, AgentWorker) for name in self._agents]),
            rewards=Workers([self._restarting_stub(name, RewardWorker) for name in rewards]) if rewards else None,
            estimator=self._stub(store, AdvantageWorker, seconds),
            shares_devices=chosen.placement == "colocated",
            places=self,
            watch=partial(self._cluster.watch, fragile),
        )

    def _stub(self, actor: actors.Actor, cls: type[T], seconds: float) -> T:
        return stub(actor.connection, cls.__name__, CONTRACTS[cls], cls, seconds)

    def _restarting_stub(self, name: str, cls: type[T]) -> T:
        async def begin(actor: actors.Actor) -> None:
            self._note_places()
            if name in self._agents:
                await self._routed(actor, 0.0)

        seconds = longest(self._config) + self._deadlines.batch
        stub_of = partial(self._stub, cls=cls, seconds=seconds)
        return self._cluster.restarting_stub(name, stub_of, CONTRACTS[cls], begin)

    def _rank(self, role: str, rank: int) -> actors.Actor:
        return self._cluster.actors[worker_name("engine", rank, role)]

    def _rank_stub(self, actor: actors.Actor) -> EngineRank:
        rank = self._stub(actor, EngineRank, self._deadlines.engine)
        rank.sender = self._stub(actor, WeightSender, self._deadlines.engine)
        return rank

    # -- replicas

    async def start(self, number: int) -> Worker:
        """Make a replica's server in an actor, in a new place if the first places are full.

        Raises:
            JackfieldError: If there is no room, or making it fails. Nothing of a new replica is left then.
        """
        name = worker_name("rollout", number)
        if number in self._made:
            self._made.discard(number)
        elif name in self._cluster.actors:
            await self._cluster.restart(name)
            self._note_places()
        else:
            await self._add(number, name)
        connection, server = self._cluster.actors[name].connection, cast(Any, BaseRolloutServer)
        worker = Worker(stub(connection, "worker", ROLLOUT, server, longest(self._config)), "cluster")
        connection.lost.add_done_callback(lambda _: worker.lose(connection.error()))
        return worker

    async def _add(self, number: int, name: str) -> None:
        try:
            actor = await self._cluster.start(await self._spec("rollout", number))
            self._note_places()
            await actor.make()
        except BaseException:
            await self._drop(name)
            raise
        self._replicas = (self._replicas or 0) + 1

    async def end(self, number: int) -> None:
        """End a replica's process, and release its place if that was added for it."""
        self._replicas = (self._replicas or 0) - 1
        await self._drop(worker_name("rollout", number))

    async def _drop(self, name: str) -> None:
        await self._cluster.end(name)
        self._note_places()
        self._cluster.give_back(name)

    async def route(self, replicas: Mapping[int, Replica], seconds: float) -> int:
        """Send the routes to every agent worker. One that dies gets them after its restart."""
        self._routes = dict(replicas)
        agents = [self._cluster.actors[name] for name in self._agents]
        return sum(await asyncio.gather(*(self._routed(actor, seconds) for actor in agents)))

    async def _routed(self, agent: actors.Actor, seconds: float) -> int:
        found = self._cluster.actors
        routes = {n: address for n, each in self._routes.items() if (address := found[each.name].address)}
        try:
            return await self._stub(agent, Routes, longest(self._config)).route(routes, seconds)
        except WorkerLost:  # its restart uses the new routes
            return 0

    # -- descriptions of workers

    async def _spec(self, kind: Kind, number: int = 0, role: str = "") -> actors.WorkerSpec:
        """Return the description of a worker; a replica that is added to the run gets a new place."""
        assert self._interpreters is not None
        name, make = worker_name(kind, number, role), partial(self._maker, kind, number, role)
        restarts = kind in ("agent", "reward")
        spec = actors.WorkerSpec(name=name, make=make, python=self._interpreters.get(kind), restarts=restarts)
        if kind not in ("engine", "rollout"):
            return spec
        pool = "shared" if "shared" in self._groups else {"engine": "train"}.get(kind, kind)
        (group, count), bundle = self._groups[pool], number
        if number >= count:
            group, bundle = await self._cluster.places(1, self._resources(1), name), 0
        return attrs.evolve(spec, group=group, bundle=bundle, resources=self._resources(_ROLES))

    def _maker(self, kind: Kind, number: int, role: str) -> WorkerMaker:
        """Return the maker to send to a worker's process; the addresses in it must be known."""
        return WorkerMaker(
            config=self._config,
            algorithm=self._role.algorithm,
            generates=self._role.generates,
            kind=kind,
            number=number,
            role=role,
            name=worker_name(kind, number, role),
            store=self._cluster.actors[worker_name("store")].address,
            place=self._rank_place(role, number) if role else RankPlace(),
        )

    def _rank_place(self, role: str, rank: int) -> RankPlace:
        """Return the rendezvous of an engine's ranks, and the number of one of them on its node."""
        places = [self._rank(role, each).place for each in range(self._config.cluster.ray.engine_ranks)]
        host, first = places[rank].address, places[0]
        meeting = f"file://{self._meetings}/{role}"  # torch's TCP store would listen on all interfaces
        if self._config.cluster.ray.address is not None:
            meeting = f"tcp://{f'[{first.address}]' if ':' in first.address else first.address}:{first.port}"
        return RankPlace(
            rank=rank,
            world_size=len(places),
            local_rank=sum(place.address == host for place in places[:rank]),
            init_method=meeting if len(places) > 1 else None,
            host=host,
        )

    def _note_places(self) -> None:
        """Write the places of all workers to a file, for information."""
        found = {name: actor.place for name, actor in self._cluster.actors.items() if hasattr(actor, "place")}
        lines = {name: {"pid": place.pid, "node": place.address} for name, place in found.items()}
        replace_file(Path(self._config.folder) / "workers.json", json.dumps(lines, indent=1))

    def _resources(self, parts: int) -> dict[str, float]:
        """Return the resources of a place divided by ``parts``; Ray counts in ten-thousandths."""
        chosen = self._config.cluster.ray
        amounts = {"CPU": chosen.cpus_per_place, "GPU": chosen.gpus_per_place}
        shares = {name: int(10_000 * amount / parts) / 10_000 for name, amount in amounts.items()}
        return {name: share for name, share in shares.items() if share} or {"CPU": 0.001 / parts}
