"""How long each stage takes, for the timeline and the step's metrics; and what else is measured on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from jackfield.clock import Clock
from jackfield.plugins.hooks import StageEnded


class Stages:
    """Measures stages and reports them to the hooks."""

    def __init__(self, clock: Clock, hooks: Any) -> None:
        self._clock = clock
        self.hooks = hooks
        self._seconds: dict[str, float] = {}
        self._noted: dict[str, float] = {}

    @asynccontextmanager
    async def measure(self, name: str, lane: str, step: int) -> AsyncIterator[None]:
        """Measure what runs inside."""
        start = self._clock.time()
        try:
            yield
        finally:
            end = self._clock.time()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            self.hooks.stage_ended(event=StageEnded(name=name, lane=lane, start=start, end=end, step=step))

    def note(self, name: str, value: float) -> None:
        """A metric of the step; of several values under one name, the last."""
        self._noted[name] = value

    def drain(self) -> dict[str, float]:
        """Return what was noted since the last call, and seconds per stage, as metrics ``seconds/<stage>``."""
        drained = {**self._noted, **{f"seconds/{name}": seconds for name, seconds in self._seconds.items()}}
        self._seconds, self._noted = {}, {}
        return drained
