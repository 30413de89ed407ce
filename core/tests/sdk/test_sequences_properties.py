"""Random conversations with every family's template: no drift between what the model sees and is trained on."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from typing import Any

import attrs
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.abc.agent import AgentContext, AgentSequence
from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.errors import DataError
from jackfield.sdk.sequences import SequenceBuilder, sequences_of
from jackfield_chats import FAMILIES, QUESTION, TOOLS, Family, make_tokenizer, render, result, said, spoken, user

EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")
PIECES = ["it is", ".", "\n\n", "\n", " ", "so", "ü", "…", "🙂", "{", '"', "7", "</think", "user:"]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
SPOKEN = TEXTS.map(str.strip).filter(bool).map(lambda text: text + "x")  # a text that no template trims or merges
NAMES = sorted({name for family in FAMILIES.values() for name in family.special})
RESULTS = st.lists(st.sampled_from([*PIECES, *NAMES]), max_size=8).map("".join)
STEPS = st.sampled_from(["turn"] * 6 + ["inline"] * 2 + ["cut", "branch", "sub_agent", "compact", "reward"])


@attrs.define
class Model:
    """A model that says what the conversation tells it next, and keeps what it was asked and has said."""

    tokenizer: Any
    says: str = ""
    requests: list[GenerateRequest] = attrs.field(factory=list)
    given: list[tuple[int, ...]] = attrs.field(factory=list)
    whole: bool = True  #: whether the last answer was said to its end

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        token_ids = self.tokenizer._continued(self.says)  # a model writes no space at the start of a piece
        kept = token_ids[: request.sampling.max_new_tokens]
        self.requests.append(request)
        self.given.append(kept)
        self.whole = len(kept) == len(token_ids)
        return GenerateResult(
            request_id=request.request_id,
            token_ids=kept,
            log_probs=(-0.001 * len(self.requests),) * len(kept),
            weight_versions=(len(self.requests),) * len(kept),
            finish_reason="stop" if self.whole else "length",
        )


@attrs.define(eq=False)
class Conversation:
    """One builder, and whether its tokens still have to be the template's own."""

    builder: SequenceBuilder
    exact: bool = True


