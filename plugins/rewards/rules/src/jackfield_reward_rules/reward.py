"""Rewards by rule, as a plugin."""

from __future__ import annotations

import attrs

from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import RewardError
from jackfield_reward_rules.judge import Config, Judge
from jackfield_user_code import WorkerResult, WorkerReward, try_first

#: A pattern that takes longer on one text runs in a worker process, where it cannot block the event loop.
INLINE_SECONDS = 0.02
_PATIENCE = 4  #: a ground truth may take this many times as long as a response


class RulesReward(WorkerReward):
    """A reward that compares a response's answer with the ground truth.

    ``exact`` and ``regex`` run here, in microseconds; ``math``, and patterns that backtrack for long, run in a worker
    process that is killed at the deadline. An answer that is missing or cannot be parsed is wrong. If the checker
    raises, crashes or runs out of memory on an answer, it compares the ground truth with itself: if that works, the
    answer is wrong; else the sample is ``failed``, never a score. An answer that takes longer than ``seconds`` (at most
    half of the caller's deadline, without the wait for a free worker) is wrong, or with ``on_timeout: fail`` a
    ``timeout``.

    Metrics of each score: ``correct``, ``well_formed``, ``timeout`` and ``checker_failed``, 0 or 1.
    """

    def __init__(self, config: Config, context: RewardContext) -> None:
        settings = attrs.asdict(config)
        module = "_checker" if config.method == "math" else "judge"
        target = f"jackfield_reward_rules.{module}:Judge"
        super().__init__(config, context, target, method="judge", keywords=settings)
        self._judge = None if config.method == "math" else Judge(**settings)

    async def start(self) -> None:
        """Start the worker process if the method needs it, and try the first task (``reward.first-task``).

        Raise ``worker.start`` without math-verify.
        """
        if self._judge is None:
            await super().start()
        example, data = self.context.example, "data.format.answer_key"
        if self.config.try_first and example is not None and not example.ground_truth.strip():
            fix = f"name the field with the ground truth in {data}, or choose a reward that needs none"
            details = {"where": data, "expected": "a text or a number to compare answers with", "found": "none"}
            raise RewardError("the first task has no ground truth", code="reward.first-task", fix=fix, **details)
        await try_first(self, "reward")

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
        config: Config = self.config
        seconds = min(config.seconds, request.deadline_seconds / 2)
        result = await self._call(request, request.solution_str, seconds)
        if result.status == "ok":
            return self._result(*result.value)
        timed_out = result.status == "timeout"
        if timed_out and config.on_timeout == "fail":
            return ScoreResult(status="timeout", error=result.error)
        longest = min(_PATIENCE * seconds, request.deadline_seconds - seconds)
        control = await self._call(request, request.ground_truth, longest)
        if control.status == "ok":  # ground truth and checker work, so the response broke the checker
            return self._result(False, False, **{"timeout" if timed_out else "checker_failed": 1.0})
        return ScoreResult(status="failed", error=f"the ground truth cannot be compared with itself: {control.error}")

    async def _call(self, request: ScoreRequest, response: str, seconds: float) -> WorkerResult:
        arguments = {"response": response, "ground_truth": request.ground_truth}
        return await self._pool.call(arguments, seconds, name=f"sample {request.idempotency_key}")

    def _result(self, correct: bool, well_formed: bool, **why: float) -> ScoreResult:
        config: Config = self.config
        found = {"correct": float(correct), "well_formed": float(well_formed)}
        metrics = {**found, "timeout": 0.0, "checker_failed": 0.0, **why}
        if correct:
            return ScoreResult(score=config.correct, metrics=metrics)
        partial = well_formed and config.format_score is not None
        return ScoreResult(score=config.format_score if partial else config.incorrect, metrics=metrics)
