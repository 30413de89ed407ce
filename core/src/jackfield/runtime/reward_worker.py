"""Scores samples: reads rows from the queue's backend, and writes the column ``reward`` of whole groups.

The controller sees statuses and errors; responses and rewards stay here and in the backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import attrs

from jackfield.abc.agent import ChatTokenizer
from jackfield.abc.reward import RewardAgent, ScoreRequest, ScoreResult
from jackfield.algorithms import fill_failed
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, RewardError, described
from jackfield.queue import Values, Written, column_from_rows, rows_of
from jackfield.runtime.samples import not_finite

REWARD_INPUTS = ("prompt_ids", "response_ids", "task")  #: the columns that a reward agent's request is made from


@attrs.frozen(kw_only=True)
class Scored:
    """How the scoring of a row ended."""

    key: str
    score: float | None  #: None where there is none
    error: str | None  #: why there is none
    metrics: Mapping[str, float] = attrs.field(factory=dict)  #: of the score

    @classmethod
    def of(cls, key: str, result: ScoreResult) -> Scored:
        """Take from a result what the controller needs."""
        good = result.status == "ok"
        return cls(
            key=key,
            score=result.score if good else None,
            error=None if good else f"reward {result.status}: {result.error}",
            metrics=dict(result.metrics) if good else {},
        )


class RewardWorker:
    """Scores rows side by side. Values of one group come to one worker."""

    def __init__(
        self,
        values: Values,
        agent: RewardAgent,
        tokenizer: ChatTokenizer,
        clock: Clock,
        *,
        score_seconds: float,
        retries: int = 0,
        dimensions: Sequence[str] = (),
        fill_failed: bool = False,
    ) -> None:
        """
        Args:
            values: reads and writes columns of samples.
            agent: scores; started.
            tokenizer: of the model.
            clock: through which every wait goes.
            score_seconds: the deadline of one call of the agent.
            retries: of a sample whose score failed, before it counts as failed.
            dimensions: metrics of a score that are rewards of their own, ``score`` being the score itself; they are
                written as ``reward_dimensions``.
            fill_failed: a failed score becomes the mean of its group's others.
        """
        self._values = values
        self._agent = agent
        self._tokenizer = tokenizer
        self._clock = clock
        self._score_seconds = score_seconds
        self._retries = retries
        self._dimensions = tuple(dimensions)
        self._fill_failed = fill_failed
        self._scores: dict[str, asyncio.Task[ScoreResult]] = {}
        most = agent.concurrency
        self._turns: AbstractAsyncContextManager[Any] = nullcontext() if most is None else asyncio.Semaphore(most)

    async def score(self, partition: str, keys: Sequence[str]) -> tuple[Scored, ...]:
        """Score rows, each once, and keep the scores until they are used or forgotten.

        Raises:
            QueueError: ``queue.unknown-sample`` when a row is gone.
        """
        scoring = self._scoring(partition, keys)
        await asyncio.wait(scoring)
        gone = ScoreResult(status="failed", error="the score is not needed any more")
        results = [gone if each.cancelled() else each.result() for each in scoring]
        return tuple(Scored.of(key, result) for key, result in zip(keys, results, strict=True))

    async def reward(
        self, partition: str, keys: Sequence[str], apart: Sequence[str] = ()
    ) -> tuple[tuple[Scored, ...], Written]:
        """Write ``reward`` of one group's rows, those that have a score; forgets the scores.

        Args:
            partition: of the group.
            keys: the whole group, in the order of its runs; rows that were not scored yet are scored now.
            apart: keys of rows that the group's post-processing does not see: an expert's, and greedy rollouts.

        Returns:
            how each row's scoring ended, in order; what was written for those with a score, in order.
        """
        results = dict(zip(keys, await asyncio.gather(*self._scoring(partition, keys)), strict=True))
        await self.forget(keys)
        siblings = [key for key in keys if key not in apart]
        processed = self._processed([results[key] for key in siblings])
        results |= {key: _checked(result, key) for key, result in zip(siblings, processed, strict=True)}
        return await self._write(partition, results)

    def _processed(self, results: Sequence[ScoreResult]) -> list[ScoreResult]:
        """The agent's post-processing of one group; then the run's own."""
        processed = list(self._agent.post_process_scores(results))
        if self._fill_failed:
            processed = _filled(processed)
        return [_with_dimensions(result, self._dimensions) for result in processed]

    async def _write(self, partition: str, results: Mapping[str, ScoreResult]) -> tuple[tuple[Scored, ...], Written]:
        scored = tuple(Scored.of(key, result) for key, result in results.items())
        good = {key: result for key, result in results.items() if result.status == "ok"}
        columns = {"reward": _reward_column(list(good.values()))}
        if self._dimensions:
            columns["reward_dimensions"] = _dimension_column(list(good.values()), self._dimensions)
        return scored, await self._values.put(partition, list(good), columns)

    async def forget(self, keys: Sequence[str]) -> None:
        """Drop scores that are not needed any more, and cancel those that are being made."""
        for key in keys:
            scoring = self._scores.pop(key, None)
            if scoring is not None:
                scoring.cancel()

    async def close(self) -> None:
        """End everything the worker and its agent have started."""
        await self.forget(list(self._scores))
        await self._agent.close()

    def _scoring(self, partition: str, keys: Sequence[str]) -> list[asyncio.Task[ScoreResult]]:
        """The tasks that score rows; what was not begun, or could not be read, is begun now."""
        missing = [key for key in keys if _failed(self._scores.get(key))]
        if missing:
            reading = asyncio.ensure_future(self._read(partition, missing))
            for key in missing:
                self._scores[key] = asyncio.ensure_future(self._score(key, reading))
        return [self._scores[key] for key in keys]

    async def _read(self, partition: str, keys: Sequence[str]) -> dict[str, tuple[Any, ...]]:
        columns = await self._values.get(partition, keys, REWARD_INPUTS)
        return dict(zip(keys, zip(*(rows_of(columns[name]) for name in REWARD_INPUTS), strict=True), strict=True))

    async def _score(self, key: str, reading: asyncio.Future[dict[str, tuple[Any, ...]]]) -> ScoreResult:
        prompt_ids, response_ids, task = (await asyncio.shield(reading))[key]
        return await self._score_row(key, prompt_ids.tolist(), response_ids.tolist(), task)

    async def _score_row(
        self, key: str, prompt_ids: Sequence[int], response_ids: Sequence[int], task: Mapping[str, Any]
    ) -> ScoreResult:
        if task["reward"] is not None:
            return ScoreResult(score=float(task["reward"]))
        request = ScoreRequest(
            data_source=task["data_source"],
            solution_str=self._tokenizer.decode(response_ids),
            ground_truth=task["ground_truth"],
            extra_info=task["extra_info"],
            prompt_str=self._tokenizer.decode(prompt_ids),
            response_ids=tuple(response_ids),
            idempotency_key=key,
            deadline_seconds=self._score_seconds,
        )
        async with self._turns:
            return await score_sample(self._agent, request, self._clock, self._retries)


async def score_sample(agent: RewardAgent, request: ScoreRequest, clock: Clock, retries: int = 0) -> ScoreResult:
    """Score under the request's deadline, again where that fails; what remains wrong is a status, never a score.

    Args:
        agent: scores.
        request: The first call; retries have the same idempotency key.
        clock: Time source of the deadline, which begins again with each retry.
        retries: Further calls, at most.
    """
    for retry in range(retries + 1):
        result = await _call(agent, attrs.evolve(request, retry=retry), clock)
        if result.status == "ok":
            break
    return result


async def _call(agent: RewardAgent, request: ScoreRequest, clock: Clock) -> ScoreResult:
    try:
        result = await clock.wait_for(
            agent.compute_score(request), request.deadline_seconds, f"the reward of sample {request.idempotency_key}"
        )
    except DeadlineExceeded as error:
        return ScoreResult(status="timeout", error=error.message)
    except Exception as error:
        return ScoreResult(status="failed", error=described(error))
    return _checked(result, request.idempotency_key)


def _checked(result: ScoreResult, key: str) -> ScoreResult:
    """A score that is no finite number, or has such a metric, has failed: no step could use or show it."""
    wrong = not_finite({"score": result.score}) or not_finite(result.metrics)
    if result.status != "ok" or not wrong:
        return result
    refusal = RewardError(
        f"a reward agent returned a {', '.join(map(str, wrong))} that is no finite number",
        code="reward.output",
        where=key,
        expected="a score and metrics that are finite numbers",
        found=wrong,
    )
    return ScoreResult(status="failed", error=str(refusal))


def _failed(scoring: asyncio.Task[ScoreResult] | None) -> bool:
    return scoring is None or (scoring.done() and (scoring.cancelled() or scoring.exception() is not None))


def _total(result: ScoreResult) -> float:
    return sum(result.token_scores) if result.token_scores else float(result.score or 0.0)


def _filled(results: Sequence[ScoreResult]) -> list[ScoreResult]:
    """Failed scores of one group become the mean of the others; a group without any score stays failed."""
    import torch

    failed = torch.tensor([result.status != "ok" for result in results])
    totals = torch.tensor([0.0 if result.status != "ok" else _total(result) for result in results])
    means, still_failed = fill_failed(totals, failed, torch.zeros(len(results), dtype=torch.int64))
    good = [result.metrics for result in results if result.status == "ok"]
    shared = set(good[0]).intersection(*good) if good else set[str]()
    metrics = {name: sum(each[name] for each in good) / len(good) for name in sorted(shared)}
    filled = (failed & ~still_failed).tolist()
    return [
        ScoreResult(score=mean, metrics=metrics) if is_filled else result
        for result, mean, is_filled in zip(results, means.tolist(), filled, strict=True)
    ]


def _with_dimensions(result: ScoreResult, dimensions: Sequence[str]) -> ScoreResult:
    """A score that lacks one of the rewards that the algorithm compares has failed."""
    missing = [name for name in dimensions if name != "score" and name not in result.metrics]
    if result.status != "ok" or not missing:
        return result
    refusal = RewardError(
        f"a score has no metric {', '.join(missing)}, which algorithm.reward_dimensions names",
        code="reward.output",
        expected=", ".join(dimensions),
        found=", ".join(result.metrics) or "no metrics",
    )
    return ScoreResult(status="failed", error=str(refusal))


def _dimension_column(results: Sequence[ScoreResult], dimensions: Sequence[str]) -> Any:
    """Jagged float32, one number for each dimension; 0 for a row without metrics, which is not scored."""
    import torch

    return column_from_rows(
        [
            torch.tensor([_total(one) if name == "score" else one.metrics.get(name, 0.0) for name in dimensions])
            for one in results
        ]
    )


def _reward_column(scores: Sequence[ScoreResult]) -> Any:
    """Jagged float32: one number for a row, or one for each of its response tokens."""
    import torch

    return column_from_rows(
        [torch.tensor(score.token_scores or (score.score,), dtype=torch.float32) for score in scores]
    )
