"""The workers of a run: their descriptions, and how each is made in its process from configuration and plugins."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, cast

import attrs
import msgspec

from jackfield.abc import SECTIONS
from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.operator import OperatorContext
from jackfield.abc.reward import RewardContext
from jackfield.abc.rollout import BaseRolloutServer, RolloutContext
from jackfield.abc.transfer_queue import TransferQueueBackend, TransferQueueContext
from jackfield.clock import Clock
from jackfield.cluster.placement import PlacementRequest
from jackfield.compose import checks
from jackfield.compose.agents import Models, agent_host
from jackfield.compose.checks import interpreters, prompt_limit
from jackfield.compose.devices import local_device, placement_request, uses_gpus
from jackfield.compose.engines import engine_context
from jackfield.compose.libraries import archives, example, pipelines
from jackfield.compose.parts import register_any, register_installed
from jackfield.compose.resolve import agent_has, has_arrays, load_tokenizer
from jackfield.compose.rewards import http_client, make_reward, run_id, scorer, share_of
from jackfield.compose.tasks import check_tokens, prompts, read_tasks
from jackfield.compose.worker import KINDS as WORKER_KINDS
from jackfield.compose.worker import Worker
from jackfield.config.sections import PluginSection, RunConfig
from jackfield.errors import RewardError, RolloutError
from jackfield.plugins import HookManager, Registry, installed
from jackfield.queue import TransferQueue, Values
from jackfield.queue.store import STORE_FILE
from jackfield.routing import Replica, Router
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine import EngineRank
from jackfield.runtime.experiences import ExperienceShaper
from jackfield.runtime.process import ROLLOUT, connect_worker, interface_of, open_host, rollout_service, use_process
from jackfield.runtime.rewards import RewardWorker
from jackfield.runtime.samples import AdvantageWorker, StepValues
from jackfield.runtime.workers import Workers
from jackfield.sdk.archive import queue_name
from jackfield.sdk.child import ChildProcess
from jackfield.sdk.rpc import Address, Connection, Contract, Service
from jackfield.trainer.role import Role, RunWorkers
from jackfield.weights import WeightSender, WeightSource

_END_SECONDS = 15.0  #: for a replica's process to exit by itself, once its socket is closed

#: Opens the queue of a role, with servers at an address of this machine, and returns the backend of this process.
OpenQueue: TypeAlias = Callable[..., Awaitable[TransferQueueBackend]]


@attrs.define(kw_only=True, eq=False)
class WorkerFactory:
    """Makes workers of a run in this process, from plugins of this interpreter.

    An inline run has one worker of each kind. Its replicas run in this process or in child processes.
    """

    config: RunConfig
    registry: Registry
    clock: Clock
    router: Router = attrs.field(init=False)  #: sends the requests of the agent worker that was made here
    _children: dict[int, ChildProcess] = attrs.field(factory=dict, init=False)  #: processes of replicas, by number
    _request: PlacementRequest | None = attrs.field(default=None, init=False)  #: None: for replicas alone

    async def make(self, role: Role, stack: AsyncExitStack, open_queue: OpenQueue) -> RunWorkers:
        """Make the workers of a role, again after each recovery. ``stack`` ends them."""
        import torch

        cluster = self.config.cluster
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(cluster.threads or torch.get_num_threads())
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jackfield-compute")
        asyncio.get_running_loop().set_default_executor(pool)  # the loop shuts it down when it closes
        backend = await open_queue()
        values, step_values, scores = Values(backend), StepValues(backend), role.scores or role.evaluates
        stack.push_async_callback(lambda: asyncio.gather(*map(self.end, list(self._children))))
        agent = await self.agent_worker(values, stack, role.generates, request_prefix=self.config.name)
        self._request = need = placement_request(self.config, self.registry, role.engines, generates=role.generates)
        if role.engines or need.replicas:  # refuse what does not fit
            self._device((*role.engines, "rollout")[0])
        worker = partial(Worker, kind="engine", config=self.config, algorithm=role.algorithm, arrays=role.arrays)
        return RunWorkers(
            backend=backend,
            ranks={name: [self.engine_rank(self._on(worker(role=name)), step_values, stack)] for name in role.engines},
            agents=Workers([agent]),
            rewards=Workers([await self.reward_worker(values, stack, generates=role.generates)]) if scores else None,
            estimator=AdvantageWorker(step_values, role.algorithm),
            replicas=need.replicas,
            replica_devices=need.width,
            shares_devices=cluster.shares_devices,
            places=self,
        )

    def _device(self, role: str, number: int = 0, *, apart: bool = False) -> Any:
        apart = apart or (uses_gpus(self.config) and "rollout" in interpreters(self.config, self.registry))
        need = self._request or PlacementRequest()  # a replica alone, whose plugin may be in another interpreter
        if self._request is None and uses_gpus(self.config):
            need = placement_request(self.config, self.registry, (), generates=True)
        return local_device(self.config, self.registry, need, role, number, apart=apart)

    def _on(self, worker: Worker, **options: Any) -> Worker:
        """Give a worker of this machine its device and memory."""
        found = self._device(worker.role or worker.kind, worker.number, **options)
        return attrs.evolve(worker, device=found.device, memory_fraction=found.memory_fraction)

    def _plugin(self, kind: str, context: Any) -> Any:
        chosen: PluginSection = getattr(self.config, kind)
        return self.registry.load(kind, chosen.name).build(chosen.settings, context, kind)

    def backend(self, joins: str | Path | None = None, host: str = "127.0.0.1") -> TransferQueueBackend:
        """Make a backend without starting it, or a client of the one in the folder ``joins``."""
        folder = str(joins or Path(self.config.folder) / "queue")
        how: Any = {"joins": joins is not None, "heartbeat_seconds": self.config.deadlines.heartbeat}
        context = TransferQueueContext(folder=folder, host=host, **how)
        return cast(TransferQueueBackend, self._plugin("transfer_queue", context))

    def queue(self, backend: TransferQueueBackend) -> TransferQueue:
        """Make the queue of the run, with its controller in this process, without starting it."""
        settings, folder = self.config.queue, Path(self.config.folder) / "queue"
        archive = settings.archive and archives().Archive(Path(settings.archive), queue_name(str(folder)))
        return TransferQueue(
            backend,
            self.clock,
            store=folder / STORE_FILE,
            archive=archive,
            durable=settings.durable,
            max_samples=settings.max_samples,
            max_bytes=settings.max_bytes,
            max_retries=self.config.schedule.max_retries,
            minimum_rows=self.config.data.minimum_rows,
        )

    def engine_rank(self, worker: Worker, values: Values, stack: AsyncExitStack) -> EngineRank:
        """Make an engine's rank without loading the model, with a weight sender if an actor's."""
        config, role, algorithm, sender = self.config, worker.role, worker.algorithm, None
        assert algorithm is not None
        shared: Any = {"rank": worker.number, "world_size": worker.world_size, "device": worker.device}
        place = {name: getattr(worker, name) for name in ("local_rank", "init_method", "memory_fraction")}
        engine = self._plugin("engine", engine_context(config, role, **shared, **place))
        if role == "actor":
            seconds, blocks = config.deadlines.sync, config.weights.block_bytes if config.weights.kind == "delta" else 0
            sending = CheckpointEngineContext(end="sender", host=worker.host, deadline_seconds=seconds, **shared)
            alone = attrs.evolve(sending, rank=0, world_size=1)  # a link's sender is the only one

            def make(source: WeightSource) -> WeightSender:
                return WeightSender(self._plugin("checkpoint_engine", alone), source)

            transport = self._plugin("checkpoint_engine", sending)
            declared = self.registry.resolve(config.checkpoint_engine.name, "checkpoint_engine").usable().capabilities
            own: dict[str, Any] = {"local": engine.get_local_param, "make": make}
            own = {} if "retains_weights" in declared else own  # what is kept has to be whole
            sender = WeightSender(transport, engine.get_per_tensor_param, block_bytes=blocks, **own)
        of_critic = {name: name for name in ("returns", "values")}
        columns = {"actor": algorithm.loss_columns, "critic": of_critic}.get(role, {})
        rank = EngineRank(engine, values, loss_columns=columns, sender=sender, arrays=worker.arrays)
        stack.push_async_callback(rank.close)
        return rank

    async def start(self, replica: Replica) -> None:
        """Make a replica's server, here or in a process of its own interpreter, without starting it.

        Raise a ``PluginError`` if the interpreter, or the plugin in it, is not what this process expects.
        """
        python = interpreters(self.config, self.registry).get("rollout")
        if python is None:
            worker = self._on(Worker(kind="rollout", number=replica.number, config=self.config))
            replica.server = self.rollout_server(worker)
        else:
            await self.start_process(replica, python)

    async def start_process(self, replica: Replica, python: str) -> None:
        """Make a replica's server in a process, without starting it. An earlier process of the replica is ended."""
        config, number, deadlines = self.config, replica.number, self.config.deadlines
        log = Path(config.folder) / f"replica-{number}.log"
        record = self.registry.resolve(config.rollout.name, "rollout")
        environment = {} if config.cluster.threads is None else {"OMP_NUM_THREADS": str(config.cluster.threads)}
        worker = self._on(Worker(kind="rollout", number=number, config=config), apart=True)
        if visible := self._device("rollout", number, apart=True).visible:
            environment["CUDA_VISIBLE_DEVICES"], worker = visible, attrs.evolve(worker, device="cuda:0")

        def lost(how: str) -> RolloutError:
            found = f"{child.connection.process} {how}"
            return replica.stopped("is not running", found, f"what it printed is in {log}")

        await self.end(number)
        options: Any = {"lost_error": lost, "log": log, "heartbeat_seconds": deadlines.heartbeat}
        self._children[number] = child = ChildProcess(replica.name, self.clock, **options)
        try:
            host = await open_host(child, python, f"{__name__}:make_worker", record, environment, deadlines.start)
            await host.make(cast(Any, worker))
        except BaseException:
            await self.end(number)
            raise
        use_process(replica, child.connection, "process", longest(config))

    async def end(self, number: int) -> None:
        """End the process of a replica, if it has one, and all processes that it has started."""
        if child := self._children.pop(number, None):
            await child.close(grace_seconds=_END_SECONDS)

    async def route(self, replicas: Mapping[int, Replica], seconds: float, updating: Sequence[int] = ()) -> int:
        """Route the agents' requests to these replicas."""
        return await self.router.route(replicas, seconds, updating)

    def rollout_server(self, worker: Worker) -> BaseRolloutServer:
        """Make a replica's server in this process, without starting it."""
        config, replica = self.config, worker.number
        there = Path(config.model.path, "config.json").is_file()  # a server refuses a folder without a model itself
        described = checks.read_model(config) if there else {}
        context = RolloutContext(
            model=attrs.evolve(config.model, dtype=config.weights.dtype or config.model.dtype),
            replica=replica,
            device=worker.device,
            seed=config.seed + replica,
            host=worker.host,
            memory_fraction=worker.memory_fraction,
            max_model_len=checks.token_limit(config, described),
            clock=self.clock,
        )
        return cast(BaseRolloutServer, self._plugin("rollout", context))

    async def agent_worker(
        self, values: Values, stack: AsyncExitStack, generates: bool, *, request_prefix: str
    ) -> AgentWorker:
        """Make a worker and start what its agents share; without ``generates`` it copies given answers."""
        config, tokenizer, limit = self.config, load_tokenizer(self.config), prompt_limit(self.config)
        self.router = Router(self.clock, partial(tokenizer.decode, skip_special_tokens=False))
        host = None
        if generates:
            host, models = agent_host(config, self.registry, self.clock, self.router, tokenizer, request_prefix)
            stack.push_async_callback(models.close)
            stack.push_async_callback(host.close)
            waiting = f"the agent {config.agent.name} to start"
            await self.clock.wait_for(host.start(), config.deadlines.start, waiting)
        vocabulary = checks.read_model(config).get("vocab_size")
        options: Any = {"vocabulary": vocabulary, "versions": config.keeps_token_versions}
        options |= {
            "arrays": has_arrays(config, self.registry),
            "cuts_prompts": config.data.prompt_overflow == "truncate_left",
        }
        return AgentWorker(values, tokenizer, self.clock, host, max_prompt_tokens=limit, **options)

    async def reward_worker(
        self, values: Values, stack: AsyncExitStack, number: int = 0, *, generates: bool
    ) -> RewardWorker:
        """Make a worker and start its reward agent, which logs into the folder ``logs``."""
        config, deadlines, folder = self.config, self.config.deadlines, Path(self.config.folder)
        cluster, settings, tokenizer = config.cluster, config.reward_service, load_tokenizer(config)
        if not hasattr(self, "router"):  # an inline run has one router, and one agent worker
            self.router = Router(self.clock, partial(tokenizer.decode, skip_special_tokens=False))
        run, logs = run_id(config), str(folder / "logs" / f"reward-{number}")
        context = RewardContext(
            clock=self.clock, seed=config.seed, heartbeat_seconds=deadlines.heartbeat, logs=logs, run=run
        )
        if generates:
            prefix = f"{config.name}-reward-{number}"
            models = Models(config, self.registry, self.clock, self.router, tokenizer, prefix, RewardError)
            stack.push_async_callback(models.close)
            context = attrs.evolve(context, generate=models)
        if number == 0 and not agent_has(config, self.registry, "environment_reward"):  # it may score what that leaves
            context = attrs.evolve(context, example=example(config))
        settings = share_of(settings, cluster.ray.reward_workers if cluster.name == "ray" else 1)
        agent = make_reward(self.registry, config.reward.name, config.reward.settings, settings, context)
        try:
            await self.clock.wait_for(agent.start(), deadlines.start, f"the reward agent {config.reward.name} to start")
        except BaseException:
            await agent.close()
            raise
        keeps = settings.keep or (settings.keep is None and find_spec("jackfield_archive") is not None)
        records = archives().RewardRecords(folder / "scores", f"worker-{number}") if keeps else None
        shaper: ExperienceShaper | None = None
        if config.data.pipeline.experiences:
            services: Any = {"generate": context.generate, "score": scorer(agent, deadlines.reward)}
            services |= {} if (http := http_client()) is None else {"http": http}
            services |= {"count": lambda name, number: agent.limits.count(f"pipeline/{name}", number)}
            shared = OperatorContext(clock=self.clock, seed=config.seed, target="experiences", **services)
            served = config.data.pipeline.service is not None
            kind = pipelines().ServedPipeline if served else pipelines().ExperiencePipeline
            pipeline = kind.of_run(config, self.registry, shared, number)
            stack.push_async_callback(pipeline.close)
            if http is not None:
                stack.push_async_callback(http.close)
            await self.clock.wait_for(pipeline.start(), deadlines.start, "the operators of data.pipeline.experiences")
            made = {"keeps_made": config.mixing.made is not None, "arrays": has_arrays(config, self.registry)}
            shaper = ExperienceShaper(pipeline=pipeline, values=values, tokenizer=tokenizer, **made)
        given: Any = (records, run, prompts(config), shaper)
        worker = RewardWorker(values, agent, tokenizer, self.clock, config, *given)
        stack.push_async_callback(worker.close)
        return worker


