"""A reward that looks at one answer first, and at the whole group afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield_reward_brevity.config import Config


class BrevityReward(RewardAgent):
    """``correct`` for an answer that ends with the ground truth, less where a sibling said it in fewer tokens."""

    def __init__(self, config: Config, context: RewardContext) -> None:
        super().__init__(config, context)
        self._settings = config

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score one answer. A task without a ground truth cannot be scored, which is not the answer's fault."""
        if not request.ground_truth:
            return ScoreResult(status="failed", error=f"task of {request.data_source!r} has no ground truth")
        expected = request.ground_truth.split()[-1]
        right = request.solution_str.split()[-1:] == [expected]
        return ScoreResult(
            score=self._settings.correct if right else 0.0,
            metrics={"correct": float(right), "tokens": float(len(request.response_ids))},
        )

    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        """Compare the right answers of one group by length; failed scores stay as they are."""
        lengths = [score.metrics["tokens"] for score in scores if score.metrics.get("correct")]
        spread = max(lengths, default=0.0) - min(lengths, default=0.0)
        if not spread:
            return scores
        return [self._shortened(score, min(lengths), spread) for score in scores]

    def _shortened(self, score: ScoreResult, shortest: float, spread: float) -> ScoreResult:
        if score.score is None or not score.metrics.get("correct"):
            return score
        surplus = (score.metrics["tokens"] - shortest) / spread
        return attrs.evolve(score, score=score.score - self._settings.penalty * surplus)
