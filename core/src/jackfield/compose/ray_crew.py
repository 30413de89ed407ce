"""The workers of one run in a Ray cluster: each made in an actor of its own, from the run's configuration.

Nothing of the controller's process is sent to an actor but the configuration and stubs of other workers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import attrs

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.cluster.replica import Replica, Worker
from jackfield.compose.crew import Crew
from jackfield.compose.ray_workers import (
    make_agent_worker,
    make_engine_rank,
    make_replica,
    make_reward_worker,
    make_storage,
)
from jackfield.compose.selection import interpreters
from jackfield.compose.workers import Needs, RankPlace, WorkerFactory
from jackfield.config import RunConfig
from jackfield.errors import DeadlineExceeded, JackfieldError, WorkerLost
from jackfield.files import replace_file
from jackfield.plugins import Registry
from jackfield.runtime.advantages import AdvantageWorker
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.ray import (
    Cluster,
    ClusterOptions,
    Place,
    RemoteBackend,
    RemoteRank,
    RemoteServer,
    Stub,
)
from jackfield.runtime.ray.cluster import check_interpreter
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.runtime.workers import Workers

__all__ = ["RayCrews"]

_ROLES = 4  #: actor, reference, critic and replica fit into one place
_RESTARTS = 100  #: of a worker without state, in one run

_STORAGE = "the queue's storage worker"


@attrs.frozen(kw_only=True)
class _Spec:
    """A worker, and the actor that holds it."""

    name: str
    make: Callable[[], Callable[[], Any]]  #: what makes it there; asked for once all places are known
    kind: str | None = None  #: whose interpreter it gets
    pool: str | None = None  #: the places that it takes a part of; None: anywhere
    bundle: int = 0  #: in the pool; beyond its end: a place of its own
    restarts: int = 0  #: times that Ray starts the process again


class RayCrews:
    """Makes the workers of a run in a cluster, and again after a recovery: in what is left of their processes."""

    def __init__(self, make: WorkerFactory) -> None:
        self._make, self._config, self._deadlines = make, make.config, make.config.deadlines
        self._cluster = Cluster(make.clock, self._deadlines.start, self._deadlines.heartbeat)
        self._interpreters: dict[str, str] | None = None  # None: the cluster is not open
        self._replicas: int | None = None  # apart from those on their way, as an earlier crew has left them
        self._needs: Needs
        self._pools: dict[str, int]
        self._groups: dict[str, Any]
        self._meetings: str
        self._backend: RemoteBackend

    async def make(self, needs: Needs, stack: AsyncExitStack) -> Crew:
        """Start or join the cluster, and start every worker in it; ``stack`` has them put their things away.

        Raises:
            JackfieldError: The first thing that is missing, or does not answer in time.
        """
        chosen, replicas = self._config.cluster.ray, self._config.cluster.replicas if needs.replicas else 0
        pools = {"train": chosen.engine_ranks, "rollout": replicas}
        if chosen.placement == "colocated":
            pools = {"shared": max(pools.values())}
        await self._open(sum(pools.values()))
        self._needs, self._pools = needs, {name: count for name, count in pools.items() if count}
        self._replicas = replicas if self._replicas is None else self._replicas
        self._meetings = stack.enter_context(
            TemporaryDirectory(prefix="jackfield-meetings-", ignore_cleanup_errors=True)
        )
        stack.push_async_callback(self._cluster.rest)
        self._handles: dict[str, Any] = {}
        self._places: dict[str, Place] = {}
        self._agents: list[Stub] = []
        self._routes: dict[int, RemoteServer] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._made = set(range(self._replicas))  # replicas that are made with the other workers, and are not started
        self._groups = {
            name: await self._cluster.places(count, self._resources(1), name) for name, count in self._pools.items()
        }
        return await self._crew(self._replicas)

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

    async def _crew(self, replicas: int) -> Crew:
        """Start everything side by side: processes need seconds to import what they work with."""
        config, needs, ray = self._config, self._needs, self._config.cluster.ray
        roles = ["actor", *(["reference"] if needs.reference else []), *(["critic"] if needs.critic else [])]
        ranks = {role: [self._rank(role, rank) for rank in range(ray.engine_ranks)] for role in roles}
        agents = [self._stateless("agent", n, partial(self._make_agent, n)) for n in range(ray.agent_workers)]
        rewards = [
            self._stateless("reward", n, lambda n=n: partial(make_reward_worker, config, self._backend, n))  # type: ignore[misc]
            for n in range(ray.reward_workers if replicas else 0)
        ]
        fragile = [_Spec(name=_STORAGE, make=lambda: partial(make_storage, config, needs)), *chain(*ranks.values())]
        specs = [*fragile, *map(self._replica, range(replicas)), *agents, *rewards]
        for spec in specs:
            await self._start(spec)
        await asyncio.gather(*map(self._find, specs))
        storage = self._handles[_STORAGE]
        self._backend = RemoteBackend(Stub(storage, _STORAGE, self._deadlines.batch))
        again = dict(zip(specs, await asyncio.gather(*map(self._make_worker, specs)), strict=True))
        longest = self._longest + self._deadlines.batch
        self._agents, scoring = (
            [Stub(self._handles[spec.name], spec.name, longest, make=again[spec]) for spec in group]
            for group in (agents, rewards)
        )
        engines = {
            role: [
                cast(EngineRank, RemoteRank(self._handles[spec.name], spec.name, self._deadlines.engine))
                for spec in ranks.get(role, ())
            ]
            for role in ("actor", "reference", "critic")
        }
        return Crew(
            backend=self._backend,
            **engines,
            replicas=replicas,
            agents=Workers(cast("list[AgentWorker]", self._agents)),
            rewards=Workers(cast("list[RewardWorker]", scoring)) if scoring else None,
            estimator=cast(
                AdvantageWorker, Stub(storage, "the advantage worker", self._deadlines.engine, "estimator.")
            ),
            shares_devices=ray.placement == "colocated",
            places=self,
            watch=partial(self._cluster.watch, [self._handles[spec.name] for spec in fragile]),
        )

    # -- replicas

    async def start(self, number: int) -> Worker:
        """Have an actor make a replica's server, in a place of its own where the first places have no room for it.

        Raises:
            JackfieldError: There is no place for it, or it does not come; nothing of a new replica is left.
        """
        spec = self._replica(number)
        if number in self._made:
            self._made.discard(number)
        elif spec.name in self._handles:
            with suppress(WorkerLost, DeadlineExceeded):
                await self._cluster.empty(self._handles[spec.name])
            await self._find(spec)
            await self._make_worker(spec)
        else:
            await self._add(number, spec)
        handle = self._handles[spec.name]
        worker = Worker(cast(BaseRolloutServer, RemoteServer(handle, spec.name, self._longest)), "cluster")
        self._lives[number] = asyncio.create_task(self._watch(handle, worker), name=f"life of {spec.name}")
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

    async def _watch(self, handle: Any, worker: Worker) -> None:
        try:
            await self._cluster.watch([handle])
        except JackfieldError as error:
            worker.lose(error)

    async def end(self, number: int) -> None:
        """End its process, and give its place back if it was added to the run."""
        self._replicas = (self._replicas or 0) - 1
        await self._drop(number)

    async def route(self, replicas: Mapping[int, Replica], seconds: float) -> int:
        """Tell every agent worker; one that dies meanwhile, or later, is told when it is made again."""
        self._routes = {number: cast(RemoteServer, replica.worker.server) for number, replica in replicas.items()}
        for number, agent in enumerate(self._agents):
            agent.made_by(self._cluster.told(self._make_agent(number)))
        return sum(await asyncio.gather(*(self._routed(agent, seconds) for agent in self._agents)))

    async def _routed(self, agent: Stub, seconds: float) -> int:
        try:
            moved: int = await agent.route(self._routes, seconds)
        except WorkerLost:  # it was made again with the new routes
            return 0
        return moved

    async def _drop(self, number: int) -> None:
        name = f"rollout replica {number}"
        if number in self._lives:
            self._lives.pop(number).cancel()
        handle = self._handles.pop(name, None)
        if handle is not None:
            await self._cluster.end(handle)
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
            make=lambda: partial(make_replica, self._config, number, host=self._places[name].address),
            kind="rollout",
            pool=self._pool("rollout"),
            bundle=number,
            restarts=-1 if self._config.cluster.replica_restarts else 0,
        )

    def _stateless(self, kind: str, number: int, make: Callable[[], Callable[[], Any]]) -> _Spec:
        return _Spec(name=f"{kind} worker {number}", make=make, kind=kind, restarts=_RESTARTS)

    def _pool(self, name: str) -> str:
        return name if name in self._pools else "shared"

    def _make_agent(self, number: int) -> Callable[[], Any]:
        servers = self._routes if self._needs.replicas else None
        return partial(make_agent_worker, self._config, self._backend, servers, number)

    def _make_rank(self, role: str, rank: int) -> Callable[[], Any]:
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
        return partial(make_engine_rank, self._config, self._needs, self._backend, role, place)

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
        self._handles[spec.name] = await self._cluster.start(
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
        self._places[spec.name] = await self._cluster.place(self._handles[spec.name])
        self._note_places()

    async def _make_worker(self, spec: _Spec) -> bytes:
        return await self._cluster.make(self._handles[spec.name], spec.make())

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


def _rank_name(role: str, rank: int) -> str:
    return f"the {role} engine, rank {rank}"


def _interpreters(config: RunConfig, registry: Registry) -> dict[str, str]:
    """Kinds of workers that have an interpreter of their own, each looked at before anything starts."""
    chosen = interpreters(config, registry)
    for kind, python in chosen.items():
        check_interpreter(python, f"the {kind} worker", min(config.deadlines.start, 60.0))
    return chosen
