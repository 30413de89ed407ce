"""The workers of one run in a Ray cluster: each made in an actor of its own, from the run's configuration.

This module's functions that begin with ``make`` run in actors; nothing of the controller's process is sent there but
the configuration and stand-ins for other workers.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.algorithms import register_part
from jackfield.clock import Clock
from jackfield.cluster.pool import Replica, Worker
from jackfield.compose.crew import CRITIC_COLUMNS, Crew, Needs
from jackfield.compose.inputs import check_tokens, read_model, read_tasks
from jackfield.compose.recipe import make_recipe
from jackfield.compose.selection import interpreters
from jackfield.compose.workers import WorkerFactory
from jackfield.config import RunConfig, plugin_sections
from jackfield.errors import DeadlineExceeded, JackfieldError, WorkerLost
from jackfield.files import replace_file
from jackfield.plugins import Registry, hook_manager, installed
from jackfield.queue import Rows
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
    Storage,
    Stub,
)
from jackfield.runtime.ray.cluster import check_interpreter
from jackfield.runtime.ray.host import interface_of
from jackfield.runtime.reward_worker import RewardWorker
from jackfield.runtime.workers import Workers, resubmitted
from jackfield.workers.router import Generates

__all__ = ["RayCrews"]

_ROLES = 4  #: actor, reference, critic and replica fit into one place
_RESTARTS = 100  #: of a worker without state, in one run

_Made = tuple[Any, Callable[[], Any]]  # an actor, and what makes its worker there


class RayCrews:
    """Makes the workers of a run in a cluster, and again after a recovery: in what is left of their processes."""

    def __init__(self, make: WorkerFactory) -> None:
        self._make = make
        self._config = make.config
        self._registry = make.registry
        self._cluster = Cluster(make.clock, make.config.deadlines.start, make.config.deadlines.heartbeat)
        self._interpreters: dict[str, str] | None = None  # None: the cluster is not open
        self._crew: _RayCrew | None = None

    async def make(self, needs: Needs, stack: AsyncExitStack) -> Crew:
        """Start or join the cluster, and start every worker in it; ``stack`` has them put their things away.

        Raises:
            JackfieldError: the first thing that is missing, or does not answer in time.
        """
        config = self._config
        chosen = config.cluster.ray
        pools = {"train": chosen.engine_ranks, "rollout": config.cluster.replicas if needs.replicas else 0}
        if chosen.placement == "colocated":
            pools = {"shared": max(pools.values())}
        if self._interpreters is None:
            interpreters = _interpreters(config, self._registry)
            options = ClusterOptions(
                address=chosen.address, num_cpus=chosen.num_cpus, object_store_bytes=chosen.object_store_bytes
            )
            await self._cluster.open(options, sum(pools.values()) * chosen.cpus_per_place)
            self._interpreters = interpreters
        meetings = stack.enter_context(TemporaryDirectory(prefix="jackfield-meetings-", ignore_cleanup_errors=True))
        stack.push_async_callback(self._cluster.rest)
        replicas = config.cluster.replicas if self._crew is None else self._crew.replicas  # as it was left
        self._crew = _RayCrew(
            self._make, needs, self._cluster, self._interpreters, replicas if needs.replicas else 0, meetings
        )
        return await self._crew.begin({name: count for name, count in pools.items() if count})

    async def close(self) -> None:
        """End the workers' processes, and leave the cluster."""
        if self._interpreters is not None:
            await self._cluster.close()


