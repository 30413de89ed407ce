"""Helpers for the suite of agents: a tokenizer, a scripted model, and a rollout with both.

Each id of a model token is used once, so an id shows which call generated it. The tokens decode to letters that the
tokenizer encodes to other ids, so text that was tokenised again shows, too.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.agent import AgentContext, AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.errors import RolloutError
from jackfield_conformance.registry import Subject
from jackfield_conformance.support.expecting import assert_no_tasks, cancelled, finite
from jackfield_conformance.support.processes import descendants, names, remaining

END = 2  #: the token that ends a turn
_SEPARATOR = 3
_ANSWER = 4  #: where the model must answer
_ROLES = {"system": 5, "user": 6, "assistant": 7, "tool": 8}
_OTHER_ROLE = 9
_LETTERS = 1_000  #: plus the letter's number
_FIRST_MODEL_TOKEN = 10_000_000
_MOST_CALLS = 64

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


class Letters:
    """A chat tokenizer with a token per letter."""

    def __init__(self) -> None:
        self.turns: list[tuple[int, ...]] = []  #: what ``encode_turn`` returned
        self._texts: dict[int, str] = {}
        self._ids = itertools.count(_FIRST_MODEL_TOKEN)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return (END,)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return (*itertools.chain.from_iterable(map(self._message, messages)), _ANSWER)

    def encode_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        turn = (_SEPARATOR, *self.encode_chat(messages))
        self.turns.append(turn)
        return turn

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(self._text, token_ids))

    def answer(self, text: str) -> tuple[int, ...]:
        """Return new tokens of the model, and the end token."""
        ids = tuple(itertools.islice(self._ids, len(text)))
        self._texts.update(zip(ids, text, strict=True))
        return (*ids, END)

    def _message(self, message: Mapping[str, Any]) -> tuple[int, ...]:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else repr(content)
        return (_ROLES.get(message["role"], _OTHER_ROLE), *(_LETTERS + ord(letter) for letter in text), _SEPARATOR)

    def _text(self, token: int) -> str:
        if token >= _FIRST_MODEL_TOKEN:
            return self._texts[token]
        return chr(token - _LETTERS) if token >= _LETTERS else ""


class Model:
    """A model that answers by script, repeats the last answer, and records its requests.

    The call ``hang_at``, counted from 0, never ends; ``abort_at`` is aborted after ``abort_tokens`` tokens.
    """

    def __init__(
        self,
        answers: Sequence[str],
        *,
        tokenizer: Letters | None = None,
        hang_at: int | None = None,
        abort_at: int | None = None,
        abort_tokens: int = 0,
        fails: bool = False,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        self.calls: list[tuple[GenerateRequest, GenerateResult]] = []  #: those that were answered
        self.running = 0
        self.hangs = asyncio.Event()  #: set when the call ``hang_at`` has started
        self.tokenizer = tokenizer or Letters()
        self._answers = tuple(answers)
        self._hang_at, self._abort_at, self._abort_tokens, self._fails = hang_at, abort_at, abort_tokens, fails

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        call = len(self.requests)
        self.requests.append(request)
        if call >= _MOST_CALLS:
            raise RuntimeError(f"the agent has asked the model {call} times for one task, and continues")
        self.running += 1
        try:
            await asyncio.sleep(0)
            if call == self._hang_at:
                self.hangs.set()
                await asyncio.Event().wait()
            if self._fails:
                raise RolloutError("the replica died (says the conformance suite)", code="rollout.stopped")
            return self._answer(call, request)
        finally:
            self.running -= 1

    def _answer(self, call: int, request: GenerateRequest) -> GenerateResult:
        token_ids = self.tokenizer.answer(self._answers[min(call, len(self._answers) - 1)])
        finish_reason = "stop"
        if len(token_ids) > request.sampling.max_new_tokens:
            token_ids, finish_reason = token_ids[: request.sampling.max_new_tokens], "length"
        if call == self._abort_at:
            token_ids, finish_reason = token_ids[: self._abort_tokens], "abort"
        result = GenerateResult(
            request_id=request.request_id,
            token_ids=token_ids,
            log_probs=tuple(-(1 + (token + place) % 97) / 100 for place, token in enumerate(token_ids)),
            weight_versions=tuple(call * 3 + place % 2 + 1 for place in range(len(token_ids))),
            finish_reason=finish_reason,  # type: ignore[arg-type]
        )
        self.calls.append((request, result))
        return result


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
    """A finished rollout: the model with its requests, and the agent's output."""

    model: Model
    output: AgentLoopOutput

    def blocks(self, sequence: AgentSequence) -> list[Block]:
        """Return the calls whose tokens are in this sequence, in order; require that their tokens are there whole."""
        found = []
        for request, result in self.model.calls:
            own = [token for token in result.token_ids if token >= _FIRST_MODEL_TOKEN]
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