@attrs.define(eq=False)
class Routes:
    """An agent worker's connections to the replicas on which it generates."""

    _router: Router
    _name: str  #: name of the worker
    _seconds: float  #: deadline of a call of a replica
    _connections: dict[Replica, Connection] = attrs.field(factory=dict, init=False)

    async def route(self, addresses: dict[int, Address], seconds: float, updating: Sequence[int] = ()) -> int:
        """Use these replicas from now on (see :meth:`~jackfield.routing.Router.route`)."""
        replicas = {each.number: each for each in self._connections if each.number in addresses}
        for number in addresses.keys() - replicas.keys():
            replica = Replica(number=number)
            connection = await connect_worker(addresses[number], replica.name, self._name, Clock())
            use_process(replica, connection, "cluster", self._seconds)
            replicas[number], self._connections[replica] = replica, connection
        removed = [self._connections.pop(each) for each in self._connections.keys() - replicas.values()]
        moved = await self._router.route(replicas, seconds, updating)
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


async def make_worker(description: dict[str, Any], stack: AsyncExitStack) -> Mapping[str, Service]:
    """Make the :class:`Worker` of a description and return its services; ``stack`` closes its resources."""
    worker = msgspec.convert(description, Worker)
    config, number = worker.config, worker.number
    registry = installed()  # its interpreter need not have the plugins of other workers
    await asyncio.to_thread(load_plugins, worker, registry)  # in a thread, so that heartbeats go on
    factory = WorkerFactory(config=config, registry=registry, clock=Clock())
    if worker.kind == "rollout":  # the pool starts its server later; outside a cluster it alone calls it
        server = factory.rollout_server(worker)
        stack.push_async_callback(server.stop)
        alone = Service(target=server, contract=ROLLOUT)
        return {"worker": alone if worker.queue is None else rollout_service(server, number)}
    backend = factory.backend(worker.queue, worker.host)
    stack.push_async_callback(backend.close)
    await backend.start()
    if worker.kind == "engine":
        if interface := interface_of(worker.host):  # gloo would take the address of the machine's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        assert worker.algorithm is not None
        values: Values = StepValues(backend)
        rank, estimator = factory.engine_rank(worker, values, stack), AdvantageWorker(values, worker.algorithm)
        return _served(rank, estimator, *([] if rank.sender is None else [rank.sender]))
    values = Values(backend)
    made: Any = None
    if worker.kind == "reward":
        made = await factory.reward_worker(values, stack, number, generates=worker.generates)
    else:
        prefix = f"{config.name}-{number}"
        made = await factory.agent_worker(values, stack, worker.generates, request_prefix=prefix)
    routes = Routes(factory.router, worker.name, longest(config))
    stack.push_async_callback(routes.close)
    return _served(made, routes)


def load_plugins(worker: Worker, registry: Registry) -> None:
    """Import what a worker needs; the first agent worker checks that data and model fit together."""
    config, chosen = worker.config, {kind: getattr(worker.config, kind).name for kind in SECTIONS}
    if config.cluster.threads is not None:
        import torch

        torch.set_num_threads(config.cluster.threads)
    for kind in WORKER_KINDS[worker.kind][1]:
        registry.load(kind, chosen[kind])
    here = [each.manifest for each in registry.records() if each.manifest and each.name == chosen.get(each.kind)]
    register_installed(registry, warn=False)
    HookManager([], here).call("register_parts", register=register_any)
    if worker.kind == "agent" and worker.number == 0 and worker.algorithm is not None:
        tasks, model = read_tasks(config, worker.algorithm), checks.read_model(config)
        check_tokens(config, tasks, model, prompt_limit(config, model))


def _served(*targets: Any) -> dict[str, Service]:
    return {type(each).__name__: Service(target=each, contract=CONTRACTS[type(each)]) for each in targets}
