"""The world around a simulated run: its clock, its faults, and a store whose units die."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

import attrs

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.errors import QueueError, RunError, WorkerLost
from jackfield.queue.meta import Written, partition_of
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield_simulation.clock import VirtualClock
from jackfield_simulation.settings import SimulationSettings

T = TypeVar("T")
Who = tuple[str, int]  #: a role and its number
RANK, TRAINER, CONTROLLER = ("engine rank", 0), ("trainer", 0), ("controller", 0)
_LOOPS = ("trainer", "explorer", "controller")  #: roles with an event loop, which runs the code of the core
_PROCESS: ContextVar[Who | None] = ContextVar("process", default=None)  #: whose code runs
_DETECTION = 2.0  #: seconds until a death is found, in which a worker may still do something
_CELL = ('["jagged","float32",[]]', b"")  #: a value that an engine has written


@attrs.define(eq=False)
class Condition:
    """The condition of a worker or process, until another one replaces it."""

    stopped: asyncio.Future[None] = attrs.field(factory=asyncio.Future)
    lost: asyncio.Future[None] = attrs.field(factory=asyncio.Future)  #: it is found dead
    late: float = 0.0  #: seconds by which its next answer is late
    twice: bool = False  #: whether its next answer is repeated


@attrs.define(eq=False)
class World:
    """Time, faults, and a record of what happened."""

    settings: SimulationSettings
    seed: int = 0
    clock: VirtualClock = attrs.field(factory=VirtualClock)
    heartbeat: float = 30.0  #: seconds until a frozen process is found
    begun: Counter[str] = attrs.field(factory=Counter)  #: by phase
    spans: list[tuple[str, float, float, int]] = attrs.field(factory=list)  #: stage, start, end and batch of all work
    trace: list[str] = attrs.field(factory=list)
    restarts: dict[Who, Callable[[], None]] = attrs.field(factory=dict)  #: called when a worker is found dead
    struck: Counter[str] = attrs.field(factory=Counter)  #: faults by role, in this life of the run
    breached: asyncio.Future[None] = attrs.field(init=False)  #: has the error of a broken invariant
    _conditions: dict[Who, Condition] = attrs.field(factory=dict)
    _stalled: dict[Who, list[asyncio.Handle]] = attrs.field(factory=dict)  #: next steps of processes that stand still

    def condition(self, who: Who) -> Condition:
        """Return the condition of a worker or process."""
        return self._conditions.get(who) or self._conditions.setdefault(who, Condition())

    def note(self, text: str) -> None:
        """Add an event to the trace."""
        self.trace.append(f"{self.clock.now:10.2f} s: {text}")

    def begin(self, phase: str) -> None:
        """Begin a phase, in which faults may strike."""
        self.begun[phase] += 1
        for fault in self.settings.faults:
            if (fault.phase, fault.at) == (phase, self.begun[phase]):
                self._strike((fault.role, fault.number % self.settings.count(fault.role)), fault.kind, fault.seconds)

    def _strike(self, who: Who, kind: str, seconds: float) -> None:
        self.note(f"{who[0]} {who[1]} {kind}")
        self.struck[who[0]] += 1
        condition = self.condition(who)
        if kind == "answers twice":
            condition.twice = True
        elif kind == "answers late" and who[0] in _LOOPS and not self.settings.distributed:
            self.clock.now += seconds  # they share an event loop
        elif kind == "answers late" and who[0] in _LOOPS:
            self._stall(who)
            asyncio.get_running_loop().call_later(seconds, self._go_on, who, context=Context())
        elif kind == "answers late":
            condition.late += seconds
        elif not condition.stopped.done():
            condition.stopped.set_result(None)
            found = _DETECTION if kind == "dies" else self.heartbeat
            asyncio.get_running_loop().call_later(found, self._lose, who, condition, context=Context())

    def _lose(self, who: Who, condition: Condition) -> None:
        if self._conditions.get(who) is condition:
            self.note(f"{who[0]} {who[1]} is found dead")
            self.renew(who)
            self._go_on(who)
            condition.lost.set_result(None)
            self.restarts.get(who, lambda: None)()

    def renew(self, who: Who) -> None:
        """Let another worker or process take the place of one."""
        self._conditions.pop(who, None)

    def _stall(self, who: Who) -> None:
        """Hold back the next steps of a process, while those of others go on."""
        loop: Any = asyncio.get_running_loop()
        self._stalled.setdefault(who, [])

        def call_soon(callback: Any, *arguments: Any, context: Context | None = None) -> asyncio.Handle:
            context = copy_context() if context is None else context
            held = self._stalled.get(context.get(_PROCESS))  # type: ignore[arg-type]
            if held is None:
                return type(loop).call_soon(loop, callback, *arguments, context=context)  # type: ignore[no-any-return]
            held.append(handle := asyncio.Handle(callback, arguments, loop, context))
            return handle

        loop.call_soon = call_soon

    def _go_on(self, who: Who) -> None:
        """Let a process that stood still take its steps, in their order."""
        loop: Any = asyncio.get_running_loop()
        loop._ready.extend(self._stalled.pop(who, ()))
        if not self._stalled:
            loop.__dict__.pop("call_soon", None)

    def process(self, who: Who) -> Context:
        """Return a context for the code of a process."""
        context = copy_context()
        context.run(_PROCESS.set, who)
        return context

    def breach(self, invariant: str, found: str) -> None:
        """End the run because of a broken invariant, wherever that was found."""
        if not self.breached.done():
            self.breached.set_exception(broken(invariant, found))
            self.breached.exception()  # mark it as retrieved

    async def guard(self, who: Who, work: Awaitable[T]) -> T:
        """Return what a worker answers, late if a fault says so, or raise WorkerLost when it is found dead."""
        condition = self.condition(who)
        start: Callable[[Any], asyncio.Future[Any]] = asyncio.ensure_future
        task = self.process(who).run(start, work) if who[0] in _LOOPS else start(work)
        try:
            await asyncio.wait([task, condition.stopped], return_when=asyncio.FIRST_COMPLETED)
            late, condition.late = condition.late, 0.0
            if late:
                await asyncio.wait([condition.stopped], timeout=late)
            if condition.stopped.done():
                await asyncio.wait([condition.lost], timeout=_DETECTION)
                task.cancel()
                await asyncio.wait([condition.lost])
                raise WorkerLost(f"the {who[0]} {who[1]} died")
            found: T = task.result()
            return found
        finally:
            task.cancel()
            await asyncio.wait([task])
            _ = task.cancelled() or task.exception()  # an error that comes with a cancellation is not logged

    def repeats(self, who: Who) -> bool:
        """Return whether a worker's answer is to be repeated now."""
        condition = self.condition(who)
        twice, condition.twice = condition.twice, False
        return twice

    async def spend(
        self, stage: str, batch: int, group: int = 0, rollout: int = 0, again: str = "", share: float = 1.0
    ) -> None:
        """Begin a stage and take its time, or a share of it."""
        self.begin(stage)
        seconds = self.settings.times.draw(stage, self.seed, batch, group, rollout, again=again)
        await self.take(stage, share * seconds, batch, group, rollout)

    async def take(self, stage: str, seconds: float, batch: int, group: int = 0, rollout: int = 0) -> None:
        """Take time for a stage."""
        start = self.clock.now
        try:
            await self.clock.sleep(seconds)
        finally:
            self.spans.append((stage, start, self.clock.now, batch))