async def play(
    subject: Subject,
    task: ScriptedTask,
    *,
    agent: AgentLoopBase | None = None,
    model: Model | None = None,
    sampling: Mapping[str, Any] = SAMPLING,
    fields: Mapping[str, Any] | None = None,
    **context: Any,
) -> Trial:
    """Run one rollout of a task, by default with a new agent and a model with the task's script.

    ``fields`` are added to the task's, ``context`` to the ``AgentContext``.
    """
    model = model or Model(task.answers)
    if agent is None:
        agent = subject.make(AgentContext(generate=model, tokenizer=model.tokenizer, **context))
    given = copy.deepcopy({**task.fields, **(fields or {})})
    output = await agent.run(dict(sampling), **given)
    assert isinstance(output, AgentLoopOutput), f"run returned {type(output).__name__}, expected an AgentLoopOutput"
    return Trial(model=model, output=output)


def _short(ids: Sequence[int]) -> str:
    return f"{tuple(ids)}" if len(ids) <= 8 else f"({', '.join(map(str, ids[:8]))}, …, {len(ids)} tokens)"


@attrs.define
class Switch:
    """A model that can be replaced while an agent has it."""

    model: Model

    async def __call__(self, request: Any) -> Any:
        return await self.model(request)


async def played(subject: Subject) -> list[tuple[Trial, AgentSequence, list[Block]]]:
    """Run a rollout of each task; return all sequences, each with its rollout and its calls."""
    found = []
    for task in tasks(subject):
        trial = await play(subject, task)
        found += [(trial, sequence, trial.blocks(sequence)) for sequence in trial.output.sequences]
    assert found, "no task yields a sequence"
    return found


def tight_budgets(model: Model) -> list[int]:
    """Return token budgets that end within the first answer, just after it, and just before the end of the last."""
    lengths = [len(result.token_ids) for _, result in model.calls]
    return sorted({1, lengths[0], lengths[0] + 1, sum(lengths) - 1} - {0, sum(lengths)})


def assert_budget(model: Model, budget: int) -> None:
    """Require that no request asks for more tokens than the rollout has left."""
    left = budget
    for turn, (request, result) in enumerate(model.calls):
        asked = request.sampling.max_new_tokens
        assert asked <= left, (
            f"turn {turn} asks for {asked} tokens, and {left} are left of max_new_tokens={budget}: the budget"
            " holds for all turns together"
        )
        left -= len(result.token_ids)


async def cancel_at(subject: Subject, task: ScriptedTask, call: int) -> None:
    """Cancel a rollout while it waits for the model's ``call``-th answer; require that nothing of it continues."""
    model = Model(task.answers, hang_at=call)
    tasks_before, processes_before = set(asyncio.all_tasks()), descendants()
    rollout = asyncio.create_task(play(subject, task, model=model))
    hangs = asyncio.create_task(model.hangs.wait())
    await asyncio.wait({rollout, hangs}, timeout=GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    hangs.cancel()
    assert model.hangs.is_set(), f"the model was not asked for the {call}-th time within {GRACE_SECONDS:g} s"
    await cancelled(rollout, GRACE_SECONDS, "the rollout")
    assert rollout.cancelled(), "a cancelled rollout returned, expected asyncio.CancelledError to leave it"
    assert not model.running, "the rollout has ended, but its generation continues"
    assert_no_tasks(tasks_before | {hangs}, "after a rollout was cancelled")
    processes = await asyncio.to_thread(remaining, descendants() - processes_before, GRACE_SECONDS)
    assert not processes, f"processes that continue after the rollout was cancelled: {names(processes)}"


def assert_well_formed(sequence: AgentSequence) -> None:
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
    aborted = trial.model.calls[-1][1]
    for sequence in trial.output.sequences:
        assert_well_formed(sequence)
        own = [token for token in aborted.token_ids if token in sequence.response_ids]
        if own:
            found = sequence.finish_reason
            assert "abort" == found, f"a sequence ends with an aborted answer of {tokens} tokens, reported as {found!r}"


def assert_unique(trials: list[Trial]) -> None:
    ids = [request.request_id for trial in trials for request in trial.model.requests]
    twice = sorted({id for id in ids if ids.count(id) > 1}) if len(ids) != len(set(ids)) else []
    assert not twice, f"{len(twice)} request ids are used by several requests, such as {twice[0]!r}"


def outline(trial: Trial) -> Mapping[str, Any]:
    """Describe a rollout without the ids of the model's tokens, which differ each time."""

    def plain(ids: tuple[int, ...]) -> str:
        return trial.model.tokenizer.decode(ids)

    return {
        "asked": [plain(tuple(request.prompt_ids)) for request in trial.model.requests],
        "sequences": [
            (
                plain(tuple(each.prompt_ids)),
                plain(tuple(each.response_ids)),
                tuple(each.response_mask),
                repr(each.reward),
            )
            for each in trial.output.sequences
        ],
        "num_turns": trial.output.num_turns,
    }


def bits(mask: list[int]) -> str:
    text = "".join(map(str, mask))
    return text if len(text) <= 40 else f"{text[:40]}…"
