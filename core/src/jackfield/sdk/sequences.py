"""The sequence builder: conversations with the model as token sequences that only grow.

An agent that works on texts and messages uses it instead of counting tokens itself::

    builder = SequenceBuilder(self.context, sampling_params, fields["messages"], tools=self.context.tools.schemas)
    answer = await builder.generate()
    if builder.append_turn([{"role": "tool", "content": "4"}]):
        answer = await builder.generate()
    return AgentLoopOutput(sequences=sequences_of([builder]))
"""

from __future__ import annotations

import copy
import difflib
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import attrs
import xxhash

from jackfield.abc.agent import AgentContext, AgentSequence, Relation
from jackfield.abc.rollout import GenerateRequest, SamplingParams
from jackfield.errors import AgentError, DataError, JackfieldError
from jackfield.sdk._messages import Encode, Messages, fit, last_thought, with_thought
from jackfield.sdk._parts import Answer, Part, Point

__all__ = ["Answer", "OnOverflow", "OnTemplateChange", "SequenceBuilder", "sequences_of"]

OnTemplateChange = Literal["refuse", "fork", "keep"]
OnOverflow = Literal["truncate", "end"]

_SAMPLING_KEYS = frozenset(field.name for field in attrs.fields(SamplingParams))
_CHANGED = "data.not-append-only"
_NEW_TOKENS = SamplingParams().max_new_tokens
_request_numbers = itertools.count()