@attrs.define(slots=False, eq=False)
class World:
    """A random rollout."""

    data: st.DataObject
    family: Family
    policy: Any
    overflow: Any
    tools: Any
    limit: int | None
    metrics: Counter[str] = attrs.field(factory=Counter)
    rewards: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.tokenizer = make_tokenizer(self.family)
        self.model = Model(self.tokenizer)
        context = AgentContext(
            generate=self.model.generate,
            tokenizer=self.tokenizer,
            max_model_len=self.limit,
            metric=lambda name, number: self.metrics.update({name: int(number)}),
        )
        how: Any = {"tools": self.tools, "on_template_change": self.policy, "on_overflow": self.overflow}
        self.most = self.data.draw(st.sampled_from([40, 400, 4000]))
        root = SequenceBuilder(context, {"max_new_tokens": self.most, "seed": 3}, [QUESTION], **how)
        self.conversations = [Conversation(root)]

    async def step(self) -> None:
        """Do something in one of the conversations."""
        talk = self.data.draw(st.sampled_from(self.conversations))
        builder, step = talk.builder, self.data.draw(STEPS)
        if step == "branch" and len(self.conversations) < 4:
            self.branch(talk)
        elif step == "sub_agent" and len(self.conversations) < 4:
            tools: Any = self.tools if self.data.draw(st.booleans()) else ()
            made = builder.sub_agent([user(self.data.draw(SPOKEN))], name="s", tools=tools)
            self.conversations.append(Conversation(made))
        elif step == "compact":
            builder.compact([user(self.data.draw(SPOKEN))])
            talk.exact = True
        elif step == "reward" and self.model.given and len(self.conversations) == 1:
            builder.reward(0.5)
            self.rewards += 0.5
        elif step in ("turn", "inline", "cut") and builder.may_continue and builder.answer is None:
            await self.turn(talk, step)

    def branch(self, talk: Conversation) -> None:
        """Begin another continuation, from here or from an earlier answer."""
        turn = self.data.draw(st.none() | st.integers(1, talk.builder.turns)) if talk.builder.turns else None
        made = talk.builder.branch(name="b", turn=turn)
        self.conversations.append(Conversation(made, talk.exact and turn is None))
        if made.answer is not None:
            with contextlib.suppress(DataError):  # the text alone may be less than what the template needs
                made.append_turn([user(self.data.draw(SPOKEN))])

    async def turn(self, talk: Conversation, step: str) -> None:
        """Let the model answer, in one or in two pieces, and append what follows."""
        builder, draw = talk.builder, self.data.draw
        calls = [{"a": draw(st.integers(0, 9))}] if step == "turn" and self.family.calls and draw(st.booleans()) else []
        thought = draw(SPOKEN) if step == "turn" and draw(st.booleans()) else ""
        content = "" if calls else draw(SPOKEN)
        answer = said(self.family, content, thought=thought, calls=calls)
        whole = spoken(self.tokenizer, self.family, answer)
        if step == "inline":
            text = draw(RESULTS)
            await self.ask(talk, whole[: whole.rindex(content) + len(content)])
            if not self.model.whole or not builder.append_text(text):
                talk.exact = False
                return
            talk.exact = talk.exact and not self.metrics["cut_tokens"]
            whole = "x" + whole[whole.rindex(content) + len(content) :]
            answer["content"] = f"{content}{text}x"
        await self.ask(talk, whole if step != "cut" else whole[: len(whole) // 2], last=step != "cut")
        follows = [result(draw(RESULTS)) for _ in range(draw(st.integers(1, 2)))] if calls else [user(draw(SPOKEN))]
        before = self.trained()
        try:
            builder.append_turn(follows, answer=answer)
        except DataError as error:
            if error.code != "data.not-append-only" or self.policy == "fork":
                raise
            assert before == self.trained(), "a refused turn leaves the tokens as they were"
            builder.compact([QUESTION])
            talk.exact = True
            return
        if self.policy == "keep":
            talk.exact = False  # the template may have dropped a thought

    async def ask(self, talk: Conversation, text: str, *, last: bool = True) -> None:
        """Ask the model, and compare what it saw with what the template renders."""
        self.model.says = text
        builder = talk.builder
        fresh = not builder._turn
        if not builder.may_continue:
            talk.exact = False
            self.model.whole = False
            return
        await builder.generate()
        talk.exact = talk.exact and (self.model.whole or not last)
        if talk.exact and fresh and self.model.requests:
            self.compare(builder)
        talk.exact = talk.exact and self.model.whole and last

    def compare(self, builder: SequenceBuilder) -> None:
        """Compare what the model saw last with what the template makes of the conversation.

        GPT-OSS has another end of the last turn, the plain template none, and a SentencePiece space is a space.
        """
        seen = self.tokenizer.decode(self.model.requests[-1].prompt_ids, skip_special_tokens=False)
        expected = render(self.tokenizer, builder.messages, builder._tools)
        same = {"gpt_oss": ("<|return|>", "<|end|>"), "plain": ("<|endoftext|>", "")}.get(self.family.name, ("▁", " "))
        expected, seen = (EMPTY_THOUGHT.sub("", text.replace(*same)) for text in (expected, seen))
        assert expected == seen

    def sequences(self) -> tuple[AgentSequence, ...]:
        return sequences_of([talk.builder for talk in self.conversations])

    def trained(self) -> int:
        return sum(sum(sequence.response_mask) for sequence in self.sequences())

    def check(self) -> None:
        """Each token of the model is in one sequence, behind exactly what the model saw."""
        sequences = self.sequences()
        free = {(number, place) for number, each in enumerate(sequences) for place in self.starts(each)}
        for number, (request, token_ids) in enumerate(zip(self.model.requests, self.model.given, strict=True), 1):
            if not token_ids:
                continue
            assert request.prompt_ids, "no request without a prompt"
            mine = [
                (index, place)
                for index, place in free
                if self.is_at(sequences[index], place, request.prompt_ids, token_ids, number)
            ]
            assert 1 == len(mine), "an answer is in one sequence"
            free -= {*mine}
            limit = self.limit
            assert limit is None or len(request.prompt_ids) + request.sampling.max_new_tokens <= limit
        assert not free, "nothing else is trained on"
        for each in sequences:
            pairs = zip(each.response_mask, each.response_log_probs, each.weight_versions, strict=True)
            assert {pair[1:] for pair in pairs if not pair[0]} <= {(0.0, -1)}
            assert 1 == each.response_mask[-1]
            assert self.limit is None or len(each.prompt_ids) + len(each.response_ids) <= self.limit
            assert (each.parent is None) == (each.relation is None)
        of_root = sequences_of([self.conversations[0].builder])
        assert sum(sum(each.response_mask) for each in of_root) <= self.most
        assert self.rewards == sum(sum(each.token_rewards or ()) for each in sequences)

    @staticmethod
    def starts(sequence: AgentSequence) -> list[int]:
        """Return where an answer begins: where the version, which is the request's number, changes."""
        versions = sequence.weight_versions
        return [n for n, one in enumerate(versions) if one != -1 and (n == 0 or versions[n - 1] != one)]

    @staticmethod
    def is_at(each: AgentSequence, place: int, prompt: Any, token_ids: Any, number: int) -> bool:
        end = place + len(token_ids)
        return (
            (*each.prompt_ids, *each.response_ids[:place]) == prompt
            and each.response_ids[place:end] == token_ids
            and {*each.response_mask[place:end]} == {1}
            and {*each.response_log_probs[place:end]} == {-0.001 * number}
            and {*each.weight_versions[place:end]} == {number}
        )


@settings(max_examples=200)
@given(
    data=st.data(),
    family=st.sampled_from(list(FAMILIES.values())),
    policy=st.sampled_from(["refuse", "fork", "keep"]),
    overflow=st.sampled_from(["truncate", "end"]),
    limit=st.sampled_from([None, None, 320, 1200]),
    steps=st.integers(1, 10),
)
def test_nothing_drifts(data: Any, family: Family, policy: str, overflow: str, limit: int | None, steps: int) -> None:
    """Prompts are prefixes, masks are the model's tokens, the text is the template's, and budgets hold."""
    tools = TOOLS if family.calls and data.draw(st.booleans()) else ()

    async def rollout() -> None:
        world = World(data, family, policy, overflow, tools, limit)
        for _ in range(steps):
            await world.step()
        world.check()

    asyncio.run(rollout())
