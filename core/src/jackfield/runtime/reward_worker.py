"""Scores samples: reads them from the queue's backend, and writes the column ``reward`` of whole groups.

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
    """How the scoring of a sample ended."""

    key: str
    score: float | None  #: None where there is none
    error: str | None  #: why there is none
    metrics: Mapping[str, float] = attrs.field(factory=dict)  #: of the score

    @classmethod
    def of(cls, key: str, result: ScoreResult) -> Scored:
        """Take from a result what the controller needs."""
        if result.status != "ok":
            return cls(key=key, score=None, error=f"reward {result.status}: {result.error}")
        return cls(key=key, score=result.score, error=None, metrics=dict(result.metrics))


@attrs.define(eq=False)
class RewardWorker:
    """Scores samples side by side. Values of one group come to one worker."""

    _values: Values
    _agent: RewardAgent  #: started
    _tokenizer: ChatTokenizer  #: of the model
    _clock: Clock
    _score_seconds: float = attrs.field(kw_only=True)  #: the deadline of one call of the agent
    _retries: int = attrs.field(default=0, kw_only=True)  #: of a sample whose score failed, before it counts as failed
    #: metrics of a score that are rewards of their own, ``score`` being the score itself: ``reward_dimensions``
    _dimensions: Sequence[str] = attrs.field(default=(), kw_only=True)
    _fill_failed: bool = attrs.field(default=False, kw_only=True)  #: a failed score becomes the mean of its group's
    _scores: dict[str, asyncio.Task[ScoreResult]] = attrs.field(factory=dict, init=False)
    _turns: AbstractAsyncContextManager[Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Limit the calls of the agent."""
        most = self._agent.concurrency
        self._turns = nullcontext() if most is None else asyncio.Semaphore(most)

    async def score(self, partition: str, keys: Sequence[str]) -> tuple[Scored, ...]:
        """Score samples, each once, and keep the scores until they are used or forgotten.

        Raises:
            QueueError: ``queue.unknown-sample`` when a sample is gone.
        """
        scoring = self._scoring(partition, keys)
        await asyncio.wait(scoring)
        gone = ScoreResult(status="failed", error="the score is not needed any more")
        results = [gone if each.cancelled() else each.result() for each in scoring]
        return tuple(map(Scored.of, keys, results))

    async def reward(
        self, partition: str, keys: Sequence[str], apart: Sequence[str] = ()
    ) -> tuple[tuple[Scored, ...], Written]:
        """Write ``reward`` of one group's samples, those that have a score; forgets the scores.

        Args:
            partition: of the group.
            keys: the whole group, in the order of its rollouts; samples that were not scored yet are scored now.
            apart: keys of samples that the group's post-processing does not see: an expert's, and greedy rollouts.

        Returns:
            how the scoring of each sample ended, in order; what was written for those with a score, in order.
        """
        results = dict(zip(keys, await asyncio.gather(*self._scoring(partition, keys)), strict=True))
        await self.forget(keys)
        siblings = [key for key in keys if key not in apart]
        processed = self._agent.post_process_scores([results[key] for key in siblings])
        for key, result in zip(siblings, _filled(processed) if self._fill_failed else processed, strict=True):
            results[key] = _checked(result, key, self._dimensions)
        good = {key: result for key, result in results.items() if result.status == "ok"}
        columns = {"reward": _column([result.token_scores or (result.score,) for result in good.values()])}
        if self._dimensions:
            columns["reward_dimensions"] = _column([self._compared(result) for result in good.values()])
        written = await self._values.put(partition, list(good), columns)
        return tuple(map(Scored.of, results.keys(), results.values())), written

    def _compared(self, result: ScoreResult) -> list[float]:
        """Return one number for each dimension; 0 for a sample without metrics, which is not scored."""
        return [_total(result) if name == "score" else result.metrics.get(name, 0.0) for name in self._dimensions]

    async def forget(self, keys: Sequence[str]) -> None:
        """Drop scores that are not needed any more, and cancel those that are being made."""
        for key in keys:
            if key in self._scores:
                self._scores.pop(key).cancel()

    async def close(self) -> None:
        """End everything the worker and its agent have started."""
        await self.forget(list(self._scores))
        await self._agent.close()

    def _scoring(self, partition: str, keys: Sequence[str]) -> list[asyncio.Task[ScoreResult]]:
        """Return the tasks that score samples; what was not begun, or could not be read, is begun now."""
        missing = [key for key in keys if key not in self._scores or _is_failed(self._scores[key])]
        if missing:
            reading = asyncio.ensure_future(self._read(partition, missing))
            self._scores |= {key: asyncio.ensure_future(self._score(key, reading)) for key in missing}
        return [self._scores[key] for key in keys]

    async def _read(self, partition: str, keys: Sequence[str]) -> dict[str, tuple[Any, ...]]:
        columns = await self._values.get(partition, keys, REWARD_INPUTS)
        return dict(zip(keys, zip(*(rows_of(columns[name]) for name in REWARD_INPUTS), strict=True), strict=True))

    async def _score(self, key: str, reading: asyncio.Future[dict[str, tuple[Any, ...]]]) -> ScoreResult:
        prompt_ids, response_ids, task = (await asyncio.shield(reading))[key]
        if task["reward"] is not None:
            return ScoreResult(score=float(task["reward"]))
        response = response_ids.tolist()
        request = ScoreRequest(
            data_source=task["data_source"],
            solution_str=self._tokenizer.decode(response),
            ground_truth=task["ground_truth"],
            extra_info=task["extra_info"],
            prompt_str=self._tokenizer.decode(prompt_ids.tolist()),
            response_ids=tuple(response),
            idempotency_key=key,
            deadline_seconds=self._score_seconds,
        )
        async with self._turns:
            for retry in range(self._retries + 1):
                result = await self._call(attrs.evolve(request, retry=retry))
                if result.status == "ok":
                    break
        return result

    async def _call(self, request: ScoreRequest) -> ScoreResult:
        """Score under a deadline, which begins again with each retry; what goes wrong is a status, never a score."""
        key = request.idempotency_key
        try:
            calling = self._agent.compute_score(request)
            result = await self._clock.wait_for(calling, self._score_seconds, f"the reward of sample {key}")
        except DeadlineExceeded as error:
            return ScoreResult(status="timeout", error=error.message)
        except Exception as error:
            return ScoreResult(status="failed", error=described(error))
        return _checked(result, key)


def _is_failed(scoring: asyncio.Task[ScoreResult]) -> bool:
    return scoring.done() and (scoring.cancelled() or scoring.exception() is not None)


def _checked(result: ScoreResult, key: str, dimensions: Sequence[str] = ()) -> ScoreResult:
    """Fail a score that no step could use or show, or that lacks one of the rewards that the algorithm compares."""
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
    """Give failed scores of one group the mean of the others; a group without any score stays failed."""
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
    """Make a jagged float32 column of one row of numbers for each sample."""
    import torch

    return column_from_rows([torch.tensor(row, dtype=torch.float32) for row in values])
