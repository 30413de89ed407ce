"""Stand-ins that take no time, and the processes in which ``control_loop.py`` puts them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.abc.engine import EngineLayout
from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.abc.transfer_queue import TransferQueueBackend, TransferQueueContext
from jackfield.algorithms import LossSpec
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.cluster.pool import DeviceLease, ReplicaPool
from jackfield.compose.workers import CONTRACTS
from jackfield.config import make_config
from jackfield.config.sections import RayConfig
from jackfield.data.formats import Task
from jackfield.imports import collection_paused, own_process
from jackfield.plugins import HookManager, installed
from jackfield.queue import TransferQueue, Values
from jackfield.queue.meta import BatchMeta, Written
from jackfield.queue.transfer_queue import QueueServer, connect_queue
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.agents import AgentHost
from jackfield.runtime.comparison import Distances
from jackfield.runtime.engine import EngineRank
from jackfield.runtime.ray_cluster import Cluster, WorkerSpec
from jackfield.runtime.rewards import RewardWorker
from jackfield.runtime.workers import Workers
from jackfield.sdk.rpc import Service, stub
from jackfield.trainer.rewards import RewardPipeline
from jackfield.trainer.role import WEIGHTS, Role, RoleName, RunWorkers
from jackfield.trainer.rollouts import Explorer
from jackfield.trainer.weights import WeightSubscriber
from jackfield.weights import WeightsSynced

RUNS = 8
PROMPT = tuple(range(15))
RESPONSE = tuple(range(32))
SECONDS = 300.0


def import_torch() -> None:
    """Import torch now rather than at the first row, and keep it from garbage collection as processes of a run do."""
    own_process()
    with collection_paused():
        import torch  # noqa: F401


class Tokenizer:
    """Knows no text."""

    end_token_ids = (0,)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return PROMPT

    def encode_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return ()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


class Agent(AgentLoopBase):
    """Answers at once."""

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        length = len(RESPONSE)
        sequence = AgentSequence(
            prompt_ids=PROMPT,
            response_ids=RESPONSE,
            response_mask=(1,) * length,
            response_log_probs=(-1.0,) * length,
            weight_versions=(self.config,) * length,
        )
        return AgentLoopOutput(sequences=(sequence,))


class Reward(RewardAgent):
    """Scores at once."""

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        return ScoreResult(score=1.0)


class Rank:
    """An engine that computes nothing."""

    async def initialize(self) -> EngineLayout:
        return EngineLayout()

    async def read(self, batch: BatchMeta, *, update: bool, comparison: object = None) -> None:
        return

    async def update(
        self, loss: LossSpec, batch: BatchMeta | None = None, comparison: object = None
    ) -> tuple[dict[str, float], Distances]:
        return {"policy/loss": 0.0, "grad_norm": 0.0, "lr": 0.0}, {}


class Estimator:
    """An estimator that returns no advantages."""

    async def estimate(
        self, batch: BatchMeta, kl_coefficient: float = 0.0, version: int | None = None
    ) -> tuple[dict[str, float], Written]:
        return {}, Written(columns=(), sizes=(0,) * len(batch))


async def sync(version: int) -> WeightsSynced:
    """Publish a version to replicas that have every version."""
    return WeightsSynced(version=version, retained={})


def role_of(samples: int, steps: int, name: RoleName = "all", clock: Clock | None = None) -> Role:
    """Return a role of ``steps`` batches of ``samples`` samples that loads no model."""
    values = {
        "model": {"path": "none"},
        "data": {"groups_per_batch": samples // RUNS, "rollouts_per_group": RUNS},
        "schedule": {"steps": steps},
        "reward_service": {"retries": 0, "keep": False},
        "checkpoint": {"every": 0, "at_end": False},
        "log_prob_check": {"every": 0, "probe_tokens": 0},
        "algorithm": {"kl": {"initial_responses": 0}},
        "deadlines": dict.fromkeys(("batch", "rollout", "reward", "engine"), SECONDS),
        "observe": {"samples_per_step": 0},
    }
    algorithm = ResolvedAlgorithm(loss="ppo", advantages="grpo")
    tasks: Any = {"train": [Task(id="q", messages=({"role": "user", "content": "q"},))]}
    shared: Any = {"clock": clock or Clock(), "hooks": HookManager()}
    role = Role(config=make_config(values, ()), name=name, algorithm=algorithm, tasks=tasks, **shared)
    role.rollout_devices, role.train_devices = (DeviceLease(role.clock, SECONDS) for _ in range(2))
    return role


def workers(
    backend: TransferQueueBackend,
    agents: AgentWorker | None = None,
    rewards: RewardWorker | None = None,
    rank: Any = None,
) -> RunWorkers:
    """Return the workers that a role has, one of each kind."""
    return RunWorkers(
        backend=backend,
        ranks={"actor": [rank]},
        agents=Workers([] if agents is None else [agents]),
        rewards=None if rewards is None else Workers([rewards]),
        estimator=Estimator(),  # type: ignore[arg-type]
        places=None,  # type: ignore[arg-type]
    )


def make_agents(backend: TransferQueueBackend) -> AgentWorker:
    tokenizer: Any = Tokenizer()
    return AgentWorker(Values(backend), tokenizer, Clock(), AgentHost(make=partial(Agent, 10**9)))


def make_rewards(backend: TransferQueueBackend) -> RewardWorker:
    tokenizer: Any = Tokenizer()
    return RewardWorker(Values(backend), Reward(None, RewardContext()), tokenizer, Clock(), role_of(RUNS, 1).config)


def units(folder: str, *, joins: bool) -> TransferQueueBackend:
    """The backend zmq of a folder, the default in a cluster."""
    context = TransferQueueContext(folder=folder, joins=joins)
    made: TransferQueueBackend = installed().load("transfer_queue", "zmq").build({}, context)
    return made


async def joined(folder: str, stack: AsyncExitStack) -> TransferQueueBackend:
    """Join the storage units of a folder."""
    import_torch()
    backend = units(folder, joins=True)
    stack.push_async_callback(backend.close)
    await backend.start()
    return backend


# -- everything in one process, or each worker in an actor of Ray


async def inline(role: Role, folder: str, stack: AsyncExitStack) -> None:
    """Make all workers of a role in this process, with a queue whose values are in its memory."""
    backend = MemoryBackend(MemoryConfig(), TransferQueueContext())
    role.workers = workers(backend, make_agents(backend), make_rewards(backend), Rank())
    await open_queue(role, stack)


async def ray(role: Role, folder: str, stack: AsyncExitStack) -> None:
    """Make the same workers as actors of a cluster that the benchmark starts."""
    cluster = Cluster(Clock(), serve, SECONDS)
    await cluster.open(RayConfig(num_cpus=2, object_store_bytes=500_000_000), needed_cpus=1)
    stack.push_async_callback(cluster.close)
    backend = units(folder, joins=False)
    role.workers = workers(backend)
    await open_queue(role, stack)  # before those that join its backend
    agents, rewards, rank = [await cluster.start(WorkerSpec(name=kind)) for kind in ("agents", "rewards", "rank")]
    for actor in (agents, rewards, rank):
        await cluster.make(actor, {"kind": actor.spec.name, "folder": folder})
    role.workers = workers(
        backend,
        stub(agents.connection, "worker", CONTRACTS[AgentWorker], AgentWorker, SECONDS),
        stub(rewards.connection, "worker", CONTRACTS[RewardWorker], RewardWorker, SECONDS),
        stub(rank.connection, "worker", CONTRACTS[EngineRank], EngineRank, SECONDS),
    )


async def serve(worker: dict[str, Any], stack: AsyncExitStack) -> Mapping[str, Service]:
    """Make a part in its actor; it joins the storage units of a folder."""
    if worker["kind"] == "rank":
        return {"worker": Service(target=Rank(), contract=CONTRACTS[EngineRank])}
    backend = await joined(worker["folder"], stack)
    if worker["kind"] == "agents":
        return {"worker": Service(target=make_agents(backend), contract=CONTRACTS[AgentWorker])}
    return {"worker": Service(target=make_rewards(backend), contract=CONTRACTS[RewardWorker])}


async def open_queue(role: Role, stack: AsyncExitStack) -> None:
    """Open a queue with the backend of the role's workers, and its controller in this process."""
    role.queue = TransferQueue(role.workers.backend, role.clock)
    stack.push_async_callback(role.queue.close)
    await role.queue.start()


