"""Construction of the objects of a run or role, execution of their loops, and their end by a signal."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import attrs
import psutil

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.cluster.control import serve_control
from jackfield.cluster.pool import DeviceLease, ReplicaPool
from jackfield.compose.checks import mixed_samples
from jackfield.compose.export import write_card
from jackfield.compose.modes import check_joins, shared_settings
from jackfield.compose.workers import OpenQueue, WorkerFactory
from jackfield.errors import DeadlineExceeded
from jackfield.queue import Values
from jackfield.queue.transfer_queue import connect_queue
from jackfield.runtime.engine import EngineGroup
from jackfield.trainer.checkpoint import Checkpoint, mark_finished, written
from jackfield.trainer.rewards import RewardPipeline
from jackfield.trainer.role import FINISHED, SHARED, WEIGHTS, Role, RunWorkers
from jackfield.trainer.rollouts import Explorer
from jackfield.trainer.trainer import Trainer
from jackfield.trainer.weights import EngineWeights, WeightSubscriber

T = TypeVar("T")

_WORKING = 0.8  #: share of the grace period for reaching a boundary; the rest is for closing
_STARTING_SECONDS = 2.0  #: grace period of a run that is still starting and has nothing to save
#: Name of each role at the queue's controller; the run's name follows.
_CLIENTS = {"all": "the run", "train": "the trainer of", "explore": "the explorer", "reward": "the role"}


class Stop:
    """A request to stop a run early, made by a signal.

    ``grace`` is the maximum of seconds from the first signal to the end of the process, which is then killed. A run
    that is still starting gets less.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._until: Callable[[], str] | None = None
        self.begun = False  #: whether everything has started, so that closing may take the whole grace period
        self.code: int | None = None  #: exit code of the first signal: 128 + its number
        self.requested: asyncio.Event  #: of the work that is under way; set by the first signal
        self.abandon: Callable[[], object]  #: cancels the work that is under way

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Let this object receive the signals. Call it in the main thread."""
        before = {number: signal.signal(number, self._received) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def boundary(self, until: Callable[[], str]) -> Iterator[None]:
        """Declare that the enclosed code ends soon after a signal, at the boundary that ``until`` describes."""
        self.begun, self._until = True, until
        try:
            yield
        finally:
            self._until = None

    async def bounded(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``; a signal cancels it (``CancelledError``), inside a :meth:`boundary` only after some time."""
        self.requested = asyncio.Event()
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self.requested.wait())
        self.abandon = task.cancel
        if self.code is not None:  # a signal came before
            self.requested.set()
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if self._until and not task.done():
                await asyncio.wait({task}, timeout=_WORKING * self._grace)
        finally:
            asked.cancel()
            task.cancel()  # no effect on a finished task
            await asyncio.wait({task})
            self._loop = None
        return task.result()

    def _received(self, number: int, _: FrameType | None) -> None:
        if self.code is not None:
            _end_now(number)
        self.code = 128 + number
        how = f"ending {self._until()}, within {self._grace:g} s" if self._until else "ending"
        os.write(2, f"{signal.Signals(number).name}: {how}; a second signal ends at once\n".encode())
        timer = threading.Timer(self._grace if self.begun else min(self._grace, _STARTING_SECONDS), _end_now, [number])
        timer.daemon = True
        timer.start()
        if self._loop is None:
            raise SystemExit(self.code)  # no work is running
        self._loop.call_soon_threadsafe(self.requested.set)


def _boundary(pausable: int | None) -> str:
    """Return in words where a stop takes effect: at once, with so many steps done, or after a step (None)."""
    if pausable is None:
        return "after this step, with a checkpoint"
    return f"now, with a checkpoint of {pausable} steps" if pausable else "now, before the first step"