class _RayCrew:
    """Starts workers pool by pool; then the fleet of the replicas."""

    def __init__(
        self,
        make: WorkerFactory,
        needs: Needs,
        cluster: Cluster,
        interpreters: dict[str, str],
        replicas: int,
        meetings: str,
    ) -> None:
        self._make = make
        self._config = config = make.config
        self._needs = needs
        self._cluster = cluster
        self._interpreters = interpreters
        self._meetings = meetings
        self.replicas = replicas  #: how many there are, apart from those that are on their way
        self._pools: dict[str, int] = {}
        self._groups: dict[str, Any] = {}
        self._agents: list[Stub] = []
        self._routes: dict[int, RemoteServer] = {}
        self._made: set[int] = set()  # replicas that were made with the other workers, and are not started
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._backend: RemoteBackend
        self._names: dict[str, Any] = {}
        self._places: dict[str, Place] = {}
        self._deadlines = config.deadlines

    async def begin(self, pools: dict[str, int]) -> Crew:
        """Everything, side by side: processes need seconds to import what they work with."""
        config, needs, cluster, self._pools = self._config, self._needs, self._cluster, pools
        self._groups = {name: await cluster.places(count, self._resources(1), name) for name, count in pools.items()}
        storage = await self._actor("the queue's storage worker")
        backend = self._backend = RemoteBackend(Stub(storage, "the queue's storage worker", self._deadlines.batch))
        roles = ["actor", *(["reference"] if needs.reference else []), *(["critic"] if needs.critic else [])]
        ranks = {role: await self._ranks(role) for role in roles}
        servers = [await self._replica(number) for number in range(self.replicas)]
        ray = config.cluster.ray
        agents = [await self._stateless("agent", number) for number in range(ray.agent_workers)]
        rewards = [await self._stateless("reward", number) for number in range(ray.reward_workers if servers else 0)]
        places = await self._find_places()
        self._made = set(range(self.replicas))
        makes: list[_Made] = [(storage, partial(make_storage, config, needs))]
        for role, made in ranks.items():
            makes += self._engine_group(role, [handle for handle, _ in made], places, backend)
        makes += [
            (handle, partial(make_replica, config, number, host=places[id(handle)].address))
            for number, handle in enumerate(servers)
        ]
        makes += [(handle, self._make_agent(number)) for number, handle in enumerate(agents)]
        makes += [
            (handle, partial(make_reward_worker, config, backend, number)) for number, handle in enumerate(rewards)
        ]
        told = await asyncio.gather(*(cluster.make(handle, make) for handle, make in makes))
        again = {id(handle): made_by for (handle, _), made_by in zip(makes, told, strict=True)}
        self._agents = [self._stub(handle, again) for handle in agents]
        return Crew(
            backend=backend,
            actor=[cast(EngineRank, stand_in) for _, stand_in in ranks["actor"]],
            reference=[cast(EngineRank, stand_in) for _, stand_in in ranks.get("reference", ())],
            critic=[cast(EngineRank, stand_in) for _, stand_in in ranks.get("critic", ())],
            replicas=self.replicas,
            agents=Workers(cast("list[AgentWorker]", self._agents)),
            rewards=Workers([cast(RewardWorker, self._stub(handle, again)) for handle in rewards]) if rewards else None,
            estimator=cast(
                AdvantageWorker, Stub(storage, "the advantage worker", self._deadlines.engine, "estimator.")
            ),
            shares_devices=config.cluster.ray.placement == "colocated",
            places=self,
            watch=partial(cluster.watch, [storage, *(handle for made in ranks.values() for handle, _ in made)]),
        )

    # -- replicas

    async def start(self, number: int) -> Worker:
        """Have an actor make a replica's server, in a place of its own where the first places have no room for it.

        Raises:
            JackfieldError: There is no place for it, or it does not come; nothing of a new replica is left.
        """
        name = f"rollout replica {number}"
        if number not in self._made:
            await (self._make_again(number, name) if name in self._names else self._add(number, name))
        self._made.discard(number)
        worker = Worker(cast(BaseRolloutServer, RemoteServer(self._names[name], name, self._longest)), "cluster")
        self._lives[number] = asyncio.create_task(self._watch(self._names[name], worker), name=f"life of {name}")
        return worker

    async def _watch(self, handle: Any, worker: Worker) -> None:
        try:
            await self._cluster.watch([handle])
        except JackfieldError as error:
            worker.lose(error)

    async def _add(self, number: int, name: str) -> None:
        try:
            await self._make_replica(number, await self._replica(number), name)
        except BaseException:
            await self._drop(number)
            raise
        self.replicas += 1

    async def _make_again(self, number: int, name: str) -> None:
        with suppress(WorkerLost, DeadlineExceeded):
            await self._cluster.empty(self._names[name])
        await self._make_replica(number, self._names[name], name)

    async def end(self, number: int) -> None:
        """End its process, and give its place back if it was added to the run."""
        self.replicas -= 1
        await self._drop(number)

    async def route(self, replicas: Mapping[int, Replica], seconds: float) -> int:
        """Tell every agent worker; one that dies meanwhile, or later, is told when it is made again."""
        self._routes = {number: cast(RemoteServer, replica.worker.server) for number, replica in replicas.items()}
        for number, agent in enumerate(self._agents):
            agent.made_by(self._cluster.told(self._make_agent(number)))
        work = (
            resubmitted(lambda agent=agent: agent.route(self._routes, seconds), "the list of replicas")  # type: ignore[misc]
            for agent in self._agents
        )
        return sum(await asyncio.gather(*work))

    async def _drop(self, number: int) -> None:
        name = f"rollout replica {number}"
        if number in self._lives:
            self._lives.pop(number).cancel()
        handle = self._names.pop(name, None)
        if handle is not None:
            await self._cluster.end(handle)
        self._places.pop(name, None)
        self._note_places()
        self._cluster.give_back(name)

    def _make_agent(self, number: int) -> Callable[[], Any]:
        servers = self._routes if self._needs.replicas else None
        return partial(make_agent_worker, self._config, self._backend, servers, number)

    # -- workers ---------------------------------------------------------------------------------------------------

    async def _ranks(self, role: str) -> list[tuple[Any, RemoteRank]]:
        """Actors of one engine group."""
        made = []
        for rank in range(self._config.cluster.ray.engine_ranks):
            name = f"the {role} engine, rank {rank}"
            group = self._groups.get("train") or self._groups["shared"]
            handle = await self._actor(name, kind="engine", group=group, bundle=rank, one_thread=True)
            made.append((handle, RemoteRank(handle, name, self._deadlines.engine)))
        return made

    async def _replica(self, number: int) -> Any:
        """An actor that Ray starts again without end; how often it may die is looked at here."""
        name = f"rollout replica {number}"
        pool = "rollout" if "rollout" in self._groups else "shared"
        bundle, group = number, self._groups[pool]
        if number >= self._pools[pool]:
            bundle, group = 0, await self._cluster.places(1, self._resources(1), name)
        restarts = -1 if self._config.cluster.replica_restarts else 0
        return await self._actor(name, kind="rollout", group=group, bundle=bundle, restarts=restarts, one_thread=True)

    async def _make_replica(self, number: int, handle: Any, name: str) -> None:
        """Have an actor make its replica, wherever Ray has started it."""
        place = self._places[name] = await self._cluster.place(handle)
        self._note_places()
        await self._cluster.make(handle, partial(make_replica, self._config, number, host=place.address))

    @property
    def _longest(self) -> float:
        return max(self._deadlines.rollout, self._deadlines.start, self._deadlines.sync)

    async def _stateless(self, kind: str, number: int) -> Any:
        return await self._actor(f"{kind} worker {number}", kind=kind, restarts=_RESTARTS)

    async def _actor(
        self,
        name: str,
        *,
        kind: str | None = None,
        group: Any = None,
        bundle: int = 0,
        restarts: int = 0,
        one_thread: bool = False,
    ) -> Any:
        handle = await self._cluster.start(
            name,
            group=group,
            bundle=bundle,
            resources=self._resources(_ROLES) if group is not None else None,
            python=None if kind is None else self._interpreters.get(kind),
            restarts=restarts,
            one_thread=one_thread,
        )
        self._names[name] = handle
        return handle

    def _resources(self, parts: int) -> dict[str, float]:
        """A place's resources, or a part of them; Ray counts in ten-thousandths."""
        chosen = self._config.cluster.ray
        amounts = {"CPU": chosen.cpus_per_place, "GPU": chosen.gpus_per_place}
        shares = {name: int(10_000 * amount / parts) / 10_000 for name, amount in amounts.items()}
        return {name: share for name, share in shares.items() if share} or {"CPU": 0.001 / parts}

    def _stub(self, handle: Any, again: Mapping[int, bytes]) -> Stub:
        """Stands for a worker that is made again when it dies."""
        name = next(name for name, each in self._names.items() if each is handle)
        longest = max(self._deadlines.rollout, self._deadlines.reward) + self._deadlines.batch
        return Stub(handle, name, longest, make=again[id(handle)])

    async def _find_places(self) -> dict[int, Place]:
        """Find out where everybody lives; places by their actor's ``id``."""
        found = await asyncio.gather(*(self._cluster.place(handle) for handle in self._names.values()))
        self._places = dict(zip(self._names, found, strict=True))
        self._note_places()
        return {id(self._names[name]): place for name, place in self._places.items()}

    def _note_places(self) -> None:
        """Who lives where, for people."""
        lines = {name: {"pid": place.pid, "node": place.address} for name, place in self._places.items()}
        replace_file(Path(self._config.folder) / "workers.json", json.dumps(lines, indent=1))

    def _engine_group(
        self, role: str, handles: Sequence[Any], places: Mapping[int, Place], backend: RemoteBackend
    ) -> list[_Made]:
        """What makes each rank, which has to know where they meet."""
        meeting = self._meeting(role, places[id(handles[0])]) if len(handles) > 1 else None
        local: dict[str, int] = {}
        makes: list[_Made] = []
        for rank, handle in enumerate(handles):
            host = places[id(handle)].address
            number = local[host] = local.get(host, -1) + 1
            make = partial(make_engine_rank, self._config, self._needs, backend, role, rank, len(handles))
            makes.append((handle, partial(make, init_method=meeting, host=host, local_rank=number)))
        return makes

    def _meeting(self, role: str, first: Place) -> str:
        """In a file where the cluster is this machine alone: torch's store at a port listens on all interfaces."""
        if self._config.cluster.ray.address is None:
            return f"file://{self._meetings}/{role}"
        address = f"[{first.address}]" if ":" in first.address else first.address
        return f"tcp://{address}:{first.port}"


