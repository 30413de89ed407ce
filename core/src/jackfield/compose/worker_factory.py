"""The workers of a run, each made in the process where it lives: from the run's configuration and its plugins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs

from jackfield.abc.agent import AgentContext, AgentLoopBase
from jackfield.abc.checkpoint_engine import CheckpointEngine, CheckpointEngineContext
from jackfield.abc.engine import EngineContext, ModelSpec
from jackfield.abc.reward import RewardAgent, RewardContext
from jackfield.abc.rollout import (
    BaseRolloutServer,
    GenerateRequest,
    GenerateResult,
    RolloutContext,
    SamplingParams,
)
from jackfield.abc.transfer_queue import TransferQueueBackend, TransferQueueContext
from jackfield.algorithms.resolved import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.cluster.replica import Worker
from jackfield.compose.inputs import read_model
from jackfield.compose.selection import interpreters
from jackfield.config import PluginSection, RunConfig
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.plugins import Registry
from jackfield.queue import Values
from jackfield.routing.router import Generates, Router
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine_rank import EngineRank
from jackfield.runtime.process import RolloutProcess
from jackfield.runtime.reward_worker import RewardWorker

_CRITIC_COLUMNS = ("returns", "values")  #: what the critic's loss reads beside the sample


@attrs.frozen(kw_only=True)
class RankPlace:
    """Where a rank of an engine is among the others."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    init_method: str | None = None
    host: str = "127.0.0.1"


