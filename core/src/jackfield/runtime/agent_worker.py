"""The agent worker: it runs agent loops and writes their samples to the queue's backend.

The controller sees only keys, tags and sizes; token ids go directly to the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import attrs

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence, ChatTokenizer
from jackfield.abc.rollout import SamplingParams
from jackfield.clock import Clock
from jackfield.data.tasks import Task
from jackfield.data.tokens import encode_answers, encode_prompt
from jackfield.errors import AgentError, ConfigError, DataError, JackfieldError, PluginError, described
from jackfield.plugins.hooks import SampleRecord
from jackfield.queue import Values
from jackfield.queue.meta import RolloutReport
from jackfield.runtime.samples import metric_tags, not_finite, sequence_columns, sequence_tags
from jackfield.runtime.workers import is_lost, resubmitted
from jackfield.sdk.cells import rows_of


@attrs.frozen(kw_only=True)
class RolloutJob:
    """One rollout of an agent loop, or answers from the data that replace one."""

    id: str  #: prefix of the keys of its samples
    partition: str
    group: str
    rollout: int = 0
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

        Raises:
            JackfieldError: An error of the loop, ``agent.failed``, ``agent.output`` or ``deadline``.
            DataError: If the task has no answer to copy, or its prompt is too long.
            QueueError: ``queue.lost`` if storage units die repeatedly.
        """
        sequences, more = await self._sequences(job)
        tags = tuple({**sequence_tags(job.task, each, job.rollout), **more} for each in sequences)
        columns = sequence_columns(job.task, sequences, supervised=job.sampling is None and not job.expert)
        keys = tuple(f"{job.id}/{number}" for number in range(len(tags)))
        put = partial(self._values.put, job.partition, keys, columns, tags)
        written = await resubmitted(put, f"sample {job.id}", is_lost)  # a retry puts samples on the remaining units
        return RolloutReport(group=job.group, rollout=job.rollout, keys=keys, written=written)

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


def ends_the_run(error: JackfieldError) -> bool:
    """Return whether an error would fail every rollout: input, config or replica is wrong."""
    return isinstance(error, ConfigError | DataError | PluginError) or error.code == "rollout.stopped"


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