def _end_now(number: int) -> NoReturn:
    """Kill this process and all processes that it has started."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
    os._exit(128 + number)


@attrs.define(kw_only=True, eq=False)
class RunBuilder:
    """Builds the objects of one role, runs its loops, and closes everything."""

    role: Role  #: the role of a run whose configuration has been checked
    stop: Stop
    factory: WorkerFactory
    make_workers: Callable[[Role, AsyncExitStack, OpenQueue], Awaitable[RunWorkers]]
    stack: AsyncExitStack = attrs.field(init=False)  #: closes what was started, in reverse order
    _loops: asyncio.TaskGroup = attrs.field(init=False)
    _background: list[asyncio.Task[Any]] = attrs.field(init=False, factory=list)
    _engines: dict[str, EngineGroup] = attrs.field(init=False, factory=dict)  #: loaded models: actor, reference, critic
    _pool: ReplicaPool | None = attrs.field(init=False, default=None)
    _finished: bool = attrs.field(init=False, default=False)  #: whether the role has completed its work

    async def execute(self, checkpoint: Checkpoint | None) -> int:
        """Run the role to its end, from a checkpoint if one is given, and close everything.

        Return the completed steps, an explorer's newest weight version, or the number of scored groups.
        """
        role, config = self.role, self.role.config
        async with AsyncExitStack() as self.stack, asyncio.TaskGroup() as self._loops:
            role.workers = await self.make_workers(role, self.stack, self._open_queue)
            role.rollout_devices = role.train_devices = DeviceLease(role.clock, config.deadlines.batch)
            if not (role.workers.shares_devices and role.engines):
                role.train_devices = DeviceLease(role.clock, config.deadlines.batch)
            if role.trains:
                count = await self.train(checkpoint)
            else:
                count = await (self._explore() if role.name == "explore" else self._reward())
            self._finished = not role.trains or count == role.schedule.steps
            for task in self._background:
                task.cancel()
        return count

    async def _open_queue(self, host: str = "127.0.0.1") -> TransferQueueBackend:
        """Open the queue, or connect to the one that is served, before the workers that use its backend are made."""
        role, address = self.role, self.role.config.queue.address
        backend = self.factory.backend(None if address is None else Path(address).parent, host)
        if address is None:
            role.queue = self.factory.queue(backend)
            self.stack.push_async_callback(role.queue.close)
            await role.queue.start()
        else:
            self.stack.push_async_callback(backend.close)
            await backend.start()
            name, file = f"{_CLIENTS[role.name]} {role.config.name}", role.config.address_file
            role.queue, connection = await connect_queue(file, name, role.clock)
            early = "has ended before its work was done"
            self.stack.push_async_callback(lambda: connection.close("" if self._finished else early))
        return backend

    def run_loops(self, *loops: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start background loops that run until the role ends. An error of a loop ends the role."""
        self._background += [self._loops.create_task(loop()) for loop in loops]

    async def train(self, checkpoint: Checkpoint | None) -> int:
        """Train until the schedule ends or a stop is requested; return the completed steps."""
        role, config, folder = self.role, self.role.config, Path(self.role.config.folder)
        trainer = await self.trainer()
        if not gc.get_freeze_count():  # a full collection would look through all that the program has imported
            gc.collect()
            gc.freeze()
            self.stack.callback(gc.unfreeze)
        self.stack.push_async_callback(trainer.report_failures)  # also those that end the run
        mixed = mixed_samples(role, Values(role.workers.backend))
        await role.queue.post(SHARED, shared_settings(config))
        await role.queue.post(FINISHED, {"steps": 0})
        first_step = await trainer.begin(checkpoint, mixed)
        await self.open_control()
        if role.scores:
            pipeline = RewardPipeline(role=role)
            await pipeline.register()
            self.run_loops(pipeline.run)
        if role.name == "all" and config.mode != "train":
            self.run_loops(Explorer(role=role, name="explorer-0").run)
        self.run_loops(*(samples.keep for samples in mixed))
        with self.stop.boundary(lambda: _boundary(trainer.pausable)):
            steps = await trainer.run(first_step)
            if steps == role.schedule.steps:
                model, partial = folder / "model", folder / "model.partial"
                with written(partial, "the trained model could not be written", "goes on from the newest checkpoint"):
                    await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
                    if role.engines:
                        await trainer.actor.save(str(partial), "huggingface")
                        write_card(partial, config, steps)
                        shutil.rmtree(model, ignore_errors=True)
                        partial.replace(model)
                if role.name == "train" or not role.engines:
                    await role.queue.post(FINISHED, {"steps": steps})
                mark_finished(config, steps)
        return steps

    async def _explore(self) -> int:
        """Explore for a trainer elsewhere until it has all batches, or has ended; return the newest version."""
        pool = await self.start_replicas()
        assert pool is not None
        pool.source = weights = WeightSubscriber(role=self.role, pool=pool)
        self.stop.begun = True
        self.run_loops(pool.keep, weights.run)
        who, seconds = "the trainer to say which weights it has", self.role.config.deadlines.batch
        await self.role.version.until(lambda version: version >= 0, seconds, who)
        check_joins(self.role.config, (await self.role.queue.wait_notice(SHARED, 0, seconds)).value)
        await self.open_control()
        exploring = Explorer(role=self.role, name=self.role.config.name).run()
        tasks = [self._loops.create_task(each) for each in (exploring, self._until_finished())]
        self._background += tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return self.role.version.value

    async def _reward(self) -> int:
        """Score samples for a trainer elsewhere until its last step; return the group count.

        Each group that is rewarded extends the deadline for the trainer's end.
        """
        role, deadlines = self.role, self.role.config.deadlines
        seconds, wait = deadlines.batch + deadlines.engine, role.clock.wait_for
        await wait(role.queue.wait_notice(WEIGHTS, 0, 2 * seconds), deadlines.batch, "the trainer to begin")
        pipeline, finished = RewardPipeline(role=role), False
        await pipeline.register()
        self.stop.begun = True
        self.run_loops(pipeline.run)
        who = "the trainer to finish, or the explorers to bring a group"
        while not finished:
            before = pipeline.groups
            try:
                await wait(self._until_finished(), seconds, who)
                finished = True
            except DeadlineExceeded:
                if pipeline.groups == before:
                    raise
        await role.steps_done.advance(pipeline.groups)
        return pipeline.groups

    async def _until_finished(self) -> None:
        """Wait for the trainer's last step; a trainer that continues with more steps takes that back."""
        number, steps = 0, 0
        while not steps:
            notice = await self.role.queue.wait_notice(FINISHED, number, inf)
            number, steps = notice.number, notice.value["steps"]

    async def start_replicas(self) -> ReplicaPool | None:
        """Start the rollout servers. Return None if this role has none."""
        workers = self.role.workers
        if not workers.replicas:
            return None
        self._pool = pool = ReplicaPool(workers.places, self.role.config, self.role.clock)
        self.stack.push_async_callback(pool.close)
        await pool.start(workers.replicas)
        return pool

    async def open_control(self) -> None:
        """Let other processes list and scale the replicas, if there are any."""
        config = self.role.config
        if self._pool is not None:
            silence, port = config.deadlines.heartbeat, config.cluster.metrics_port
            control = serve_control(Path(config.folder), self._pool, self.role.clock, silence, port)
            await self.stack.enter_async_context(control)

    async def trainer(self) -> Trainer:
        """Build the trainer with engines, replicas and their weights."""
        role = self.role
        shares = role.workers.shares_devices and bool(role.workers.replicas)
        for name in role.engines or ("actor",):  # before replicas, whose servers reserve the memory that is free
            await self._load(name)
            if role.engines and shares and role.config.cluster.offload:
                await self._engines[name].to("cpu")
        pool = await self.start_replicas()
        weights: EngineWeights | WeightSubscriber | None = None
        if pool is not None and not role.engines:
            weights = WeightSubscriber(role=role, pool=pool)  # it keeps those of the model's folder
        elif pool is not None or role.name == "train":
            weights = EngineWeights(role=role, engines=self._engines, pool=pool)
        sync = weights.sync if isinstance(weights, EngineWeights) else None
        trainer = Trainer(role=role, stop=self.stop.requested, sync=sync, **self._engines)
        if role.workers.watch is not None:
            self.run_loops(role.workers.watch)
        if pool is not None:
            pool.source = weights
            self.run_loops(pool.keep)
        return trainer

    async def _load(self, name: str) -> None:
        role, seconds = self.role, self.role.config.deadlines.engine
        group = EngineGroup(name, role.workers.ranks.get(name, ()), role.queue, role.clock, seconds=seconds)
        if role.engines:  # otherwise the group has no ranks
            await group.initialize()
        self._engines[name] = group
