"""What the control loop costs: milliseconds of a step in which agents, rewards, engine and weights take no time.

    python benchmarks/control_loop.py [--cluster inline ray] [--samples 256 1024] [--steps N] [--quick] [--json]

Everything else is real: batches, groups, leases, placement, the queue with its values, workers and their messages;
with ``ray``, agent worker, reward worker and engine rank are actors of a cluster on this machine, and values are in a
storage unit of zmq. A sample has 15 prompt and 32 response tokens. ``--quick`` takes few steps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.abc.engine import EngineLayout
from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.abc.transfer_queue import TransferQueueBackend, TransferQueueContext
from jackfield.algorithms import LossSpec
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.cluster.pool import DeviceLease
from jackfield.compose.workers import CONTRACTS
from jackfield.config import make_config
from jackfield.config.sections import RayConfig
from jackfield.data.tasks import Task
from jackfield.errors import JackfieldError
from jackfield.plugins import HookManager, installed
from jackfield.queue import TransferQueue, Values
from jackfield.queue.meta import BatchMeta, Written
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.runtime.engine import Distances, EngineGroup, EngineRank
from jackfield.runtime.ray_cluster import Cluster, WorkerSpec
from jackfield.runtime.rewards import RewardWorker
from jackfield.runtime.workers import AgentWorker, Workers
from jackfield.sdk.rpc import Service, stub
from jackfield.trainer.role import Role, RunWorkers
from jackfield.trainer.rollouts import Explorer, RewardPipeline
from jackfield.trainer.trainer import Trainer
from jackfield.weights import WeightsSynced

RUNS = 8
PROMPT = tuple(range(15))
RESPONSE = tuple(range(32))
SECONDS = 300.0


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

    async def estimate(self, batch: BatchMeta, kl_coefficient: float = 0.0) -> tuple[dict[str, float], Written]:
        return {}, Written(columns=(), sizes=(0,) * len(batch))


class Weights:
    """Replicas that have every version."""

    async def sync(self, version: int) -> WeightsSynced:
        return WeightsSynced(version=version)


def workers(backend: TransferQueueBackend, agents: AgentWorker, rewards: RewardWorker, rank: Any) -> RunWorkers:
    return RunWorkers(
        backend=backend,
        ranks={"actor": [rank]},
        agents=Workers([agents]),
        rewards=Workers([rewards]),
        estimator=Estimator(),  # type: ignore[arg-type]
        places=None,  # type: ignore[arg-type]
    )


def make_agents(backend: TransferQueueBackend) -> AgentWorker:
    return AgentWorker(Values(backend), Tokenizer(), Clock(), lambda _: Agent(10**9, None))  # type: ignore[arg-type]


def make_rewards(backend: TransferQueueBackend) -> RewardWorker:
    reward = Reward(None, RewardContext())
    config = make_config({"model": {"path": "none"}, "deadlines": {"reward": SECONDS}}, ())
    return RewardWorker(Values(backend), reward, Tokenizer(), Clock(), config)


async def serve(worker: dict[str, Any], stack: AsyncExitStack) -> Mapping[str, Service]:
    """Make a part in its actor; it joins the storage units of a folder."""
    import torch  # noqa: F401, now rather than at the first row

    if worker["kind"] == "rank":
        return {"worker": Service(target=Rank(), contract=CONTRACTS[EngineRank])}
    backend = units(worker["folder"], joins=True)
    stack.push_async_callback(backend.close)
    await backend.start()
    if worker["kind"] == "agents":
        return {"worker": Service(target=make_agents(backend), contract=CONTRACTS[AgentWorker])}
    return {"worker": Service(target=make_rewards(backend), contract=CONTRACTS[RewardWorker])}


def units(folder: str, *, joins: bool) -> TransferQueueBackend:
    """The backend zmq of a folder, the default in a cluster."""
    context = TransferQueueContext(folder=folder, joins=joins)
    made: TransferQueueBackend = installed().load("transfer_queue", "zmq").build({}, context)
    return made


async def inline_workers() -> RunWorkers:
    backend = MemoryBackend(MemoryConfig(), TransferQueueContext())
    return workers(backend, make_agents(backend), make_rewards(backend), Rank())


async def ray_workers(stack: AsyncExitStack) -> RunWorkers:
    """The same parts as actors of a cluster that the benchmark starts; Ray pickles what makes them, by itself."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    cluster = Cluster(Clock(), serve, SECONDS)
    await cluster.open(RayConfig(num_cpus=2, object_store_bytes=500_000_000), needed_cpus=1)
    stack.push_async_callback(cluster.close)

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    backend = units(folder, joins=False)
    await backend.start()  # before those that join it
    setattr(backend, "start", partial(asyncio.sleep, 0))  # noqa: B010 - the queue would start it again
    agents, rewards, rank = [await cluster.start(WorkerSpec(name=kind)) for kind in ("agents", "rewards", "rank")]
    for actor in (agents, rewards, rank):
        await cluster.make(actor, {"kind": actor.spec.name, "folder": folder})
    return workers(
        backend,
        stub(agents.connection, "worker", CONTRACTS[AgentWorker], AgentWorker, SECONDS),
        stub(rewards.connection, "worker", CONTRACTS[RewardWorker], RewardWorker, SECONDS),
        stub(rank.connection, "worker", CONTRACTS[EngineRank], EngineRank, SECONDS),
    )


