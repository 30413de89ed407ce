"""The reward worker, which scores samples and writes their rewards."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import attrs
import msgspec

from jackfield.abc.agent import ChatTokenizer
from jackfield.abc.reward import ResponsePart, RewardAgent, ScoreRequest, ScoreResult
from jackfield.abc.transfer_queue import Column
from jackfield.clock import Clock
from jackfield.config import RunConfig
from jackfield.data.formats import Conversation
from jackfield.queue import Values
from jackfield.queue.meta import Written, batch_of, group_of
from jackfield.runtime.experiences import ExperienceShaper, MadeSample, Scored, total
from jackfield.runtime.reward_service import RewardService, checked
from jackfield.runtime.workers import together
from jackfield.sdk.cells import offsets_of, split

_Read: TypeAlias = dict[str, tuple[list[int], list[int], list[int], bytes]]  #: prompt, response, mask and task, by key
_KEPT = ("status", "score", "dimensions", "metrics", "explanation", "raw", "error", "tokens", "seconds")
_PROGRESS_SECONDS = 10.0  #: between reports that only say that the wait goes on
_SHARE = 0.02  #: a mini-batch may wait for its last reward, while a device is idle
REWARD_INPUTS = (
    "prompt_ids",
    "response_ids",
    "response_mask",
    "task",
)  #: the columns from which a reward agent's request is built


@attrs.frozen
class RewardJob:
    """A whole group to score."""

    keys: tuple[str, ...]  #: in the order of the group's rollouts
    uncompared: tuple[str, ...] = ()  #: left out of post-processing: expert samples and greedy rollouts


@attrs.frozen
class RewardReport:
    """The scores of whole groups. The values are already in the backend."""

    results: dict[str, ScoreResult]  #: by key; empty: the wait goes on
    written: Written  #: of the samples with a score, in the same order
    removed: dict[str, str] = attrs.field(factory=dict, kw_only=True)  #: by key, why the pipeline does not keep it
    made: tuple[MadeSample, ...] = attrs.field(default=(), kw_only=True)  #: by operators, and kept by the worker
    progress: tuple[int, int, int] = (0, 0, 0)  #: of the service: tries that have ended, turns in progress and waiting


@attrs.define(eq=False)
class RewardWorker:
    """Scores samples concurrently. All retries of a group go to the same worker."""

    _values: Values
    #: an agent that has been started; one that is no :class:`RewardService` gets one of the configuration's settings
    _agent: RewardAgent
    _tokenizer: ChatTokenizer  #: of the model
    _clock: Clock
    _config: RunConfig
    _records: Any = None  #: a ``jackfield_archive.RewardRecords``: what is kept of the scores
    _run: str = ""  #: name of the run in these
    _prompt_of: Callable[[Mapping[str, Any]], Conversation] = lambda record: ()  #: returns the messages of a record
    _shaper: ExperienceShaper | None = None  #: has operators shape what was scored
    #: scores that :meth:`reward` will use, by key, and their group, by the group's key without its retry
    _scores: dict[str, tuple[str, dict[str, asyncio.Task[Scored]]]] = attrs.field(factory=dict, init=False)
    _service: RewardService = attrs.field(init=False)
    _task: Callable[[bytes], tuple[dict[str, Any], dict[str, Any]]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        own = self._agent if isinstance(self._agent, RewardService) else None
        self._service = own or RewardService(self._agent, self._config.reward_service, self._clock)
        self._task = functools.lru_cache(maxsize=256)(self._read_task)

    async def generates(self) -> bool:
        """Return whether scoring needs the run's replicas."""
        return self._service.generates or (self._shaper is not None and self._shaper.pipeline.generates)

    async def score(self, partition: str, keys: Sequence[str]) -> dict[str, ScoreResult]:
        """Score samples that are not compared with others; ``queue.unknown-sample`` if one has been deleted."""
        reading = asyncio.ensure_future(self._read(partition, keys))
        if self._service.compares:
            jobs = dict[str, list[str]]()
            for key in keys:
                jobs.setdefault(group_of(key), []).append(key)
            ended = await asyncio.gather(*(self._compared(mine, (), reading) for mine in jobs.values()))
            scored = {key: one for each in ended for key, one in each.items()}
        else:
            scored = dict(zip(keys, await asyncio.gather(*(self._score(key, reading) for key in keys)), strict=True))
        self._keep(scored)
        return {key: _told(result) for key, (_, result) in scored.items()}

    async def begin(self, partition: str, keys: Sequence[str]) -> None:
        """Score samples ahead of :meth:`reward`, which then raises what failed here.

        Scores of earlier retries of their groups are dropped. An agent that compares groups waits for whole ones.
        """
        if not self._service.compares:
            scoring = self._scoring(partition, keys)
            await asyncio.wait(scoring)

    async def reward(self, partition: str, jobs: Sequence[RewardJob]) -> AsyncIterator[RewardReport]:
        """Score the samples of groups, write ``reward`` for those that have a score, and yield reports.

        A report has the results of several whole groups, without token scores, and none of a group that was retried.
        An empty one says that the wait goes on: other samples were scored meanwhile, or the agent waits for long.
        """
        keys, ended_before = [key for job in jobs for key in job.keys], self._service.ended
        if self._service.compares:
            reading = asyncio.ensure_future(self._read(partition, keys))
            work = [(None, self._compared(job.keys, job.uncompared, reading)) for job in jobs]
        else:
            scoring = dict(zip(keys, self._scoring(partition, keys), strict=True))
            work = [(None, self._group(job, [scoring[key] for key in job.keys])) for job in jobs]
        async for ended in together(work, share=_SHARE, every=min(self._config.deadlines.reward, _PROGRESS_SECONDS)):
            if not ended and (self._service.ended > ended_before or self._service.agent.keeps_deadlines):
                ended_before = self._service.ended
                yield RewardReport(results={}, written=Written(), progress=self._progress)
            scored = dict(pair for _, task in ended if not task.cancelled() for pair in task.result().items())
            if scored:
                yield await self._written(partition, scored)

    async def _written(self, partition: str, scored: Mapping[str, Scored]) -> RewardReport:
        """Write the scores of whole groups; return their report."""
        removed, made = dict[str, str](), tuple[MadeSample, ...]()
        if self._shaper is not None:
            scored, removed, made = await self._shaper.shape(partition, scored)
        self._keep(scored)
        good = {key: one for key, (_, one) in scored.items() if one.status == "ok" and key not in removed}
        written = await self._values.put(partition, list(good), self._columns(list(good.values())))
        if counts := self._service.limits.taken():
            metrics = {name if "/" in name else f"reward/{name}": number for name, number in counts.items()}
            written = msgspec.structs.replace(written, metrics=metrics)
        results = {key: _told(result) for key, (_, result) in scored.items()}
        told: Any = {"removed": removed, "made": made, "progress": self._progress}
        return RewardReport(results=results, written=written, **told)

    async def put_made(self, name: str, key: str) -> Written:
        """Write a sample that an operator made, by the name in a report, under its key in the queue."""
        assert self._shaper is not None
        return await self._shaper.put(name, key)

    async def pipeline_state(self, batch: int) -> Any:
        """Return what operators had learnt before a batch, as JSON values; None: there are none."""
        return None if self._shaper is None else self._shaper.pipeline.state_before(batch)

    async def restore_pipeline(self, state: Any) -> None:
        """Have the operators continue from a state, before the first sample is scored."""
        if self._shaper is not None:
            self._shaper.pipeline.restore(state)

    @property
    def _progress(self) -> tuple[int, int, int]:
        return self._service.ended, self._service.limits.in_progress, self._service.limits.waiting

    async def _group(self, job: RewardJob, scoring: Sequence[asyncio.Task[Scored]]) -> dict[str, Scored]:
        """Wait for the scores of a group, post-process them together, and check them; return them by key."""
        for each in reversed(scoring):  # the last to end is most likely the last to begin, and one wait is enough
            if not each.done():
                await asyncio.wait([each])
        scored = dict(zip(job.keys, (each.result() for each in scoring), strict=True))
        self._scores.pop(_place(group_of(job.keys[0])), None)
        siblings = [key for key in job.keys if key not in job.uncompared]
        asked = [scored[key][0] for key in siblings]
        processed = await self._service.finish_group(asked, [scored[key][1] for key in siblings])
        return self._checked(
            {**scored, **dict(zip(siblings, zip(asked, processed, strict=True), strict=True))}, siblings
        )

    async def _compared(
        self, keys: Sequence[str], uncompared: Sequence[str], reading: asyncio.Future[_Read]
    ) -> dict[str, Scored]:
        """Score a whole group, and those that stand apart each as a group of one."""
        read = reading.result() if reading.done() else await asyncio.shield(reading)
        requests = {key: self._request(key, *read[key]) for key in keys}
        siblings = [key for key in keys if key not in uncompared]
        parts = [part for part in (siblings, *([key] for key in keys if key not in siblings)) if part]
        asked = [[attrs.evolve(requests[key], group_size=len(part)) for key in part] for part in parts]
        results = await asyncio.gather(*map(self._service.score_group, asked))
        named = zip(parts, asked, results, strict=True)
        scored = {key: (r, one) for part, own, ones in named for key, r, one in zip(part, own, ones, strict=True)}
        return self._checked({key: scored[key] for key in keys}, siblings)

    def _checked(self, scored: dict[str, Scored], siblings: Sequence[str]) -> dict[str, Scored]:
        """Fill failures of a group if the settings say so, and turn scores without a dimension into failures."""
        if self._config.reward_service.on_failure == "group_mean":
            filled = _filled([scored[key][1] for key in siblings])
            scored.update({key: (scored[key][0], one) for key, one in zip(siblings, filled, strict=True)})
        if dimensions := self._config.algorithm.reward_dimensions:
            for key in siblings:
                scored[key] = scored[key][0], checked(scored[key][1], key, dimensions)
        return scored

    def _columns(self, good: Sequence[ScoreResult]) -> dict[str, Column]:
        """Return ``reward`` and, for dimensions (metrics, and ``score`` for the score itself), those."""
        columns = {"reward": _column([result.token_scores or (result.score,) for result in good])}
        if dimensions := self._config.algorithm.reward_dimensions:  # 0 for a reward that the agent loop has computed
            rows = [{**each.metrics, **each.dimensions, "score": total(each)} for each in good]
            columns["reward_dimensions"] = _column([[row.get(name, 0.0) for name in dimensions] for row in rows])
        return columns

    async def close(self) -> None:
        """Cancel the scores in progress and close the agent."""
        for _, scores in self._scores.values():
            for scoring in scores.values():
                scoring.cancel()
        if self._records is not None:
            self._records.close()
        await self._service.close()

    def _scoring(self, partition: str, keys: Sequence[str]) -> list[asyncio.Task[Scored]]:
        """Return the tasks that score samples; start those that are missing or failed."""
        found, missing = list[dict[str, asyncio.Task[Scored]]](), dict[str, dict[str, asyncio.Task[Scored]]]()
        for key in keys:
            found.append(scores := self._scores_of(group_of(key)))
            scoring = scores.get(key)
            if scoring is None or (scoring.done() and (scoring.cancelled() or scoring.exception() is not None)):
                missing[key] = scores
        if missing:
            reading = asyncio.ensure_future(self._read(partition, list(missing)))
            for key, scores in missing.items():
                scores[key] = task = asyncio.ensure_future(self._score(key, reading))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio would log it
        return [scores[key] for key, scores in zip(keys, found, strict=True)]

    def _scores_of(self, group: str) -> dict[str, asyncio.Task[Scored]]:
        """Return the scores of a group. Those of earlier retries are cancelled and forgotten."""
        name, scores = self._scores.get(_place(group), ("", {}))
        if name != group:
            for old in scores.values():
                old.cancel()
            self._scores[_place(group)] = group, (scores := {})
        return scores

    async def _read(self, partition: str, keys: Sequence[str]) -> _Read:
        columns = await self._values.get(partition, keys, REWARD_INPUTS)
        numbers = (_lists(columns[name]) for name in REWARD_INPUTS[:3])
        return dict(zip(keys, zip(*numbers, map(bytes, split(columns["task"])[1]), strict=True), strict=True))

    async def _score(self, key: str, reading: asyncio.Future[_Read]) -> Scored:
        """Score a sample, unless the agent loop has computed its reward."""
        read = (reading.result() if reading.done() else await asyncio.shield(reading))[key]
        request = self._request(key, *read)
        task = self._task(read[3])[0]
        if (own := task["reward"]) is not None:
            tokens = task.get("token_rewards")
            return request, ScoreResult(score=float(own), token_scores=None if tokens is None else tuple(tokens))
        return request, await self._service.compute_score(request)

    def _request(self, key: str, prompt: list[int], response: list[int], mask: list[int], task: bytes) -> ScoreRequest:
        """Return the request of a sample."""
        decode, group, fields = self._tokenizer.decode, group_of(key), self._task(task)[1]
        text = decode(response)
        if 0 in mask:
            ends = [0, *(at for at, (one, other) in enumerate(pairwise(mask), 1) if one != other), len(mask)]
            authors: Any = ("tool", "model")
            parts = [ResponsePart(author=authors[mask[at]], text=decode(response[at:to])) for at, to in pairwise(ends)]
        else:
            parts = [ResponsePart(author="model", text=text)]
        return ScoreRequest(
            solution_str=text,
            prompt_str=decode(prompt),
            response_ids=tuple(response),
            response_mask=tuple(map(int, mask)),
            parts=tuple(parts),
            idempotency_key=key,
            deadline_seconds=self._config.deadlines.reward,
            group_id=group,
            group_size=self._config.data.rollouts_per_group,
            priority=batch_of(group),
            **fields,
        )

    def _read_task(self, text: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the column ``task`` of a sample, and the fields of a request that follow from it."""
        task = msgspec.json.decode(text)
        fields = {name: task[name] for name in ("data_source", "ground_truth", "extra_info")}
        made: Mapping[str, Any] = task.get("rollout") or {}
        messages = self._prompt_of(task["extra_info"])
        contents = [each["content"] for each in messages if isinstance(each.get("content"), list)]
        images = [part for parts in contents for part in parts if "image" in str(dict(part).get("type"))]
        fields |= {"messages": messages, "images": tuple(images), "turns": made.get("turns", 1)}
        fields |= {"metrics": made.get("metrics", {}), "tool_calls": tuple(made.get("tool_calls", ()))}
        return task, fields

    def _keep(self, scored: Mapping[str, Scored]) -> None:
        """Record requests with their results."""
        if self._records is None:
            return
        reward, run, version, now = self._config.reward.name, self._run, self._service.version, time.time()
        shared = {"run": run, "reward": reward, "version": version, "time": now}
        self._records.add(
            [
                shared
                | {name: getattr(result, name) for name in _KEPT}
                | {"key": key, "group": asked.group_id, "rollout": int(key.rsplit("/", 2)[1].partition("r")[0])}
                | {"data_source": asked.data_source, "ground_truth": asked.ground_truth, "cached": result.is_cached}
                | {"prompt": asked.prompt_str, "response": asked.solution_str, "extra_info": dict(asked.extra_info)}
                for key, (asked, result) in scored.items()
            ]
        )


def _place(group: str) -> str:
    """Return the key of a group without its retry."""
    return group.rpartition("/")[0]


def _told(result: ScoreResult) -> ScoreResult:
    """Return what the controller gets of a result: dimensions are metrics there."""
    if result.status != "ok":
        return ScoreResult(status=result.status, error=f"reward {result.status}: {result.error}")
    if type(result.metrics) is dict and not (
        result.token_scores or result.dimensions or result.explanation or result.raw
    ):
        return result
    error = None if result.error is None else f"reward failed: {result.error}"  # it has the mean of its group
    return ScoreResult(score=result.score, metrics={**result.metrics, **result.dimensions}, error=error)


def _filled(results: Sequence[ScoreResult]) -> list[ScoreResult]:
    """Replace failed scores of a group by the mean of the others, if there are any."""
    good = [{**each.metrics, **each.dimensions, "": total(each)} for each in results if each.status == "ok"]
    shared = sorted(set(good[0]).intersection(*good)) if good else []
    metrics = {name: sum(each[name] for each in good) / len(good) for name in shared}
    mean = ScoreResult(score=metrics.pop("", None), metrics=metrics, explanation="the mean of its group")
    failed = [each.status != "ok" and bool(good) for each in results]
    return [attrs.evolve(mean, error=one.error) if fills else one for one, fills in zip(results, failed, strict=True)]


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
