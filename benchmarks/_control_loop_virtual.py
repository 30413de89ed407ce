"""The controller of a large run on virtual time: real code and messages, and workers that only take declared time.

A worker is the other end of a connection. It decodes what it gets and answers after a declared time; what that costs
the processor is measured and left out.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar, cast

import _control_loop_parts as parts
import attrs
from msgspec import Raw

from jackfield.abc.checkpoint_engine import Topology
from jackfield.abc.engine import EngineLayout
from jackfield.abc.reward import ScoreResult
from jackfield.abc.rollout import ServerInfo, WeightReceipt, WorkerReceipt
from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.cluster.pool import ReplicaPool
from jackfield.compose.workers import CONTRACTS
from jackfield.data.formats import Task
from jackfield.queue.meta import RolloutReport, Written
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.routing import Replica
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.engine import EngineGroup, EngineRank
from jackfield.runtime.process import ROLLOUT, use_process
from jackfield.runtime.rewards import RewardReport, RewardWorker
from jackfield.runtime.samples import AdvantageWorker
from jackfield.runtime.workers import Workers, list_seconds
from jackfield.sdk.rpc import Connection, Contract, stub
from jackfield.sdk.rpc.connection import MSGPACK
from jackfield.sdk.rpc.wire import HEAD, MAGIC, Call, Message, Reply
from jackfield.simulation import VirtualClock
from jackfield.trainer.rewards import RewardPipeline
from jackfield.trainer.role import Role, RunWorkers
from jackfield.trainer.rollouts import Explorer
from jackfield.trainer.trainer import Trainer
from jackfield.trainer.weights import EngineWeights
from jackfield.weights import PreparedSender, WeightSender

T = TypeVar("T")

AGENTS, REWARDS, RANKS, TENSORS = 64, 8, 64, 300
STEP_SECONDS = 60.0  #: of which the controller's share is given
#: Declared times in seconds: the longest answer, its shares of lengths (a normal distribution of logarithms), a score,
#: a pass for advantages, the update with its reading, and a transfer of weights.
LONGEST, MEDIAN, SPREAD, SCORE, ESTIMATE, READ, UPDATE, TRANSFER = 40.0, 12.0, 0.6, 0.2, 0.5, 1.0, 16.0, 2.0


@attrs.define(eq=False)
class World:
    """The workers, and the processor time that they have used."""

    clock: VirtualClock
    draw: random.Random = attrs.field(factory=lambda: random.Random(1))
    seconds: float = 0.0
    messages: int = 0  #: that the controller has sent and got


@attrs.define(eq=False)
class Peer:
    """A worker at the other end of a connection.

    ``answer`` returns the seconds from a call to its result, and the result; for an iteration, those of each item.
    """

    world: World
    contract: Contract
    answer: Callable[[str, Any], list[tuple[float, Any]]]
    connection: Connection = attrs.field(init=False)
    _streams: dict[int, tuple[float, Iterator[tuple[float, Any]]]] = attrs.field(factory=dict, init=False)

    def stub(self, name: str, cls: type[T]) -> T:
        """Return what the controller calls."""
        self.connection = Connection(name, {}, self.world.clock)
        self.connection.connection_made(cast(Any, self))
        return stub(self.connection, "worker", self.contract, cls, parts.SECONDS)

    def write(self, data: bytes) -> None:
        """Take a message of the controller. Its transport would copy it to a socket."""
        self.world.messages += 1
        asyncio.get_running_loop().call_soon(self._hear, data)

    def close(self) -> None:
        """Take the end of the connection."""

    def get_extra_info(self, name: str) -> None:
        """Tell nothing about the transport."""

    def _hear(self, data: bytes) -> None:
        began = time.process_time()
        message = MSGPACK.decode(data[HEAD.size :], Message, "a call")
        if isinstance(message, Call):
            service, _, member = message.method.rpartition(".")
            if service:
                method = self.contract.methods[member]
                found = self.answer(member, MSGPACK.decode(message.arguments, method.arguments, member))
                if method.streams:
                    self._streams[message.id] = self.world.clock.now, iter(found)
                    self._next(message.id, message.id)
                else:
                    ((seconds, value),) = found
                    self._reply(message.id, self.world.clock.now + seconds, value)
            else:
                (number,) = MSGPACK.decode(message.arguments, tuple[int], member)
                self._next(message.id, number) if member == "next" else self._reply(message.id, 0.0, None)
        self.world.seconds += time.process_time() - began

    def _next(self, call: int, number: int) -> None:
        began, items = self._streams[number]
        seconds, item = next(items, (0.0, None))
        self._reply(call, began + seconds, [] if item is None else [item])

    def _reply(self, call: int, when: float, value: Any) -> None:
        content = MSGPACK.encode(Reply(call, Raw(MSGPACK.encode(value))))
        self.world.messages += 1
        received = HEAD.pack(MAGIC, len(content)) + content
        asyncio.get_running_loop().call_at(when, self.connection.data_received, received)


def agents(world: World) -> Callable[[str, Any], Any]:
    """Return an agent worker: each rollout takes its own time, and reports are coalesced as the real worker does."""

    def answer(member: str, arguments: Any) -> list[tuple[float, list[RolloutReport]]]:
        made = []
        for job in arguments.jobs:
            name = str(job.group)
            for rollout in job.rollouts:
                seconds = min(MEDIAN * math.exp(world.draw.gauss(0.0, SPREAD)), LONGEST)
                tags: dict[str, Any] = {"task": job.task.id, "rollout": rollout, "prompt_tokens": 300, "turns": 1}
                tags |= {"response_tokens": int(100 * seconds), "model_tokens": int(100 * seconds), "step_id": 0}
                version = job.group.batch  # on-policy
                tags |= {"weight_version_min": version, "weight_version_max": version, "finish_reason": "stop"}
                columns = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "task")
                written = Written(columns=columns, sizes=(40_000,), tags=(tags,))
                key = (job.group.sample(rollout, 0, job.restart),)
                made.append((seconds, RolloutReport(group=name, rollout=rollout, keys=key, written=written)))
        return list(coalesced(sorted(made, key=lambda each: each[0])))

    return answer


def coalesced(ends: Sequence[tuple[float, RolloutReport]]) -> Iterator[tuple[float, list[RolloutReport]]]:
    """Put into a list what ends soon after its first."""
    while ends:
        due = ends[0][0] + list_seconds(ends[0][0])
        some = [report for seconds, report in ends if seconds <= due]
        rest = ends[len(some) :]
        yield (due if rest else ends[-1][0]), some
        ends = rest


def rewards(member: str, arguments: Any) -> list[tuple[float, Any]]:
    """Answer as a reward worker."""
    if member != "reward":
        return [(0.0, False) if member == "generates" else (SCORE, None)]
    results = {key: ScoreResult(score=1.0, metrics={"length": 1.0}) for job in arguments.jobs for key in job.keys}
    written = Written(columns=("reward",), sizes=(4,) * len(results))
    return [(SCORE, RewardReport(results=results, written=written))]


def rank(number: int) -> Callable[[str, Any], Any]:
    """Return an engine's rank."""
    answers: dict[str, tuple[float, Any]] = {
        "initialize": (0.0, EngineLayout(data_parallel_rank=number, data_parallel_size=RANKS)),
        "read": (READ, None),
        "update": (UPDATE, ({"policy/loss": 0.0, "grad_norm": 0.0, "lr": 0.0}, {})),
    }
    return lambda member, _: [answers[member]]


