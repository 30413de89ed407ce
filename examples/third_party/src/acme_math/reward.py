import re

import attrs

from jackfield.abc.reward import RewardAgent, ScoreResult

FINAL_LINE = re.compile(r"####\s*(-?\d+)")


@attrs.frozen(kw_only=True)
class Config:
    consolation: float = 0.1


class ConsolingReward(RewardAgent):
    async def compute_score(self, request):
        truth = FINAL_LINE.search(request.ground_truth)
        if truth is None:
            return ScoreResult(status="failed", error=f"no final line in {request.ground_truth!r}")
        answers = FINAL_LINE.findall(request.solution_str)
        right = bool(answers) and int(answers[-1]) == int(truth[1])
        return ScoreResult(score=1.0 if right else self.config.consolation if answers else 0.0)
