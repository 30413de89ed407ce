"""The workers of a run in a Ray cluster, each made in its own process.

Processes receive only the configuration and the addresses of other workers from the controller's process.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import attrs

from jackfield.cluster.placement import Placement, PlacementRequest, place
from jackfield.compose.checks import interpreters
from jackfield.compose.devices import placement_request, uses_gpus
from jackfield.compose.worker import Kind, Worker
from jackfield.compose.workers import CONTRACTS, OpenQueue, Routes, WorkerFactory, longest, make_worker
from jackfield.errors import RunError, WorkerLost
from jackfield.files import replace_file
from jackfield.routing import Replica
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine import EngineRank
from jackfield.runtime.process import death, node_address, use_process
from jackfield.runtime.ray_cluster import Actor, Bundles, Cluster, WorkerSpec, check_interpreter
from jackfield.runtime.rewards import RewardWorker
from jackfield.runtime.samples import AdvantageWorker
from jackfield.runtime.workers import Workers
from jackfield.sdk.rpc import stub
from jackfield.trainer.role import Role, RunWorkers
from jackfield.weights import WeightSender

T = TypeVar("T")

_ROLES = 4  #: one place holds an actor, a reference, a critic and a replica
_RUN = "the run"  #: name of what is reserved for its first ranks and replicas
_MANY = 1 << 16  #: places of a node whose CPUs do not count


class RayWorkers:
    """Makes a run's workers in a cluster; after a recovery it reuses live processes."""

    def __init__(self, make: WorkerFactory) -> None:
        self._registry, self._config, self._deadlines = make.registry, make.config, make.config.deadlines
        self._cluster = Cluster(make.clock, make_worker, self._deadlines.start, self._deadlines.heartbeat)
        self._interpreters: dict[str, str] | None = None  # None: the cluster is not open
        self._replicas = 0  # how many to make at the start or after a recovery
        self._role: Role
        self._places = dict[str, tuple[Placement, Bundles]]()  # of the run, and of replicas that were added
        self._nodes = dict[str, list[str]]()  # likewise, ids of nodes
        self._dead = set[str]()  # ids of nodes
        self._request: PlacementRequest
        self._rendezvous: str  # folder in which the ranks of an engine find each other
        self._restarting, self._agents = asyncio.Lock(), list[str]()

    async def make(self, role: Role, stack: AsyncExitStack, open_queue: OpenQueue) -> RunWorkers:
        """Start or join the cluster, open the queue, and start every worker; ``stack`` ends them."""
        chosen = self._config.cluster.ray
        self._request = placement_request(self._config, self._registry, role.engines, generates=role.generates)
        if self._interpreters is None:
            found = interpreters(self._config, self._registry)
            for kind, python in found.items():
                check_interpreter(python, f"the {kind} worker", min(self._deadlines.start, 60.0))
            places = sum(place(self._request, [_MANY]).reserved)
            await self._cluster.open(chosen, places * chosen.cpus_per_place)
            self._interpreters, self._replicas = found, self._request.replicas
        await self._leave_dead_nodes()
        await self._reserve(_RUN, self._request)
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
            replica_devices=self._request.width,
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
            before = self._cluster.actors.get(replica.name)
            if before is not None and await self._is_lost(before):
                raise death(replica.name, f"node {before.place.address}", "its node has died, too")  # the run resumes
            new = before is None
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
        self._give_back(name)
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
        worker = Worker(kind=kind, number=number, role=role, arrays=self._role.arrays, **run)
        python, restarts = self._interpreters.get(kind), kind in ("agent", "reward")
        spec = WorkerSpec(name=worker.name, worker=worker, python=python, restarts=restarts)
        if kind not in ("engine", "rollout"):
            return spec
        what, wanted = _RUN, (role or kind, number)
        if self._places[_RUN][0].of(*wanted) is None:
            what, wanted = worker.name, (kind, 0)
            await self._reserve(what, attrs.evolve(self._request, roles=(), replicas=1))
        placement, bundles = self._places[what]
        found = placement.of(*wanted)
        assert found is not None, "it was placed"
        bundle, gpus = sum(map(bool, placement.reserved[: found.node])), None
        if uses_gpus(self._config):
            gpus = [bundles.gpus[bundle][device] for device in found.devices]
            worker = attrs.evolve(worker, device="cuda:0", memory_fraction=found.memory_fraction)
        cpus = self._config.cluster.ray.cpus_per_place * len(found.devices) / _ROLES
        cpus = int(10_000 * cpus) / 10_000  # Ray counts in ten-thousandths
        return attrs.evolve(spec, worker=worker, group=bundles.group, bundle=bundle, cpus=cpus, gpus=gpus)

    async def _reserve(self, what: str, request: PlacementRequest) -> None:
        """Place processes and reserve their devices, or refuse what does not fit."""
        if what in self._places:
            return
        nodes = [each for each in self._cluster.nodes() if each.name not in self._dead]
        try:
            placement = place(request, [self._slots(each.free) for each in nodes])
        except RunError:  # other users of the cluster may leave
            own = Counter[str]()
            for name, (made, _) in self._places.items():
                own.update(dict(zip(self._nodes[name], filter(None, made.reserved), strict=True)))
            placement = place(request, [self._slots(each.total) - own[each.name] for each in nodes])
        each = {"CPU": self._config.cluster.ray.cpus_per_place, "GPU": float(uses_gpus(self._config))}
        used = [(node.name, count) for node, count in zip(nodes, placement.reserved, strict=True) if count]
        taken = [name for name, _ in used]
        self._check_reach({*taken, *(name for names in self._nodes.values() for name in names)})
        resources = [{name: part * count for name, part in each.items() if part} for _, count in used]
        bundles = [(name, some or {"CPU": 0.001}) for (name, _), some in zip(used, resources, strict=True)]
        self._places[what] = placement, await self._cluster.places(bundles, what)
        self._nodes[what] = taken

    async def _leave_dead_nodes(self) -> None:
        """Give back all places if processes have died with their node, so that the next ones are on other nodes."""
        placed = {name: each for name, each in self._cluster.actors.items() if each.spec.group is not None}
        by_node = {each.place.node: each for each in placed.values() if not each.lives}
        if any([await self._is_lost(actor) for actor in by_node.values()]):
            await asyncio.gather(*map(self._cluster.end, placed))
            for what in list(self._places):
                self._give_back(what)

    async def _is_lost(self, actor: Actor) -> bool:
        """Return whether a process has died with its node."""
        node = actor.place.node
        if not actor.lives and node not in self._dead and not await self._cluster.answers(node):
            self._dead.add(node)
        return not actor.lives and node in self._dead

    def _give_back(self, what: str) -> None:
        self._places.pop(what, None)
        self._nodes.pop(what, None)
        self._cluster.give_back(what)

    def _slots(self, resources: Mapping[str, float]) -> int:
        """Return how many devices a node has, each with the CPUs of a place."""
        cpus = self._config.cluster.ray.cpus_per_place
        slots = int(resources.get("CPU", 0.0) / cpus + 1e-6) if cpus else _MANY
        return min(slots, int(resources.get("GPU", 0.0))) if uses_gpus(self._config) else slots

    def _check_reach(self, nodes: Collection[str]) -> None:
        """Refuse a checkpoint engine that does not leave a node, for a run on several."""
        name = self._config.checkpoint_engine.name
        declared = self._registry.resolve(name, "checkpoint_engine").usable().capabilities
        if len(nodes) > 1 and declared.get("multi_host") == "unsupported":
            raise RunError(
                f"the checkpoint engine '{name}' does not leave a node, and the run is on {len(nodes)}",
                code="cluster.placement",
                where="checkpoint_engine.name",
                expected="nccl or zmq",
                found=name,
                fix="choose one of them, or fewer ranks and replicas, so that one node has room for all",
            )

    async def _make(self, actor: Actor) -> None:
        """Make a worker, once the processes of all ranks of its engine have started."""
        self._note_places()
        worker, at, chosen = actor.spec.worker, actor.place, self._config.cluster.ray
        if worker.kind == "engine":  # where its ranks find each other, and the number of this one on its node
            ranks = [attrs.evolve(worker, number=number).name for number in range(chosen.engine_ranks)]
            places = [self._cluster.actors[name].place for name in ranks]
            host, port = places[0].address, places[0].port
            rendezvous = f"file://{self._rendezvous}/{worker.role}"  # torch's TCP store would use all interfaces
            if chosen.address is not None:
                rendezvous = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
            local_rank = sum(each.node == at.node for each in places[: worker.number])
            init_method = rendezvous if len(places) > 1 else None
            worker = attrs.evolve(worker, world_size=len(places), local_rank=local_rank, init_method=init_method)
        await self._cluster.make(actor, attrs.evolve(worker, host=at.address))

    def _note_places(self) -> None:
        found = {name: each for name, each in self._cluster.actors.items() if each.lives and hasattr(each, "place")}
        lines = {name: {"pid": each.address.process.pid, "node": each.place.address} for name, each in found.items()}
        replace_file(Path(self._config.folder) / "workers.json", json.dumps(lines, indent=1), durable=False)
