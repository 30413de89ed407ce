"""Makes samples: runs agent loops, keeps what they yield, and stores it once the queue's controller has named the rows.

The controller sees handles, tags and sizes; token ids go from here to the queue's backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    WorkerLost,
    described,
)
from jackfield.plugins.hooks import SampleRecord
from jackfield.queue import Rows, Written, rows_of
from jackfield.queue.rows import check_columns
from jackfield.runtime.samples import (
    agent_tags,
    expert_columns,
    not_finite,
    sequence_columns,
    sequence_tags,
    supervised_columns,
    supervised_tags,
)
from jackfield.workers.router import Generates, Router

__all__ = ["AgentWorker", "RunOrder", "RunProduct", "ends_the_run", "run_agent"]


@attrs.frozen(kw_only=True)
class RunOrder:
    """One run of an agent loop, to be made."""

    id: str  #: under which the worker keeps what the run yields
    task: Task
    run: int = 0
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    seconds: float = 600.0  #: the run's deadline


@attrs.frozen(kw_only=True)
class RunProduct:
    """What a run has yielded, without the values: the worker keeps those."""

    id: str
    written: Written  #: what :meth:`AgentWorker.store` will write
    tags: tuple[Mapping[str, Any], ...]  #: of each row


class AgentWorker:
    """Runs agent loops side by side."""

    def __init__(
        self,
        rows: Rows,
        tokenizer: ChatTokenizer,
        clock: Clock,
        make_agent: Callable[[Callable[[SamplingParams], None]], AgentLoopBase] | None,
        *,
        max_prompt_tokens: int | None = None,
        router: Router | None = None,
    ) -> None:
        """
        Args:
            rows: where samples go.
            tokenizer: of the model.
            clock: through which every wait goes.
            make_agent: a fresh loop for each run, which tells of the sampling parameters of each of its requests;
                None where nobody generates.
            max_prompt_tokens: of a sample of the data's own answers; agents have the limit in their context.
            router: through which the agents generate.
        """
        self._rows = rows
        self._tokenizer = tokenizer
        self._clock = clock
        self._make_agent = make_agent
        self._max_prompt_tokens = max_prompt_tokens
        self._router = router
        self._kept: dict[str, Mapping[str, Column]] = {}

    async def run(self, order: RunOrder, *, last: bool = False) -> RunProduct:
        """Run a loop to its end and keep its sequences (``last``: only the last one).

        Raises:
            JackfieldError: as :func:`run_agent`.
        """
        assert self._make_agent is not None, "a worker without replicas runs no agents"
        asked: list[SamplingParams] = []
        output = await run_agent(self._make_agent(asked.append), order.sampling, order.task, self._clock, order.seconds)
        sequences = output.sequences[-1:] if last else output.sequences
        more = {**agent_tags(output), **_own_sampling(order.sampling, asked)}
        tags = [{**sequence_tags(order.task, sequence, order.run), **more} for sequence in sequences]
        return self._keep(order.id, sequence_columns(order.task, sequences), tags)

    async def route(self, servers: Mapping[int, Generates], seconds: float) -> int:
        """Have agents generate on these replicas from now on: :meth:`Router.route`."""
        assert self._router is not None, "a worker without replicas runs no agents"
        return await self._router.route(servers, seconds)

    async def prompt_ids(self, task: Task, most: int) -> tuple[int, ...]:
        """The first tokens of a task's prompt, ``most`` of them at most, and no more than a prompt may have."""
        limit = most if self._max_prompt_tokens is None else min(most, self._max_prompt_tokens)
        return self._tokenizer.encode_chat(task.messages)[:limit]

    async def answer(self, order: RunOrder, *, expert: bool = False) -> RunProduct:
        """Keep the task's own answer as a sample to learn from; a task with a worse answer, too, gives two rows.

        Args:
            order: the task, and the sample's id.
            expert: the row stands among those that the policy generated, and has their columns.

        Raises:
            DataError: the task has none, or its prompt is too long.
        """
        task = order.task
        prompt_ids = encode_prompt(self._tokenizer, task, self._max_prompt_tokens)
        answers = encode_answers(self._tokenizer, task)  # type: ignore[arg-type]
        tags = [supervised_tags(task, prompt_ids, mask) for _, mask in answers]
        make = expert_columns if expert else supervised_columns
        return self._keep(order.id, make(task, prompt_ids, answers), tags)

    def _keep(self, id: str, columns: Mapping[str, Column], tags: Sequence[Mapping[str, Any]]) -> RunProduct:
        self._kept[id] = columns
        sizes = check_columns(columns, len(tags))
        return RunProduct(id=id, written=Written(columns=tuple(columns), sizes=sizes), tags=tuple(tags))

    async def store(self, id: str, partition: str, keys: Sequence[str]) -> None:
        """Write what a run has yielded under ``keys``, and forget it once that is done.

        Raises:
            WorkerLost: when this worker does not have it (it was started again in the meantime).
        """
        columns = self._kept.get(id)
        if columns is None:
            raise WorkerLost(f"the worker that made sample {id} is gone, and with it what it had made", where=id)
        await self._rows.put(partition, keys, columns)
        self._kept.pop(id, None)

    async def discard(self, id: str) -> None:
        """Forget what a run has yielded; unknown: no effect."""
        self._kept.pop(id, None)

    async def records(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], *, with_reward: bool
    ) -> tuple[SampleRecord, ...]:
        """Samples in a form that people read; ``reward`` is None without ``with_reward``."""
        names = ("prompt_ids", "response_ids", "response_mask", *(("reward",) if with_reward else ()))
        columns = await self._rows.get(partition, keys, names)
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
    """Whether any other run would fail likewise: the input, the configuration or a replica is what is wrong."""
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
