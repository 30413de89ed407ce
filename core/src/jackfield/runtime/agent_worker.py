"""Makes samples: runs agent loops and writes what they yield to the queue's backend.

The controller sees keys, tags and sizes; token ids go from here to the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence, ChatTokenizer
from jackfield.abc.rollout import SamplingParams
from jackfield.abc.transfer_queue import Column
from jackfield.clock import Clock
from jackfield.data.tasks import Task
from jackfield.data.tokens import encode_answers, encode_prompt
from jackfield.errors import (
    AgentError,
    ConfigError,
    DataError,
    JackfieldError,
    PluginError,
    described,
)
from jackfield.plugins.hooks import SampleRecord
from jackfield.queue import RolloutReport, Values, rows_of
from jackfield.routing.router import Generates, Router
from jackfield.runtime.samples import (
    agent_tags,
    expert_columns,
    not_finite,
    sequence_columns,
    sequence_tags,
    supervised_columns,
    supervised_tags,
)
from jackfield.runtime.workers import written_again


@attrs.frozen(kw_only=True)
class RolloutJob:
    """One rollout of an agent loop, or an answer of the data that stands for one."""

    id: str  #: what the keys of its samples begin with
    partition: str
    group: str
    rollout: int = 0
    task: Task
    sampling: Mapping[str, Any] | None = None  #: None: copy the task's own answers
    seconds: float = 600.0  #: the rollout's deadline
    expert: bool = False  #: an answer stands among samples of the policy, and has their columns
    last: bool = False  #: keep the last sequence alone


class AgentWorker:
    """Runs agent loops side by side."""

    def __init__(
        self,
        values: Values,
        tokenizer: ChatTokenizer,
        clock: Clock,
        make_agent: Callable[[Callable[[SamplingParams], None]], AgentLoopBase] | None,
        *,
        max_prompt_tokens: int | None = None,
        router: Router | None = None,
    ) -> None:
        """
        Args:
            values: writes samples.
            tokenizer: of the model.
            clock: through which every wait goes.
            make_agent: a fresh loop for each run, which tells of the sampling parameters of each of its requests;
                None where nothing is generated.
            max_prompt_tokens: of a sample of the data's own answers; agents have the limit in their context.
            router: through which the agents generate.
        """
        self._values = values
        self._tokenizer = tokenizer
        self._clock = clock
        self._make_agent = make_agent
        self._max_prompt_tokens = max_prompt_tokens
        self._router = router

    async def run(self, job: RolloutJob) -> RolloutReport:
        """Do a rollout to its end, or copy the task's answers, and write the samples to the queue's backend.

        Raises:
            JackfieldError: as :func:`run_agent`.
            DataError: the task has no answer, or its prompt is too long.
            QueueError: ``queue.lost`` where storage units die again and again.
        """
        columns, tags = self._answers(job) if job.sampling is None else await self._sequences(job, job.sampling)
        keys = tuple(f"{job.id}/{sequence}" for sequence in range(len(tags)))
        written = await written_again(partial(self._values.put, job.partition, keys, columns, tags))
        return RolloutReport(
            group=job.group,
            rollout=job.rollout,
            keys=keys,
            columns=written.columns,
            sizes=written.sizes,
            tags=tags,
        )

    async def _sequences(
        self, job: RolloutJob, sampling: Mapping[str, Any]
    ) -> tuple[Mapping[str, Column], tuple[Mapping[str, Any], ...]]:
        assert self._make_agent is not None, "a worker without replicas runs no agents"
        asked: list[SamplingParams] = []
        output = await run_agent(self._make_agent(asked.append), sampling, job.task, self._clock, job.seconds)
        sequences = output.sequences[-1:] if job.last else output.sequences
        more = {**agent_tags(output), **_own_sampling(sampling, asked)}
        tags = tuple({**sequence_tags(job.task, sequence, job.rollout), **more} for sequence in sequences)
        return sequence_columns(job.task, sequences), tags

    def _answers(self, job: RolloutJob) -> tuple[Mapping[str, Column], tuple[Mapping[str, Any], ...]]:
        """Make samples of the task's own answers; a task with a worse answer, too, gives two."""
        prompt_ids = encode_prompt(self._tokenizer, job.task, self._max_prompt_tokens)
        answers = encode_answers(self._tokenizer, job.task)  # type: ignore[arg-type]
        tags = tuple(supervised_tags(job.task, prompt_ids, mask) for _, mask in answers)
        make = expert_columns if job.expert else supervised_columns
        return make(job.task, prompt_ids, answers), tags

    async def route(self, servers: Mapping[int, Generates], seconds: float) -> int:
        """Have agents generate on these replicas from now on: :meth:`Router.route`."""
        assert self._router is not None, "a worker without replicas runs no agents"
        return await self._router.route(servers, seconds)

    async def prompt_ids(self, task: Task, most: int) -> tuple[int, ...]:
        """The first tokens of a task's prompt, ``most`` of them at most, and no more than a prompt may have."""
        limit = most if self._max_prompt_tokens is None else min(most, self._max_prompt_tokens)
        return self._tokenizer.encode_chat(task.messages)[:limit]

    async def records(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], *, with_reward: bool
    ) -> tuple[SampleRecord, ...]:
        """Samples in a form that people read; ``reward`` is None without ``with_reward``."""
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


