"""When a batch may be started and when weights are published: every synchronous and off-by-n mode as numbers.

A *weight version* counts the trainer steps whose result is loaded: 0 is the initial model. Batches are *tickets*,
numbered from 0; step ``t`` trains on ticket ``t`` and makes version ``t + 1``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import attrs

from jackfield.clock import Clock
from jackfield.errors import ScheduleError


@attrs.frozen(kw_only=True)
class Schedule:
    """``k = sync_interval`` steps between synchronisations; explorers run ``o = sync_offset`` batches ahead."""

    steps: int
    sync_interval: int = 1
    sync_offset: int = 0
    explores: bool = True  #: False: steps train on the data's own answers, and no replica needs new weights

    @property
    def max_staleness(self) -> int:
        """The most steps by which the weights that made a token may lag behind the step that trains on it."""
        return self.sync_interval - 1 + self.sync_offset

    def may_start(self, ticket: int, version: int) -> bool:
        """Return whether an explorer that has ``version`` loaded may start ``batch``."""
        return ticket - version <= self.max_staleness

    def syncs_after(self, step: int) -> bool:
        """Return whether weights are published after ``step`` (from 0)."""
        return self.explores and (step + 1) % self.sync_interval == 0

    def is_due(self, every: int, steps_done: int) -> bool:
        """Return whether what happens every so many steps happens after ``steps_done``.

        With explorers it happens at weight syncs only: at the first one when or after its step has come. 0: never.
        """
        interval = self.sync_interval if self.explores else 1
        if not every or not steps_done or steps_done % interval:
            return False
        return steps_done // every > (steps_done - interval) // every

    def check(self, step: int, oldest_version: int) -> int:
        """The staleness of a batch, in steps.

        Raises:
            ScheduleError: ``schedule.staleness`` when it is beyond the bound.
        """
        staleness = step - oldest_version
        if staleness > self.max_staleness:
            raise ScheduleError(
                "a batch is staler than the schedule allows",
                code="schedule.staleness",
                where=f"step {step}",
                expected=f"at most {self.max_staleness} steps (sync_interval - 1 + sync_offset)",
                found=f"weight version {oldest_version}, {staleness} steps",
            )
        return staleness


class Progress:
    """A number that only grows, and tasks that wait for it to be large enough."""

    def __init__(self, clock: Clock, value: int = 0) -> None:
        self._clock = clock
        self._value = value
        self._changed = asyncio.Condition()

    @property
    def value(self) -> int:
        """The number now."""
        return self._value

    async def advance(self, value: int) -> None:
        """Raise the number and wake its waiters."""
        async with self._changed:
            self._value = max(self._value, value)
            self._changed.notify_all()

    async def until(self, enough: Callable[[int], bool], seconds: float, waiting_for: str) -> int:
        """Wait until ``enough(value)``.

        Raises:
            DeadlineExceeded: naming ``waiting_for``.
        """

        async def wait() -> int:
            async with self._changed:
                await self._changed.wait_for(lambda: enough(self._value))
            return self._value

        return await self._clock.wait_for(wait(), seconds, waiting_for)
