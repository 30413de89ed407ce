"""The workers of a run, each made in its own process from configuration and plugins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import attrs

from jackfield.abc.agent import AgentContext, AgentLoopBase
from jackfield.abc.checkpoint_engine import CheckpointEngineContext
from jackfield.abc.engine import EngineContext
from jackfield.abc.reward import RewardAgent, RewardContext
from jackfield.abc.rollout import BaseRolloutServer, RolloutContext, SamplingParams
from jackfield.abc.transfer_queue import TransferQueueBackend, TransferQueueContext
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.compose.checks import interpreters, load_tokenizer, prompt_limit
from jackfield.config.sections import PluginSection, RunConfig
from jackfield.plugins import Registry
from jackfield.queue import TransferQueue, Values
from jackfield.queue.store import STORE_FILE
from jackfield.routing import Replica, Router
from jackfield.runtime.engine import EngineRank
from jackfield.runtime.process import RolloutProcess
from jackfield.runtime.samples import AdvantageWorker
from jackfield.runtime.workers import AgentWorker, RewardWorker, Workers
from jackfield.trainer.role import Role, RunWorkers
from jackfield.weights import WeightSender


@attrs.frozen(kw_only=True)
class RankPlace:
    """The place of a rank among the other ranks of its engine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    init_method: str | None = None
    host: str = "127.0.0.1"


_ALONE = RankPlace()


