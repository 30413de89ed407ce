"""The reward worker, which scores samples and writes ``reward`` for whole groups.

The controller sees statuses and errors only; responses and rewards stay in the worker and the backend.
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
from jackfield.config import RunConfig
from jackfield.errors import DeadlineExceeded, RewardError, described
from jackfield.queue import Values
from jackfield.queue.meta import Written
from jackfield.runtime.samples import not_finite
from jackfield.sdk.cells import column_from_rows, rows_of

REWARD_INPUTS = ("prompt_ids", "response_ids", "task")  #: the columns from which a reward agent's request is built


@attrs.frozen(kw_only=True)
class Scored:
    """The outcome of scoring a sample."""

    key: str
    score: float | None  #: None if scoring failed
    error: str | None = None  #: why scoring failed
    metrics: Mapping[str, float] = attrs.field(factory=dict)  #: metrics that the reward reports

    @classmethod
    def of(cls, key: str, result: ScoreResult) -> Scored:
        """Extract from a result what the controller needs."""
        if result.status != "ok":
            return cls(key=key, score=None, error=f"reward {result.status}: {result.error}")
        return cls(key=key, score=result.score, metrics=dict(result.metrics))


@attrs.define(eq=False)
class RewardWorker:
    """Scores samples concurrently. All samples of a group go to the same worker."""

    _values: Values
    _agent: RewardAgent  #: an agent that has been started
    _tokenizer: ChatTokenizer  #: of the model
    _clock: Clock
    _config: RunConfig
    _scores: dict[str, asyncio.Task[ScoreResult]] = attrs.field(factory=dict, init=False)
    _turns: AbstractAsyncContextManager[Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        most = self._agent.concurrency
        self._turns = nullcontext() if most is None else asyncio.Semaphore(most)

    async def score(self, partition: str, keys: Sequence[str]) -> tuple[Scored, ...]:
        """Score samples, each once, and keep the scores until they are used or forgotten.

        Raises:
            QueueError: ``queue.unknown-sample`` if a sample has been deleted.
        """
        scoring = self._scoring(partition, keys)
        await asyncio.wait(scoring)
        gone = ScoreResult(status="failed", error="the score is not needed any more")
        results = [gone if each.cancelled() else each.result() for each in scoring]
        return tuple(map(Scored.of, keys, results))

    async def reward(
        self, partition: str, keys: Sequence[str], uncompared: Sequence[str] = ()
    ) -> tuple[tuple[Scored, ...], Written]:
        """Write ``reward`` for the samples of one group that have a score, and forget the scores.

        Args:
            partition: Partition of the group.
            keys: All samples of the group, in the order of its rollouts. Samples without a score are scored now.
            uncompared: Keys that the group's post-processing leaves out: expert samples and greedy rollouts.

        Returns:
            The outcome of each sample, and what was written for the samples with a score, both in order.
        """
        algorithm = self._config.algorithm
        dimensions = algorithm.reward_dimensions  #: metrics in ``reward_dimensions``; ``score`` is the score itself
        results = dict(zip(keys, await asyncio.gather(*self._scoring(partition, keys)), strict=True))
        await self.forget(keys)
        siblings = [key for key in keys if key not in uncompared]
        processed = self._agent.post_process_scores([results[key] for key in siblings])
        if algorithm.shaping.fill_failed:
            processed = _filled(processed)
        for key, result in zip(siblings, processed, strict=True):
            results[key] = _checked(result, key, dimensions)
        good = {key: result for key, result in results.items() if result.status == "ok"}
        columns = {"reward": _column([result.token_scores or (result.score,) for result in good.values()])}
        if dimensions:  # 0 for a sample whose reward the agent loop has computed
            columns["reward_dimensions"] = _column(
                [
                    [_total(each) if name == "score" else each.metrics.get(name, 0.0) for name in dimensions]
                    for each in good.values()
                ]
            )
        written = await self._values.put(partition, list(good), columns)
        return tuple(map(Scored.of, results.keys(), results.values())), written

    async def forget(self, keys: Sequence[str]) -> None:
        """Drop scores that are no longer needed, and cancel those in progress."""
        for key in keys:
            if key in self._scores:
                self._scores.pop(key).cancel()

    async def close(self) -> None:
        """Cancel the scores in progress and close the agent."""
        await self.forget(list(self._scores))
        await self._agent.close()

    def _scoring(self, partition: str, keys: Sequence[str]) -> list[asyncio.Task[ScoreResult]]:
        """Return the tasks that score samples; start those that are missing or failed."""

        def is_missing(scoring: asyncio.Task[ScoreResult] | None) -> bool:
            return scoring is None or (scoring.done() and (scoring.cancelled() or scoring.exception() is not None))

        async def read() -> dict[str, tuple[Any, ...]]:
            columns = await self._values.get(partition, missing, REWARD_INPUTS)
            rows = zip(*(rows_of(columns[name]) for name in REWARD_INPUTS), strict=True)
            return dict(zip(missing, rows, strict=True))

        if missing := [key for key in keys if is_missing(self._scores.get(key))]:
            reading = asyncio.ensure_future(read())
            self._scores |= {key: asyncio.ensure_future(self._score(key, reading)) for key in missing}
        return [self._scores[key] for key in keys]

    async def _score(self, key: str, reading: asyncio.Future[dict[str, tuple[Any, ...]]]) -> ScoreResult:
        """Score with a deadline for each attempt. A failure becomes a status, never a score."""
        prompt_ids, response_ids, task = (await asyncio.shield(reading))[key]
        if task["reward"] is not None:
            return ScoreResult(score=float(task["reward"]))
        response, seconds = response_ids.tolist(), self._config.deadlines.reward
        async with self._turns:
            for retry in range(self._config.schedule.reward_retries + 1):
                request = ScoreRequest(
                    data_source=task["data_source"],
                    solution_str=self._tokenizer.decode(response),
                    ground_truth=task["ground_truth"],
                    extra_info=task["extra_info"],
                    prompt_str=self._tokenizer.decode(prompt_ids.tolist()),
                    response_ids=tuple(response),
                    idempotency_key=key,
                    retry=retry,
                    deadline_seconds=seconds,
                )
                try:
                    scoring = self._agent.compute_score(request)
                    result = _checked(await self._clock.wait_for(scoring, seconds, f"the reward of sample {key}"), key)
                except DeadlineExceeded as error:
                    result = ScoreResult(status="timeout", error=error.message)
                except Exception as error:
                    result = ScoreResult(status="failed", error=described(error))
                if result.status == "ok":
                    break
        return result


def _checked(result: ScoreResult, key: str, dimensions: Sequence[str] = ()) -> ScoreResult:
    """Turn a score into a failure if a number is not finite or a dimension is missing."""
    wrong = not_finite({"score": result.score}) or not_finite(result.metrics)
    missing = [name for name in dimensions if name != "score" and name not in result.metrics]
    if result.status != "ok" or not (wrong or missing):
        return result
    message = f"a reward agent returned a {', '.join(map(str, wrong))} that is no finite number"
    expected, found = "a score and metrics that are finite numbers", str(wrong)
    if not wrong:
        message = f"a score has no metric {', '.join(missing)}, which algorithm.reward_dimensions names"
        expected, found = ", ".join(dimensions), ", ".join(result.metrics) or "no metrics"
    refusal = RewardError(message, code="reward.output", where=key, expected=expected, found=found)
    return ScoreResult(status="failed", error=str(refusal))


def _total(result: ScoreResult) -> float:
    return sum(result.token_scores) if result.token_scores else float(result.score or 0.0)


def _filled(results: Sequence[ScoreResult]) -> list[ScoreResult]:
    """Replace failed scores of a group by the mean of the others, if there are any."""
    import torch

    good = [result.metrics for result in results if result.status == "ok"]
    failed = torch.tensor([result.status != "ok" for result in results], dtype=torch.bool)
    totals = torch.tensor([_total(result) for result in results])
    means, still_failed = fill_failed(totals, failed, torch.zeros(len(results), dtype=torch.int64))
    shared = set(good[0]).intersection(*good) if good else set[str]()
    metrics = {name: sum(each[name] for each in good) / len(good) for name in sorted(shared)}
    return [
        ScoreResult(score=mean, metrics=metrics) if filled else result
        for result, mean, filled in zip(results, means.tolist(), (failed & ~still_failed).tolist(), strict=True)
    ]


def _column(values: Sequence[Sequence[float | None]]) -> Any:
    """Make a jagged float32 column from one row of numbers per sample."""
    import torch

    return column_from_rows([torch.tensor(row, dtype=torch.float32) for row in values])
