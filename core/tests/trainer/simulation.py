"""A simulated run on virtual time, with the real queue, explorer, reward pipeline and trainer around fakes."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch

from jackfield.abc.agent import AgentContext, AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.abc.transfer_queue import (
    GetRequest,
    GetResult,
    KeysRequest,
    KeysResult,
    PutRequest,
    PutResult,
    TransferQueueContext,
)
from jackfield.algorithms import LossSpec
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.cluster.pool import DeviceLease
from jackfield.config import make_config
from jackfield.data.formats import Task
from jackfield.errors import QueueError
from jackfield.plugins import HookManager, hookimpl
from jackfield.plugins.hooks import SamplesFailed, StepEnded, WeightsSynced
from jackfield.queue import BatchMeta, TransferQueue, Values
from jackfield.queue.meta import GroupKey, Reuse
from jackfield.queue.store import STORE_FILE
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.agents import AgentHost, no_model
from jackfield.runtime.rewards import RewardWorker
from jackfield.runtime.samples import AdvantageWorker
from jackfield.runtime.workers import Workers
from jackfield.sdk.cells import column_from_rows
from jackfield.trainer.checkpoint import CheckpointStore
from jackfield.trainer.rewards import RewardPipeline
from jackfield.trainer.role import Role, RunWorkers, Schedule
from jackfield.trainer.rollouts import Explorer
from jackfield.trainer.trainer import Trainer
from jackfield_virtual_clock import VirtualClock

Worker = TypeVar("Worker")


class Inline(ThreadPoolExecutor):
    """An executor that runs work at once, because a virtual clock does not wait for threads."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class FakeTokenizer:
    """A tokenizer with one token per letter."""

    end_token_ids = (0,)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return tuple(ord(letter) for letter in messages[-1]["content"])

    def encode_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return self.encode_chat(messages)

    def encode_response(self, text: str) -> tuple[int, ...]:
        return tuple(ord(letter) for letter in text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in token_ids)


