"""Contract of a reward agent: how a sample gets its score, by rule, by model or by a service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from jackfield.clock import Clock


@attrs.frozen(kw_only=True, eq=False)
class RewardContext:
    """What a reward agent works with."""

    clock: Clock = attrs.field(factory=Clock)
    seed: int = 0
    heartbeat_seconds: float = 30.0  #: after which a process of the agent's that sends no heartbeat is dead
    #: what processes of the agent's print goes into files whose paths begin so (``UserCodePool``); None: nowhere
    logs: str | None = None


@attrs.frozen(kw_only=True)
class ScoreRequest:
    """One sample to score."""

    data_source: str
    solution_str: str  #: the response's text
    ground_truth: str
    extra_info: Mapping[str, Any] = attrs.field(factory=dict)  #: the task's further fields
    prompt_str: str = ""
    response_ids: tuple[int, ...] = ()
    idempotency_key: str = ""  #: the same for every retry of this sample
    retry: int = 0  #: 0 is the first call
    deadline_seconds: float = 60.0  #: the call is cancelled after it


@attrs.frozen(kw_only=True)
class ScoreResult:
    """A score, or the reason why there is none. A failure is never a score of 0."""

    status: Literal["ok", "failed", "timeout"] = "ok"
    score: float | None = None  #: set exactly when ``status`` is ``ok``
    token_scores: tuple[float, ...] | None = None  #: one per response token, in the place of one at the end
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    error: str | None = None


class RewardAgent(ABC):
    """Scores samples, many at once.

    Invariants, each checked by the conformance suite: a deadline ends the call and whatever it started; a retry
    carries the same idempotency key; a failure is a status, never a score of 0; group post-processing sees whole
    groups.
    """

    abi_version: ClassVar[str] = "1.0"

    def __init__(self, config: Any, context: RewardContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score one sample. What it raises becomes ``status="failed"`` with the error's text."""

    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        """Adjust the scores of one whole group, in the order of its rollouts (fill in failed ones, rank, …)."""
        return scores

    @property
    def concurrency(self) -> int | None:
        """Return how many samples the agent scores at a time; the deadlines of those that wait have not begun.

        None: as many as there are.
        """
        return None

    async def start(self) -> None:
        """Open connections and workers, before the first score."""
        return

    async def close(self) -> None:
        """End everything the agent started."""
        return
