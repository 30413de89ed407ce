"""The agent and reward workers, the assignment of work to them, and retries after one dies.

The controller sees only keys, tags, sizes, statuses and errors. Tokens and rewards stay in the workers and the
queue's backend.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import islice
from typing import Any, Generic, NoReturn, TypeVar, cast

import attrs
import xxhash

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence, ChatTokenizer
from jackfield.abc.rollout import SamplingParams
from jackfield.clock import Clock, too_late
from jackfield.data.tasks import Task
from jackfield.data.tokens import encode_answers, encode_prompt
from jackfield.errors import (
    AgentError,
    ConfigError,
    DataError,
    JackfieldError,
    PluginError,
    QueueError,
    WorkerLost,
    described,
    some,
)
from jackfield.plugins.hooks import SampleRecord
from jackfield.queue import Values
from jackfield.queue.meta import GroupKey, RolloutReport, Written, sample_key
from jackfield.runtime.samples import metric_tags, not_finite, sequence_cells, sequence_tags
from jackfield.sdk.cells import Cell, join, rows_of

S = TypeVar("S")
T = TypeVar("T")

ATTEMPTS = 3  #: how often work is tried in total, if workers die
_LIST = 512  #: size at which a list of results is reported
_CHOSEN = ("temperature", "top_p", "top_k", "min_p", "log_probs")  #: sampling parameters that agents may change


@attrs.frozen
class Workers(Generic[T]):
    """Stateless workers or their stubs. Work on one group always goes to the same worker."""

    _workers: Sequence[T]

    def of(self, index: int) -> T:
        """Return the worker of the groups with an index."""
        return self._workers[index % len(self._workers)]

    def shares(self, work: Iterable[S], index: Callable[[S], int]) -> list[tuple[T, list[S]]]:
        """Return each worker's share of work on groups, of which ``index`` returns the index."""
        if len(self._workers) == 1:
            return [(self._workers[0], mine)] if (mine := list(work)) else []
        shares: dict[int, list[S]] = {}
        for each in work:
            shares.setdefault(index(each) % len(self._workers), []).append(each)
        return [(self._workers[number], share) for number, share in shares.items()]


def list_seconds(elapsed: float, share: float = 0.1) -> float:
    """Return how long the first result of a list waits for others, ``elapsed`` seconds after the beginning.

    The wait is a share of the age of the work, up to 2 s, so that stragglers of a long rollout share few lists.
    """
    return min(share * max(0.5, elapsed), 2.0)


async def together(
    work: Iterable[tuple[S, Coroutine[Any, Any, T]]],
    seconds: float | None = None,
    share: float = 0.1,
    every: float | None = None,
) -> AsyncIterator[list[tuple[S, asyncio.Task[T]]]]:
    """Run named work concurrently, and yield it in lists as it ends: what ends soon after the first one, up to a size.

    ``share`` is that of :func:`list_seconds`. What is still running after ``seconds``, or at the end, is cancelled. If
    nothing has ended ``every`` so many seconds, yield an empty list.
    """
    loop, ended, news = asyncio.get_running_loop(), list[asyncio.Task[T]](), asyncio.Event()
    began = loop.time()
    tasks = {loop.create_task(each): name for name, each in work}
    left = len(tasks)

    def note(task: asyncio.Task[T]) -> None:
        ended.append(task)
        if not task.cancelled():
            task.exception()  # or asyncio would log those that are not raised
        if len(ended) >= min(_LIST, left):
            news.set()
        elif len(ended) == 1:
            loop.call_later(list_seconds(loop.time() - began, share), news.set)

    def cancel() -> None:
        for task in tasks:
            task.cancel()

    for task in tasks:
        task.add_done_callback(note)
    timer = None if seconds is None else loop.call_later(seconds, cancel)
    try:
        while left:
            tick = None if every is None else loop.call_later(every, news.set)
            await news.wait()
            if tick is not None:
                tick.cancel()
            news.clear()
            found, ended[:] = ended[:_LIST], ended[_LIST:]
            left -= len(found)
            if ended:
                news.set()
            if found or every is not None:
                yield [(tasks.pop(task), task) for task in found]
    finally:
        if timer is not None:
            timer.cancel()
        cancel()