class FakeSynchronizer:
    """A synchronizer that represents replicas by one version number."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds, self.loaded, self.syncs = clock, seconds, 0, []

    async def sync(self, version: int) -> WeightsSynced:
        await self.clock.sleep(self.seconds)
        self.loaded = version
        self.syncs.append(version)
        return WeightsSynced(version=version)


class FakeActor:
    """An actor that takes time and records what it was trained on."""

    def __init__(self, queue: TransferQueue, clock: Clock, seconds: float, overflows: tuple[int, ...]) -> None:
        self.queue, self.clock, self.seconds, self.overflows = queue, clock, seconds, overflows
        self.updates: list[tuple[BatchMeta, LossSpec]] = []
        self.kept: Sequence[str] = ()  #: samples of the initial model
        self.advantages: list[list[float]] = []
        self.passes: list[tuple[float, str, BatchMeta]] = []  #: with the time at their end
        self.ended_at: list[float] = []  #: by update
        self.saving: str | None = None  #: folder of a checkpoint in the background
        self.traces: list[tuple[str, int]] = []  #: beginnings and folders, each with the number of updates before it

    async def compute(self, kind: str, batch: BatchMeta, column: str) -> None:
        await self.clock.sleep(self.seconds / 2)
        self.passes.append((self.clock.time(), column, batch))
        rows = [torch.full((tags["response_tokens"],), -1.0) for tags in batch.tags]
        written = await Values(self.queue.backend).write(batch, {column: column_from_rows(rows)})
        await self.queue.add_columns(batch, written)

    async def keep_initial(self, batch: BatchMeta, count: int) -> None:
        """Note the samples, before any update."""
        assert not self.updates
        self.kept = batch.keys[:count]

    async def initial_kl(self) -> float | None:
        """Each update moves the policy by 0.1."""
        return 0.1 * len(self.updates) if self.kept else None

    async def update(self, batch: BatchMeta, loss: LossSpec, comparison: object = None) -> tuple[Any, Any]:
        columns = await Values(self.queue.backend).read(batch, ("advantages",))
        await self.clock.sleep(self.seconds)
        self.updates.append((batch, loss))
        self.ended_at.append(self.clock.time())
        self.advantages.append(columns["advantages"].values.tolist())
        norm = math.inf if len(self.updates) in self.overflows else 1.0
        return {"policy/loss": 0.5, "grad_norm": norm, **({"policy/kl": 0.3} if "kl" in loss.options else {})}, {}

    async def save(self, folder: str, format: str, *, background: bool = False) -> None:
        await self.clock.sleep(self.seconds)
        Path(folder).mkdir()
        self.saving = folder
        if not background:
            self._write()

    async def finish_save(self) -> None:
        await self.clock.sleep(self.seconds / 4)
        if self.saving is not None:
            self._write()

    def _write(self) -> None:
        assert self.saving is not None
        (Path(self.saving) / "model").write_text("weights")
        self.saving = None

    async def load(self, folder: str) -> None:
        assert "weights" == (Path(folder) / "model").read_text()

    async def begin_trace(self) -> None:
        self.traces.append(("begins", len(self.updates)))

    async def end_trace(self, folder: str) -> None:
        self.traces.append((folder, len(self.updates)))


class DyingBackend(MemoryBackend):
    """A store whose units die, with their samples and with those that are being put at the moment.

    It outlives the run that uses it.
    """

    def __init__(self, parts: int = 1) -> None:
        super().__init__(MemoryConfig(), TransferQueueContext())
        self.living = list(range(parts))
        self.homes: dict[str, int] = {}
        self.gone: set[str] = set()
        self.swallows = False  #: whether the next put is lost

    def die(self) -> None:
        """Let the first live unit die."""
        part = self.living.pop(0)
        for partition, key in [place for place in self._cells if self.homes[place[1]] == part]:
            del self._cells[partition, key]
            self.gone.add(key)
        self.swallows = True

    def _require(self, keys: Sequence[str]) -> None:
        if lost := [key for key in keys if key in self.gone]:
            raise QueueError(f"{len(lost)} rows went with a part of the store", code="queue.lost", found=lost)

    async def put(self, request: PutRequest) -> PutResult:
        for key in request.keys:
            self.homes.setdefault(key, self.living[zlib.crc32(key.encode()) % len(self.living)])
        if self.swallows:
            self.swallows = False
            self.gone.update(request.keys)
            self._require(request.keys)
        return await super().put(request)

    async def get(self, request: GetRequest) -> GetResult:
        self._require(request.keys)
        return await super().get(request)

    async def close(self) -> None:
        return

    async def keys(self, request: KeysRequest) -> KeysResult:
        samples = (await super().keys(request)).samples
        return KeysResult(samples={place: names for place, names in samples.items() if place[1] not in self.gone})


class FakeCritic:
    """A critic that gives every token the value 0.5."""

    def __init__(self, queue: TransferQueue) -> None:
        self.queue = queue
        self.updates: list[tuple[BatchMeta, LossSpec]] = []

    async def compute(self, kind: str, batch: BatchMeta, column: str) -> None:
        assert "values" == kind
        rows = [torch.full((tags["response_tokens"],), 0.5) for tags in batch.tags]
        written = await Values(self.queue.backend).write(batch, {column: column_from_rows(rows)})
        await self.queue.add_columns(batch, written)

    async def update(self, batch: BatchMeta, loss: LossSpec, comparison: object = None) -> tuple[Any, Any]:
        self.updates.append((batch, loss))
        return {"value/loss": 0.25, "grad_norm": 2.0, "lr": 0.1}, {}

    async def save(self, folder: str, format: str, *, background: bool = False) -> None:
        return

    async def finish_save(self) -> None:
        return

    async def load(self, folder: str) -> None:
        return


class FakeAgent(AgentLoopBase):
    """An agent that responds with one letter, from the replicas' current weights."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        simulation = self.simulation
        simulation.seeds.append(sampling_params["seed"])
        simulation.temperatures.append(sampling_params.get("temperature"))
        version = simulation.synchronizer.loaded
        if simulation.failure is not None:
            raise simulation.failure
        seconds = simulation.rollout_seconds or (lambda task, seed: simulation.generate_seconds)
        await simulation.clock.sleep(seconds(fields["task_id"], sampling_params["seed"]))
        letter = simulation.answer(fields["task_id"], sampling_params["seed"])
        sequence = AgentSequence(
            prompt_ids=(1, 2),
            response_ids=(ord(letter), 0),
            response_mask=(1, 1),
            response_log_probs=(-1.0, -1.0),
            weight_versions=(version, version),
        )
        return AgentLoopOutput(sequences=(sequence,))