def estimator(member: str, arguments: Any) -> list[tuple[float, Any]]:
    """Answer as an advantage worker."""
    return [(ESTIMATE, ({}, Written(columns=("advantages", "returns"), sizes=(8_000,) * len(arguments.batch))))]


DIGESTS = {f"model.layers.{number}.mlp.weight": f"{number:016x}" for number in range(TENSORS)}


def sender(member: str, arguments: Any) -> list[tuple[float, Any]]:
    """Answer as the sender of a rank."""
    if member == "build_topology":
        ends = ({"address": "10.0.0.1:4000", "rank": 0},)
        return [(0.0, Topology(trainer=ends * RANKS, rollout=ends * arguments.request.rollout_workers, retained={}))]
    prepared = PreparedSender(metadata={"address": "10.0.0.1:4000"})
    return [{"prepare": (0.0, prepared), "transfer": (TRANSFER, (DIGESTS, 1 << 30))}.get(member, (0.0, None))]


def replica(number: int) -> Callable[[str, Any], Any]:
    """Return a replica, whose receipt has the digest of each tensor."""

    def answer(member: str, arguments: Any) -> list[tuple[float, Any]]:
        if member == "start":
            return [(0.0, ServerInfo(replica=number))]
        if member != "update_weights":
            return [(0.0, None)]
        workers = (WorkerReceipt(worker=0, digests=DIGESTS),)
        return [(TRANSFER, WeightReceipt(version=arguments.request.version, replica=number, workers=workers))]

    return answer


