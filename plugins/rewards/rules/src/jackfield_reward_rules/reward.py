"""Rewards by rule, as a plugin."""

from __future__ import annotations

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import RewardError
from jackfield.runtime.worker import UserCodePool, WorkerLimits
from jackfield_reward_rules.config import Config
from jackfield_reward_rules.judge import Judge, settings_of

__all__ = ["RulesReward"]

#: A pattern that takes longer on one text goes to a worker process, where it cannot hold the event loop.
INLINE_SECONDS = 0.02


class RulesReward(RewardAgent):
    """Scores a response by comparing its answer with the ground truth.

    ``exact`` and ``regex`` run here, in microseconds; ``math``, and patterns that backtrack for long, run in a worker
    process that is killed at the deadline. An answer that is missing or cannot be parsed is wrong. A rule that raises
    is ``failed``, never a score. An answer on which ``seconds`` run out is wrong, or with ``on_timeout: fail`` a
    ``timeout``; one that the caller's own deadline ends is a ``timeout`` in any case.

    Metrics of each score: ``correct``, ``well_formed`` and ``timeout``, 0 or 1.
    """

    def __init__(self, config: Config, context: RewardContext) -> None:
        super().__init__(config, context)
        settings = settings_of(config)
        self._judge = None if config.method == "math" else Judge(**settings)
        self._pool = UserCodePool(
            "jackfield_reward_rules.judge:Judge",
            method="judge",
            keywords=settings,
            workers=config.workers,
            limits=WorkerLimits(memory_bytes=config.memory_bytes, silence_seconds=context.silence_seconds),
            clock=context.clock,
        )

    async def start(self) -> None:
        """Start the worker process where the method needs it.

        Raises:
            RunError: ``worker.start`` when it cannot start (math-verify is not installed).
        """
        if self._judge is None:
            await self._pool.start()

    async def close(self) -> None:
        """End the worker processes."""
        await self._pool.close()

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score one response."""
        if self._judge is None:
            return await self._judge_apart(request)
        try:
            return self._result(*self._judge.judge(request.solution_str, request.ground_truth, INLINE_SECONDS))
        except TimeoutError:
            return await self._judge_apart(request)
        except RewardError as error:
            return ScoreResult(status="failed", error=str(error))

    async def _judge_apart(self, request: ScoreRequest) -> ScoreResult:
        arguments = {"response": request.solution_str, "ground_truth": request.ground_truth}
        name, config = f"sample {request.idempotency_key}", self.config
        result = await self._pool.call(arguments, request.deadline_seconds, call_seconds=config.seconds, name=name)
        if result.timed_out_after == config.seconds and config.on_timeout == "incorrect":
            metrics = {"correct": 0.0, "well_formed": 0.0, "timeout": 1.0}
            return ScoreResult(score=config.incorrect, metrics=metrics)
        if result.status != "ok":
            return ScoreResult(status="timeout" if result.status == "timeout" else "failed", error=result.error)
        return self._result(*result.value)

    def _result(self, correct: bool, well_formed: bool) -> ScoreResult:
        config: Config = self.config
        metrics = {"correct": float(correct), "well_formed": float(well_formed), "timeout": 0.0}
        if correct:
            return ScoreResult(score=config.correct, metrics=metrics)
        partial = well_formed and config.format_score is not None
        return ScoreResult(score=config.format_score if partial else config.incorrect, metrics=metrics)