def role_of(samples: int, steps: int) -> Role:
    """Return a trainer of ``steps`` batches of ``samples`` samples that loads no model."""
    values = {
        "model": {"path": "none"},
        "data": {"groups_per_batch": samples // RUNS, "rollouts_per_group": RUNS},
        "schedule": {"steps": steps, "reward_retries": 0},
        "checkpoint": {"every": 0, "at_end": False},
        "log_prob_check": {"every": 0},
        "deadlines": dict.fromkeys(("batch", "rollout", "reward", "engine"), SECONDS),
        "observe": {"samples_per_step": 0},
    }
    algorithm = ResolvedAlgorithm(loss="ppo", advantages="grpo")
    tasks: Any = {"train": [Task(id="q", messages=({"role": "user", "content": "q"},))]}
    hooks = HookManager()
    return Role(config=make_config(values, ()), algorithm=algorithm, tasks=tasks, clock=Clock(), hooks=hooks)


async def measure(made: RunWorkers, samples: int, steps: int) -> list[float]:
    """Seconds of each step."""
    role = role_of(samples, steps)
    role.workers, clock = made, role.clock
    role.queue = queue = TransferQueue(made.backend, clock)
    await queue.start()
    actor = EngineGroup("actor", made.ranks["actor"], queue, clock, seconds=SECONDS)
    await actor.initialize()
    role.rollout_devices = role.train_devices = DeviceLease(clock, SECONDS)
    trainer = Trainer(role=role, actor=actor, sync=Weights().sync)
    rewards = RewardPipeline(role=role)
    await rewards.register()
    explorer = Explorer(role=role, name="explorer-0")
    ends = [clock.time()]

    async def note() -> None:
        for done in range(1, steps + 1):
            await role.steps_done.until(lambda value, wanted=done: value >= wanted, SECONDS, "a step")  # type: ignore[misc]
            ends.append(clock.time())

    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(part()) for part in (explorer.run, rewards.run)]
        noting = tasks.create_task(note())
        await trainer.begin()
        await trainer.run()
        await noting
        for task in background:
            task.cancel()
    await queue.close()
    return [end - begin for begin, end in itertools.pairwise(ends)]


async def run(runtime: str, sizes: Sequence[int], steps: int) -> dict[str, float]:
    """By the number of samples: the median milliseconds of a step, the first one left out."""
    found = {}
    for samples in sizes:
        async with AsyncExitStack() as stack:
            made = await (inline_workers() if runtime == "inline" else ray_workers(stack))
            milliseconds = 1000 * statistics.median((await measure(made, samples, steps + 1))[1:])
        print(f"{runtime:6}  {samples:5} samples  {milliseconds:8.1f} ms per step", flush=True)
        found[str(samples)] = round(milliseconds, 2)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", nargs="+", default=["inline", "ray"], choices=["inline", "ray"])
    parser.add_argument("--samples", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="two steps")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    steps = 2 if arguments.quick else arguments.steps
    found: dict[str, dict[str, float]] = {}
    for runtime in arguments.cluster:
        try:
            found[runtime] = asyncio.run(run(runtime, arguments.samples, steps))
        except JackfieldError as error:
            sys.exit(str(error))
    if arguments.json:
        print(json.dumps({"overhead_ms_per_step": found, "steps": steps}))


if __name__ == "__main__":
    main()
