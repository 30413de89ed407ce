"""Workers that cost nothing: what hosts, stubs and clusters are tested with."""

from __future__ import annotations

import asyncio
import os

from jackfield.abc.rollout import HealthReport
from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.errors import EngineError
from jackfield.queue import Values
from jackfield.queue.memory import MemoryBackend, MemoryConfig
from jackfield.runtime.advantages import AdvantagePlan, AdvantageWorker
from jackfield.runtime.ray import Storage


class Counter:
    """Counts, fails, waits; ``part`` is a part of it."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.cancelled = self.refuses = False
        self.part = self if start == 0 else Counter(0)

    def add(self, number: int, *, twice: bool = False) -> int:
        self.count += 2 * number if twice else number
        return self.count

    async def pid(self) -> int:
        return os.getpid()

    async def refuse(self) -> None:
        raise EngineError("no", code="engine.state", where="here", expected="yes", found="no", fix="say yes")

    async def stumble(self) -> None:
        raise ZeroDivisionError("by nought")

    async def health(self) -> HealthReport:
        return HealthReport(healthy=self.count >= 0, detail="it counts below zero")

    async def hang(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def hung(self) -> bool:
        while not self.cancelled:
            await asyncio.sleep(0)
        return self.cancelled

    async def refuse_to_end(self) -> None:
        self.refuses = True

    async def close(self) -> None:
        if self.refuses:
            await self.refuse()


async def make_counter(start: int = 0) -> Counter:
    return Counter(start)


def make_failure() -> Counter:
    raise EngineError("cannot be made", where="the worker")


def make_memory() -> Storage:
    backend = MemoryBackend(MemoryConfig(), TransferQueueContext())
    return Storage(backend, AdvantageWorker(Values(backend), AdvantagePlan()))
