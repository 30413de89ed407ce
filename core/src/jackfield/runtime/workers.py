"""The agent and reward workers, the assignment of work to them, and retries after one dies.

The controller sees only keys, tags, sizes, statuses and errors. Tokens and rewards stay in the workers and the
queue's backend.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import attrs
import xxhash

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence, ChatTokenizer
from jackfield.abc.reward import RewardAgent, ScoreRequest, ScoreResult
from jackfield.abc.rollout import SamplingParams
from jackfield.algorithms.shaping import fill_failed
from jackfield.clock import Clock
from jackfield.config import RunConfig
from jackfield.data.tasks import Task
from jackfield.data.tokens import encode_answers, encode_prompt
from jackfield.errors import (
    AgentError,
    DeadlineExceeded,
    JackfieldError,
    QueueError,
    RewardError,
    WorkerLost,
    described,
)
from jackfield.plugins.hooks import SampleRecord
from jackfield.queue import Values
from jackfield.queue.meta import GroupKey, RolloutReport, Written, group_of
from jackfield.runtime.samples import metric_tags, not_finite, sequence_columns, sequence_tags
from jackfield.sdk.cells import column_from_rows, rows_of

T = TypeVar("T")

_ATTEMPTS = 3  #: how often work is tried in total, if workers die


@attrs.frozen
class Workers(Generic[T]):
    """Stateless workers or their stubs. Work on one subject always goes to the same worker."""

    _workers: Sequence[T]

    def of(self, subject: str) -> T:
        """Return the worker of a subject (a group or a rollout), which is always the same."""
        return self._workers[xxhash.xxh3_64_intdigest(subject.encode()) % len(self._workers)]


async def resubmitted(
    work: Callable[[], Awaitable[T]],
    what: str,
    may_repeat: Callable[[JackfieldError], bool] = lambda error: isinstance(error, WorkerLost),
) -> T:
    """Run work, and again from its beginning if ``may_repeat`` says that an error lost it: three times in all.

    By default a worker's death is such an error. ``what`` is the result of the work for messages, such as a sample.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return await work()
        except JackfieldError as error:
            if not may_repeat(error):
                raise
            logging.getLogger("jackfield").warning("%s; %s is made again", one_line(error), what)
    return await work()


def one_line(error: JackfieldError, *, located: bool = True) -> str:
    """Describe an error in one line. Without its location, equal failures have equal texts."""
    where = f" ({error.where})" if located else ""
    found = "" if error.found is None else f", found {error.found}"
    return f"{error.message}{where}{found} [{error.code}]"


def is_lost(error: JackfieldError) -> bool:
    """Return whether an error says that samples were lost with a storage unit."""
    return isinstance(error, QueueError) and error.code == "queue.lost"


@attrs.frozen(kw_only=True)
class RolloutJob:
    """One rollout of an agent loop, or answers from the data that replace one."""

    group: GroupKey
    rollout: int = 0
    restart: int = 0  #: number of workers that died during it
    task: Task
    sampling: Mapping[str, Any] | None = None  #: None: copy the task's answers instead of generating
    seconds: float = 600.0  #: the rollout's deadline
    expert: bool = False  #: the answer joins samples of the policy, and gets all their columns
    last: bool = False  #: keep the last sequence only


