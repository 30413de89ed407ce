"""Tasks of reasoning-gym, each answered in one step. It needs only the standard library until one is made."""

from __future__ import annotations

import re
from typing import Any


def make(task: str, settings: dict[str, Any] | None = None, answer: str | None = None) -> ReasoningGym:
    """Make tasks of the generator ``task``; ``answer`` is a pattern whose last match (group 1) is the answer."""
    import reasoning_gym

    return ReasoningGym(reasoning_gym, task, settings or {}, answer)


class ReasoningGym:
    """A question, and the score of its answer as the reward of the only step."""

    def __init__(self, reasoning_gym: Any, task: str, settings: dict[str, Any], answer: str | None) -> None:
        self._library, self._task, self._settings = reasoning_gym, task, settings
        self._answer = re.compile(answer, re.DOTALL) if answer is not None else None
        self._made = self._data(0)  # unknown names and settings are refused here

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Return the question of a seed."""
        self._made = self._data(seed or 0)
        self._entry = self._made[0]
        return str(self._entry["question"]), {"answer": self._entry["answer"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the answer."""
        answer = action
        if self._answer is not None:
            found = list(self._answer.finditer(action))
            answer = found[-1][min(1, self._answer.groups)] if found else ""
        score = float(self._made.score_answer(answer=answer.strip(), entry=self._entry))
        return "", score, True, False, {"won": score >= 1.0}

    def _data(self, seed: int) -> Any:
        return self._library.create_dataset(self._task, size=1, seed=seed, **self._settings)
