"""Simulated runs: the real schedule, queue, explorer, reward pipeline and trainer on virtual time, and their checks."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import attrs

from jackfield.cluster.pool import DeviceLease
from jackfield.compose.run import starting_point
from jackfield.config import RunConfig
from jackfield.data.tasks import Task
from jackfield.errors import JackfieldError, RunError, WorkerLost, some
from jackfield.plugins import HookManager, hookimpl
from jackfield.plugins.hooks import StageEnded, StepEnded
from jackfield.queue import TransferQueue, Values
from jackfield.queue.meta import group_of
from jackfield.queue.store import STORE_FILE, uses
from jackfield.runtime.rewards import RewardWorker
from jackfield.runtime.workers import AgentWorker, Workers
from jackfield.abc.reward import RewardContext
from jackfield.simulation.settings import SimulationSettings
from jackfield.simulation.world import FaultyWorker, LosingStore, TimedAgent, TimedEngine, TimedReward, World, broken
from jackfield.trainer.role import Role, RunWorkers
from jackfield.trainer.rollouts import Explorer, RewardPipeline
from jackfield.trainer.trainer import CONSUMER, Trainer

_TRACE = 40  #: events that an error shows
_CLIENT: ContextVar[str | None] = ContextVar("client", default=None)
#: calls of the queue that a role repeats if it answers twice, as if it had not got the answer
_REPEATED = {"ack": "trainer", "end_rollouts": "explorer", "commit": "controller", "add_columns": "engine rank"}


class _Tasks:
    """Tasks and tokenizer of a simulation."""

    digest = "simulated"

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> Task:
        return Task(id=f"task-{number}", messages=({"role": "user", "content": f"{number}"},))

    def decode(self, token_ids: Any) -> str:
        return ""


@attrs.define(eq=False)
class Simulation(World):
    """A simulated run with its resumes, and what it did. Times are in virtual seconds."""

    config: RunConfig = attrs.field(init=False)
    store: LosingStore = attrs.field(init=False)
    queue: TransferQueue = attrs.field(init=False)
    engine: TimedEngine = attrs.field(init=False)
    starts: int = 0  #: 1, and the number of resumes
    steps: dict[int, Mapping[str, float]] = attrs.field(factory=dict)  #: metrics by completed steps
    stages: list[StageEnded] = attrs.field(factory=list)  #: for a timeline

    def run(self) -> None:
        """Run to the end and check the invariants."""
        with tempfile.TemporaryDirectory(prefix="jackfield-") as folder:
            self.config = self.settings.config(folder)
            self.heartbeat = self.config.deadlines.heartbeat
            self.clock.run(self._run())

    def busy(self) -> dict[str, float]:
        """Return for how long each stage was at work."""
        found = dict[str, float]()
        until = dict[str, float]()
        for stage, start, end, _ in sorted(self.spans, key=lambda span: span[1]):
            found[stage] = found.get(stage, 0.0) + max(0.0, end - max(start, until.get(stage, 0.0)))
            until[stage] = max(end, until.get(stage, 0.0))
        return found

    async def _run(self) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.run_in_executor = _at_once
        self.store = LosingStore(self)
        while True:
            self.starts += 1
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
        """Run from the newest checkpoint to the end, or until what the run cannot do without dies."""
        config, clock, tasks = self.config, self.clock, {"train": _Tasks()}
        checkpoint = starting_point(config, tasks)  # type: ignore[arg-type]
        self.queue = queue = TransferQueue(
            self.store,
            clock,
            store=Path(config.folder) / "queue" / STORE_FILE,
            durable=config.queue.durable,
            max_samples=config.queue.max_samples,
            max_bytes=config.queue.max_bytes,
            max_retries=config.schedule.max_retries,
        )
        queue.caller = _CLIENT.get
        for name, kind in _REPEATED.items():
            setattr(queue, name, self._repeating(kind, getattr(queue, name)))
        await queue.start()
        role = Role(config=config, algorithm=self.settings.algorithm, clock=clock, hooks=HookManager([self]), tasks=tasks)
        role.queue = queue
        role.rollout_devices = role.train_devices = DeviceLease(clock, config.deadlines.batch)
        if not self.settings.shared:
            role.train_devices = DeviceLease(clock, config.deadlines.batch)
        self.engine = TimedEngine(self, self.store, role)
        critic = TimedEngine(self, self.store, role) if self.settings.algorithm.critic else None
        role.workers = self._workers(role)
        trainer = Trainer(role=role, actor=self.engine, critic=critic, sync=self.sync)  # type: ignore[arg-type]
        self.slots = asyncio.Semaphore(self.settings.slots) if self.settings.slots else nullcontext()
        try:
            first = await self.guard(("trainer", 0), trainer.begin(checkpoint))
            pipeline = RewardPipeline(role=role)
            await pipeline.register()
            async with asyncio.TaskGroup() as loops:
                running = [pipeline.run(), self._watch("engine rank"), self._watch("controller"), self._progress(role)]
                running += [self._explore(role, number) for number in range(self.settings.explorers)]
                background = [loops.create_task(each) for each in running]
                await self.guard(("trainer", 0), trainer.run(first))
                for task in background:
                    task.cancel()
            self._check((await queue.stats())["samples"])
        finally:
            await queue.close()

    def _workers(self, role: Role) -> RunWorkers:
        values, clock, config, numbers = Values(self.store), self.clock, role.config, range(self.settings.workers)
        parts: Any = _Tasks()
        agents: Any = [
            FaultyWorker(self, ("agent worker", n), lambda: AgentWorker(values, parts, clock, lambda _: TimedAgent(self)))
            for n in numbers
        ]
        scorer = lambda: RewardWorker(values, TimedReward(self), parts, clock, config)  # noqa: E731
        rewards: Any = [FaultyWorker(self, ("reward worker", number), scorer) for number in numbers]
        engine: Any = self.engine
        places: Any = None
        return RunWorkers(
            backend=self.store, agents=Workers(agents), rewards=Workers(rewards), estimator=engine, places=places
        )

    def _repeating(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the queue that is called again where a fault says so: this is refused, or changes nothing."""

        async def called(*args: Any, **kwargs: Any) -> Any:
            found = await method(*args, **kwargs)
            if self.repeats((kind, 0)):
                self.note(f"{kind} repeats {method.__name__}")
                with suppress_lease():
                    await method(*args, **kwargs)
            return found

        return called

    async def _explore(self, role: Role, number: int) -> None:
        """Run an explorer, and another one in its place if it dies."""
        for life in range(1 + len(self.settings.faults)):
            name = f"explorer-{number}-{life}"
            _CLIENT.set(name)
            try:
                return await self.guard(("explorer", number), Explorer(role=role, name=name).run())
            except WorkerLost:
                await self.queue.end_holder(name)

    async def _watch(self, kind: str) -> None:
        """Raise WorkerLost as soon as a worker is found dead without which the run ends."""
        await asyncio.wait([self.condition((kind, 0)).lost])
        raise WorkerLost(f"the {kind} died")

    async def _progress(self, role: Role) -> None:
        """Raise DeadlineExceeded if a step does not end in time."""
        done = role.steps_done.value
        while True:
            done = await role.steps_done.until(lambda now, before=done: now > before, self.settings.deadline, "a step")

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

    def _check(self, known: int) -> None:
        """Check that each group was trained on once, by ledger and model, and that the store has what is known."""
        groups, rollouts = self.config.data.groups_per_batch, self.config.data.rollouts_per_group
        steps, replays = range(self.config.schedule.steps), self.config.mixing.replay is not None
        used = uses(self.queue.ledger).get(CONSUMER, {})
        if (again := [key for key, each in used.items() if len(each) > 1]) and not replays:
            raise broken("nothing twice", f"the ledger has further uses of {some(again)}")
        acked = Counter((key.split("/")[1], key.split("/")[2], step) for key, each in used.items() for step in each)
        per_step = Counter(step for _, _, step in acked)
        if not replays and (wrong := {step: per_step[step] for step in steps if per_step[step] != groups}):
            raise broken("nothing lost", f"the ledger has other numbers of groups than {groups} in steps {wrong}")
        if getattr(self.config.schedule, "mode", "sync") == "sync" and not replays:
            if wrong := [place for place in acked if int(place[0]) != place[2]]:
                raise broken("the schedule", f"batch, group and step {wrong[0]}")
        learnt = Counter((*key.split("/")[1:3], step) for step, keys in self.engine.model for key in keys)
        epochs = self.config.algorithm.epochs
        if learnt != Counter({place: epochs * count for place, count in acked.items()}):
            wrong = [place for place in learnt | acked if learnt[place] != epochs * acked[place]]
            raise broken("model = ledger", f"batch, group and step {wrong[0]}: {learnt[wrong[0]]} samples")
        rows = {key for _, key in self.store._cells}
        if len(rows) != known or rows & used.keys():
            raise broken("store = ledger", f"{known} samples are known, and there are {some(sorted(rows))}")


async def _at_once(_: object, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run work that would have a thread, for which a virtual clock would not wait."""
    return work(*arguments)


@contextmanager
def suppress_lease() -> Iterator[None]:
    try:
        yield
    except JackfieldError as error:
        if error.code != "queue.lease":
            raise
