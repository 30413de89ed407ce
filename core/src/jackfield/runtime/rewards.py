"""The reward worker, which scores samples and writes their rewards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import pairwise
from typing import Any

import attrs
import msgspec

from jackfield.abc.agent import ChatTokenizer
from jackfield.abc.reward import RewardAgent, ScoreRequest, ScoreResult
from jackfield.abc.transfer_queue import Column
from jackfield.algorithms.shaping import fill_failed
from jackfield.clock import Clock
from jackfield.config import RunConfig
from jackfield.errors import DeadlineExceeded, RewardError, described
from jackfield.queue import Values
from jackfield.queue.meta import Written, group_of
from jackfield.runtime.samples import not_finite
from jackfield.runtime.workers import together
from jackfield.sdk.cells import offsets_of, split

_SHARE = 0.02  #: a mini-batch may wait for its last reward, while a device is idle
REWARD_INPUTS = ("prompt_ids", "response_ids", "task")  #: the columns from which a reward agent's request is built


@attrs.frozen
class RewardJob:
    """A whole group to score."""

    keys: tuple[str, ...]  #: in the order of the group's rollouts
    uncompared: tuple[str, ...] = ()  #: left out of post-processing: expert samples and greedy rollouts


@attrs.frozen
class RewardReport:
    """The scores of whole groups. The values are already in the backend."""

    results: dict[str, ScoreResult]  #: by key
    written: Written  #: of the samples with a score, in the same order


@attrs.define(eq=False)
class RewardWorker:
    """Scores samples concurrently. All retries of a group go to the same worker."""

    _values: Values
    _agent: RewardAgent  #: an agent that has been started
    _tokenizer: ChatTokenizer  #: of the model
    _clock: Clock
    _config: RunConfig
    #: scores that :meth:`reward` will use, by key, and their group, by the group's key without its retry
    _scores: dict[str, tuple[str, dict[str, asyncio.Task[ScoreResult]]]] = attrs.field(factory=dict, init=False)
    _turns: AbstractAsyncContextManager[Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        most = self._agent.concurrency
        self._turns = nullcontext() if most is None else asyncio.Semaphore(most)

    async def score(self, partition: str, keys: Sequence[str]) -> dict[str, ScoreResult]:
        """Score samples that are not compared with others; ``queue.unknown-sample`` if one has been deleted."""
        reading = asyncio.ensure_future(self._read(partition, keys))
        results = await asyncio.gather(*(self._score(key, reading) for key in keys))
        return dict(zip(keys, map(_told, results), strict=True))

    async def begin(self, partition: str, keys: Sequence[str]) -> None:
        """Score samples ahead of :meth:`reward`, which then raises what failed here.

        Scores of earlier retries of their groups are dropped.
        """
        scoring = self._scoring(partition, keys)
        await asyncio.wait(scoring)
        _retrieve(scoring)

    async def reward(self, partition: str, jobs: Sequence[RewardJob]) -> AsyncIterator[RewardReport]:
        """Score the samples of groups, write ``reward`` for those that have a score, and yield reports.

        A report has the results of several whole groups, without token scores, and none of a group that was retried.
        """
        keys = [key for job in jobs for key in job.keys]
        scoring = dict(zip(keys, self._scoring(partition, keys), strict=True))
        work = [(None, self._group(job, [scoring[key] for key in job.keys])) for job in jobs]
        async for ended in together(work, share=_SHARE):
            results = dict(pair for _, task in ended if not task.cancelled() for pair in task.result().items())
            good = {key: result for key, result in results.items() if result.status == "ok"}
            written = await self._values.put(partition, list(good), self._columns(list(good.values())))
            yield RewardReport(results={key: _told(result) for key, result in results.items()}, written=written)

    async def _group(self, job: RewardJob, scoring: Sequence[asyncio.Task[ScoreResult]]) -> dict[str, ScoreResult]:
        """Wait for the scores of a group, post-process them together, and check them; return them by key."""
        for each in reversed(scoring):  # the last to end is most likely the last to begin, and one wait is enough
            if not each.done():
                await asyncio.wait([each])
        _retrieve(scoring)
        results = dict(zip(job.keys, (each.result() for each in scoring), strict=True))
        self._scores.pop(_place(group_of(job.keys[0])), None)
        siblings = [key for key in job.keys if key not in job.uncompared]
        processed = self._agent.post_process_scores([results[key] for key in siblings])
        if self._config.algorithm.shaping.fill_failed:
            processed = _filled(processed)
        for key, result in zip(siblings, processed, strict=True):
            if result is results[key] and not self._config.algorithm.reward_dimensions:
                continue  # it was checked
            results[key] = _checked(result, key, self._config.algorithm.reward_dimensions)
        return results

    def _columns(self, good: Sequence[ScoreResult]) -> dict[str, Column]:
        """Return ``reward`` and, for dimensions (metrics, and ``score`` for the score itself), those."""
        columns = {"reward": _column([result.token_scores or (result.score,) for result in good])}
        if dimensions := self._config.algorithm.reward_dimensions:  # 0 for a reward that the agent loop has computed
            rows = [{**each.metrics, "score": _total(each)} for each in good]
            columns["reward_dimensions"] = _column([[row.get(name, 0.0) for name in dimensions] for row in rows])
        return columns

    async def close(self) -> None:
        """Cancel the scores in progress and close the agent."""
        for _, scores in self._scores.values():
            for scoring in scores.values():
                scoring.cancel()
        await self._agent.close()

    def _scoring(self, partition: str, keys: Sequence[str]) -> list[asyncio.Task[ScoreResult]]:
        """Return the tasks that score samples; start those that are missing or failed."""
        found, missing = list[dict[str, asyncio.Task[ScoreResult]]](), dict[str, dict[str, asyncio.Task[ScoreResult]]]()
        for key in keys:
            found.append(scores := self._scores_of(group_of(key)))
            scoring = scores.get(key)
            if scoring is None or (scoring.done() and (scoring.cancelled() or scoring.exception() is not None)):
                missing[key] = scores
        if missing:
            reading = asyncio.ensure_future(self._read(partition, list(missing)))
            for key, scores in missing.items():
                scores[key] = asyncio.ensure_future(self._score(key, reading))
        return [scores[key] for key, scores in zip(keys, found, strict=True)]

    def _scores_of(self, group: str) -> dict[str, asyncio.Task[ScoreResult]]:
        """Return the scores of a group. Those of earlier retries are cancelled and forgotten."""
        name, scores = self._scores.get(_place(group), ("", {}))
        if name != group:
            for old in scores.values():
                old.cancel()
            self._scores[_place(group)] = group, (scores := {})
        return scores

    async def _read(self, partition: str, keys: Sequence[str]) -> dict[str, tuple[list[int], list[int], Any]]:
        columns = await self._values.get(partition, keys, REWARD_INPUTS)
        prompts, responses = (_lists(columns[name]) for name in REWARD_INPUTS[:2])
        tasks = map(msgspec.json.decode, split(columns["task"])[1])
        return dict(zip(keys, zip(prompts, responses, tasks, strict=True), strict=True))

    async def _score(
        self, key: str, reading: asyncio.Future[dict[str, tuple[list[int], list[int], Any]]]
    ) -> ScoreResult:
        """Score with a deadline for each try. A failure becomes a status, never a score."""
        prompt, response, task = (reading.result() if reading.done() else await asyncio.shield(reading))[key]
        if task["reward"] is not None:
            return ScoreResult(score=float(task["reward"]))
        fields = {name: task[name] for name in ("data_source", "ground_truth", "extra_info")}
        fields |= {"solution_str": self._tokenizer.decode(response), "prompt_str": self._tokenizer.decode(prompt)}
        fields |= {"response_ids": tuple(response), "deadline_seconds": (seconds := self._config.deadlines.reward)}
        async with self._turns:
            for retry in range(self._config.schedule.reward_retries + 1):
                request = ScoreRequest(idempotency_key=key, retry=retry, **fields)
                try:
                    scoring = self._agent.compute_score(request)
                    result = _checked(await self._clock.wait_for(scoring, seconds, f"the reward of sample {key}"), key)
                except DeadlineExceeded as error:
                    result = ScoreResult(status="timeout", error=error.message)
                except asyncio.CancelledError:
                    raise
                except BaseException as error:  # SystemExit is the reward's, too
                    result = ScoreResult(status="failed", error=described(error))
                if result.status == "ok":
                    break
        return result


def _retrieve(scoring: Iterable[asyncio.Task[ScoreResult]]) -> None:
    """Retrieve the errors of scores that have ended, or asyncio would log those that are not raised."""
    for each in scoring:
        if not each.cancelled():
            each.exception()


def _place(group: str) -> str:
    """Return the key of a group without its retry."""
    return group.rpartition("/")[0]


def _told(result: ScoreResult) -> ScoreResult:
    """Return what the controller gets of a result."""
    if result.status != "ok":
        return ScoreResult(status=result.status, error=f"reward {result.status}: {result.error}")
    if result.token_scores is None and type(result.metrics) is dict:
        return result
    return ScoreResult(score=result.score, metrics=dict(result.metrics))


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


def _column(values: Sequence[Sequence[float | None]]) -> Column:
    """Make a jagged float32 column from one row of numbers per sample."""
    import torch

    flat = [each for row in values for each in row]
    return Column(values=torch.tensor(flat, dtype=torch.float32), offsets=offsets_of(map(len, values)))


def _lists(column: Column) -> list[list[int]]:
    """Return the rows of a jagged column of integers."""
    assert column.offsets is not None
    flat = column.values.tolist()
    return [flat[start:end] for start, end in pairwise(column.offsets.tolist())]
