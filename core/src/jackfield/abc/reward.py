"""Contract of a reward agent, which scores samples by rule, by model or by a service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from jackfield.clock import Clock


@attrs.frozen(kw_only=True, eq=False)
class RewardContext:
    """The context that a reward agent gets at its construction."""

    clock: Clock = attrs.field(factory=Clock)
    seed: int = 0
    heartbeat_seconds: float = 30.0  #: a process of the agent without a heartbeat for so long is dead
    #: path prefix of files that get the output of the agent's processes (``UserCodePool``); None: no files
    logs: str | None = None


@attrs.frozen(kw_only=True)
class ScoreRequest:
    """One sample to score."""

    data_source: str
    solution_str: str  #: text of the response
    ground_truth: str
    extra_info: Mapping[str, Any] = attrs.field(factory=dict)  #: other fields of the task
    prompt_str: str = ""
    response_ids: tuple[int, ...] = ()
    idempotency_key: str = ""  #: the same for every retry of this sample
    retry: int = 0  #: 0 is the first call
    deadline_seconds: float = 60.0  #: the call is cancelled after so long


@attrs.frozen(kw_only=True)
class ScoreResult:
    """A score, or the reason why there is none. A failure is never a score of 0."""

    status: Literal["ok", "failed", "timeout"] = "ok"
    score: float | None = None  #: set exactly when ``status`` is ``ok``
    token_scores: tuple[float, ...] | None = None  #: one per response token, instead of one score at the end
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    error: str | None = None


class RewardAgent(ABC):
    """A scorer of samples, which handles many calls concurrently.

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
        """Score one sample. An exception becomes ``status="failed"`` with the exception's text."""

    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        """Adjust the scores of one whole group, in rollout order (fill in failed scores, rank, …)."""
        return scores

    @property
    def concurrency(self) -> int | None:
        """The maximum number of samples that are scored at a time; None: no limit.

        The deadline of a sample starts when its scoring starts, not while it waits.
        """
        return None

    async def start(self) -> None:
        """Open connections and workers, before the first score."""
        return

    async def close(self) -> None:
        """End everything the agent started."""
        return