@attrs.define(eq=False)
class AgentWorker:
    """Runs agent loops concurrently."""

    _values: Values
    _tokenizer: ChatTokenizer  #: of the model
    _clock: Clock
    #: makes the loop of one rollout; its argument is called with each request's sampling parameters; None: no agents
    _make_agent: Callable[[Callable[[SamplingParams], None]], AgentLoopBase] | None
    #: for samples that copy the data's answers; agents find their limit in their context
    _max_prompt_tokens: int | None = attrs.field(default=None, kw_only=True)

    async def run(self, job: RolloutJob) -> RolloutReport:
        """Run a rollout, or copy the task's answers, and write the samples to the backend.

        Errors are those of the loop, ``agent.failed``, ``agent.output``, ``deadline``, a ``DataError`` if the task has
        no answer to copy or its prompt is too long, and ``queue.lost`` if storage units die repeatedly.
        """
        sequences, more = await self._sequences(job)
        tags = tuple({**sequence_tags(job.task, each, job.rollout), **more} for each in sequences)
        columns = sequence_columns(job.task, sequences, supervised=job.sampling is None and not job.expert)
        keys = tuple(job.group.sample(job.rollout, number, job.restart) for number in range(len(tags)))
        put = partial(self._values.put, job.group.partition, keys, columns, tags)
        written = await resubmitted(put, f"samples {', '.join(keys)}", is_lost)  # on the remaining units
        return RolloutReport(group=str(job.group), rollout=job.rollout, keys=keys, written=written)

    async def _sequences(self, job: RolloutJob) -> tuple[Sequence[AgentSequence], dict[str, Any]]:
        """Run an agent loop, or copy answers; return sequences and additional tags for each."""
        sampling = job.sampling
        if sampling is None:
            return self._answers(job.task), {}
        assert self._make_agent is not None, "a worker without replicas runs no agents"
        asked: list[SamplingParams] = []
        try:
            running = self._make_agent(asked.append).run(sampling, **job.task.agent_fields())
            output = await self._clock.wait_for(running, job.seconds, f"the agent loop on task {job.task.id}")
        except JackfieldError:
            raise
        except Exception as error:
            message = f"{described(error)} (raised by the agent loop)"
            raise AgentError(message, where=f"task {job.task.id}") from error
        _check(output, job.task)
        tags: dict[str, Any] = {"turns": output.num_turns, **metric_tags("agent", output.metrics)}
        names = [name for name in ("temperature", "top_p", "top_k", "min_p", "log_probs") if name in sampling]
        own = {(name, getattr(one, name)) for one in asked for name in names if getattr(one, name) != sampling[name]}
        if own:  # the sampling parameters that the agent changed
            tags["own_sampling"] = ", ".join(sorted(f"{name}: {value}" for name, value in own))
        return output.sequences[-1:] if job.last else output.sequences, tags

    def _answers(self, task: Task) -> list[AgentSequence]:
        """Make sequences from the task's answers: two if the task has a rejected answer, else one.

        Answers are not sampled, so their log-probs are 0, and they have no score.
        """
        prompt_ids = tuple(encode_prompt(self._tokenizer, task, self._max_prompt_tokens))
        return [
            AgentSequence(
                prompt_ids=prompt_ids,
                response_ids=tuple(token_ids),
                response_mask=tuple(mask),
                response_log_probs=(0.0,) * len(token_ids),
                weight_versions=(),
                reward=0.0,
            )
            for token_ids, mask in encode_answers(self._tokenizer, task)  # type: ignore[arg-type]
        ]

    async def prompt_ids(self, task: Task, most: int) -> tuple[int, ...]:
        """Return the first ``most`` tokens of a task's prompt, within the prompt's limit."""
        limit = most if self._max_prompt_tokens is None else min(most, self._max_prompt_tokens)
        return self._tokenizer.encode_chat(task.messages)[:limit]

    async def records(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], *, with_reward: bool
    ) -> tuple[SampleRecord, ...]:
        """Return samples as text for display; ``reward`` is None without ``with_reward``."""
        names = ("prompt_ids", "response_ids", "response_mask", *(("reward",) if with_reward else ()))
        columns = await self._values.get(partition, keys, names)
        rows = {name: rows_of(column) for name, column in columns.items()}
        decode = self._tokenizer.decode
        return tuple(
            SampleRecord(
                key=key,
                prompt=decode(rows["prompt_ids"][index].tolist(), skip_special_tokens=False),
                response=decode(rows["response_ids"][index].tolist(), skip_special_tokens=False),
                reward=float(rows["reward"][index].sum()) if with_reward else None,
                response_ids=tuple(rows["response_ids"][index].tolist()),
                response_mask=tuple(int(value) for value in rows["response_mask"][index].tolist()),
                tags=tags[index],
            )
            for index, key in enumerate(keys)
        )


def _check(output: AgentLoopOutput, task: Task) -> None:
    """Refuse non-finite metrics, unsupported inputs, and parts that do not match."""

    def refuse(what: str, expected: str, found: str, fix: str | None = None) -> NoReturn:
        message, where = f"an agent loop returned {what}", f"task {task.id}"
        raise AgentError(message, code="agent.output", where=where, expected=expected, found=found, fix=fix)

    turns, wrong = output.num_turns, not_finite(output.metrics)
    if wrong or not isinstance(turns, int) or turns < 1:
        expected = "num_turns of 1 or more, and finite numbers as metrics"
        refuse("metrics that are not numbers", expected, f"num_turns {turns!r}, metrics {wrong}")
    images = sorted({name for sequence in output.sequences for name in sequence.multi_modal_inputs})
    if images:
        found = f"multi_modal_inputs {', '.join(map(str, images))}"
        what = "multi_modal_inputs, which no engine trains on"
        refuse(what, "sequences of tokens alone", found, "leave multi_modal_inputs empty")
    for each in output.sequences:
        names = ("response_ids", "response_mask", "response_log_probs", "weight_versions")
        lengths = {name: len(getattr(each, name)) for name in names}
        if len(set(lengths.values())) != 1 or not each.prompt_ids or not each.response_ids:
            expected = "a prompt, and a response whose ids, mask, log-probs and versions have one length above 0"
            refuse("a sequence whose parts do not fit", expected, f"prompt {len(each.prompt_ids)}, {lengths}")