@attrs.define(eq=False)
class Places:
    """Where the replicas are."""

    world: World

    async def start(self, made: Replica) -> None:
        peer = Peer(self.world, ROLLOUT, replica(made.number))
        peer.stub(made.name, object)
        use_process(made, peer.connection, "cluster", parts.SECONDS)

    async def end(self, number: int) -> None:
        return

    async def route(self, replicas: Mapping[int, Replica], seconds: float, updating: Sequence[int] = ()) -> int:
        return 0


def worker(world: World, cls: type[T], answer: Callable[[str, Any], Any], number: int = 0) -> T:
    """Return the stub of a worker."""
    return Peer(world, CONTRACTS[cls], answer).stub(f"{cls.__name__} {number}", cls)


def role_of(world: World, samples: int, steps: int) -> Role:
    """Return the trainer's role with all of its workers but replicas."""
    role = parts.role_of(samples, steps, clock=world.clock)
    tasks = [Task(id=f"task-{number}", messages=({"role": "user", "content": "q"},)) for number in range(4096)]
    role.tasks = {"train": tasks}  # type: ignore[dict-item]
    ranks = [worker(world, EngineRank, rank(number), number) for number in range(RANKS)]
    for number, each in enumerate(ranks):
        each.sender = worker(world, WeightSender, sender, number)
    role.workers = RunWorkers(
        backend=MemoryBackend(MemoryConfig(), TransferQueueContext()),
        ranks={"actor": ranks},
        agents=Workers([worker(world, AgentWorker, agents(world), number) for number in range(AGENTS)]),
        rewards=Workers([worker(world, RewardWorker, rewards, number) for number in range(REWARDS)]),
        estimator=worker(world, AdvantageWorker, estimator),
        places=cast(Any, Places(world)),
        shares_devices=False,
    )
    return role


async def measure(world: World, samples: int, replicas: int, steps: int) -> list[tuple[float, float, int]]:
    """Return each step's virtual seconds, the controller's processor seconds, and its messages."""
    role, clock, seen = role_of(world, samples, steps), world.clock, list[tuple[float, float, int]]()
    async with AsyncExitStack() as stack:
        await parts.open_queue(role, stack)
        actor = EngineGroup("actor", role.workers.ranks["actor"], role.queue, clock, seconds=parts.SECONDS)
        await actor.initialize()
        pool = ReplicaPool(role.workers.places, role.config, clock)
        await pool.start(replicas)
        pool.source = weights = EngineWeights(role=role, engines={"actor": actor}, pool=pool)
        trainer = Trainer(role=role, actor=actor, sync=weights.sync)
        scoring = RewardPipeline(role=role)
        await scoring.register()

        async def note() -> None:
            for done in range(steps + 1):
                await role.steps_done.until(lambda value, wanted=done: value >= wanted, 10 * parts.SECONDS, "a step")  # type: ignore[misc]
                seen.append((clock.now, time.process_time() - world.seconds, world.messages))

        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(loop()) for loop in (scoring.run, pool.keep)]
            background.append(tasks.create_task(Explorer(role=role, name="explorer-0").run()))
            noting = tasks.create_task(note())
            await trainer.begin()
            await trainer.run()
            await noting
            for task in background:
                task.cancel()
    return [
        (now - before, busy - idle, messages - fewer)
        for (before, idle, fewer), (now, busy, messages) in itertools.pairwise(seen)
    ]


def curve(samples: int, counts: Sequence[int], steps: int) -> dict[str, float]:
    """Print the controller's share of a step of 60 s over the number of replicas, and return it in percent."""
    found = {}
    print(f"{samples:,} samples, {AGENTS} agent workers, {RANKS} ranks; medians of {steps} steps after the first")
    for count in counts:
        world = World(VirtualClock())
        measured = world.clock.run(measure(world, samples, count, steps + 1))[1:]
        seconds, busy, messages = map(statistics.median, zip(*measured, strict=True))
        share = 100 * busy / STEP_SECONDS
        found[str(count)] = round(share, 3)
        print(
            f"{count:5} replicas: a step of {seconds:.1f} s, {messages:,.0f} messages, controller {1000 * busy:.1f} ms,"
            f" {share:.2f} % of {STEP_SECONDS:.0f} s",
            flush=True,
        )
    return found