class SequenceBuilder:
    """One conversation with the model of the run, and its tokens.

    ``messages`` is the prompt; one above ``context.max_prompt_tokens`` raises ``data.prompt-too-long`` (or is cut, with
    ``context.cuts_prompts``), and none ``agent.failed``, as do unknown sampling parameters and every call out of turn.
    ``max_new_tokens`` of the sampling parameters is for all answers together. ``tools`` are schemas that the template
    shows to the model.
    ``on_template_change`` says what to do if the chat template would render earlier turns otherwise than the model saw
    them: ``refuse`` (``data.not-append-only``), ``fork`` (begin another sequence with the conversation as the template
    renders it) or ``keep`` (go on with what the model saw). ``on_overflow`` says what happens to messages for which the
    context has no room: ``truncate`` (cut the longest of them) or ``end`` (do not append them).
    """

    def __init__(
        self,
        context: AgentContext,
        sampling_params: Mapping[str, Any],
        messages: Messages,
        *,
        tools: Messages = (),
        on_template_change: OnTemplateChange = "refuse",
        on_overflow: OnOverflow = "truncate",
        name: str = "",
        task: object = None,
    ) -> None:
        self.context, self._name, self._task = context, name, task
        self.messages = self._given(messages)  #: the conversation so far
        self.turns = 0  #: how often the model has answered
        self.answer: Answer | None = None  #: the last one, until something follows it
        for policy, known in ((on_template_change, OnTemplateChange), (on_overflow, OnOverflow)):
            if policy not in get_args(known):
                raise self._misuse("unknown policy of a conversation", " or ".join(get_args(known)), repr(policy))
        self._sampling, self._tools = _checked(sampling_params), tuple(tools)
        self._on_template_change, self._on_overflow = on_template_change, on_overflow
        self._made, self._asking = 0, False  # tokens that the model has generated; whether it is answering
        self._path, self._children = "", itertools.count()  # which conversation of the rollout, for seeds
        self._turn, self._text = list[int](), ""  # the model's turn so far, with appended text
        self._since = len(self.messages)  # the first message behind the prompt of the sequence
        self._thoughtful: Mapping[str, Any] = {}  # the model's last message from there on that has a thought
        self._points: list[Point] = []  # one for each answer
        self._spoken = set[int]()  # tokens of the model in the prompt of a branch
        self._parts = [self._begin()]

    # -- what the model says

    @property
    def left(self) -> int:
        """The number of tokens that the model may still generate."""
        given: int = self._sampling.get("max_new_tokens", _NEW_TOKENS)
        return max(0, min(given - self._made, self.room))

    @property
    def room(self) -> int:
        """The number of tokens for which the context has room."""
        part, limit = self._parts[-1], self.context.max_model_len
        return 2**31 if limit is None else max(0, limit - len(part.prompt_ids) - len(part.response_ids))

    @property
    def may_continue(self) -> bool:
        """Return whether the model may be asked again: tokens are left, and no answer was aborted."""
        return self.left > 0 and self._parts[-1].finish_reason != "abort"

    async def generate(self, *, stop: str | Sequence[str] = (), max_new_tokens: int | None = None) -> Answer:
        """Ask the model for its next turn, or for more of one that has not ended.

        ``stop`` are further texts that end it; ``max_new_tokens`` is a limit beside what is left. Errors are those of
        the server, and ``agent.failed`` if nothing is left (:attr:`may_continue`), if the answer has ended and no turn
        was appended, or if another call is in progress.
        """
        part = self._parts[-1]
        hindrances = {
            "another call is in progress": self._asking,
            "the answer was aborted": part.finish_reason == "abort",
            "the answer has ended, and no turn was appended": self.answer is not None and self.answer.closed,
            "no token is left": self.left == 0,
        }
        if any(hindrances.values()):
            found = next(what for what, holds in hindrances.items() if holds)
            raise self._misuse("the model may not be asked now", "may_continue, and a turn of the model", found)
        limit = self.left if max_new_tokens is None else min(self.left, max_new_tokens)
        request = GenerateRequest(
            request_id=f"{self.context.request_prefix or 'run'}/{next(_request_numbers)}",
            prompt_ids=(*part.prompt_ids, *part.response_ids),
            sampling=self._params(stop, limit),
            multi_modal_data=part.inputs,
        )
        self._asking = True
        try:
            result = await self.context.generate(request)
        finally:
            self._asking = False
        token_ids = tuple(result.token_ids)
        lengths = [len(token_ids), len(result.log_probs), len(result.weight_versions)]
        if len(set(lengths)) > 1 or len(token_ids) > limit:
            raise self._misuse("the server's answer is malformed", f"one length, at most {limit}", f"lengths {lengths}")
        part.response_ids += token_ids
        part.mask += [1] * len(token_ids)
        part.log_probs += result.log_probs
        part.versions += result.weight_versions
        part.finish_reason = result.finish_reason
        if token_ids:
            part.end, part.seen = len(part.mask), part.inputs
        self._made += len(token_ids)
        self._turn += token_ids
        self.turns += 1
        decode, ends = self.context.tokenizer.decode, self.context.tokenizer.end_token_ids
        text, closed = decode(token_ids), bool(token_ids) and token_ids[-1] in ends
        self._text = text if len(self._turn) == len(token_ids) else decode(self._turn)
        self.answer = Answer(text=text, token_ids=token_ids, finish_reason=result.finish_reason, closed=closed)
        self._points.append(self._point())
        return self.answer

    # -- what others say

    def append_turn(self, messages: Messages, *, answer: Mapping[str, Any] | None = None) -> bool:
        """Append messages after the model's answer, up to its next one; return whether the model may go on.

        ``answer`` is the last answer as a message, with ``reasoning_content`` and ``tool_calls`` where it has them; by
        default its text is its content. If there is no room for the messages and a token of the model, they are cut or
        left out; the metric ``cut_tokens`` counts what is missing. After an aborted answer nothing is appended.
        """
        given = self._given(messages)
        if self.answer is None or self._asking:
            raise self._misuse("a turn follows an answer of the model", "a call after generate")
        if self._parts[-1].finish_reason == "abort":
            return False
        said = dict(answer) if answer is not None else {"role": "assistant", "content": self._text}
        encode: Encode = lambda shown: self._turn_of(said, shown)[0]  # noqa: E731
        room, forks = self.room - 1, False  # one token is for the model
        try:
            made = encode(given)
        except JackfieldError as error:
            if error.code != _CHANGED or self._on_template_change != "fork":
                raise
            before, room, forks = [*self.messages, said], (self.context.max_model_len or 2**31) - 1, True
            encode = functools.partial(self._rendered, before)
            made = encode(given)
        shown, inserted = fit(given, made, room, encode, cuts=self._on_overflow == "truncate")
        inputs = {} if forks or not _has_parts(shown) else self._turn_of(said, shown)[1]
        # behind its own placeholder, the model would see images in that place
        if inputs and not self._said(self._parts[-1]).isdisjoint(self.context.tokenizer.placeholders()):
            self.context.metric("placeholders_said", 1)
            return False
        if cut := len(made) - len(inserted):
            self.context.metric("cut_tokens", cut if shown or not forks else len(made) - room)
        if not shown:
            return False
        self.messages += [said, *map(dict, shown)]
        self._thoughtful = last_thought(self.messages[-1 - len(shown) :]) or self._thoughtful
        if forks:
            self.context.metric("template_forks", 1)
            self._go_on("template")
        else:
            self._parts[-1].insert(inserted, inputs)
            self.answer, self._turn = None, []
        return self.may_continue

    def append_text(self, text: str) -> bool:
        """Append text to the model's own answer, which goes on after it; return whether the model may go on.

        The text is never tokenised together with the answer. Text without room is cut, or with ``end`` left out. After
        an aborted answer nothing is appended; an answer that has ended is refused (``agent.failed``).
        """
        if self._asking or (self.answer is not None and self.answer.closed):
            raise self._misuse("text is appended to an answer that goes on", "an answer without an end token")
        if self._parts[-1].finish_reason == "abort":
            return False
        inserted = tuple(self.context.tokenizer.encode_text(text))
        most = max(0, self.room - 1)
        if len(inserted) > most:
            kept = most if self._on_overflow == "truncate" else 0
            self.context.metric("cut_tokens", len(inserted) - kept)
            if not kept:
                return False
            inserted = inserted[:kept]
        self._parts[-1].insert(inserted)
        self._turn += inserted
        self._text = self.context.tokenizer.decode(self._turn)
        return self.may_continue

    def reward(self, value: float) -> None:
        """Give a reward of the environment to the model's last turn: to its last token."""
        part = next((part for part in reversed(self._parts) if part.end), None)
        if part is None:
            raise self._misuse("a reward is for a turn of the model", "a call after generate")
        part.rewards[part.end - 1] = part.rewards.get(part.end - 1, 0.0) + float(value)

    # -- further sequences

    def branch(self, *, name: str = "", turn: int | None = None) -> SequenceBuilder:
        """Return another builder that goes on from here on its own; this one is its parent.

        What the model said so far is the branch's prompt, so that no token is trained on twice. ``turn`` is the number
        of an earlier answer, counted from 1, after which it goes on instead. The branch has what was left of this
        builder's tokens there, and random numbers of its own.
        """
        if turn is not None and not 1 <= turn <= len(self._points):
            raise self._misuse("there is no such answer to branch after", f"1 to {len(self._points)}", str(turn))
        point = self._point() if turn is None else self._points[turn - 1]
        made, part = copy.copy(self), point.part
        made.messages, made._turn, made._name = point.messages[: point.count], list(point.turn), name or self._name
        made.answer, made._made, made._text, made._points = point.answer, point.made, point.text, []
        made.turns, made._asking, made._children = 0, False, itertools.count()
        made._path = f"{self._path}.{next(self._children)}"
        made._thoughtful = last_thought(made.messages[made._since :])
        prompt = (*part.prompt_ids, *part.response_ids[: point.end])
        how: Any = {"name": made._name, "step_id": part.step_id}
        how["finish_reason"] = part.finish_reason if turn is None else "stop"
        made._parts = [Part(prompt, point.inputs, parent=part, relation="branch", **how)]
        made._spoken = self._said(part)
        return made

    def sub_agent(self, messages: Messages, *, name: str, tools: Messages = ()) -> SequenceBuilder:
        """Return a builder of another conversation of the same rollout, of which this one is the parent."""
        how: Any = {"on_template_change": self._on_template_change, "on_overflow": self._on_overflow}
        how |= {"tools": tools, "name": name, "task": self._task}
        made = SequenceBuilder(self.context, self._sampling, messages, **how)
        made._path = f"{self._path}.{next(self._children)}"
        made._parts[-1].parent, made._parts[-1].relation = self._parts[-1], "sub_agent"
        return made

    def compact(self, messages: Messages) -> None:
        """Go on in another sequence whose prompt is these messages, such as a summary of the conversation."""
        if self._asking:
            raise self._misuse("the model is answering", "a call after generate")
        self.messages = self._given(messages)
        self._go_on("compaction")

    # -- inside

    def _point(self) -> Point:
        part, turn, count = self._parts[-1], tuple(self._turn), len(self.messages)
        so_far = part, part.inputs, len(part.response_ids), self.messages, count
        return Point(*so_far, self.answer, self._made, turn, self._text)

    def _misuse(self, what: str, expected: str, found: str | None = None, **more: Any) -> JackfieldError:
        where = None if self._task is None else f"task {self._task}"
        made: JackfieldError = more.pop("kind", AgentError)(what, where=where, expected=expected, found=found, **more)
        return made

    def _given(self, messages: Messages) -> list[dict[str, Any]]:
        fits = isinstance(messages, Sequence) and all(isinstance(each, Mapping) for each in messages)
        if not fits or not messages or not all(each.get("role") for each in messages):
            expected = "a list of role and content, such as the task's field 'messages'"
            raise self._misuse("these are no messages", expected, repr(messages)[:200])
        return [dict(message) for message in messages]

    def _prompt(self, messages: Messages) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        tools: Any = {"tools": self._tools} if self._tools else {}
        if _has_parts(messages):
            return self.context.tokenizer.encode_multi_modal(messages, **tools)
        return self.context.tokenizer.encode_chat(messages, **tools), {}

    def _rendered(self, before: Messages, messages: Messages) -> tuple[int, ...]:
        return self._prompt([*before, *messages])[0]

    def _begin(self, parent: Part | None = None, relation: Relation | None = None) -> Part:
        prompt, inputs = self._prompt(self.messages)
        limit = self.context.max_prompt_tokens
        if parent is None and limit is not None and len(prompt) > limit and self.context.cuts_prompts and not inputs:
            self.context.metric("prompt_tokens_cut", len(prompt) - limit)
            prompt = prompt[-limit:]
        if parent is None and limit is not None and len(prompt) > limit:
            what, fix = "the prompt has too many tokens", "raise the limit, or leave this task out of the data"
            how: Any = {"kind": DataError, "code": "data.prompt-too-long", "fix": fix}
            raise self._misuse(what, f"at most {limit} tokens", f"{len(prompt)} tokens", **how)
        step = 0 if parent is None else parent.step_id + 1
        return Part(tuple(prompt), dict(inputs), parent, relation, name=self._name, step_id=step)

    def _go_on(self, relation: Relation) -> None:
        """Go on in another sequence, whose prompt is the conversation."""
        self._parts = [*self._parts, self._begin(self._parts[-1], relation)]
        self._since, self._turn, self.answer, self._thoughtful = len(self.messages), [], None, {}

    def _turn_of(self, said: Mapping[str, Any], messages: Messages) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        """Return the tokens between the answer and the next one, and the arrays of their images."""
        last = self.answer.token_ids[-1:] if self.answer is not None and self.answer.closed else ()
        # another end token than the template's may be the header of the next turn, or of a turn that does not follow
        closed = bool(last) and last == tuple(self.context.tokenizer.end_token_ids[:1])
        tokenizer, seen = self.context.tokenizer, _has_parts(messages)
        encode: Any = tokenizer.encode_multi_modal_turn if seen else tokenizer.encode_turn
        encode = functools.partial(encode, messages, tools=self._tools, closed=closed)
        try:
            made = encode(answer=self._with_thought(said))
        except JackfieldError as error:
            if error.code != _CHANGED or self._on_template_change != "keep":
                raise
            made = encode()
        token_ids, inputs = made if seen else (made, {})
        return (token_ids[1:] if not closed and last and token_ids[:1] == last else token_ids), inputs

    def _said(self, part: Part) -> set[int]:
        return {*self._spoken, *itertools.compress(part.response_ids, part.mask)}

    def _with_thought(self, said: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer; if it has no thought, with the last one in the sequence, which a template may drop."""
        return with_thought(said, [{"content": self._text}, self._thoughtful])

    def _params(self, stop: str | Sequence[str], limit: int) -> SamplingParams:
        given = dict(self._sampling)
        ends = tuple(given.get("stop_token_ids", ()))
        if not given.get("ignore_eos", False):
            ends = tuple(dict.fromkeys((*ends, *self.context.tokenizer.end_token_ids)))
        if (self.turns or self._path) and given.get("seed") is not None:  # no two requests share random numbers
            key = f"{given['seed']}/{self._name}{self._path}/{self.turns}"
            given["seed"] = xxhash.xxh3_64_intdigest(key.encode()) >> 1
        texts = [[each] if isinstance(each, str) else each for each in (given.get("stop", ()), stop)]
        stops = tuple(dict.fromkeys(itertools.chain(*texts)))
        return SamplingParams(**{**given, "stop": stops, "stop_token_ids": ends, "max_new_tokens": limit})


def sequences_of(builders: Iterable[SequenceBuilder]) -> tuple[AgentSequence, ...]:
    """Return the sequences of conversations in their order, parents first; those without an answer are left out.

    A sequence ends with the model's last token. Its parent is the next one up that has an answer.
    """
    parts = {id(part): part for builder in dict.fromkeys(builders) for part in builder._parts if part.end}
    made = dict[int, AgentSequence]()

    def number_of(part: Part | None) -> int | None:
        while part is not None and id(part) not in parts:
            part = part.parent
        if part is not None and id(part) not in made:
            parent = number_of(part.parent)
            made[id(part)] = part.sequence(parent)
        return None if part is None else list(made).index(id(part))

    for part in parts.values():
        number_of(part)
    return tuple(made.values())


def _has_parts(messages: Messages) -> bool:
    return any(isinstance(each.get("content"), list) for each in messages)


def _checked(sampling: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sampling.keys() - _SAMPLING_KEYS:
        name = min(unknown)
        close = difflib.get_close_matches(name, _SAMPLING_KEYS, n=1)
        what = f"unknown sampling parameter {name!r}" + (f" (did you mean {close[0]!r}?)" if close else "")
        raise AgentError(what, expected=", ".join(sorted(_SAMPLING_KEYS)), found=", ".join(sorted(sampling)))
    SamplingParams(**sampling)  # refuses values out of range
    return dict(sampling)