@attrs.define(kw_only=True, eq=False)
class WorkerFactory:
    """Makes workers of a run in this process, from plugins of this interpreter.

    An inline run has one worker of each kind. Its replicas run in this process or in child processes.
    """

    config: RunConfig
    registry: Registry
    clock: Clock
    router: Router = attrs.field(init=False)  #: sends the requests of the agent worker that was made here

    async def make(self, role: Role, stack: AsyncExitStack) -> RunWorkers:
        """Make the workers of a role, again after each recovery. ``stack`` ends them."""
        import torch

        # one thread for engine and replicas, which would compete for cores
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if self.config.cluster.threads is not None:
            torch.set_num_threads(self.config.cluster.threads)
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jackfield-compute")
        asyncio.get_running_loop().set_default_executor(pool)  # the loop shuts it down when it closes
        address = self.config.queue.address
        backend = self.backend(None if address is None else Path(address).parent)
        values, scores = Values(backend), role.scores or role.evaluates
        agent = self.agent_worker(values, role.generates, request_prefix=self.config.name)
        return RunWorkers(
            backend=backend,
            ranks={engine: [self.engine_rank(values, engine, role.algorithm, stack)] for engine in role.engines},
            agents=Workers([agent]),
            rewards=Workers([await self.reward_worker(values, stack)]) if scores else None,
            estimator=AdvantageWorker(values, role.algorithm),
            replicas=self.config.cluster.replicas if role.generates else 0,
            places=self,
        )

    def _plugin(self, kind: str, context: Any) -> Any:
        chosen: PluginSection = getattr(self.config, kind)
        return self.registry.load(kind, chosen.name).build(chosen.settings, context, kind)

    def backend(self, joins: Path | None = None) -> TransferQueueBackend:
        """Make a backend without starting it, or a client of the one in the folder ``joins``."""
        folder, silence = joins or Path(self.config.folder) / "queue", self.config.deadlines.heartbeat
        context = TransferQueueContext(folder=str(folder), joins=joins is not None, heartbeat_seconds=silence)
        return cast(TransferQueueBackend, self._plugin("transfer_queue", context))

    def queue(self, backend: TransferQueueBackend) -> TransferQueue:
        """Make the queue of the run, with its controller in this process, without starting it."""
        settings = self.config.queue
        return TransferQueue(
            backend,
            self.clock,
            store=Path(self.config.folder) / "queue" / STORE_FILE,
            durable=settings.durable,
            max_samples=settings.max_samples,
            max_bytes=settings.max_bytes,
            max_retries=self.config.schedule.max_retries,
        )

    def engine_rank(
        self, values: Values, role: str, algorithm: ResolvedAlgorithm, stack: AsyncExitStack, place: RankPlace = _ALONE
    ) -> EngineRank:
        """Make an engine's rank without loading the model, with a weight sender if an actor's."""
        config, actor, sender = self.config, role == "actor", None
        shared: Any = {"rank": place.rank, "world_size": place.world_size, "device": config.cluster.device}
        model = config.model
        if not actor:  # only actors have adapters, and critics have value heads
            path = (config.critic.path if role == "critic" else None) or model.path
            model = attrs.evolve(model, lora=None, value_head=role == "critic", path=path)
        context = EngineContext(
            role=role,  # type: ignore[arg-type]
            model=model,
            optimizer={"actor": config.optimizer, "critic": config.critic.optimizer}.get(role),
            local_rank=place.local_rank,
            init_method=place.init_method,
            seed=config.seed,
            temperature=config.engine_temperature,
            micro_batch_tokens=config.cluster.micro_batch_tokens,
            **shared,
        )
        engine = self._plugin("engine", context)
        if actor:
            seconds, blocks = config.deadlines.sync, config.weights.block_bytes if config.weights.kind == "delta" else 0
            sending = CheckpointEngineContext(end="sender", host=place.host, deadline_seconds=seconds, **shared)
            transport = self._plugin("checkpoint_engine", sending)
            sender = WeightSender(transport, engine.get_per_tensor_param, block_bytes=blocks)
        columns = {"actor": algorithm.loss_columns, "critic": ("returns", "values")}.get(role, ())
        renamed = algorithm.renamed if actor else {}
        rank = EngineRank(engine, values, loss_columns=columns, renamed=renamed, sender=sender)
        stack.push_async_callback(rank.close)
        return rank

    async def start(self, replica: Replica) -> None:
        """Make a replica's server, here or in its own interpreter, without starting it."""
        config, python = self.config, interpreters(self.config, self.registry).get("rollout")
        if python is None:
            replica.server = self.rollout_server(replica.number)
            return
        deadlines, threads = config.deadlines, config.cluster.threads
        server = RolloutProcess(
            config.rollout.settings,
            self._rollout_context(replica.number),
            record=self.registry.resolve(config.rollout.name, "rollout"),
            python=python,
            seconds=max(deadlines.rollout, deadlines.start, deadlines.sync),
            log=Path(config.folder) / f"replica-{replica.number}.log",
            environment={} if threads is None else {"OMP_NUM_THREADS": str(threads)},
            heartbeat_seconds=deadlines.heartbeat,
        )
        server.on_lost, replica.server, replica.place = replica.lose, cast(Any, server), "process"

    async def end(self, number: int) -> None:
        """Do nothing: replicas of an inline run have no places to release."""

    async def route(self, replicas: Mapping[int, Replica], seconds: float) -> int:
        """Route the agents' requests to these replicas."""
        return await self.router.route(replicas, seconds)

    def rollout_server(self, replica: int, *, host: str = "127.0.0.1") -> BaseRolloutServer:
        """Make a replica's server in this process, without starting it."""
        return cast(BaseRolloutServer, self._plugin("rollout", self._rollout_context(replica, host)))

    def _rollout_context(self, replica: int, host: str = "127.0.0.1") -> RolloutContext:
        config = self.config
        return RolloutContext(
            model=attrs.evolve(config.model, dtype=config.weights.dtype or config.model.dtype),
            replica=replica,
            device=config.cluster.device,
            seed=config.seed + replica,
            host=host,
            max_model_len=config.cluster.max_model_len,
            clock=self.clock,
        )

    def agent_worker(self, values: Values, generates: bool, *, request_prefix: str) -> AgentWorker:
        """Make a worker that runs agents, or copies given answers without ``generates``."""
        tokenizer, limit, self.router = load_tokenizer(self.config), prompt_limit(self.config), Router(self.clock)
        self.registry.load("agent", self.config.agent.name)

        def make_agent(asks: Callable[[SamplingParams], None]) -> AgentLoopBase:
            context = AgentContext(
                generate=self.router.of_one_rollout(asks),
                tokenizer=tokenizer,
                clock=self.clock,
                request_prefix=request_prefix,
                max_prompt_tokens=limit,
            )
            return cast(AgentLoopBase, self._plugin("agent", context))

        make = make_agent if generates else None
        return AgentWorker(values, tokenizer, self.clock, make, max_prompt_tokens=limit)

    async def reward_worker(self, values: Values, stack: AsyncExitStack, number: int = 0) -> RewardWorker:
        """Make a worker and start its reward agent, which logs into the folder ``logs``."""
        config, deadlines = self.config, self.config.deadlines
        logs = str(Path(config.folder) / "logs" / f"reward-{number}")
        silence = deadlines.heartbeat
        context = RewardContext(clock=self.clock, seed=config.seed, heartbeat_seconds=silence, logs=logs)
        agent: RewardAgent = self._plugin("reward", context)
        try:
            await self.clock.wait_for(agent.start(), deadlines.start, f"the reward agent {config.reward.name} to start")
        except BaseException:
            await agent.close()
            raise
        worker = RewardWorker(values, agent, load_tokenizer(config), self.clock, config)
        stack.push_async_callback(worker.close)
        return worker
