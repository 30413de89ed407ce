"""The workers of one run in a Ray cluster: each made in an actor of its own, from the run's configuration.

Nothing of the controller's process is sent to an actor but the configuration and addresses of other workers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import attrs

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.cluster.replica import Replica, Worker
from jackfield.compose.checks import interpreters
from jackfield.compose.ray_serving import (
    ADVANTAGES,
    AGENT,
    RANK,
    REWARD,
    ROUTES,
    SENDER,
    Routes,
    serve_agent_worker,
    serve_engine_rank,
    serve_replica,
    serve_reward_worker,
    serve_store,
    store_name,
)
from jackfield.compose.workers import RankPlace, WorkerFactory
from jackfield.config import RunConfig
from jackfield.errors import DeadlineExceeded, WorkerLost
from jackfield.files import replace_file
from jackfield.plugins import Registry
from jackfield.rpc import Address, Contract
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.process.host import ROLLOUT
from jackfield.runtime.ray import Actor, Cluster, ClusterOptions, MakeServices, Place, remote_backend
from jackfield.runtime.ray.cluster import check_interpreter
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.runtime.workers import Workers
from jackfield.trainer import Role, RunWorkers
from jackfield.weights import WeightSender

T = TypeVar("T")

_ROLES = 4  #: actor, reference, critic and replica fit into one place
_RESTARTS = 100  #: of a worker without state, in one run
_STOP_SECONDS = 15.0  #: for a replica to stop, or a rank to close


@attrs.frozen(kw_only=True)
class _Spec:
    """A worker, and the actor that holds it."""

    name: str
    make: Callable[[], MakeServices]  #: what makes it there; asked for once all places are known
    kind: str | None = None  #: whose interpreter it gets
    pool: str | None = None  #: the places that it takes a part of; None: anywhere
    bundle: int = 0  #: in the pool; beyond its end: a place of its own
    restarts: int = 0  #: times that Ray starts the process again


class RayWorkers:
    """Makes the workers of a run in a cluster, and again after a recovery: in what is left of their processes."""

    def __init__(self, make: WorkerFactory) -> None:
        self._make, self._config, self._deadlines = make, make.config, make.config.deadlines
        self._cluster = Cluster(make.clock, self._deadlines.start, self._deadlines.heartbeat)
        self._interpreters: dict[str, str] | None = None  # None: the cluster is not open
        self._replicas: int | None = None  # apart from those on their way, as the workers before have left them
        self._role: Role
        self._pools: dict[str, int]
        self._groups: dict[str, Any]
        self._meetings: str
        self._store: Address

    async def make(self, role: Role, stack: AsyncExitStack) -> RunWorkers:
        """Start or join the cluster, and start every worker in it; ``stack`` has them put their things away.

        Raises:
            JackfieldError: The first thing that is missing, or does not answer in time.
        """
        chosen, replicas = self._config.cluster.ray, self._config.cluster.replicas if role.generates else 0
        pools = {"train": chosen.engine_ranks, "rollout": replicas}
        if chosen.placement == "colocated":
            pools = {"shared": max(pools.values())}
        await self._open(sum(pools.values()))
        self._role, self._pools = role, {name: count for name, count in pools.items() if count}
        self._replicas = replicas if self._replicas is None else self._replicas
        self._meetings = stack.enter_context(
            TemporaryDirectory(prefix="jackfield-meetings-", ignore_cleanup_errors=True)
        )
        stack.push_async_callback(self._cluster.rest)
        self._actors: dict[str, Actor] = {}
        self._places: dict[str, Place] = {}
        self._agents: list[Actor] = []
        self._routes: dict[int, Address] = {}
        self._made = set(range(self._replicas))  # replicas that are made with the other workers, and are not started
        self._groups = {
            name: await self._cluster.places(count, self._resources(1), name) for name, count in self._pools.items()
        }
        return await self._workers(self._replicas)

    async def close(self) -> None:
        """End the workers' processes, and leave the cluster."""
        if self._interpreters is not None:
            await self._cluster.close()

    async def _open(self, places: int) -> None:
        if self._interpreters is not None:
            return
        chosen, interpreters = self._config.cluster.ray, _interpreters(self._config, self._make.registry)
        options = ClusterOptions(
            address=chosen.address, num_cpus=chosen.num_cpus, object_store_bytes=chosen.object_store_bytes
        )
        await self._cluster.open(options, places * chosen.cpus_per_place)
        self._interpreters = interpreters

    async def _workers(self, replicas: int) -> RunWorkers:
        """Start everything side by side: processes need seconds to import what they work with."""
        config, role, ray = self._config, self._role, self._config.cluster.ray
        ranks = {engine: [self._rank(engine, rank) for rank in range(ray.engine_ranks)] for engine in role.engines}
        store = _Spec(name=store_name, make=lambda: partial(serve_store, config, role.algorithm))
        agents = [
            self._stateless("agent", n, lambda n=n: partial(serve_agent_worker, config, self._store, n, role.generates))  # type: ignore[misc]
            for n in range(ray.agent_workers)
        ]
        rewards = [
            self._stateless("reward", n, lambda n=n: partial(serve_reward_worker, config, self._store, n))  # type: ignore[misc]
            for n in range(ray.reward_workers if replicas else 0)
        ]
        others = [*chain(*ranks.values()), *map(self._replica, range(replicas)), *agents, *rewards]
        for spec in (store, *others):
            await self._start(spec)
        await asyncio.gather(*map(self._find, (store, *others)))
        self._store = await self._make_worker(store)
        backend = remote_backend(self._actors[store_name].connection, self._deadlines.batch)
        await asyncio.gather(*map(self._make_worker, others))
        self._agents = [self._actors[spec.name] for spec in agents]
        scoring = [self._restarting_stub(spec, REWARD, RewardWorker) for spec in rewards]
        fragile = [self._actors[spec.name] for spec in (store, *chain(*ranks.values()))]
        seconds = self._deadlines.engine
        return RunWorkers(
            backend=backend,
            ranks={engine: [self._rank_stub(spec) for spec in specs] for engine, specs in ranks.items()},
            replicas=replicas,
            agents=Workers([self._restarting_stub(spec, AGENT, AgentWorker) for spec in agents]),
            rewards=Workers(scoring) if scoring else None,
            estimator=self._actors[store_name].stub("advantages", ADVANTAGES, AdvantageWorker, seconds),
            shares_devices=ray.placement == "colocated",
            places=self,
            watch=partial(self._cluster.watch, fragile),
        )

    def _restarting_stub(self, spec: _Spec, contract: Contract, cls: type[T]) -> T:
        actor, longest = self._actors[spec.name], self._longest + self._deadlines.batch

        async def begin() -> None:
            await self._find(spec)
            if actor in self._agents:
                await self._routed(actor, 0.0)

        return actor.restarting_stub("worker", contract, cls, longest, begin)

    def _rank_stub(self, spec: _Spec) -> EngineRank:
        """What stands for a rank: a dead one has been closed."""
        actor, seconds = self._actors[spec.name], self._deadlines.engine
        rank = actor.stub("worker", RANK, EngineRank, seconds)
        rank.sender = actor.stub("sender", SENDER, WeightSender, seconds)
        rank.close = _if_there(actor.stub("worker", RANK, EngineRank, _STOP_SECONDS).close)  # type: ignore[method-assign]
        return rank

    # -- replicas

    async def start(self, number: int) -> Worker:
        """Have an actor make a replica's server, in a place of its own where the first places have no room for it.

        Raises:
            JackfieldError: There is no place for it, or it does not come; nothing of a new replica is left.
        """
        spec = self._replica(number)
        if number in self._made:
            self._made.discard(number)
        elif spec.name in self._actors:
            with suppress(WorkerLost, DeadlineExceeded):
                await self._actors[spec.name].empty()
            await self._find(spec)
            await self._make_worker(spec)
        else:
            await self._add(number, spec)
        actor = self._actors[spec.name]
        server = actor.stub("worker", ROLLOUT, BaseRolloutServer, self._longest)  # type: ignore[type-abstract]
        stopping = actor.stub("worker", ROLLOUT, BaseRolloutServer, _STOP_SECONDS)  # type: ignore[type-abstract]
        server.stop = _if_there(stopping.stop)  # type: ignore[method-assign]
        worker, connection = Worker(server, "cluster"), actor.connection
        connection.lost.add_done_callback(lambda _: worker.lose(connection.error()))
        return worker

    async def _add(self, number: int, spec: _Spec) -> None:
        try:
            await self._start(spec)
            await self._find(spec)
            await self._make_worker(spec)
        except BaseException:
            await self._drop(number)
            raise
        self._replicas = (self._replicas or 0) + 1

    async def end(self, number: int) -> None:
        """End its process, and give its place back if it was added to the run."""
        self._replicas = (self._replicas or 0) - 1
        await self._drop(number)

    async def route(self, replicas: Mapping[int, Replica], seconds: float) -> int:
        """Route every agent worker to the replicas; one that dies gets the routes once it is made again."""
        actors = {number: self._actors[f"rollout replica {number}"] for number in replicas}
        self._routes = {number: actor.address for number, actor in actors.items() if actor.address is not None}
        return sum(await asyncio.gather(*(self._routed(agent, seconds) for agent in self._agents)))

    async def _routed(self, agent: Actor, seconds: float) -> int:
        try:
            return await agent.stub("routes", ROUTES, Routes, self._longest).route(self._routes, seconds)
        except WorkerLost:  # it is made again with the new routes
            return 0

    async def _drop(self, number: int) -> None:
        name = f"rollout replica {number}"
        actor = self._actors.pop(name, None)
        if actor is not None:
            await self._cluster.end(actor)
        self._places.pop(name, None)
        self._note_places()
        self._cluster.give_back(name)

    # -- what each worker is

    def _rank(self, role: str, rank: int) -> _Spec:
        make = partial(self._make_rank, role, rank)
        return _Spec(name=_rank_name(role, rank), make=make, kind="engine", pool=self._pool("train"), bundle=rank)

    def _replica(self, number: int) -> _Spec:
        """Ray starts it again without end; the pool counts how often it dies."""
        name = f"rollout replica {number}"
        return _Spec(
            name=name,
            make=lambda: partial(serve_replica, self._config, number, self._places[name].address),
            kind="rollout",
            pool=self._pool("rollout"),
            bundle=number,
            restarts=-1 if self._config.cluster.replica_restarts else 0,
        )

    def _stateless(self, kind: str, number: int, make: Callable[[], MakeServices]) -> _Spec:
        return _Spec(name=f"{kind} worker {number}", make=make, kind=kind, restarts=_RESTARTS)

    def _pool(self, name: str) -> str:
        return name if name in self._pools else "shared"

    def _make_rank(self, role: str, rank: int) -> MakeServices:
        """A rank has to know where all meet, and its number on its node."""
        places = [self._places[_rank_name(role, each)] for each in range(self._config.cluster.ray.engine_ranks)]
        host = places[rank].address
        place = RankPlace(
            rank=rank,
            world_size=len(places),
            local_rank=sum(place.address == host for place in places[:rank]),
            init_method=self._meeting(role, places[0]) if len(places) > 1 else None,
            host=host,
        )
        return partial(serve_engine_rank, self._config, self._role.algorithm, self._store, role, place)

    def _meeting(self, role: str, first: Place) -> str:
        """In a file where the cluster is this machine alone: torch's store at a port listens on all interfaces."""
        if self._config.cluster.ray.address is None:
            return f"file://{self._meetings}/{role}"
        address = f"[{first.address}]" if ":" in first.address else first.address
        return f"tcp://{address}:{first.port}"

    # -- actors

    async def _start(self, spec: _Spec) -> None:
        """Start the actor of a worker, or take the one that an earlier worker of this name has left."""
        assert self._interpreters is not None
        group, bundle = None if spec.pool is None else self._groups[spec.pool], spec.bundle
        if spec.pool is not None and bundle >= self._pools[spec.pool]:
            group, bundle = await self._cluster.places(1, self._resources(1), spec.name), 0
        self._actors[spec.name] = await self._cluster.start(
            spec.name,
            group=group,
            bundle=bundle,
            resources=None if group is None else self._resources(_ROLES),
            python=None if spec.kind is None else self._interpreters.get(spec.kind),
            restarts=spec.restarts,
            one_thread=group is not None,
        )

    async def _find(self, spec: _Spec) -> None:
        """Find out where a worker lives."""
        self._places[spec.name] = await self._cluster.place(self._actors[spec.name])
        self._note_places()

    async def _make_worker(self, spec: _Spec) -> Address:
        return await self._actors[spec.name].make(spec.make())

    def _note_places(self) -> None:
        """Who lives where, for people."""
        lines = {name: {"pid": place.pid, "node": place.address} for name, place in self._places.items()}
        replace_file(Path(self._config.folder) / "workers.json", json.dumps(lines, indent=1))

    def _resources(self, parts: int) -> dict[str, float]:
        """A place's resources, or a part of them; Ray counts in ten-thousandths."""
        chosen = self._config.cluster.ray
        amounts = {"CPU": chosen.cpus_per_place, "GPU": chosen.gpus_per_place}
        shares = {name: int(10_000 * amount / parts) / 10_000 for name, amount in amounts.items()}
        return {name: share for name, share in shares.items() if share} or {"CPU": 0.001 / parts}

    @property
    def _longest(self) -> float:
        """The longest that a call of a worker may take."""
        deadlines = self._deadlines
        return max(deadlines.rollout, deadlines.start, deadlines.sync, deadlines.reward)


def _if_there(call: Callable[[], Awaitable[None]]) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a call that has nothing to do where the worker is dead."""

    async def called() -> None:
        with suppress(WorkerLost, DeadlineExceeded):
            await call()

    return called


def _rank_name(role: str, rank: int) -> str:
    return f"the {role} engine, rank {rank}"


def _interpreters(config: RunConfig, registry: Registry) -> dict[str, str]:
    """Kinds of workers that have an interpreter of their own, each looked at before anything starts."""
    chosen = interpreters(config, registry)
    for kind, python in chosen.items():
        check_interpreter(python, f"the {kind} worker", min(config.deadlines.start, 60.0))
    return chosen