def _own_sampling(given: Mapping[str, Any], asked: Iterable[SamplingParams]) -> dict[str, str]:
    """A tag that says what an agent has asked for in the place of what it was given."""
    names = ("temperature", "top_p", "top_k", "min_p", "log_probs")
    pairs = {(name, getattr(one, name)) for one in asked for name in names if name in given}
    own = sorted(f"{name}: {value}" for name, value in pairs if value != given[name])
    return {"own_sampling": ", ".join(own)} if own else {}


def ends_the_run(error: JackfieldError) -> bool:
    """Return whether every rollout would fail likewise: input, configuration or a replica is wrong."""
    return isinstance(error, ConfigError | DataError | PluginError) or error.code == "rollout.stopped"


async def run_agent(
    agent: AgentLoopBase, sampling: Mapping[str, Any], task: Task, clock: Clock, seconds: float
) -> AgentLoopOutput:
    """Run an agent loop once, check what it returns, and give every failure a name.

    Raises:
        JackfieldError: the loop's own, ``agent.failed``, ``agent.output`` or ``deadline``.
    """
    try:
        output = await clock.wait_for(
            agent.run(sampling, **task.agent_fields()), seconds, f"the agent loop on task {task.id}"
        )
    except JackfieldError:
        raise
    except Exception as error:
        raise AgentError(f"{described(error)} (raised by the agent loop)", where=f"task {task.id}") from error
    _check_output(output, task)
    for sequence in output.sequences:
        _check(sequence, task)
    return output


def _check_output(output: AgentLoopOutput, task: Task) -> None:
    """Refuse what no step could show, and inputs that no engine would see."""
    turns = output.num_turns
    wrong = not_finite(output.metrics)
    if wrong or not isinstance(turns, int) or turns < 1:
        raise AgentError(
            "an agent loop returned metrics that are not numbers",
            code="agent.output",
            where=f"task {task.id}",
            expected="num_turns of 1 or more, and finite numbers as metrics",
            found=f"num_turns {turns!r}, metrics {wrong}",
        )
    images = sorted({name for sequence in output.sequences for name in sequence.multi_modal_inputs})
    if images:
        raise AgentError(
            "an agent loop returned multi_modal_inputs, which no engine trains on",
            code="agent.output",
            where=f"task {task.id}",
            expected="sequences of tokens alone",
            found=f"multi_modal_inputs {', '.join(map(str, images))}",
            fix="leave multi_modal_inputs empty",
        )


def _check(sequence: AgentSequence, task: Task) -> None:
    lengths = {
        "response_ids": len(sequence.response_ids),
        "response_mask": len(sequence.response_mask),
        "response_log_probs": len(sequence.response_log_probs),
        "weight_versions": len(sequence.weight_versions),
    }
    if len(set(lengths.values())) != 1 or not sequence.prompt_ids or not sequence.response_ids:
        raise AgentError(
            "an agent loop returned a sequence whose parts do not fit",
            code="agent.output",
            where=f"task {task.id}",
            expected="a prompt, and a response whose ids, mask, log-probs and versions have one length above 0",
            found=f"prompt {len(sequence.prompt_ids)}, {lengths}",
        )
