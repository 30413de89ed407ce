"""The workers of a run in a Ray cluster, each made in its own process.

Processes receive only the configuration and the addresses of other workers from the controller's process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import attrs

from jackfield.compose.checks import interpreters
from jackfield.compose.workers import CONTRACTS, Kind, OpenQueue, Routes, Worker, WorkerFactory, longest, make_worker
from jackfield.errors import WorkerLost
from jackfield.files import replace_file
from jackfield.routing import Replica
from jackfield.runtime.engine import EngineRank
from jackfield.runtime.process import death, node_address, use_process
from jackfield.runtime.ray_cluster import Actor, Cluster, WorkerSpec, check_interpreter
from jackfield.runtime.rewards import RewardWorker
from jackfield.runtime.samples import AdvantageWorker
from jackfield.runtime.workers import AgentWorker, Workers
from jackfield.sdk.rpc import stub
from jackfield.trainer.role import Role, RunWorkers
from jackfield.weights import WeightSender

T = TypeVar("T")

_ROLES = 4  #: one place holds an actor, a reference, a critic and a replica


class RayWorkers:
    """Makes a run's workers in a cluster; after a recovery it reuses live processes."""

    def __init__(self, make: WorkerFactory) -> None:
        self._registry, self._config, self._deadlines = make.registry, make.config, make.config.deadlines
        self._cluster = Cluster(make.clock, make_worker, self._deadlines.start, self._deadlines.heartbeat)
        self._interpreters: dict[str, str] | None = None  # None: the cluster is not open
        self._replicas = 0  # how many to make at the start or after a recovery
        self._role: Role
        self._pools: dict[str, int]  # numbers of bundles of the placement groups
        self._rendezvous: str  # folder in which the ranks of an engine find each other
        self._restarting, self._agents = asyncio.Lock(), list[str]()

    async def make(self, role: Role, stack: AsyncExitStack, open_queue: OpenQueue) -> RunWorkers:
        """Start or join the cluster, open the queue, and start every worker; ``stack`` ends them."""
        chosen, replicas = self._config.cluster.ray, self._config.cluster.replicas if role.generates else 0
        self._pools = {"engine": chosen.engine_ranks, "rollout": replicas}
        if self._config.cluster.shares_devices:
            self._pools = {"shared": max(self._pools.values())}
        if self._interpreters is None:
            found = interpreters(self._config, self._registry)
            for kind, python in found.items():
                check_interpreter(python, f"the {kind} worker", min(self._deadlines.start, 60.0))
            await self._cluster.open(chosen, sum(self._pools.values()) * chosen.cpus_per_place)
            self._interpreters, self._replicas = found, replicas
        folder = TemporaryDirectory(prefix="jackfield-ranks-", ignore_cleanup_errors=True)
        self._role, self._rendezvous = role, stack.enter_context(folder)
        backend = await open_queue(node_address())
        stack.push_async_callback(self._cluster.rest)
        self._routes: tuple[Mapping[int, Replica], Sequence[int]] = {}, ()
        self._made = set(range(self._replicas))  # replicas that are made together and that start() returns first
        replicas, seconds, scores = self._replicas, self._deadlines.engine, role.scores or role.evaluates
        ranks = [(engine, number) for engine in role.engines for number in range(chosen.engine_ranks)]
        specs = [
            *[await self._spec("engine", number, engine) for engine, number in ranks],
            *[await self._spec("rollout", number) for number in range(replicas)],
            *[await self._spec("agent", number) for number in range(chosen.agent_workers)],
            *[await self._spec("reward", number) for number in range(chosen.reward_workers if scores else 0)],
        ]
        # concurrently, because processes need seconds for their imports
        actors = await asyncio.gather(*map(self._cluster.start, specs))
        await asyncio.gather(*map(self._make, actors))
        names = [spec.name for spec in specs if spec.restarts]
        self._routed_names, count = names, chosen.agent_workers
        stubs: dict[str, list[EngineRank]] = {engine: [] for engine in role.engines}
        for (engine, _), actor in zip(ranks, actors, strict=False):
            rank = self._stub(actor, EngineRank, seconds)
            rank.sender = self._stub(actor, WeightSender, seconds)
            stubs[engine].append(rank)
        return RunWorkers(
            backend=backend,
            ranks=stubs,
            replicas=replicas,
            agents=Workers([self._restarting_stub(name, AgentWorker) for name in names[:count]]),
            rewards=Workers([self._restarting_stub(name, RewardWorker) for name in names[count:]]) if scores else None,
            estimator=self._stub(actors[0], AdvantageWorker, seconds),  # beside the actor's first rank
            shares_devices=self._config.cluster.shares_devices,
            places=self,
            watch=partial(self._cluster.watch, actors[: len(ranks)]) if ranks else None,
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
        """Return a stub of a stateless worker, which is restarted when a call finds it dead."""
        seconds, actors = longest(self._config) + self._deadlines.batch, self._cluster.actors

        async def restart() -> None:
            with suppress(WorkerLost):  # the next call tries again
                async with self._restarting:
                    if not actors[name].lives:
                        actor = await self._cluster.start(actors[name].spec)
                        await self._make(actor)
                        await self._routed(actor, 0.0)

        async def call(method: str, *arguments: Any, **named: Any) -> Any:
            try:
                return await getattr(self._stub(actors[name], cls, seconds), method)(*arguments, **named)
            except WorkerLost:
                await restart()
                raise

        async def iterate(method: str, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
            try:
                called = getattr(self._stub(actors[name], cls, seconds), method)
                async with aclosing(called(*arguments, **named)) as items:
                    async for item in items:
                        yield item
            except WorkerLost:
                await restart()
                raise

        methods = {each.name: partial(iterate if each.streams else call, each.name) for each in CONTRACTS[cls]}
        return cast(T, SimpleNamespace(**methods))

    # -- replicas

    async def start(self, replica: Replica) -> None:
        """Make a replica's server in a process, in a new place if the first places are full."""
        if replica.number in self._made:
            self._made.discard(replica.number)
        else:
            new = replica.name not in self._cluster.actors
            self._replicas += new
            try:
                await self._make(await self._cluster.start(await self._spec("rollout", replica.number)))
            except BaseException:
                if new:
                    await self.end(replica.number)
                raise
        use_process(replica, self._cluster.actors[replica.name].connection, "cluster", longest(self._config))

    async def end(self, number: int) -> None:
        """End a replica's process, and release its place if that was added for it."""
        self._replicas -= 1
        await self._cluster.end(name := Replica(number=number).name)
        self._cluster.give_back(name)
        self._note_places()

    async def route(self, replicas: Mapping[int, Replica], seconds: float, updating: Sequence[int] = ()) -> int:
        """Send the routes to every agent and reward worker. One that dies gets them after its restart."""
        self._routes = dict(replicas), updating
        workers = [self._cluster.actors[name] for name in self._routed_names]
        return sum(await asyncio.gather(*(self._routed(actor, seconds) for actor in workers)))

    async def _routed(self, worker: Actor, seconds: float) -> int:
        replicas, updating = self._routes
        actors = {number: self._cluster.actors[each.name] for number, each in replicas.items()}
        routes = {number: each.address for number, each in actors.items() if each.lives}
        try:
            return await self._stub(worker, Routes, longest(self._config)).route(routes, seconds, updating)
        except WorkerLost:  # its restart uses the new routes
            return 0

    # -- descriptions of workers

    async def _spec(self, kind: Kind, number: int = 0, role: str = "") -> WorkerSpec:
        """Return where a worker runs; a replica that is added to the run gets a new place."""
        assert self._interpreters is not None
        run: Any = {"config": self._config, "algorithm": self._role.algorithm, "generates": self._role.generates}
        run["queue"] = str(Path(self._config.folder, "queue").absolute())
        worker = Worker(kind=kind, number=number, role=role, **run)
        python, restarts = self._interpreters.get(kind), kind in ("agent", "reward")
        spec = WorkerSpec(name=worker.name, worker=worker, python=python, restarts=restarts)
        if kind not in ("engine", "rollout"):
            return spec
        pool: str = "shared" if "shared" in self._pools else kind
        count, bundle = self._pools[pool], number
        if number >= count:
            pool, count, bundle = worker.name, 1, 0
        group = await self._cluster.places(count, self._resources(1), pool)
        return attrs.evolve(spec, group=group, bundle=bundle, resources=self._resources(_ROLES))

    async def _make(self, actor: Actor) -> None:
        """Make a worker, once the processes of all ranks of its engine have started."""
        self._note_places()
        worker, place, chosen = actor.spec.worker, actor.place, self._config.cluster.ray
        if worker.kind == "engine":  # where its ranks find each other, and the number of this one on its node
            ranks = [attrs.evolve(worker, number=number).name for number in range(chosen.engine_ranks)]
            places = [self._cluster.actors[name].place for name in ranks]
            host, port = places[0].address, places[0].port
            rendezvous = f"file://{self._rendezvous}/{worker.role}"  # torch's TCP store would use all interfaces
            if chosen.address is not None:
                rendezvous = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
            local_rank = sum(each.address == place.address for each in places[: worker.number])
            init_method = rendezvous if len(places) > 1 else None
            worker = attrs.evolve(worker, world_size=len(places), local_rank=local_rank, init_method=init_method)
        await self._cluster.make(actor, attrs.evolve(worker, host=place.address))

    def _note_places(self) -> None:
        found = {name: each for name, each in self._cluster.actors.items() if each.lives and hasattr(each, "place")}
        lines = {name: {"pid": each.address.process.pid, "node": each.place.address} for name, each in found.items()}
        replace_file(Path(self._config.folder) / "workers.json", json.dumps(lines, indent=1), durable=False)

    def _resources(self, parts: int) -> dict[str, float]:
        """Return the resources of a place divided by ``parts``; Ray counts in ten-thousandths."""
        chosen = self._config.cluster.ray
        amounts = {"CPU": chosen.cpus_per_place, "GPU": chosen.gpus_per_place}
        shares = {name: int(10_000 * amount / parts) / 10_000 for name, amount in amounts.items()}
        return {name: share for name, share in shares.items() if share} or {"CPU": 0.001 / parts}
