"""Helpers for the suite of agents: a worker as a run has it, rollouts in it, and what must hold of their output."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from packaging.version import Version

from jackfield.abc.agent import AgentContext, AgentLoopBase, AgentLoopOutput, AgentSequence, AgentWorkerContext
from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield_conformance.registry import Subject
from jackfield_conformance.support.agent_model import FIRST_MODEL_TOKEN, Letters, Model
from jackfield_conformance.support.agent_services import Services
from jackfield_conformance.support.expecting import assert_no_tasks, cancelled, finite
from jackfield_conformance.support.processes import descendants, names, remaining

PAGE = "docs/plugins/agent.md#"

GRACE_SECONDS = 5.0  #: until a cancelled rollout has ended

#: Sampling parameters of every rollout.
SAMPLING: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "max_new_tokens": 64, "seed": 11}

_QUESTION = "What is two and two?"
_TASKS: tuple[Mapping[str, Any], ...] = (
    {"fields": {"messages": [{"role": "user", "content": _QUESTION}], "ground_truth": "4"}, "answers": ["4"]},
    {
        "fields": {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is three and three? Think first."},
            ],
            "ground_truth": "6",
        },
        "answers": ["It is six: 6"],
    },
)


@attrs.frozen(kw_only=True)
class ScriptedTask:
    """A task, and the model's answers to it, call by call; the last is repeated."""

    fields: Mapping[str, Any]
    answers: tuple[str, ...]


def tasks(subject: Subject) -> list[ScriptedTask]:
    """Return the fixture's ``tasks``, or two sums."""
    made = []
    for number, given in enumerate(subject.fixture.get("tasks") or _TASKS):
        fields = {"task_id": f"conformance/{number}", "data_source": "conformance", "ground_truth": ""}
        fields.update(given["fields"])
        assert fields.get("messages"), "the fixture gives a task without messages"
        made.append(ScriptedTask(fields=fields, answers=tuple(given.get("answers") or ("4",))))
    return made


@attrs.frozen(kw_only=True)
class Block:
    """The place of one call's tokens in a sequence."""

    request: GenerateRequest
    result: GenerateResult
    sequence: AgentSequence
    start: int  #: in ``response_ids``

    @property
    def end(self) -> int:
        """Return the index after the last token."""
        return self.start + len(self.result.token_ids)


@attrs.frozen(kw_only=True)
class Trial:
    """A finished rollout: the model with its requests, the other services, and the agent's output."""

    model: Model
    services: Services
    output: AgentLoopOutput

    def blocks(self, sequence: AgentSequence) -> list[Block]:
        """Return the calls whose tokens are in this sequence, in order; require that their tokens are there whole."""
        found = []
        for request, result in self.model.calls:
            own = [token for token in result.token_ids if token >= FIRST_MODEL_TOKEN]
            if not own or own[0] not in sequence.response_ids:
                continue
            start = sequence.response_ids.index(own[0])
            there = tuple(sequence.response_ids[start : start + len(result.token_ids)])
            assert there == result.token_ids, (
                f"the model's tokens {_short(result.token_ids)} of request {result.request_id} are in the response as"
                f" {_short(there)}"
            )
            found.append(Block(request=request, result=result, sequence=sequence, start=start))
        return sorted(found, key=lambda block: block.start)


@attrs.frozen(kw_only=True, eq=False)
class Rollout:
    """A rollout that has not run yet."""

    agent: AgentLoopBase
    model: Model
    services: Services
    task: ScriptedTask
    sampling: Mapping[str, Any]
    has_life: bool  #: the agent knows ``start``, ``finish`` and ``close``

    async def run(self, fields: Mapping[str, Any] | None = None) -> Trial:
        """Run it as a run does, and finish it however it ends; ``fields`` are added to the task's."""
        return await self.run_with(dict(self.sampling), copy.deepcopy({**self.task.fields, **(fields or {})}))

    async def run_with(self, sampling: dict[str, Any], fields: dict[str, Any]) -> Trial:
        """Run it with just these arguments."""
        try:
            output = await self.agent.run(sampling, **fields)
        finally:
            try:
                if self.has_life:
                    await self.agent.finish()
            finally:
                self.services.end()
        assert isinstance(output, AgentLoopOutput), f"run returned {type(output).__name__}, expected an AgentLoopOutput"
        return Trial(model=self.model, services=self.services, output=output)