REWARD_INPUTS = ("prompt_ids", "response_ids", "task")  #: the columns from which a reward agent's request is built


@attrs.define(eq=False)
class RewardWorker:
    """Scores samples concurrently. All retries of a group go to the same worker."""

    _values: Values
    _agent: RewardAgent  #: an agent that has been started
    _tokenizer: ChatTokenizer  #: of the model
    _clock: Clock
    _config: RunConfig
    #: scores that :meth:`reward` will use, by place of the group and key
    _scores: dict[str, dict[str, asyncio.Task[ScoreResult]]] = attrs.field(factory=dict, init=False)
    _turns: AbstractAsyncContextManager[Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        most = self._agent.concurrency
        self._turns = nullcontext() if most is None else asyncio.Semaphore(most)

    async def score(self, partition: str, key: str) -> ScoreResult:
        """Score a sample that is not compared with others; ``queue.unknown-sample`` if it has been deleted."""
        return _told(await self._score(key, asyncio.ensure_future(self._read(partition, [key]))))

    async def begin(self, partition: str, keys: Sequence[str]) -> None:
        """Score samples of one group ahead of :meth:`reward`, which then raises what failed here.

        Scores of earlier retries of the group are dropped.
        """
        scoring = self._scoring(partition, keys)
        await asyncio.wait(scoring)
        for each in scoring:
            if not each.cancelled():
                each.exception()  # or asyncio would log that it was not retrieved

    async def reward(
        self, partition: str, keys: Sequence[str], uncompared: Sequence[str] = ()
    ) -> tuple[tuple[ScoreResult, ...], Written]:
        """Score the samples of one group, and write ``reward`` for those that have a score.

        ``keys`` are in the order of the group's rollouts. Post-processing leaves out those that are ``uncompared``:
        expert samples and greedy rollouts. Return the result of each sample, without token scores, and what was written
        for the samples with a score, both in order.
        """
        algorithm = self._config.algorithm
        dimensions = algorithm.reward_dimensions  #: metrics in ``reward_dimensions``; ``score`` is the score itself
        results = dict(zip(keys, await asyncio.gather(*self._scoring(partition, keys)), strict=True))
        self._scores.pop(_place(keys), None)
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
        return tuple(map(_told, results.values())), written

    async def close(self) -> None:
        """Cancel the scores in progress and close the agent."""
        for scores in self._scores.values():
            for scoring in scores.values():
                scoring.cancel()
        await self._agent.close()

    def _scoring(self, partition: str, keys: Sequence[str]) -> list[asyncio.Task[ScoreResult]]:
        """Return the tasks that score samples of a group; start those that are missing or failed."""
        kept = self._scores.setdefault(_place(keys), {})
        for key in [key for key in kept if group_of(key) != group_of(keys[0])]:
            kept.pop(key).cancel()  # of an earlier retry

        def is_missing(scoring: asyncio.Task[ScoreResult] | None) -> bool:
            return scoring is None or (scoring.done() and (scoring.cancelled() or scoring.exception() is not None))

        if missing := [key for key in keys if is_missing(kept.get(key))]:
            reading = asyncio.ensure_future(self._read(partition, missing))
            kept |= {key: asyncio.ensure_future(self._score(key, reading)) for key in missing}
        return [kept[key] for key in keys]

    async def _read(self, partition: str, keys: Sequence[str]) -> dict[str, tuple[Any, ...]]:
        columns = await self._values.get(partition, keys, REWARD_INPUTS)
        rows = zip(*(rows_of(columns[name]) for name in REWARD_INPUTS), strict=True)
        return dict(zip(keys, rows, strict=True))

    async def _score(self, key: str, reading: asyncio.Future[dict[str, tuple[Any, ...]]]) -> ScoreResult:
        """Score with a deadline for each try. A failure becomes a status, never a score."""
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


def _place(keys: Sequence[str]) -> str:
    """Return the key of the samples' group without its retry."""
    return group_of(keys[0]).rpartition("/")[0]


def _told(result: ScoreResult) -> ScoreResult:
    """Return what the controller gets of a result."""
    if result.status != "ok":
        return ScoreResult(status=result.status, error=f"reward {result.status}: {result.error}")
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


def _column(values: Sequence[Sequence[float | None]]) -> Any:
    """Make a jagged float32 column from one row of numbers per sample."""
    import torch

    return column_from_rows([torch.tensor(row, dtype=torch.float32) for row in values])