async def handle_each(
    clock: Clock,
    items: AsyncIterator[T],
    seconds: float,
    missing: Callable[[], str],
    handle: Callable[[T], Awaitable[object]],
    *,
    each: bool = False,
) -> None:
    """Handle the items of an iteration, ``seconds`` in all or for ``each``; ``missing`` names what has not come."""
    until = clock.time() + seconds
    async with aclosing(cast(AsyncGenerator[T, None], items)):
        while (item := await clock.wait_for(anext(items, None), until - clock.time(), missing())) is not None:
            await handle(item)
            until = clock.time() + seconds if each else until


async def resubmitted(
    work: Callable[[], Awaitable[T]],
    what: str,
    may_repeat: Callable[[JackfieldError], bool] = lambda error: isinstance(error, WorkerLost),
) -> T:
    """Run work, and again from its beginning if ``may_repeat`` says that an error lost it: three times in all.

    By default a worker's death is such an error. ``what`` says for messages what is done: "a sample is read".
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return await work()
        except JackfieldError as error:
            if not may_repeat(error):
                raise
            logging.getLogger("jackfield").warning("%s; %s again", one_line(error), what)
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
    """Rollouts of one group by agent loops, or answers from the data that replace one."""

    group: GroupKey
    task: Task
    rollouts: Mapping[int, int] = {0: 0}  #: sampling seed by number
    restart: int = 0  #: number of workers that died during them
    sampling: Mapping[str, Any] | None = None  #: None: copy the task's answers instead of generating
    greedy: int | None = None  #: the rollout without randomness
    seconds: float = 600.0  #: deadline of each rollout
    expert: bool = False  #: the answer joins samples of the policy, and gets all their columns
    evaluates: bool = False  #: keep the last sequence only, and report whole error texts
    answer: str | None = None  #: pattern of the answer in a response, whose digest is the tag ``answer``; None: no tag

    def failed(self, rollout: int, error: JackfieldError) -> RolloutReport:
        """Report a rollout that failed, or raise an error that every rollout would have."""
        every = isinstance(error, ConfigError | DataError | PluginError) or error.code == "rollout.stopped"
        every = every or self.sampling is None or (self.evaluates and is_lost(error))
        if every and not isinstance(error, WorkerLost):
            raise error
        text = str(error) if self.evaluates else one_line(error, located=False)
        return RolloutReport(group=str(self.group), rollout=rollout, error=text)


@attrs.define(eq=False)
class _Made:
    """The samples of a rollout, which are not written yet."""

    job: RolloutJob
    group: str
    rollout: int
    keys: tuple[str, ...]
    cells: Sequence[Mapping[str, Cell]]
    tags: tuple[Mapping[str, Any], ...]


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
    _vocabulary: int | None = attrs.field(default=None, kw_only=True)  #: the model's number of token ids
    _versions: bool = attrs.field(default=False, kw_only=True)  #: whether to write the weight version of each token

    async def run(self, jobs: Sequence[RolloutJob]) -> AsyncIterator[list[RolloutReport]]:
        """Run rollouts, or copy answers, write their samples to the backend, and yield reports, several at a time.

        The report of a rollout that failed has its error: one of the loop, ``agent.failed``, ``agent.output``,
        ``deadline``, or ``queue.lost`` if storage units die repeatedly. Errors that every rollout would have are
        raised: a ``ConfigError``, ``DataError`` or ``PluginError``, and any error of answers from the data.
        """
        work, seconds = list[tuple[tuple[RolloutJob, int], Any]](), max(job.seconds for job in jobs)
        for job in jobs:
            name, texts = str(job.group), dict[float | None, bytes]()
            work += [((job, number), self._rollout(job, name, number, texts)) for number in job.rollouts]
        async for ended in together(work, seconds):
            reports, made = list[RolloutReport](), dict[frozenset[str], list[_Made]]()
            for (job, number), task in ended:
                if task.cancelled():
                    reports.append(job.failed(number, too_late(seconds, f"the agent loop on task {job.task.id}")))
                elif isinstance(each := task.result(), RolloutReport):
                    reports.append(each)
                else:
                    made.setdefault(frozenset(each.cells[0]), []).append(each)
            for alike in made.values():
                reports += await self._write(alike)
            yield reports

    async def _rollout(
        self, job: RolloutJob, group: str, rollout: int, texts: dict[float | None, bytes]
    ) -> _Made | RolloutReport:
        """Run a rollout, or copy answers; return what is to be written, or the report of a failure."""
        how = {"supervised": job.sampling is None and not job.expert, "versions": self._versions}
        try:
            sequences, more, made = await self._sequences(job, rollout)
            cells = [sequence_cells(job.task, each, texts, made, **how) for each in sequences]
            tags = tuple([{**sequence_tags(job.task, each, rollout), **more} for each in sequences])
        except JackfieldError as error:
            return job.failed(rollout, error)
        except Exception as error:
            what, expected = "an agent loop returned values that cannot be used", "what AgentLoopOutput documents"
            details: dict[str, Any] = {"where": f"task {job.task.id}", "expected": expected, "found": error}
            return job.failed(rollout, AgentError(what, code="agent.output", **details))
        if not sequences:
            return RolloutReport(group=group, rollout=rollout)
        keys = tuple([sample_key(group, rollout, number, job.restart) for number in range(len(sequences))])
        return _Made(job, group, rollout, keys, cells, tags)

    async def _write(self, made: Sequence[_Made]) -> list[RolloutReport]:
        """Write the samples of rollouts at once, on the remaining storage units if some die; return their reports."""
        keys = [key for each in made for key in each.keys]
        cells, tags = [cell for each in made for cell in each.cells], [tags for each in made for tags in each.tags]
        columns = {name: join(name, [each[name] for each in cells]) for name in cells[0]}
        put = partial(self._values.put, made[0].job.group.partition, keys, columns, tags)
        try:
            written = await resubmitted(put, f"the values of samples {some(keys)} are written", is_lost)
        except QueueError as error:
            if not is_lost(error):
                raise
            return [each.job.failed(each.rollout, error) for each in made]
        reports, names, sizes = list[RolloutReport](), written.columns, iter(written.sizes)
        for each in made:
            own = Written(columns=names, sizes=tuple(islice(sizes, len(each.keys))), tags=each.tags)
            reports.append(RolloutReport(group=each.group, rollout=each.rollout, keys=each.keys, written=own))
        return reports

    async def _sequences(
        self, job: RolloutJob, rollout: int
    ) -> tuple[Sequence[AgentSequence], dict[str, Any], dict[str, Any]]:
        """Run an agent loop, or copy answers; return sequences, additional tags, and what rewards get beside text."""
        if job.sampling is None:
            return self._answers(job.task), {}, {}
        assert self._make_agent is not None, "a worker without replicas runs no agents"
        sampling = {**job.sampling, "seed": job.rollouts[rollout]}
        if rollout == job.greedy:
            sampling["temperature"] = 0.0
        asked: list[SamplingParams] = []
        try:
            output = await self._make_agent(asked.append).run(sampling, **job.task.agent_fields())
        except (JackfieldError, asyncio.CancelledError):
            raise
        except BaseException as error:  # SystemExit is the agent's, too
            message = f"{described(error)} (raised by the agent loop)"
            raise AgentError(message, where=f"task {job.task.id}") from error
        sequences = _checked(output, job.task, self._vocabulary)
        tags: dict[str, Any] = {"turns": output.num_turns, **metric_tags("agent", output.metrics)}
        names = [name for name in _CHOSEN if name in sampling] if asked else []
        own = {(name, getattr(one, name)) for one in asked for name in names if getattr(one, name) != sampling[name]}
        if own:  # the sampling parameters that the agent changed
            tags["own_sampling"] = ", ".join(sorted(f"{name}: {value}" for name, value in own))
        if job.answer is not None and sequences:
            matches = re.finditer(job.answer, self._tokenizer.decode(sequences[-1].response_ids))
            found = [match[min(1, match.re.groups)] for match in matches]
            tags["answer"] = xxhash.xxh3_64_hexdigest((found[-1] or "").encode()) if found else None
        made = {"turns": output.num_turns, "metrics": dict(output.metrics), "tool_calls": list(output.tool_calls)}
        plain = made == {"turns": 1, "metrics": {}, "tool_calls": []}
        return sequences[-1:] if job.evaluates else sequences, tags, {} if plain else made

    def _answers(self, task: Task) -> list[AgentSequence]:
        """Make sequences from the task's answers: two if the task has a rejected answer, else one.

        Answers are not sampled, so their log-probs are 0, and they have no score.
        """
        shared: Any = {"weight_versions": (), "reward": 0.0}
        shared["prompt_ids"] = tuple(encode_prompt(self._tokenizer, task, self._max_prompt_tokens))
        answers = [(tuple(ids), tuple(mask)) for ids, mask in encode_answers(self._tokenizer, task)]  # type: ignore[arg-type]
        return [
            AgentSequence(response_ids=ids, response_mask=mask, response_log_probs=(0.0,) * len(ids), **shared)
            for ids, mask in answers
        ]

    async def prompt_ids(self, task: Task, most: int) -> tuple[int, ...]:
        """Return the first ``most`` tokens of a task's prompt, within the prompt's limit."""
        limit = most if self._max_prompt_tokens is None else min(most, self._max_prompt_tokens)
        return encode_prompt(self._tokenizer, task, None)[:limit]

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


def _checked(output: AgentLoopOutput, task: Task, vocabulary: int | None) -> list[AgentSequence]:
    """Return the sequences, or raise ``agent.output`` or, for values of other types, any exception."""

    def refuse(what: str, expected: str, found: str, fix: str | None = None) -> NoReturn:
        message, where = f"an agent loop returned {what}", f"task {task.id}"
        raise AgentError(message, code="agent.output", where=where, expected=expected, found=found, fix=fix)

    turns, wrong = output.num_turns, not_finite(output.metrics)
    if wrong or not isinstance(turns, int) or turns < 1:
        expected = "num_turns of 1 or more, and finite numbers as metrics"
        refuse("metrics that are not numbers", expected, f"num_turns {turns!r}, metrics {wrong}")
    for each in (sequences := list(output.sequences)):
        if each.multi_modal_inputs:
            found = f"multi_modal_inputs {', '.join(sorted(map(str, each.multi_modal_inputs)))}"
            refuse("multi_modal_inputs, which no engine trains on", "tokens alone", found, "leave them empty")
        parts = (each.response_ids, each.response_mask, each.response_log_probs, each.weight_versions)
        lengths = list(map(len, parts))
        if lengths.count(lengths[0]) != 4 or not each.prompt_ids or not each.response_ids:
            names = ("response_ids", "response_mask", "response_log_probs", "weight_versions")
            expected = "a prompt, and a response whose ids, mask, log-probs and versions have one length above 0"
            found = f"prompt {len(each.prompt_ids)}, {dict(zip(names, lengths, strict=True))}"
            refuse("a sequence whose parts do not fit", expected, found)
        ids, reward = (*each.prompt_ids, *each.response_ids), 0.0 if each.reward is None else each.reward
        if min(ids) < 0 or max(ids) >= (vocabulary or math.inf):
            raise ValueError(f"token ids from {min(ids)} to {max(ids)}, and the model has {vocabulary}")
        odd = not_finite({"reward": reward, "step_id": each.step_id}) or {*each.response_mask} - {0, 1}
        if odd or not isinstance(each.finish_reason, str):
            raise ValueError(f"{odd} in reward, step_id or response_mask, finish_reason {each.finish_reason!r}")
    return sequences
