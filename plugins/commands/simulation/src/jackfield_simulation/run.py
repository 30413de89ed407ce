"""A simulated run: the real schedule, queue, explorer, reward pipeline and trainer around workers that take time."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

from jackfield.abc.agent import AgentLoopOutput, AgentSequence
from jackfield.abc.reward import ScoreRequest, ScoreResult
from jackfield.abc.rollout import GenerateRequest, SamplingParams
from jackfield.cluster.pool import DeviceLease, ReplicaPool
from jackfield.compose.run import starting_point
from jackfield.config import RunConfig
from jackfield.data.formats import Task
from jackfield.errors import QueueError, WorkerLost, some
from jackfield.plugins import HookManager, hookimpl
from jackfield.plugins.hooks import StageEnded, StepEnded
from jackfield.queue import BatchMeta, TransferQueue, Values
from jackfield.queue.meta import Written
from jackfield.queue.store import STORE_FILE, uses
from jackfield.queue.transfer_queue import QUEUE
from jackfield.runtime.agent_worker import AgentWorker, RolloutJob
from jackfield.runtime.rewards import RewardWorker
from jackfield.runtime.samples import trained
from jackfield.runtime.workers import Workers
from jackfield.trainer.rewards import RewardPipeline
from jackfield.trainer.role import Role, RunWorkers
from jackfield.trainer.rollouts import Explorer
from jackfield.trainer.trainer import Trainer
from jackfield.trainer.weights import EngineWeights
from jackfield_simulation.replicas import Replicas, Response, Reward, Sender, agent_host
from jackfield_simulation.world import CONTROLLER, RANK, TRAINER, LosingStore, Who, World, broken

#: Calls of the queue that a role repeats if it answers twice, as if it had not got the result.
_REPEATED = {"ack": "trainer", "end_rollouts": "explorer", "commit": "controller", "add_columns": "engine rank"}
_CLIENT: ContextVar[str | None] = ContextVar("client", default=None)  #: of the queue


class _Tasks(list[Task]):
    digest = "simulated"


@attrs.define(eq=False)
class _Worker:
    """An agent or reward worker whose answers faults delay, repeat or prevent."""

    world: Simulation
    who: Who
    worker: Any
    generates: Any = attrs.field(default=partial(asyncio.sleep, 0, False))  #: no reward asks the replicas

    def begin(self, *arguments: Any) -> Any:
        return self.world.guard(self.who, self.worker.begin(*arguments))

    def reward(self, *arguments: Any) -> Any:
        return self._answers(self.worker.reward(*arguments))

    def run(self, jobs: Sequence[RolloutJob]) -> Any:
        for job in jobs:
            key, again = job.group, f"{job.group.retry}/{job.group.reissue}/{job.restart}"
            self.world.places |= {seed: (key.batch, key.index, n, again) for n, seed in job.rollouts.items()}
            self.world.keys |= {seed: key.sample(n, 0, job.restart) for n, seed in job.rollouts.items()}
        return self._answers(self.worker.run(jobs))

    async def _answers(self, found: Any) -> Any:
        async with aclosing(found):
            while (answer := await self.world.guard(self.who, anext(found, None))) is not None:
                yield answer
                if self.world.repeats(self.who):
                    yield answer


@attrs.define(eq=False)
class Simulation(World):
    """A simulated run with its resumes, and what it did. Its methods are also those of the engine.

    Times are in virtual seconds. An invariant that is broken raises ``run.simulation``.
    """

    model: list[tuple[int, Sequence[str]]] = attrs.field(factory=list)  #: step and samples of each of its updates
    starts: int = 0  #: 1, and the number of resumes
    steps: dict[int, Mapping[str, float]] = attrs.field(factory=dict)  #: metrics by completed steps
    stages: list[StageEnded] = attrs.field(factory=list)  #: for a timeline
    places: dict[int, tuple[int, int, int, str]] = attrs.field(factory=dict)  #: of rollouts, by sampling seed
    keys: dict[int, str] = attrs.field(factory=dict)  #: of samples, by sampling seed
    oldest: dict[str, int] = attrs.field(factory=dict)  #: version of the tokens of a sample
    requests: int = 0
    reading: asyncio.Lock = attrs.field(factory=asyncio.Lock)  #: of the engine's weights
    replicas: Replicas = attrs.field(init=False)
    config: RunConfig = attrs.field(init=False)
    store: LosingStore = attrs.field(init=False)
    queue: TransferQueue = attrs.field(init=False)
    role: Role = attrs.field(init=False)

    def run(self) -> None:
        """Run to the end and check the invariants."""
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk takes most of the time
        with tempfile.TemporaryDirectory(prefix="jackfield-", dir=memory) as folder, _held(folder):
            self.config = self.settings.config(folder)
            self.heartbeat = self.config.deadlines.heartbeat
            self.clock.run(self._run())

    def busy(self) -> dict[str, float]:
        """Return for how long each stage was at work; its lane was idle for the rest of ``clock.now``."""
        found, until = dict.fromkeys(self.begun, 0.0), dict.fromkeys(self.begun, 0.0)
        for stage, start, end, _ in sorted(self.spans, key=lambda span: span[1]):
            found[stage] += max(0.0, end - max(start, until[stage]))
            until[stage] = max(end, until[stage])
        return found

    async def _run(self) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.run_in_executor = _at_once
        self.store = LosingStore(self)
        while True:
            self.starts += 1
            self.breached, self.struck = loop.create_future(), Counter()
            self.note(f"start {self.starts}")
            try:
                return await self._live()
            except (WorkerLost, BaseExceptionGroup) as error:
                if isinstance(error, BaseExceptionGroup) and error.subgroup(WorkerLost) is None:
                    raise
                if self.starts > len(self.settings.faults):
                    raise broken("progress", f"{self.starts} starts for {len(self.settings.faults)} faults") from error
            if not self.config.queue.durable:
                self.store = LosingStore(self)

    async def _live(self) -> None:
        """Run from the newest checkpoint to the end, or until what the run cannot do without is found dead."""
        config, clock, queue, hooks = self.config, self.clock, self.config.queue, HookManager([self])
        tasks: Any = {"train": _Tasks(Task(id=f"task-{n}", messages=({"content": f"{n}"},)) for n in range(64))}
        checkpoint, self.model = starting_point(config, tasks), []
        limits: Any = {"max_samples": queue.max_samples, "max_bytes": queue.max_bytes, "durable": queue.durable}
        file, retries = Path(config.folder) / "queue" / STORE_FILE, config.schedule.max_retries
        self.queue = TransferQueue(self.store, clock, store=file, max_retries=retries, **limits)
        self.queue.caller = _CLIENT.get
        late = self.settings.distributed and any(each.role == "controller" for each in self.settings.faults)
        for method in QUEUE if late else ():
            setattr(self.queue, method.name, self._controlled(getattr(self.queue, method.name), method.streams))
        for name, kind in _REPEATED.items():
            setattr(self.queue, name, self._repeating(kind, getattr(self.queue, name)))
        await self.queue.start()
        self.role = role = Role(config=config, algorithm=self.settings.algorithm, clock=clock, hooks=hooks, tasks=tasks)
        sender = Sender(self, 2 if config.weights.in_turns and config.cluster.replicas > 1 else 1)
        self.replicas = replicas = Replicas(self, config, sender)
        role.queue, role.workers = self.queue, self._workers()
        role.rollout_devices = role.train_devices = DeviceLease(clock, config.deadlines.batch)
        if not self.settings.shared:
            role.train_devices = DeviceLease(clock, config.deadlines.batch)
        engine: Any = self
        replicas.pool = pool = ReplicaPool(replicas, config, clock)
        pool.source = weights = EngineWeights(role=role, engines={"actor": engine}, pool=pool)
        trainer = Trainer(role=role, actor=engine, critic=engine if role.algorithm.critic else None, sync=weights.sync)
        try:
            await pool.start(config.cluster.replicas)
            pipeline = RewardPipeline(role=role)
            async with asyncio.TaskGroup() as loops:
                background = [loops.create_task(each) for each in (pool.keep(), self._watch())]
                first = await self.guard(TRAINER, trainer.begin(checkpoint))
                await pipeline.register()
                background.append(loops.create_task(pipeline.run(), context=self.process(TRAINER)))
                running = [self._progress(), *map(self._explore, range(self.settings.explorers))]
                background += [loops.create_task(each) for each in running]
                await self.guard(TRAINER, trainer.run(first))
                for task in background:
                    task.cancel()
            self._check((await self.queue.stats())["samples"])
        finally:
            replicas.close()
            await self.queue.close()

    def _workers(self) -> RunWorkers:
        values, parts = Values(self.store), SimpleNamespace
        text: Any = parts(decode=lambda ids: "")
        reward = Reward(self._score, self.clock)

        def start(kind: str, make: Callable[[int], Any]) -> Any:
            started = [_Worker(self, (kind, number), make(number)) for number in range(self.settings.workers)]
            for number, each in enumerate(started):  # another one begins with nothing
                self.restarts[each.who] = lambda each=each, n=number: setattr(each, "worker", make(n))  # type: ignore[misc]
            return Workers(started)

        def agent(number: int) -> AgentWorker:
            host = agent_host(self._generate, self.replicas.router(number), self.clock)
            return AgentWorker(values, text, self.clock, host)

        agents = start("agent worker", agent)
        rewards = start("reward worker", lambda _: RewardWorker(values, reward, text, self.clock, self.config))
        others: Any = {"estimator": self, "ranks": {"actor": [parts(sender=self.replicas.sender)]}}
        others |= {"places": self.replicas, "shares_devices": self.settings.shared}
        return RunWorkers(backend=self.store, agents=agents, rewards=rewards, **others)

    def _repeating(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the queue that may be called twice: the second call is refused, or changes nothing."""

        async def called(*arguments: Any, **named: Any) -> Any:
            result = await method(*arguments, **named)
            if self.repeats((kind, 0)):
                try:
                    await method(*arguments, **named)
                except QueueError as error:
                    if error.code != "queue.lease":
                        raise
            return result

        return called

    def _controlled(self, method: Callable[..., Any], streams: bool) -> Callable[..., Any]:
        """Return a method of the queue that is executed in the controller's process."""

        async def called(*arguments: Any, **named: Any) -> Any:
            return await self.process(CONTROLLER).run(asyncio.ensure_future, method(*arguments, **named))

        async def iterated(*arguments: Any, **named: Any) -> Any:
            async with aclosing(method(*arguments, **named)) as items:
                while (
                    item := await self.process(CONTROLLER).run(asyncio.ensure_future, anext(items, None))
                ) is not None:
                    yield item

        return iterated if streams else called

    async def _explore(self, number: int) -> None:
        """Run an explorer; the first one is replaced if it dies, and others leave."""
        for life in range(1 if number else 1 + len(self.settings.faults)):
            name = f"explorer-{number}-{life}"
            _CLIENT.set(name)
            try:
                return await self.guard(("explorer", number), Explorer(role=self.role, name=name).run())
            except WorkerLost:
                await self.queue.end_holder(name)

    async def _watch(self) -> None:
        """Raise WorkerLost as soon as engine rank or controller is found dead, or the error of a broken invariant."""
        needed = [self.breached, *(self.condition(who).lost for who in (RANK, CONTROLLER))]
        await asyncio.wait(needed, return_when=asyncio.FIRST_COMPLETED)
        if self.breached.done():
            self.breached.result()
        raise WorkerLost("the run cannot go on")

    async def _progress(self) -> None:
        """Raise DeadlineExceeded if a step does not end in time."""
        steps = self.role.steps_done
        while True:
            await steps.until(partial(operator.lt, steps.value), self.settings.deadline, "a step")

    @hookimpl
    def step_ended(self, event: StepEnded) -> None:
        """Record a step."""
        self.steps[event.step] = event.metrics
        self.note(f"step {event.step} has ended")
        self.begin("between")

    @hookimpl
    def stage_ended(self, event: StageEnded) -> None:
        """Record a stage."""
        self.stages.append(event)

    # -- the work of agents, rewards, replicas, engines and advantage worker

    async def _generate(self, generate: Any, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        settings, seed = self.settings, sampling["seed"]
        key, (*place, again) = self.keys[seed], self.places[seed]
        self.begin("generate")
        self.requests += 1
        length = random.Random(f"{self.seed}/length/{place}").randint(1, 2 * settings.tokens)
        pace = settings.times.draw("generate", self.seed, *place, again=again) / min(length, settings.tokens)
        asked = SamplingParams(seed=seed, max_new_tokens=settings.tokens)
        request = GenerateRequest(request_id=f"{key}/{self.requests}", prompt_ids=(0,), sampling=asked)
        found = await self.replicas.respond(generate, request, Response(self.places[seed], length, pace))
        if settings.times.environment:
            await self.spend("environment", *self.places[seed])
        self.oldest[key] = min(found.weight_versions)
        mask = (1,) * len(found.token_ids)
        tokens: Any = {"prompt_ids": (0,), "response_ids": found.token_ids, "response_mask": mask}
        made = AgentSequence(**tokens, response_log_probs=found.log_probs, weight_versions=found.weight_versions)
        return AgentLoopOutput(sequences=(made,))

    async def _score(self, request: ScoreRequest) -> ScoreResult:
        _, batch, group, retry, rollout, _ = request.idempotency_key.rsplit("/", 5)
        await self.spend("reward", int(batch), int(group), int(rollout.partition("r")[0]), retry)
        draw = random.Random(f"{self.seed}/{request.idempotency_key}")
        if draw.random() < self.settings.failing:
            raise ValueError("no score")
        return ScoreResult(score=float(draw.random() < 0.5))

    async def to(self, device: str) -> None:
        """Move the engine, which takes no time."""

    async def compute(self, kind: str, batch: BatchMeta, column: str, adapter_off: bool = False) -> None:
        """Write log-probs or values."""
        await self.store.reach(batch.keys)
        await self.guard(RANK, self.spend("log_probs", self.role.updated))
        await self.queue.add_columns(batch, await self.store.reach(batch.keys, column))

    async def estimate(
        self, batch: BatchMeta, kl_coefficient: float, version: int | None = None
    ) -> tuple[dict[str, float], Written]:
        """Write the advantages of a batch."""
        await self.store.reach(batch.keys)
        return {}, await self.store.reach(trained(batch).keys, "advantages", "returns")

    async def prepare(self, batch: BatchMeta) -> Written:
        """Write what a loss prepares."""
        return await self.store.reach(batch.keys, "prepared")

    async def update(self, batch: BatchMeta, loss: Any, comparison: object = None) -> tuple[dict[str, float], Any]:
        """Train on a mini-batch, which may not be staler than the schedule allows."""
        step, schedule = self.role.updated, self.role.schedule
        await self.store.reach(batch.keys)
        if self.settings.shared:
            self.replicas.check_idle("the engine computes")
        await self.guard(RANK, self.spend("update", step, sum(each == step for each, _ in self.model)))
        tagged = [int(tags["weight_version_min"]) for tags in batch.tags]
        versions = list(zip((self.oldest[key] for key in batch.keys), tagged, strict=True))
        if wrong := [each for each in versions if each[0] != each[1]]:
            raise broken("a token has its version", f"the oldest token and its tag: {wrong[0]}")
        age = step - min(oldest for oldest, _ in versions)
        if age > schedule.staleness_bound and schedule.on_stale != "train_corrected":
            raise broken("staleness", f"step {step} trains on tokens that are {age} steps old: {some(batch.keys)}")
        if loss.name != "value":
            self.model.append((step, batch.keys))
        self.note(f"step {step} trains on {some(batch.keys, 1)}")
        return {"policy/loss": 0.0, "value/loss": 0.0, "grad_norm": 1.0}, {}

    async def save(self, folder: str, format: str, *, background: bool = False) -> None:
        """Save the model at once, also in the background."""
        await self.guard(RANK, self.spend("checkpoint", self.role.updated))
        Path(folder).mkdir()
        Path(folder, "model.json").write_text(json.dumps(self.model))

    async def finish_save(self) -> None:
        """Do nothing: the files are there."""

    async def load(self, folder: str) -> None:
        """Load a saved model."""
        self.model = [(step, keys) for step, keys in json.loads(Path(folder, "model.json").read_text())]

    def _check(self, known: int) -> None:
        """Check that each group was trained on once, by ledger and model, and that the store has what is known."""
        config, used = self.config, uses(self.queue.ledger).get("trainer", {})
        if self.breached.done():
            self.breached.result()
        if self.replicas.restarts > self.struck["replica"]:
            found = f"{self.replicas.restarts} restarts, {self.struck['replica']} faults"
            raise broken("a replica that lives is not restarted", found)
        acked = Counter((*_place(key), step or 0) for key, steps in used.items() for step in steps)
        learnt = Counter((*_place(key), step) for step, keys in self.model for key in keys)
        if config.mixing.replay is None:
            groups, places = Counter(step for *_, step in acked), Counter(place[:2] for place in acked)
            again: list[Any] = [key for key, steps in used.items() if len(steps) > 1]
            if again := again or [place for place, count in places.items() if count > 1]:
                raise broken("nothing twice", f"the ledger has further uses of {again[0]}")
            if groups != dict.fromkeys(range(config.schedule.steps), config.data.groups_per_batch):
                raise broken("nothing lost", f"the ledger has these numbers of groups by step: {groups}")
            if config.schedule.mode == "sync" and (moved := [place for place in acked if place[0] != place[2]]):
                raise broken("step t trains on batch t", f"batch, group and step {moved[0]}")
        if wrong := [place for place in learnt | acked if learnt[place] != config.algorithm.epochs * acked[place]]:
            found = f"{learnt[wrong[0]]} updates, {acked[wrong[0]]} acked samples"
            raise broken("model = ledger", f"batch, group and step {wrong[0]}: {found}")
        rows = {key for _, key in self.store._cells}
        if len(rows) != known or rows & used.keys():
            raise broken("store = ledger", f"{known} samples are known, and there are {some(sorted(rows))}")


@contextmanager
def _held(folder: str) -> Iterator[None]:
    """Keep a folder open: what looks for shared memory that no process holds, as conformance checks do, skips it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield
    finally:
        os.close(descriptor)


async def _at_once(_: object, work: Callable[..., Any], *arguments: Any) -> Any:
    """Do work that would have a thread, for which a virtual clock would not wait."""
    return work(*arguments)


def _place(key: str) -> tuple[int, int]:
    """Return batch and group of a sample."""
    _, batch, group, _ = key.split("/", 3)
    return int(batch), int(group)
