"""Lines of one rollout: conversations that only grow, with the exact tokens that the model saw and said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import xxhash

from jackfield.abc.agent import AgentContext, AgentSequence, Relation
from jackfield.abc.rollout import GenerateChunk, GenerateRequest, GenerateResult
from jackfield.sdk.sequences import Answer, SequenceBuilder, sequences_of


@attrs.define(eq=False)
class Tokens:
    """The tokens of one sequence, and from which other one it began."""

    ids: tuple[int, ...] = ()  #: what the model last saw, and said to it
    inputs: Mapping[str, Any] = attrs.field(factory=dict)
    parent: Tokens | None = None
    relation: Relation | None = None
    is_answered: bool = False


@attrs.frozen(eq=False)
class Node:
    """The place in a line after one answer."""

    line: Line
    tokens: Tokens
    length: int  #: of the tokens up to here
    made: int  #: tokens that the model has generated on the way
    answer: Answer
    inputs: Mapping[str, Any]  #: arrays of the images up to here


class GivenTokens:
    """A tokenizer that gets the next tokens from outside, and is another one in everything else."""

    def __init__(self, tokenizer: Any, ids: Sequence[int] | None, inputs: Mapping[str, Any]) -> None:
        self._tokenizer, self.given, self._inputs = tokenizer, ids, inputs
        self.begun = 0  #: how many sequences have begun with it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_chat(self, messages: Any, **tools: Any) -> tuple[int, ...]:
        """Return the given tokens once, and later those of the template."""
        self.begun += 1
        return self._taken() if self.given is not None else self._tokenizer.encode_chat(messages, **tools)

    def encode_multi_modal(self, messages: Any, **tools: Any) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        """Return the given tokens and inputs once, and later those of the template."""
        self.begun += 1
        if self.given is not None:
            return self._taken(), self._inputs
        found: tuple[tuple[int, ...], Mapping[str, Any]] = self._tokenizer.encode_multi_modal(messages, **tools)
        return found

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the given tokens once, and later those of the text."""
        return self._taken() if self.given is not None else self._tokenizer.encode_text(text)

    def _taken(self) -> tuple[int, ...]:
        assert self.given is not None
        ids, self.given = tuple(self.given), None
        return ids


class Line:
    """One conversation of a rollout. Its requests go to the model one after another."""

    def __init__(self, context: AgentContext, sampling: Mapping[str, Any], number: int, tokens: Tokens) -> None:
        self._context, self._sampling, self._number = context, dict(sampling), number
        self.history = [tokens]  #: its sequences
        self.at: Node | None = None  #: where it ends, if nothing follows it
        self.text = ""  #: prompt and answers of completions
        self.override: Mapping[str, Any] = {}  #: sampling parameters of the next request
        self.hear: Callable[[GenerateChunk], None] | None = None  #: hears the tokens of the next answer as they come
        self.result: GenerateResult | None = None
        self.prompt_ids: tuple[int, ...] = ()
        self._made = self._begun = 0
        self.tokenizer: GivenTokens
        self.builder: SequenceBuilder

    def begin(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        given: Sequence[int] | None = None,
        node: Node | None = None,
        is_limited: bool = False,
        **options: Any,
    ) -> None:
        """Make the builder: of messages, or of given tokens, or of what a node of another line has."""
        sampling, inputs = dict(self._sampling), dict[str, Any]()
        if node is not None:
            given, inputs = node.tokens.ids[: node.length], dict(node.inputs)
            self.history[-1].ids, self._made = tuple(given), node.made
            if "max_new_tokens" in sampling:
                sampling["max_new_tokens"] = max(0, sampling["max_new_tokens"] - node.made)
        self.tokenizer = GivenTokens(self._context.tokenizer, given, inputs)
        context = attrs.evolve(self._context, tokenizer=self.tokenizer, generate=self._generate)
        if not is_limited:
            context = attrs.evolve(context, max_prompt_tokens=None)
        self.builder = SequenceBuilder(context, sampling, messages, **options)
        self._begun = self.tokenizer.begun
        if node is not None:
            self.builder.answer = node.answer

    def arrived(self) -> Node:
        """Return the node after the answer that has just come."""
        tokens, answer = self.history[-1], self.builder.answer
        assert answer is not None
        self.at = Node(self, tokens, len(tokens.ids), self._made, answer, tokens.inputs)
        return self.at

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        """Have a request answered with the sampling of its client and a seed of its own; note the tokens."""
        changes = dict(self.override)
        if self._number and request.sampling.seed is not None:  # lines do not repeat each other's random numbers
            text = f"{self._sampling.get('seed')}/{self._number}/{self.builder.turns}"
            changes["seed"] = xxhash.xxh3_64_intdigest(text.encode()) >> 1
        if changes:
            request = attrs.evolve(request, sampling=attrs.evolve(request.sampling, **changes))
        self.prompt_ids, stream = request.prompt_ids, self._context.stream
        if self.hear is None or stream is None:
            result = await self._context.generate(request)
        else:
            result = await stream(request, self.hear)
        if self.tokenizer.begun > self._begun:  # the template renders earlier turns otherwise
            self._begun = self.tokenizer.begun
            self.history.append(Tokens(parent=self.history[-1], relation="template"))
        tokens = self.history[-1]
        tokens.ids, tokens.inputs = (*request.prompt_ids, *result.token_ids), request.multi_modal_data
        tokens.is_answered |= bool(result.token_ids)
        self._made += len(result.token_ids)
        self.result = result
        return result


def joined(lines: Sequence[Line]) -> tuple[AgentSequence, ...]:
    """Return the sequences of all lines with their parents."""
    found: list[AgentSequence] = []
    numbers: dict[int, int] = {}
    for line in lines:
        answered = [tokens for tokens in line.history if tokens.is_answered]
        for tokens, sequence in zip(answered, sequences_of([line.builder]), strict=True):
            parent = tokens.parent
            while parent is not None and id(parent) not in numbers:
                parent = parent.parent
            number = None if parent is None else numbers[id(parent)]
            relation = None if parent is None else tokens.relation
            numbers[id(tokens)] = len(found)
            found.append(attrs.evolve(sequence, parent=number, relation=relation))
    return tuple(found)
