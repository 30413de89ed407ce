"""The agent worker: runs rollouts of groups, or copies answers, and writes their samples."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import attrs
import xxhash

from jackfield.abc.agent import AgentSequence, ChatTokenizer
from jackfield.clock import Clock, too_late
from jackfield.data.encoding import encode_answers, encode_inputs, encode_prompt, tokenizer_of
from jackfield.data.formats import Task
from jackfield.errors import (
    AgentError,
    ConfigError,
    DataError,
    DeadlineExceeded,
    JackfieldError,
    PluginError,
    QueueError,
    RolloutError,
    WorkerLost,
    some,
)
from jackfield.plugins.hooks import SampleRecord
from jackfield.queue import Values
from jackfield.queue.meta import GroupKey, RolloutReport, Written, sample_key
from jackfield.runtime.agents import AgentHost, Rollout, checked_output
from jackfield.runtime.samples import sampling_seed, sequence_cells, sequence_tags
from jackfield.runtime.tags import metric_tags
from jackfield.runtime.workers import is_lost, one_line, resubmitted, together
from jackfield.sdk.cells import Cell, column_from_rows, join, rows_of

_CHOSEN = ("temperature", "top_p", "top_k", "min_p", "log_probs")  #: sampling parameters that agents may change


@attrs.frozen(kw_only=True)
class RolloutJob:
    """Rollouts of one group by agent loops, or answers from the data that replace one."""

    group: GroupKey
    task: Task
    rollouts: Mapping[int, int] = {0: 0}  #: sampling seed by number
    extra: tuple[int, ...] = ()  #: seeds of rollouts beyond these; those that complete first get the numbers
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
class _Group:
    """The rollouts of a group that one call of a worker runs. If there are extra ones, the first complete are kept."""

    job: RolloutJob
    name: str
    left: int  #: rollouts that have not ended
    free: list[int]  #: numbers that no rollout has got
    running: set[asyncio.Task[Any]] = attrs.field(factory=set)
    texts: dict[Any, bytes] = attrs.field(factory=dict)

    @classmethod
    def of(cls, job: RolloutJob) -> _Group:
        """Return the group of a job."""
        return cls(job, str(job.group), len(job.rollouts) + len(job.extra), list(job.rollouts))

    def take(self, number: int) -> int | None:
        """Return the number of a rollout that is complete; None: it is not needed. After the last, cancel the rest."""
        if self.job.extra:
            number = self.free[0] if self.free else -1
        if number not in self.free:
            return None
        self.free.remove(number)
        self.left -= 1
        for task in () if self.free else self.running - {asyncio.current_task()}:
            task.cancel()
        return number

    def fail(self, number: int, error: JackfieldError) -> RolloutReport | None:
        """Report a failure, unless it is not needed or another rollout may still take the place."""
        self.left -= 1
        if not self.free:
            return None
        if self.job.extra:
            if self.left >= len(self.free):
                self.job.failed(0, error)  # raises what every rollout would have
                return None
            number = self.free[0]
        self.free.remove(number)
        return self.job.failed(number, error)


@attrs.define(eq=False)
class AgentWorker:
    """Runs agent loops concurrently."""

    _values: Values
    _tokenizer: ChatTokenizer  #: of the model
    _clock: Clock
    _host: AgentHost | None  #: runs the loops; None: no agents
    #: for samples that copy the data's answers; agents find their limit in their context
    _max_prompt_tokens: int | None = attrs.field(default=None, kw_only=True)
    _cuts_prompts: bool = attrs.field(default=False, kw_only=True)  #: whether a longer prompt loses its first tokens
    _vocabulary: int | None = attrs.field(default=None, kw_only=True)  #: the model's number of token ids
    _versions: bool = attrs.field(default=False, kw_only=True)  #: whether to write the weight version of each token
    _arrays: bool = attrs.field(default=False, kw_only=True)  #: whether to write ``multi_modal_inputs``
    _counts: dict[str, float] = attrs.field(factory=dict, init=False)  #: of dropped rollouts, for the next report

    async def run(self, jobs: Sequence[RolloutJob]) -> AsyncIterator[list[RolloutReport]]:
        """Run rollouts, or copy answers, write their samples to the backend, and yield reports, several at a time.

        The report of a rollout that failed has its error: one of the loop, ``agent.failed``, ``agent.output``,
        ``deadline``, or ``queue.lost`` if storage units die repeatedly. Errors that every rollout would have are
        raised: a ``ConfigError``, ``DataError`` or ``PluginError``, and any error of answers from the data.
        """
        work, seconds = list[tuple[tuple[_Group, int], Any]](), max(job.seconds for job in jobs)
        for group in map(_Group.of, jobs):
            numbers = [*group.job.rollouts.items(), *((-1, seed) for seed in group.job.extra)]
            work += [((group, number), self._rollout(group, number, seed)) for number, seed in numbers]
        if self._host is not None and self._host.settings.concurrency is not None:
            seconds *= math.ceil(len(work) / self._host.settings.concurrency)  # the host counts from each one's turn
        async for ended in together(work, seconds):
            reports, made = list[RolloutReport](), dict[frozenset[str], list[_Made]]()
            for (group, number), task in ended:
                each: _Made | RolloutReport | None
                if task.cancelled():
                    late = too_late(seconds, f"the agent loop on task {group.job.task.id}")
                    each = group.fail(number, late)
                else:
                    each = task.result()
                if isinstance(each, _Made):
                    made.setdefault(frozenset(each.cells[0]), []).append(each)
                elif each is not None:
                    reports.append(each)
            for alike in made.values():
                reports += await self._write(alike)
            yield reports

    async def _rollout(self, group: _Group, number: int, seed: int) -> _Made | RolloutReport | None:
        """Run a rollout, or copy answers; return what is to be written, or the report of a failure.

        None: it was not needed, or another rollout may take its place.
        """
        job, notes = group.job, None if self._host is None else self._host.rollout(group.job.task)
        task = asyncio.current_task()
        assert task is not None
        group.running.add(task)
        try:
            return await self._made(group, number, seed, notes)
        except asyncio.CancelledError:
            if group.free:
                raise
            self._drop(notes)
            return None
        except JackfieldError as error:
            return group.fail(number, error)
        except Exception as error:
            what, expected = "an agent loop returned values that cannot be used", "what AgentLoopOutput documents"
            details: dict[str, Any] = {"where": f"task {job.task.id}", "expected": expected, "found": error}
            return group.fail(number, AgentError(what, code="agent.output", **details))
        finally:
            group.running.discard(task)

    async def _made(self, group: _Group, number: int, seed: int, notes: Rollout | None) -> _Made | RolloutReport | None:
        job = group.job
        sequences, more, told = await self._tried(job, number, seed, notes)
        how = {"versions": self._versions, "arrays": self._arrays}
        how["supervised"] = job.sampling is None and not job.expert
        rest = {name: each for name, each in told.items() if name != "events"}  # the first sequence has them
        each_told = [told, *[rest] * (len(sequences) - 1)]
        cells = [
            sequence_cells(job.task, each, group.texts, own, **how)
            for each, own in zip(sequences, each_told, strict=False)
        ]
        tags = [{**sequence_tags(job.task, each, number), **more} for each in sequences]
        if not sequences and job.extra:
            raise AgentError("an agent loop returned no sequence", code="agent.output", where=f"task {job.task.id}")
        if (rollout := group.take(number)) is None:
            self._drop(notes)
            return None
        if not sequences:
            return RolloutReport(group=group.name, rollout=rollout)
        keys = tuple([sample_key(group.name, rollout, place, job.restart) for place in range(len(sequences))])
        return _Made(job, group.name, rollout, keys, cells, tuple([{**each, "rollout": rollout} for each in tags]))

    def _drop(self, notes: Rollout | None) -> None:
        """Count a rollout that is not needed, also by the length that it had."""
        tokens = 0 if notes is None else notes.tokens
        for name in ("dropped/rollouts", f"dropped/rollouts/to_{1 << max(tokens - 1, 0).bit_length()}_tokens"):
            self._counts[name] = self._counts.get(name, 0.0) + 1.0

    async def _tried(
        self, job: RolloutJob, number: int, seed: int, notes: Rollout | None
    ) -> tuple[Sequence[AgentSequence], dict[str, Any], dict[str, Any]]:
        """Make the sequences of a rollout, again if it fails and the settings allow it."""
        retries = 0 if notes is None or self._host is None or job.evaluates else self._host.settings.retries
        for retry in range(retries + 1):
            try:
                return await self._sequences(job, number, sampling_seed(seed, retry) if retry else seed, notes)
            except (AgentError, DeadlineExceeded, RolloutError) as error:
                if retry == retries or error.code == "rollout.stopped":
                    raise
                assert notes is not None
                notes.metric("retries", 1.0)
        raise AssertionError("unreachable")

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
            counts, self._counts = self._counts, {}
            own = Written(columns=names, sizes=tuple(islice(sizes, len(each.keys))), tags=each.tags, metrics=counts)
            reports.append(RolloutReport(group=each.group, rollout=each.rollout, keys=each.keys, written=own))
        return reports

    async def _sequences(
        self, job: RolloutJob, rollout: int, seed: int, notes: Rollout | None
    ) -> tuple[Sequence[AgentSequence], dict[str, Any], dict[str, Any]]:
        """Run an agent loop, or copy answers; return sequences, additional tags, and what rewards get beside text."""
        if job.sampling is None:
            return self._answers(job.task), {}, {}
        assert self._host is not None, "a worker without replicas runs no agents"
        assert notes is not None
        sampling = {**job.sampling, "seed": seed}
        if rollout == job.greedy:
            sampling["temperature"] = 0.0
        output = await self._host.run(notes, sampling, job.seconds)
        sequences, asked = checked_output(output, notes, self._vocabulary, self._arrays), notes.asked
        sequences = notes.routes.added(sequences)
        metrics = {**notes.metrics, **output.metrics}
        tags: dict[str, Any] = {"turns": output.num_turns, **metric_tags("agent", metrics)}
        if output.end_reason:
            tags["end_reason"] = output.end_reason
        names = [name for name in _CHOSEN if name in sampling] if asked else []
        own = {(name, getattr(one, name)) for one in asked for name in names if getattr(one, name) != sampling[name]}
        if own:  # the sampling parameters that the agent changed
            tags["own_sampling"] = ", ".join(sorted(f"{name}: {value}" for name, value in own))
        if job.answer is not None and sequences:
            matches = re.finditer(job.answer, self._tokenizer.decode(sequences[-1].response_ids))
            found = [match[min(1, match.re.groups)] for match in matches]
            tags["answer"] = xxhash.xxh3_64_hexdigest((found[-1] or "").encode()) if found else None
        made = {"turns": output.num_turns, "metrics": metrics, "tool_calls": list(output.tool_calls)}
        plain = made == {"turns": 1, "metrics": {}, "tool_calls": []} and not output.end_reason
        made |= {"end_reason": output.end_reason, "events": notes.events}
        return sequences[-1:] if job.evaluates else sequences, tags, {} if plain else made

    def _answers(self, task: Task) -> list[AgentSequence]:
        """Make sequences from the task's answers: two if the task has a rejected answer, else one.

        Answers are not sampled, so their log-probs are 0, and they have no score.
        """
        shared: Any = {"weight_versions": (), "reward": 0.0}
        shared["prompt_ids"] = encode_prompt(self._tokenizer, task, self._max_prompt_tokens, cuts=self._cuts_prompts)
        own = tokenizer_of(self._tokenizer, task)
        if task.tokens is None and (inputs := encode_inputs(own, task.messages)[1]):
            if not self._arrays:
                what, fix = "the answer to a task with images", "choose an agent with the capability multi_modal"
                raise AgentError(what, code="agent.output", where=f"task {task.id}", expected="texts alone", fix=fix)
            shared["multi_modal_inputs"] = inputs
        answers = [(tuple(ids), tuple(mask)) for ids, mask in encode_answers(self._tokenizer, task)]  # type: ignore[arg-type]
        return [
            AgentSequence(response_ids=ids, response_mask=mask, response_log_probs=(0.0,) * len(ids), **shared)
            for ids, mask in answers
        ]

    async def prompt_ids(self, task: Task, most: int) -> tuple[int, ...]:
        """Return the first ``most`` tokens of a task's prompt, within the prompt's limit."""
        limit = most if self._max_prompt_tokens is None else min(most, self._max_prompt_tokens)
        return encode_prompt(self._tokenizer, task, None)[:limit]

    async def replace_rewards(self, partition: str, rewards: Mapping[str, float]) -> None:
        """Write rewards that came late in the place of those of samples, by key."""
        import torch

        column = column_from_rows([torch.tensor([reward]) for reward in rewards.values()])
        await self._values.put(partition, list(rewards), {"reward": column})

    async def records(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], *, with_reward: bool
    ) -> tuple[SampleRecord, ...]:
        """Return samples as text for display; ``reward`` is None without ``with_reward``."""
        names = ("prompt_ids", "response_ids", "response_mask", *(("reward",) if with_reward else ()))
        more = ("rollout_log_probs", "task", *(("weight_versions",) if self._versions else ()))
        try:
            columns = await self._values.get(partition, keys, (*names, *more))
        except QueueError as error:
            if error.code != "queue.column":  # answers from the data have no log-probs
                raise
            columns = await self._values.get(partition, keys, names)
        rows = {name: rows_of(column) for name, column in columns.items()}
        told = rows.pop("task", [{}] * len(keys))
        rows = {name: [row.tolist() for row in values] for name, values in rows.items()}
        decode, none = self._tokenizer.decode, [()] * len(keys)
        rewards = [one if isinstance(one, list) else [one] for one in rows.get("reward", none)]
        return tuple(
            SampleRecord(
                key=key,
                prompt=decode(rows["prompt_ids"][index], skip_special_tokens=False),
                response=decode(rows["response_ids"][index], skip_special_tokens=False),
                reward=sum(rewards[index]) if with_reward else None,
                response_ids=tuple(rows["response_ids"][index]),
                response_mask=tuple(map(int, rows["response_mask"][index])),
                tags=tags[index],
                log_probs=tuple(round(value, 6) for value in rows.get("rollout_log_probs", none)[index]),
                weight_versions=tuple(rows.get("weight_versions", none)[index]),
                token_rewards=tuple(rewards[index]) if len(rewards[index]) > 1 else (),
                rollout=told[index].get("rollout", {}),
            )
            for index, key in enumerate(keys)
        )
