"""What a workflow says to the model, as token sequences."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.agent import AgentContext, AgentSequence
from jackfield.abc.rollout import SamplingParams
from jackfield.errors import AgentError, DataError
from jackfield.sdk.sequences import SequenceBuilder, sequences_of
from jackfield_agent_workflow.settings import Config

_DEFAULT_TOKENS: int = SamplingParams().max_new_tokens


class RolloutEnded(Exception):
    """The model cannot answer any more; ``reason`` is ``budget``, ``aborted`` or ``cancelled``.

    A workflow need not catch it. If it does, it may still give rewards, and should return.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the rollout has ended: {reason}")
        self.reason = reason


@attrs.frozen(kw_only=True, eq=False)
class Reply:
    """An answer of the policy."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    builder: SequenceBuilder = attrs.field(repr=False)  #: of the sequence that it belongs to
    turn: int  #: its number among the answers of its builder, counted from 1

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to go on with."""
        return {"role": "assistant", "content": self.text}

    def __str__(self) -> str:
        return self.text


class Conversations:
    """All sequences of one rollout.

    A conversation that extends one that the model has seen goes on in its tokens. If that one has gone on already, a
    branch begins after the answer in question. Any other conversation is another sequence.
    """

    def __init__(self, config: Config, context: AgentContext, sampling: Mapping[str, Any], task: object) -> None:
        self._config, self._context, self._sampling, self._task = config, context, dict(sampling), task
        self._builders: list[SequenceBuilder] = []
        self._ends: dict[tuple[str, bytes], tuple[SequenceBuilder, int]] = {}  #: by agent and messages so far
        self._left_out: set[int] = set()
        self._last: Reply | None = None
        self._budget: int = self._sampling.get("max_new_tokens", _DEFAULT_TOKENS)
        self._asking, self._freed = 0, asyncio.Event()
        self.tool_calls: list[dict[str, Any]] = []  #: of JSON values
        self.turns = 0
        self.ended: str | None = None  #: why the model cannot be asked again

    @property
    def last(self) -> Reply | None:
        """The newest answer."""
        return self._last

    @property
    def tokens_left(self) -> int:
        """The number of tokens that the policy may still generate in this rollout."""
        return self._budget

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        name: str,
        *,
        stop: str | Sequence[str] = (),
        max_new_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        step: SequenceBuilder | None = None,
    ) -> Reply:
        """Ask for the answer to a conversation. ``step``: it is the next step of this sequence, in one of its own."""
        given = [dict(message) for message in messages]
        await self._check()
        builder = self._extended(given, name, tools) if step is None else _next_step(step, given)
        if not builder.may_continue:
            raise self._end("budget")
        limits = [each for each in (self._config.turn_tokens, max_new_tokens) if each is not None]
        limit = min([self._budget, builder.left, *limits])
        self._budget -= limit  # others may ask meanwhile
        self._asking += 1
        made = 0
        try:
            answer = await builder.generate(stop=stop, max_new_tokens=limit)
            made = len(answer.token_ids)
        finally:
            self._asking -= 1
            self._budget += limit - made
            self._freed.set()
        self.turns += 1
        reply = Reply(
            text=answer.text,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason,
            builder=builder,
            turn=builder.turns,
        )
        self._ends[name, _digest([*given, reply.message])] = builder, builder.turns
        self._last = reply
        if answer.finish_reason == "abort":
            raise self._end("aborted")
        return reply

    def reward(self, value: float, reply: Reply | None) -> None:
        """Give a reward to an answer, by default to the newest; a conversation must not have gone on after it."""
        chosen = reply or self._last
        if chosen is None:
            if self.ended:
                return
            what, expected = "a reward is for an answer of the policy", "a call after model.chat"
            raise AgentError(what, where=f"task {self._task}", expected=expected)
        if chosen.turn != chosen.builder.turns:
            what, fix = "the conversation has gone on after this answer", "give rewards before the next turn"
            found = f"answer {chosen.turn} of {chosen.builder.turns}"
            raise AgentError(what, where=f"task {self._task}", expected="the newest answer", found=found, fix=fix)
        if chosen.token_ids:
            chosen.builder.reward(value)

    def leave_out(self, reply: Reply) -> None:
        """Do not train on the sequence of an answer."""
        self._left_out.add(id(reply.builder))

    def sequences(self) -> tuple[AgentSequence, ...]:
        """Return the sequences that are trained on, with their parents and rewards."""
        kept = [builder for builder in self._builders if id(builder) not in self._left_out]
        return tuple(map(_plain, sequences_of(kept)))

    # -- inside

    async def _check(self) -> None:
        """Return when tokens are left that others who ask at the same time do not have."""
        while self._budget <= 0 and self._asking and not self.ended:
            self._freed.clear()
            await self._freed.wait()
        if self.ended:
            raise RolloutEnded(self.ended)
        if self._budget <= 0:
            raise self._end("budget")

    def _end(self, reason: str) -> RolloutEnded:
        self.ended = self.ended or reason
        return RolloutEnded(self.ended)

    def _extended(self, given: list[dict[str, Any]], name: str, tools: Sequence[Mapping[str, Any]]) -> SequenceBuilder:
        """Return the builder whose next answer is the one to this conversation."""
        places = [place for place, each in enumerate(given) if each.get("role") == "assistant"]
        digests = _digests(given) if places else []
        for place in reversed(places):
            found = self._ends.get((name, digests[place]))
            if found is None or place + 1 == len(given):
                continue
            builder, turn = found
            if turn != builder.turns or builder.answer is None:  # it has gone on
                builder = builder.branch(name=name, turn=turn)
                self._builders.append(builder)
            new = given[place + 1 :]
            if not builder.append_turn(new, answer=given[place]):
                raise self._end("budget")
            return builder
        return self._new(given, name, tools)

    def _new(self, given: list[dict[str, Any]], name: str, tools: Sequence[Mapping[str, Any]]) -> SequenceBuilder:
        parent = self._last.builder if name and self._last is not None else None
        if parent is not None:
            try:
                builder = parent.sub_agent(given, name=name, tools=tools)
            except DataError as error:
                if error.code != "data.prompt-too-long":
                    raise
                raise self._end("budget") from error  # the model's texts made it so long, not the data
        else:
            how: dict[str, Any] = {"on_template_change": self._config.on_template_change, "tools": tools, "name": name}
            how |= {"on_overflow": self._config.on_overflow, "task": self._task}
            builder = SequenceBuilder(self._context, self._sampling, given, **how)
        self._builders.append(builder)
        return builder


def _next_step(builder: SequenceBuilder, messages: list[dict[str, Any]]) -> SequenceBuilder:
    builder.compact(messages)
    return builder


def _plain(sequence: AgentSequence) -> AgentSequence:
    """Give the reward of the last token as one number, and the others, if there are some, by token."""
    rewards = sequence.token_rewards
    if rewards is None:
        return sequence
    others = (*rewards[:-1], 0.0) if any(rewards[:-1]) else None
    return attrs.evolve(sequence, token_rewards=others, reward=rewards[-1])


def _digests(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return a digest of each beginning of a conversation, of roles and contents."""
    found, so_far = list[bytes](), b""
    for each in messages:
        part = [each.get("role"), each.get("content")]
        if each.get("role") != "assistant":
            part.append({name: value for name, value in each.items() if name not in ("role", "content")} or None)
        text = json.dumps(part, sort_keys=True, default=str).encode()
        so_far = hashlib.blake2b(so_far + text, digest_size=16).digest()
        found.append(so_far)
    return found


def _digest(messages: Sequence[Mapping[str, Any]]) -> bytes:
    return _digests(messages)[-1]