def _interpreters(config: RunConfig, registry: Registry) -> dict[str, str]:
    """Kinds of workers that have an interpreter of their own, each looked at before anything starts."""
    chosen = interpreters(config, registry)
    for kind, python in chosen.items():
        check_interpreter(python, f"the {kind} worker", min(config.deadlines.start, 60.0))
    return chosen


# ---- in actors ------------------------------------------------------------------------------------------------------


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


def make_storage(config: RunConfig, needs: Needs) -> Storage:
    """The queue's backend, and the estimator beside it."""
    _use_threads(config)  # and import torch now, rather than at the first row
    backend = _factory(config).backend()
    return Storage(backend, AdvantageWorker(Rows(backend), needs.plan))


def make_engine_rank(
    config: RunConfig,
    needs: Needs,
    backend: RemoteBackend,
    role: str,
    rank: int,
    size: int,
    *,
    init_method: str | None,
    host: str,
    local_rank: int,
) -> EngineRank:
    """A rank of actor, reference or critic."""
    _use_threads(config)
    if interface := interface_of(host):  # gloo would take the address of the machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    columns = {"actor": needs.loss_columns, "critic": CRITIC_COLUMNS}.get(role, ())
    return _factory(config).engine_rank(
        Rows(backend),
        role,
        loss_columns=columns,
        renamed=needs.renamed if role == "actor" else None,
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        init_method=init_method,
        host=host,
    )


def make_replica(config: RunConfig, number: int, *, host: str) -> BaseRolloutServer:
    """A replica; not started."""
    _use_threads(config)
    return _factory(config).rollout_server(number, host=host)


def make_agent_worker(
    config: RunConfig, backend: RemoteBackend, servers: Mapping[int, RemoteServer] | None, number: int
) -> AgentWorker:
    """A worker that runs agents on the replicas; the first one looks whether data, tokenizer and model fit."""
    factory = _factory(config)
    if number == 0:
        recipe = make_recipe(config, factory.registry.find("rollout", config.rollout.name))
        check_tokens(config, read_tasks(config, recipe), read_model(config))
    return factory.agent_worker(
        Rows(backend), cast("Mapping[int, Generates] | None", servers), request_prefix=f"{config.name}-{number}"
    )


async def make_reward_worker(config: RunConfig, backend: RemoteBackend, number: int) -> RewardWorker:
    """A worker with a started reward agent."""
    return await _factory(config).reward_worker(Rows(backend), number)