# -- a process for the queue's controller and for each role


async def distributed(role: Role, folder: str, stack: AsyncExitStack) -> None:
    """Serve the queue, explore and score in a process each; this one trains."""
    size = [str(role.config.data.groups_per_batch * RUNS), str(role.config.schedule.steps)]
    for name in ("queue", "explore", "reward"):
        process = subprocess.Popen(
            [sys.executable, __file__, name, folder, *size], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.callback(process.wait)
        stack.callback(process.stdin.close)  # type: ignore[union-attr]
        await asyncio.to_thread(process.stdout.readline)  # type: ignore[union-attr]
    role.workers = workers(await joined(folder, stack), rank=Rank())
    await connect(role, folder, stack)


async def connect(role: Role, folder: str, stack: AsyncExitStack) -> None:
    """Connect a role to the served queue."""
    role.queue, connection = await connect_queue(Path(folder, "address.json"), role.name, role.clock)
    stack.push_async_callback(connection.close)


async def served(folder: str, stack: AsyncExitStack) -> None:
    """Serve the queue."""
    queue = TransferQueue(units(folder, joins=False), Clock())
    stack.push_async_callback(queue.close)
    await queue.start()
    server = QueueServer(queue, queue.clock, SECONDS)
    stack.push_async_callback(server.close)
    (await server.listen()).write(Path(folder, "address.json"))


async def explore_or_score(role: Role, folder: str, stack: AsyncExitStack) -> None:
    """Explore, or score samples, from the beginning of the training on."""
    backend = await joined(folder, stack)
    role.workers = workers(backend, make_agents(backend), make_rewards(backend))
    await connect(role, folder, stack)
    begun = partial(role.queue.wait_notice, WEIGHTS, 0, SECONDS)
    tasks = await stack.enter_async_context(asyncio.TaskGroup())
    if role.name == "explore":
        weights = tasks.create_task(
            WeightSubscriber(role=role, pool=ReplicaPool(role.workers.places, role.config, role.clock)).run()
        )
        explorer = Explorer(role=role, name="explorer-0")
        tasks.create_task(after(begun, explorer.run)).add_done_callback(lambda _: weights.cancel())
    else:
        pipeline = RewardPipeline(role=role)
        stack.callback(tasks.create_task(after(begun, pipeline.register, pipeline.run)).cancel)


async def after(*calls: Any) -> None:
    """Call one after the other."""
    for call in calls:
        await call()


async def main(name: str, folder: str, samples: str, steps: str) -> None:
    """Run one of the processes until its standard input ends."""
    async with AsyncExitStack() as stack:
        if name == "queue":
            await served(folder, stack)
        else:
            await explore_or_score(role_of(int(samples), int(steps), name), folder, stack)  # type: ignore[arg-type]
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
