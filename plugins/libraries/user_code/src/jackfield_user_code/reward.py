"""The base of reward agents that call a function in worker processes."""

from __future__ import annotations

from typing import Any

from jackfield.abc.reward import RewardAgent, RewardContext
from jackfield.errors import RewardError
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


async def try_first(agent: RewardAgent, where: str) -> None:
    """Score the first task's own answer, twice if it fails, or raise ``reward.first-task``; one that is late is not.

    Without ``try_first`` of the agent's config, or without a task in its context, do nothing.
    """
    example, error = agent.context.example if agent.config.try_first else None, None
    for _ in range(0 if example is None else 2):
        assert example is not None
        results = (
            await agent.score_group([example, example]) if agent.compares else [await agent.compute_score(example)]
        )
        error = next((each.error for each in results if each.status == "failed"), None)
        if error is None:
            return
    if error is not None:
        fix = "correct the reward's settings or code, or the data; reward.try_first: false starts without this check"
        details = {"where": where, "expected": "a score of the task's own answer", "found": error}
        raise RewardError("the reward cannot score the first task", code="reward.first-task", fix=fix, **details)