def broken(invariant: str, found: str) -> RunError:
    """Return the error of a broken invariant."""
    return RunError(f"the invariant {invariant!r} is broken", code="run.simulation", where=invariant, found=found)


class LosingStore(MemoryBackend):
    """A store in units, which die with their samples."""

    def __init__(self, world: World) -> None:
        super().__init__(MemoryConfig(), TransferQueueContext())
        self.world, self.gone = world, set[str]()
        for unit in range(world.settings.workers):
            world.restarts["store unit", unit] = lambda unit=unit: self._lose(unit)  # type: ignore[misc]

    def _unit(self, key: str) -> int:
        return zlib.crc32(key.encode()) % self.world.settings.workers

    def _lose(self, unit: int) -> None:
        self.gone |= {key for _, key in self._cells if self._unit(key) == unit}
        self._kept = {place: cells for place, cells in self._cells.items() if place[1] not in self.gone}

    async def reach(self, keys: Sequence[str], *columns: str) -> Written:
        """Read, or write columns. ``queue.lost`` names samples that are gone, or go meanwhile."""
        lost = set[str]() if columns else self.gone.intersection(keys)
        for unit in dict.fromkeys(map(self._unit, keys)):
            try:
                await self.world.guard(("store unit", unit), asyncio.sleep(0))
            except WorkerLost:
                lost |= {key for key in keys if self._unit(key) == unit}
        self.gone = (self.gone - set(keys)) | lost if columns else self.gone
        if lost:
            raise QueueError(f"{len(lost)} samples went with a unit", code="queue.lost", found=sorted(lost))
        for key in keys if columns else ():
            self._cells.setdefault((partition_of(key), key), {}).update(dict.fromkeys(columns, _CELL))
        return Written(columns=columns, sizes=(8,) * len(keys))

    async def put(self, request: Any) -> Any:
        await self.reach(request.keys, *request.columns)
        return await super().put(request)

    async def get(self, request: Any) -> Any:
        await self.reach(request.keys)
        return await super().get(request)

    async def close(self) -> None:
        return
