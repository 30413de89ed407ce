"""The workers of one run in a Ray cluster: each made in an actor of its own, from the run's configuration.

Nothing of the controller's process is sent to an actor but the configuration and addresses of other workers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

import attrs

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.cluster.replica import Replica, Worker
from jackfield.compose.checks import interpreters
from jackfield.compose.ray_serving import CONTRACTS, STORE, Routes, WorkerMaker, longest
from jackfield.compose.workers import RankPlace, WorkerFactory
from jackfield.errors import WorkerLost
from jackfield.files import replace_file
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.ray import Actor, Cluster, WorkerSpec, remote_backend
from jackfield.runtime.ray.cluster import check_interpreter
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.runtime.workers import Workers
from jackfield.trainer import Role, RunWorkers
from jackfield.weights import WeightSender

T = TypeVar("T")

_ROLES = 4  #: actor, reference, critic and replica fit into one place


class RayWorkers:
    """Makes the workers of a run in a cluster, and again after a recovery: in what is left of their processes."""

    def __init__(self, make: WorkerFactory) -> None:
        self._registry, self._config, self._deadlines = make.registry, make.config, make.config.deadlines
        self._cluster = Cluster(make.clock, self._deadlines.start, self._deadlines.heartbeat)
        self._interpreters: dict[str, str] | None = None  # None: the cluster is not open
        self._replicas: int | None = None  # apart from those on their way, as the workers before have left them
        self._role: Role
        self._pools: dict[str, int]  # places by the group of places
        self._groups: dict[str, Any]
        self._meetings: str

    async def make(self, role: Role, stack: AsyncExitStack) -> RunWorkers:
        """Start or join the cluster, and start every worker in it; ``stack`` ends them.

        Raises:
            JackfieldError: The first thing that is missing, or does not answer in time.
        """
        chosen, replicas = self._config.cluster.ray, self._config.cluster.replicas if role.generates else 0
        pools = {"train": chosen.engine_ranks, "rollout": replicas}
        if chosen.placement == "colocated":
            pools = {"shared": max(pools.values())}
        self._role, self._pools = role, {name: count for name, count in pools.items() if count}
        if self._interpreters is None:
            found = interpreters(self._config, self._registry)
            for kind, python in found.items():
                check_interpreter(python, f"the {kind} worker", min(self._deadlines.start, 60.0))
            await self._cluster.open(chosen, sum(pools.values()) * chosen.cpus_per_place)
            self._interpreters = found
        self._replicas = replicas if self._replicas is None else self._replicas
        self._meetings = stack.enter_context(
            TemporaryDirectory(prefix="jackfield-meetings-", ignore_cleanup_errors=True)
        )
        stack.push_async_callback(self._cluster.rest)
        self._agents: list[str] = []
        self._routes: Mapping[int, Replica] = {}
        self._made = set(range(self._replicas))  # replicas that are made with the other workers, and are not started
        self._groups = {
            name: await self._cluster.places(count, self._resources(1), name) for name, count in self._pools.items()
        }
        return await self._workers(self._replicas)

    async def close(self) -> None:
        """End the workers' processes, and leave the cluster."""
        if self._interpreters is not None:
            await self._cluster.close()

    async def _workers(self, replicas: int) -> RunWorkers:
        """Start everything side by side: processes need seconds to import what they work with."""
        chosen = self._config.cluster.ray
        ranks = {engine: [_rank_name(engine, n) for n in range(chosen.engine_ranks)] for engine in self._role.engines}
        agents = [f"agent worker {number}" for number in range(chosen.agent_workers)]
        rewards = [f"reward worker {number}" for number in range(chosen.reward_workers if replicas else 0)]
        specs = [
            self._spec(STORE, "store"),
            *(self._rank(engine, n) for engine, names in ranks.items() for n in range(len(names))),
            *[await self._replica(number) for number in range(replicas)],
            *(self._spec(name, "agent", n, restarts=True) for n, name in enumerate(agents)),
            *(self._spec(name, "reward", n, restarts=True) for n, name in enumerate(rewards)),
        ]
        store, *others = await asyncio.gather(*map(self._cluster.start, specs))
        self._note_places()
        await store.make()
        backend = remote_backend(store.connection, self._deadlines.batch)
        await asyncio.gather(*(actor.make() for actor in others))
        self._agents = agents
        fragile = [store, *(self._cluster.actors[name] for names in ranks.values() for name in names)]
        return RunWorkers(
            backend=backend,
            ranks={engine: [self._rank_stub(name) for name in names] for engine, names in ranks.items()},
            replicas=replicas,
            agents=Workers([self._restarting_stub(name, AgentWorker) for name in agents]),
            rewards=Workers([self._restarting_stub(name, RewardWorker) for name in rewards]) if rewards else None,
            estimator=self._stub(store, AdvantageWorker, self._deadlines.engine),
            shares_devices=chosen.placement == "colocated",
            places=self,
            watch=partial(self._cluster.watch, fragile),
        )

    def _stub(self, actor: Actor, cls: type[T], seconds: float) -> T:
        return actor.stub(cls.__name__, CONTRACTS[cls], cls, seconds)

    def _restarting_stub(self, name: str, cls: type[T]) -> T:
        async def begin(actor: Actor) -> None:
            self._note_places()
            if name in self._agents:
                await self._routed(actor, 0.0)

        seconds = longest(self._config) + self._deadlines.batch
        return self._cluster.restarting_stub(name, cls.__name__, CONTRACTS[cls], cls, seconds, begin)

    def _rank_stub(self, name: str) -> EngineRank:
        actor, seconds = self._cluster.actors[name], self._deadlines.engine
        rank = self._stub(actor, EngineRank, seconds)
        rank.sender = self._stub(actor, WeightSender, seconds)
        return rank

    # -- replicas

    async def start(self, number: int) -> Worker:
        """Make a replica's server in an actor, in a place of its own where the first places have no room for it.

        Raises:
            JackfieldError: There is no place for it, or it does not come; nothing of a new replica is left.
        """
        name = f"rollout replica {number}"
        if number in self._made:
            self._made.discard(number)
        elif name in self._cluster.actors:
            await self._cluster.restart(name)
            self._note_places()
        else:
            await self._add(number, name)
        actor = self._cluster.actors[name]
        server = actor.stub("worker", CONTRACTS[BaseRolloutServer], BaseRolloutServer, longest(self._config))  # type: ignore[type-abstract]
        worker, connection = Worker(server, "cluster"), actor.connection
        connection.lost.add_done_callback(lambda _: worker.lose(connection.error()))
        return worker

    async def _add(self, number: int, name: str) -> None:
        try:
            actor = await self._cluster.start(await self._replica(number))
            self._note_places()
            await actor.make()
        except BaseException:
            await self._drop(name)
            raise
        self._replicas = (self._replicas or 0) + 1

    async def end(self, number: int) -> None:
        """End its process, and give its place back if it was added to the run."""
        self._replicas = (self._replicas or 0) - 1
        await self._drop(f"rollout replica {number}")

    async def _drop(self, name: str) -> None:
        await self._cluster.end(name)
        self._note_places()
        self._cluster.give_back(name)

    async def route(self, replicas: Mapping[int, Replica], seconds: float) -> int:
        """Route every agent worker to the replicas; one that dies gets the routes once it is restarted."""
        self._routes = dict(replicas)
        actors = [self._cluster.actors[name] for name in self._agents]
        return sum(await asyncio.gather(*(self._routed(actor, seconds) for actor in actors)))

    async def _routed(self, agent: Actor, seconds: float) -> int:
        actors = {number: self._cluster.actors[replica.name] for number, replica in self._routes.items()}
        routes = {number: actor.address for number, actor in actors.items() if actor.address is not None}
        try:
            return await self._stub(agent, Routes, longest(self._config)).route(routes, seconds)
        except WorkerLost:  # it is restarted with the new routes
            return 0

    # -- what each worker is

    def _spec(
        self, name: str, kind: Literal["store", "engine", "rollout", "agent", "reward"], number: int = 0, **more: Any
    ) -> WorkerSpec:
        assert self._interpreters is not None
        make = partial(self._maker, name=name, kind=kind, number=number)
        return WorkerSpec(**{"name": name, "make": make, "python": self._interpreters.get(kind), **more})

    def _maker(self, **own: Any) -> WorkerMaker:
        """What is sent to a worker's process, once the addresses in it are known."""
        role, store = self._role, self._cluster.actors[STORE].address
        algorithm, generates = role.algorithm, role.generates
        return WorkerMaker(config=self._config, algorithm=algorithm, generates=generates, store=store, **own)

    async def _replica(self, number: int) -> WorkerSpec:
        name, pool = f"rollout replica {number}", self._pool("rollout")
        if number < self._pools[pool]:
            group, bundle = self._groups[pool], number
        else:
            group, bundle = await self._cluster.places(1, self._resources(1), name), 0
        return self._spec(name, "rollout", number, group=group, bundle=bundle, resources=self._resources(_ROLES))

    def _rank(self, role: str, rank: int) -> WorkerSpec:
        group, resources = self._groups[self._pool("train")], self._resources(_ROLES)
        spec = self._spec(_rank_name(role, rank), "engine", group=group, bundle=rank, resources=resources)
        return attrs.evolve(spec, make=partial(self._make_rank, role, rank))

    def _pool(self, name: str) -> str:
        return name if name in self._pools else "shared"

    def _make_rank(self, role: str, rank: int) -> WorkerMaker:
        """A rank has to know where all meet, and its number on its node."""
        names = [_rank_name(role, each) for each in range(self._config.cluster.ray.engine_ranks)]
        places = [self._cluster.actors[name].place for name in names]
        host, first = places[rank].address, places[0]
        meeting = f"file://{self._meetings}/{role}"  # torch's store at a port would listen on all interfaces
        if self._config.cluster.ray.address is not None:
            meeting = f"tcp://{f'[{first.address}]' if ':' in first.address else first.address}:{first.port}"
        place = RankPlace(
            rank=rank,
            world_size=len(places),
            local_rank=sum(place.address == host for place in places[:rank]),
            init_method=meeting if len(places) > 1 else None,
            host=host,
        )
        return self._maker(name=names[rank], kind="engine", role=role, place=place)

    def _note_places(self) -> None:
        """Write who lives where, for people."""
        found = {name: actor.place for name, actor in self._cluster.actors.items() if hasattr(actor, "place")}
        lines = {name: {"pid": place.pid, "node": place.address} for name, place in found.items()}
        replace_file(Path(self._config.folder) / "workers.json", json.dumps(lines, indent=1))

    def _resources(self, parts: int) -> dict[str, float]:
        """A place's resources, or a part of them; Ray counts in ten-thousandths."""
        chosen = self._config.cluster.ray
        amounts = {"CPU": chosen.cpus_per_place, "GPU": chosen.gpus_per_place}
        shares = {name: int(10_000 * amount / parts) / 10_000 for name, amount in amounts.items()}
        return {name: share for name, share in shares.items() if share} or {"CPU": 0.001 / parts}


def _rank_name(role: str, rank: int) -> str:
    return f"the {role} engine, rank {rank}"
