"""The base of reward agents that call a function in worker processes."""

from __future__ import annotations

from typing import Any

from jackfield.abc.reward import RewardAgent, RewardContext
from jackfield_user_code.workers import UserCodePool, WorkerLimits


class WorkerReward(RewardAgent):
    """A reward agent that calls a function in worker processes: ``workers`` of its config, with ``memory_bytes``.

    ``options`` are those of :class:`UserCodePool`.
    """

    def __init__(
        self, config: Any, context: RewardContext, target: str, *, start_seconds: float = 60.0, **options: Any
    ) -> None:
        super().__init__(config, context)
        seconds = {"start_seconds": start_seconds, "heartbeat_seconds": context.heartbeat_seconds}
        options["limits"] = WorkerLimits(memory_bytes=config.memory_bytes, **seconds)
        options |= {"workers": config.workers, "clock": context.clock, "logs": context.logs}
        self._pool = UserCodePool(target, **options)

    @property
    def concurrency(self) -> int:
        """Return the number of calls that the processes execute at a time. It is known after the start."""
        return self._pool.capacity

    @property
    def keeps_deadlines(self) -> bool:
        """Return True: a deadline begins when a process executes the call."""
        return True

    async def start(self) -> None:
        """Start a process, so that code that cannot be loaded fails at the start of a run (``worker.start``)."""
        await self._pool.start()

    async def close(self) -> None:
        """Kill the worker processes."""
        await self._pool.close()