@attrs.frozen(kw_only=True)
class WorkerFactory:
    """Makes workers of one run, from plugins of this interpreter."""

    config: RunConfig
    registry: Registry
    clock: Clock

    def backend(self, joins: Path | None = None) -> TransferQueueBackend:
        """Where values are kept, or a client of the store of a served controller's folder ``joins``; not started."""
        folder, silence = joins or Path(self.config.folder) / "queue", self.config.deadlines.heartbeat
        context = TransferQueueContext(folder=str(folder), joins=joins is not None, heartbeat_seconds=silence)
        return cast(TransferQueueBackend, self._plugin("transfer_queue", context))

    def engine_rank(
        self, values: Values, role: str, algorithm: ResolvedAlgorithm, place: RankPlace | None = None
    ) -> EngineRank:
        """A rank of the engine, with its end of the weight plane if it is the actor's; nothing is loaded yet."""
        config, actor, place = self.config, role == "actor", place or RankPlace()
        context = EngineContext(
            role=role,  # type: ignore[arg-type]
            model=self._model(role),
            optimizer={"actor": config.optimizer, "critic": config.critic.optimizer}.get(role),
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            init_method=place.init_method,
            device=config.cluster.device,
            seed=config.seed,
            temperature=config.sampling.temperature if config.mode == "online" else 1.0,
            micro_batch_tokens=config.cluster.micro_batch_tokens,
        )
        sending = CheckpointEngineContext(
            end="sender",
            rank=place.rank,
            world_size=place.world_size,
            device=config.cluster.device,
            host=place.host,
            deadline_seconds=config.deadlines.sync,
        )
        transport: CheckpointEngine | None = self._plugin("checkpoint_engine", sending) if actor else None
        return EngineRank(
            self._plugin("engine", context),
            values,
            loss_columns={"actor": algorithm.loss_columns, "critic": _CRITIC_COLUMNS}.get(role, ()),
            renamed=algorithm.renamed if actor else None,
            transport=transport,
            block_bytes=config.weights.block_bytes if config.weights.kind == "delta" else 0,
        )

    def _model(self, role: str) -> ModelSpec:
        """Adapters are the actor's alone; a critic has a value head."""
        model = self.config.model
        if role == "actor":
            return model
        if role == "critic":
            return attrs.evolve(model, lora=None, value_head=True, path=self.config.critic.path or model.path)
        return attrs.evolve(model, lora=None)

    def rollout_server(self, replica: int, *, host: str = "127.0.0.1") -> BaseRolloutServer:
        """Make a replica's server in this process; it is not started."""
        return cast(BaseRolloutServer, self._plugin("rollout", self._rollout_context(replica, host)))

    def replica(self, number: int) -> Worker:
        """Make a replica's server in this process, or in one with an interpreter of its own; it is not started."""
        python = interpreters(self.config, self.registry).get("rollout")
        if python is None:
            return Worker(self.rollout_server(number))
        server = self._rollout_process(self._rollout_context(number), python)
        worker = Worker(server, "process")
        server.on_lost = worker.lose
        return worker

    def _rollout_context(self, replica: int, host: str = "127.0.0.1") -> RolloutContext:
        config = self.config
        model = config.model if config.weights.dtype is None else attrs.evolve(config.model, dtype=config.weights.dtype)
        return RolloutContext(
            model=model,
            replica=replica,
            device=config.cluster.device,
            seed=config.seed + replica,
            host=host,
            max_model_len=config.cluster.max_model_len,
            clock=self.clock,
        )

    def _rollout_process(self, context: RolloutContext, python: str) -> RolloutProcess:
        """A replica in a process, and an interpreter, of its own."""
        config = self.config
        threads = config.cluster.threads
        return RolloutProcess(
            config.rollout.settings,
            context,
            record=self.registry.resolve(config.rollout.name, "rollout"),
            python=python,
            seconds=max(config.deadlines.rollout, config.deadlines.start, config.deadlines.sync),
            log=Path(config.folder) / f"replica-{context.replica}.log",
            environment={} if threads is None else {"OMP_NUM_THREADS": str(threads)},
            heartbeat_seconds=config.deadlines.heartbeat,
        )

    def agent_worker(
        self, values: Values, servers: Mapping[int, Generates] | None, *, request_prefix: str
    ) -> AgentWorker:
        """A worker that runs agents on ``servers``, by number; with None, it only makes samples of given answers."""
        config, tokenizer = self.config, self._tokenizer()
        max_prompt_tokens = read_model(config).max_prompt_tokens
        if servers is None:
            return AgentWorker(values, tokenizer, self.clock, None, max_prompt_tokens=max_prompt_tokens)
        loaded = self.registry.load("agent", config.agent.name)
        router = Router(self.clock, servers)

        def make_agent(asks: Callable[[SamplingParams], None]) -> AgentLoopBase:
            generate = router.of_one_rollout()

            def noted(request: GenerateRequest) -> Awaitable[GenerateResult]:
                asks(request.sampling)
                return generate(request)

            context = AgentContext(
                generate=noted,
                tokenizer=tokenizer,
                clock=self.clock,
                request_prefix=request_prefix,
                max_prompt_tokens=max_prompt_tokens,
            )
            return cast(AgentLoopBase, loaded.build(config.agent.settings, context, "agent"))

        return AgentWorker(
            values, tokenizer, self.clock, make_agent, max_prompt_tokens=max_prompt_tokens, router=router
        )

    async def reward_worker(self, values: Values, number: int = 0) -> RewardWorker:
        """A worker whose reward agent is started; what its processes print goes into the run's folder ``logs``."""
        config = self.config
        context = RewardContext(
            clock=self.clock,
            seed=config.seed,
            heartbeat_seconds=config.deadlines.heartbeat,
            logs=str(Path(config.folder) / "logs" / f"reward-{number}"),
        )
        agent: RewardAgent = self._plugin("reward", context)
        name = f"the reward agent {config.reward.name} to start"
        try:
            await self.clock.wait_for(agent.start(), config.deadlines.start, name)
        except BaseException:
            await agent.close()
            raise
        return RewardWorker(
            values,
            agent,
            self._tokenizer(),
            self.clock,
            score_seconds=config.deadlines.reward,
            retries=config.schedule.reward_retries,
            dimensions=config.algorithm.reward_dimensions,
            fill_failed=config.algorithm.shaping.fill_failed,
        )

    def _tokenizer(self) -> HuggingFaceChatTokenizer:
        config = self.config
        return HuggingFaceChatTokenizer.load(
            config.model.path,
            chat_template=config.data.chat_template,
            trust_remote_code=config.model.trust_remote_code,
        )

    def _plugin(self, kind: str, context: Any) -> Any:
        chosen: PluginSection = getattr(self.config, kind)
        return self.registry.load(kind, chosen.name).build(chosen.settings, context, kind)