@attrs.frozen(kw_only=True, eq=False)
class Host:
    """A worker that runs rollouts of one agent, which ``start`` has prepared."""

    subject: Subject
    shared: Any  #: what ``start`` returned
    folder: Path
    tokenizer: Letters = attrs.field(factory=Letters)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    @property
    def tasks(self) -> list[ScriptedTask]:
        """The fixture's tasks."""
        return tasks(self.subject)

    def model(self, task: ScriptedTask, **how: Any) -> Model:
        """Return a model with the task's script."""
        return Model(task.answers, self.tokenizer, **how)

    def rollout(
        self,
        task: ScriptedTask,
        *,
        agent: AgentLoopBase | None = None,
        model: Model | None = None,
        services: Services | None = None,
        sampling: Mapping[str, Any] = SAMPLING,
        tools: Mapping[str, Any] | None = None,
        chat: Mapping[str, Any] | None = None,
        **context: Any,
    ) -> Rollout:
        """Make a rollout, by default of a new agent and a model with the task's script.

        ``tools`` and ``chat`` say how these behave, ``context`` has further fields of the ``AgentContext``.
        """
        model = model or self.model(task)
        place = self.folder.parent / f"rollout-{next(self._numbers)}"
        services = services or Services.of(self.subject.fixture, model, place, tools=tools, chat=chat)
        agent = agent or self.agent(services, **{"generate": model, **context})
        made: dict[str, Any] = {"model": model, "services": services, "task": task, "sampling": sampling}
        return Rollout(agent=agent, has_life=_has_life(self.subject), **made)

    def agent(self, services: Services, **context: Any) -> AgentLoopBase:
        """Make an agent as a run does; ``context`` needs ``generate`` at least."""
        fields: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "shared": self.shared,
            "tools": services.tools,
            "chat": services.chat,
            "folder": services.folder,
            "metric": services.metric,
            "event": services.event,
            "seed": 3,
        }
        made: AgentLoopBase = self.subject.make(AgentContext(**{**fields, **context}))
        return made

    async def play(self, task: ScriptedTask, *, fields: Mapping[str, Any] | None = None, **how: Any) -> Trial:
        """Make a rollout and run it; the arguments are those of :meth:`rollout` and :meth:`Rollout.run`."""
        return await self.rollout(task, **how).run(fields)

    async def played(self) -> list[tuple[Trial, AgentSequence, list[Block]]]:
        """Run a rollout of each task; return all sequences, each with its rollout and its calls."""
        found = []
        for task in self.tasks:
            trial = await self.play(task)
            found += [(trial, sequence, trial.blocks(sequence)) for sequence in trial.output.sequences]
        assert found, "no task yields a sequence"
        return found

    async def cancel(self, rollout: Rollout, hangs: asyncio.Event, what: str) -> None:
        """Cancel a rollout once it waits for what never comes; require that nothing of it continues.

        What an agent with a life in the worker keeps there, such as a pool, is not of the rollout.
        """
        tasks_before, processes_before = set(asyncio.all_tasks()), descendants()
        running = asyncio.create_task(rollout.run())
        waiting = asyncio.create_task(hangs.wait())
        await asyncio.wait({running, waiting}, timeout=GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert hangs.is_set(), f"the rollout did not come to {what} within {GRACE_SECONDS:g} s"
        await cancelled(running, GRACE_SECONDS, "the rollout")
        assert running.cancelled(), "a cancelled rollout returned, expected asyncio.CancelledError to leave it"
        for name, service in (
            ("generation", rollout.model),
            ("tool call", rollout.services.tools),
            ("request to another model", rollout.services.chat),
        ):
            assert not service.running, f"the rollout has ended, but its {name} continues"
        if self.subject.has("worker_life"):
            return
        assert_no_tasks(tasks_before | {waiting}, "after a rollout was cancelled")
        processes = await asyncio.to_thread(remaining, descendants() - processes_before, GRACE_SECONDS)
        assert not processes, f"processes that continue after the rollout was cancelled: {names(processes)}"

    async def cancel_at(self, task: ScriptedTask, call: int) -> None:
        """Cancel a rollout while it waits for the model's ``call``-th answer."""
        model = self.model(task, hang_at=call)
        await self.cancel(self.rollout(task, model=model), model.hangs, f"the model's call {call}")


@contextlib.asynccontextmanager
async def opened(subject: Subject) -> AsyncIterator[Host]:
    """Start what the agent's rollouts share, and close it at the end."""
    folder, tokenizer = subject.folder / f"worker-{next(_workers)}", Letters()
    folder.mkdir(parents=True)
    context = AgentWorkerContext(tokenizer=tokenizer, folder=folder, name=f"conformance-{folder.name}", seed=1)
    shared = await subject.cls.start(subject.config, context) if _has_life(subject) else None
    try:
        yield Host(subject=subject, shared=shared, folder=folder, tokenizer=tokenizer)
    finally:
        try:
            if _has_life(subject):
                await subject.cls.close(shared)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


_workers = itertools.count()


def _has_life(subject: Subject) -> bool:
    """Return whether a run starts, finishes and closes it: an agent for ABI 1.0 means something else by these names."""
    return Version(subject.abi) >= Version("1.1")


@attrs.define
class Switch:
    """A model that can be replaced while an agent has it."""

    model: Model

    async def __call__(self, request: Any) -> Any:
        return await self.model(request)


def _short(ids: Sequence[int]) -> str:
    return f"{tuple(ids)}" if len(ids) <= 8 else f"({', '.join(map(str, ids[:8]))}, …, {len(ids)} tokens)"


def tight_budgets(model: Model) -> list[int]:
    """Return token budgets that end within the first answer, just after it, and just before the end of the last."""
    lengths = [len(result.token_ids) for _, result in model.calls]
    return sorted({1, lengths[0], lengths[0] + 1, sum(lengths) - 1} - {0, sum(lengths)})


def assert_budget(trial: Trial, budget: int, several: bool) -> None:
    """Require that no request asks for more tokens than are left, of the rollout or, with several, of its sequence."""
    calls = [[(each.request, each.result) for each in trial.blocks(one)] for one in trial.output.sequences]
    for turns in calls if several else [trial.model.calls]:
        left = budget
        for turn, (request, result) in enumerate(turns):
            asked = request.sampling.max_new_tokens
            assert asked <= left, (
                f"turn {turn} asks for {asked} tokens, and {left} are left of max_new_tokens={budget}: the budget"
                " holds for all turns together"
            )
            left -= len(result.token_ids)


def assert_well_formed(sequence: AgentSequence) -> None:
    """Require one length of ids, mask, log-probabilities and versions, and plain numbers."""
    lengths = {
        name: len(getattr(sequence, name))
        for name in ("response_ids", "response_mask", "response_log_probs", "weight_versions")
    }
    assert len(set(lengths.values())) == 1, f"expected one length, found {lengths}"
    assert sequence.prompt_ids, "a sequence has no prompt"
    assert sequence.response_ids, "a sequence has an empty response"
    for name in ("prompt_ids", "response_ids", "response_mask", "weight_versions"):
        values = getattr(sequence, name)
        assert all(type(value) is int for value in values), f"{name} holds something else than numbers: {values[:8]}"
    assert set(sequence.response_mask) <= {0, 1}, f"the mask holds {sorted(set(sequence.response_mask))}"
    assert sequence.reward is None or finite(sequence.reward), f"the reward is {sequence.reward!r}"


def assert_aborted(trial: Trial, tokens: int) -> None:
    """Require that sequences with an aborted answer say so."""
    aborted = trial.model.aborted
    assert aborted is not None, "nothing was aborted"
    for sequence in trial.output.sequences:
        assert_well_formed(sequence)
        own = [token for token in aborted.token_ids if token in sequence.response_ids]
        if own:
            found = sequence.finish_reason
            assert "abort" == found, f"a sequence ends with an aborted answer of {tokens} tokens, reported as {found!r}"


def assert_unique(trials: list[Trial]) -> None:
    """Require that no two requests have one id."""
    ids = [request.request_id for trial in trials for request in trial.model.requests]
    twice = sorted({id for id in ids if ids.count(id) > 1}) if len(ids) != len(set(ids)) else []
    assert not twice, f"{len(twice)} request ids are used by several requests, such as {twice[0]!r}"


def turns_of(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return begin and end of each uninterrupted piece of the model's own tokens."""
    ones = [place for place, own in enumerate(mask) if own]
    begins = [place for place in ones if place == 0 or not mask[place - 1]]
    ends = [place + 1 for place in ones if place + 1 == len(mask) or not mask[place + 1]]
    return list(zip(begins, ends, strict=True))


def outline(trial: Trial) -> Mapping[str, Any]:
    """Describe a rollout without the ids of the model's tokens, which differ each time."""
    plain: Callable[[Sequence[int]], str] = trial.model.tokenizer.decode
    return {
        "asked": [plain(tuple(request.prompt_ids)) for request in trial.model.requests],
        "tools": [(call.name, call.arguments) for call in trial.services.tools.asked],
        "sequences": [
            (
                plain(tuple(each.prompt_ids)),
                plain(tuple(each.response_ids)),
                tuple(each.response_mask),
                repr((each.reward, each.token_rewards, each.turn_rewards)),
                (each.parent, each.relation, each.name),
            )
            for each in trial.output.sequences
        ],
        "num_turns": trial.output.num_turns,
        "end_reason": trial.output.end_reason,
    }


def bits(mask: list[int]) -> str:
    """Return a mask as a short text."""
    text = "".join(map(str, mask))
    return text if len(text) <= 40 else f"{text[:40]}…"