class FakeReward(RewardAgent):
    """Scores 1 for ``a`` and 0 for other letters; ``x`` raises, and ``s`` never ends."""

    def __init__(self, clock: Clock, seconds: float, of: Callable[[str], float] | None = None) -> None:
        super().__init__(None, RewardContext(clock=clock))
        self.seconds, self.of = seconds, of

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        await self.context.clock.sleep(self.seconds if self.of is None else self.of(request.idempotency_key))
        if request.solution_str[0] == "x":
            raise ValueError("cannot score an x")
        if request.solution_str[0] == "s":
            await asyncio.Event().wait()
        return ScoreResult(score=float(request.solution_str[0] == "a"))


class Recorder:
    """A listener that records steps and failures."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: list[StepEnded] = []
        self.ended_at: list[float] = []
        self.failed: dict[str, str] = {}

    @hookimpl
    def step_ended(self, event: StepEnded) -> None:
        self.steps.append(event)
        self.ended_at.append(self.clock.time())

    @hookimpl
    def samples_failed(self, event: SamplesFailed) -> None:
        self.failed.update(event.reasons)


@attrs.define(eq=False, slots=False)
class Simulation:
    """The settings of a simulated run, and its results after :meth:`run`."""

    schedule: Schedule
    groups: int = 4
    runs: int = 2
    generate_seconds: float = 10.0
    reward_seconds: float = 0.0
    update_seconds: float = 6.0
    sync_seconds: float = 1.0
    score_deadline: float = 100.0
    shared: bool = False  #: whether engine and replicas share a device
    mini_batches: int = 1
    epochs: int = 1
    old_log_probs: bool = False  #: whether the actor computes them
    score_seconds: Callable[[str], float] | None = None  #: of a sample, by its key; None: ``reward_seconds``
    rollout_seconds: Callable[[str, int], float] | None = None  #: by task and seed; None: ``generate_seconds``
    max_retries: int = 3
    reward_service: Mapping[str, Any] = attrs.field(factory=dict)
    replaces_equal_groups: bool = False
    greedy_baseline: bool = False
    experts: int = 0
    replay: Reuse | None = None  #: adds half a replayed group for each new one, drawn at random
    advantages: str = "grpo"
    critic_warmup: int | None = None  #: None: no critic
    loss_options: Mapping[str, Any] = attrs.field(factory=dict)
    kl: Mapping[str, Any] = attrs.field(factory=dict)
    failure: BaseException | None = None  #: error that every rollout raises
    answer: Callable[[str, int], str] = attrs.field(default=lambda task, seed: "ab"[seed % 2])
    clock: VirtualClock = attrs.field(factory=VirtualClock)
    seeds: list[int] = attrs.field(factory=list)
    temperatures: list[float | None] = attrs.field(factory=list)
    folder: Path | None = None  #: folder of checkpoints and ledger, from which a run resumes
    checkpoint_every: int = 0
    background: int = 0  #: steps that go on while a checkpoint is written
    store: DyingBackend | None = None  #: a durable store; the queue then has a journal
    max_samples: int | None = None  #: limit for backpressure
    minimum_rows: int | None = None  #: rollouts that are enough for a group
    deaths: Sequence[float] = ()  #: times at which a unit of the store dies
    kill_at: float | None = None  #: time at which the whole run is killed
    profile: str | None = None
    optimizer: Mapping[str, Any] = attrs.field(factory=dict)
    overflows: tuple[int, ...] = ()  #: numbers of updates, from 1, whose gradients are not finite

    def run(self) -> Simulation:
        """Run to the end on virtual time."""
        with suppress(TimeoutError) if self.kill_at is not None else nullcontext():
            self.clock.run(asyncio.wait_for(self._run(), self.kill_at or 1e6))
        return self

    def _role(self, hooks: Any) -> Role:
        drawn = {"name": "random", "options": {"seed": 5}}
        replay = self.replay and {"ratio": 0.5, "sampler": drawn, **attrs.asdict(self.replay)}
        values = {
            "model": {"path": "none"},
            "folder": str(self.folder or "nowhere"),
            "seed": 7,
            "profile": self.profile,
            "optimizer": self.optimizer,
            "data": {"groups_per_batch": self.groups, "rollouts_per_group": self.runs},
            "algorithm": {"mini_batches": self.mini_batches, "epochs": self.epochs, "kl": self.kl},
            "schedule": {
                **{
                    name: each
                    for name, each in attrs.asdict(self.schedule).items()
                    if name not in ("explores", "trains")
                },
                "max_retries": self.max_retries,
            },
            "reward_service": {"retries": 0, "keep": False, **self.reward_service},
            "mixing": {"replay": replay},
            "checkpoint": {
                "every": self.checkpoint_every,
                "at_end": self.folder is not None,
                "background": self.background,
            },
            "log_prob_check": {"every": 0},
            "critic": {"clip": 0.1, "warmup_steps": self.critic_warmup or 0},
            "deadlines": {"batch": 500.0, "rollout": 50.0, "reward": self.score_deadline},
        }
        algorithm = ResolvedAlgorithm(
            loss="ppo",
            loss_options=self.loss_options,
            advantages=self.advantages,
            loss_columns={"expert_mask": "expert_mask"} if self.experts else {},
            experts=self.experts,
            greedy_baseline=self.greedy_baseline,
            dynamic_sampling=self.replaces_equal_groups,
            recompute_old_log_probs=self.old_log_probs,
            critic=self.critic_warmup is not None,
        )
        return Role(config=make_config(values, ()), algorithm=algorithm, clock=self.clock, hooks=hooks)

    async def _run(self) -> None:
        clock = self.clock
        asyncio.get_running_loop().set_default_executor(Inline())
        self.recorder = Recorder(clock)
        hooks = HookManager([self.recorder])
        backend = self.store or DyingBackend(len(self.deaths) + 1)
        ledger, newest = None, None
        if self.folder is not None:
            store = CheckpointStore(self.folder / "checkpoints")
            store.clean()
            newest = store.newest() if store.folders() else None
            ledger = self.folder / "queue" / STORE_FILE
        self.queue = queue = TransferQueue(
            backend,
            clock,
            store=ledger,
            durable=self.store is not None,
            max_retries=self.max_retries,
            max_samples=self.max_samples,
            minimum_rows=self.minimum_rows,
        )
        await queue.start()
        values = Values(backend)
        tokenizer: Any = FakeTokenizer()
        context = AgentContext(generate=no_model, tokenizer=tokenizer, clock=clock)
        host = AgentHost(make=lambda _: FakeAgent(self), context=context)
        agent = AgentWorker(values, FakeTokenizer(), clock, host)
        reward = FakeReward(clock, self.reward_seconds, self.score_seconds)
        self.synchronizer = FakeSynchronizer(clock, self.sync_seconds)
        self.actor = FakeActor(queue, clock, self.update_seconds, self.overflows)
        role = self._role(hooks)
        scorer = RewardWorker(values, reward, FakeTokenizer(), clock, role.config)
        role.queue = queue
        role.workers = RunWorkers(
            backend=backend,
            agents=Workers([await self.reach(agent)]),
            rewards=Workers([await self.reach(scorer)]),
            estimator=await self.reach(AdvantageWorker(values, role.algorithm)),
            places=None,  # type: ignore[arg-type]
        )
        self.critic = FakeCritic(queue)
        role.rollout_devices = DeviceLease(clock, 1000)
        role.train_devices = role.rollout_devices if self.shared else DeviceLease(clock, 1000)
        critic: Any = None if self.critic_warmup is None else self.critic
        trainer = Trainer(role=role, critic=critic, actor=self.actor, sync=self.synchronizer.sync)
        rewards = RewardPipeline(role=role)
        await rewards.register()
        explorer = NamingExplorer(role=role, name="explorer-0")
        try:
            self.first_step = await trainer.begin(newest)
            async with asyncio.TaskGroup() as tasks:
                loops = (explorer.run(), rewards.run(), self._kill_parts(backend))
                background = [tasks.create_task(loop) for loop in loops]
                await trainer.run(self.first_step)
                for task in background:
                    task.cancel()
            self.samples_left = (await queue.stats())["samples"]
        finally:
            self.ledger = queue.ledger
            await queue.close()

    async def reach(self, worker: Worker) -> Worker:
        """Return what the controller calls: the worker itself."""
        return worker

    async def _kill_parts(self, backend: DyingBackend) -> None:
        for moment in self.deaths:
            await self.clock.sleep(moment - self.clock.time())
            backend.die()


class NamingExplorer(Explorer):
    """An explorer whose tasks have the names of their groups."""

    def task_of(self, key: GroupKey) -> Task:
        if key.index >= self._groups:
            name = f"expert-{key.batch}-{key.index}"
            return Task(id=name, messages=({"role": "user", "content": name},), response="abc")
        name = f"task-{key.batch}-{key.index}-{key.retry}"
        return Task(id=name, messages=({"role": "user", "content": name},))
