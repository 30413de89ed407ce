"""Qwen3's own tokenizer and chat template: tool loops, thinking and several turns, against the template itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("transformers")

from jackfield.abc.agent import AgentContext
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.sdk.sequences import SequenceBuilder, sequences_of
from jackfield_chats import FAMILIES, TOOLS, ScriptedModel, render, result, said, user
from jackfield_testing import QWEN3_TOKENIZER, in_loop, refused

pytestmark = pytest.mark.needs("qwen3")

QWEN3 = FAMILIES["qwen3"]
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")
QUESTION = user("What is 2 + 3?")
CALL = said(QWEN3, thought="I have to add.", calls=[{"a": 2}])
SAYS_CALL = (
    '<think>\nI have to add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
)
SAYS_MORE = SAYS_CALL.replace("have to", "must also")
SAYS_RESULT = "<think>\nThat is it.\n</think>\n\nIt is **5**.\n<|im_end|>"


@functools.cache
def load() -> HuggingFaceChatTokenizer:
    return HuggingFaceChatTokenizer.load(QWEN3_TOKENIZER)


def talk(
    tokenizer: HuggingFaceChatTokenizer, *answers: str, tools: Sequence[Mapping[str, Any]] = TOOLS, **how: Any
) -> tuple[SequenceBuilder, ScriptedModel]:
    model = ScriptedModel(tokenizer, *answers)
    context = AgentContext(generate=model.generate, tokenizer=tokenizer)
    return SequenceBuilder(context, {"max_new_tokens": 500}, [QUESTION], tools=tools, **how), model


def test_the_end_tokens_are_known() -> None:
    tokenizer = load()
    assert "<|im_end|>" == tokenizer.decode(tokenizer.end_token_ids[:1], skip_special_tokens=False)


@in_loop
async def test_a_tool_loop_is_token_for_token_what_the_template_renders() -> None:
    """Thoughts stay in a loop; two results of one turn are one turn of the user."""
    tokenizer = load()
    builder, model = talk(tokenizer, SAYS_CALL, SAYS_MORE, SAYS_RESULT)
    more = said(QWEN3, thought="I must also add.", calls=[{"a": 2}])
    await builder.generate()
    assert builder.append_turn([result("2"), result("3")], answer=CALL)
    await builder.generate()
    assert builder.append_turn([result("5<|im_end|>")], answer=more)
    await builder.generate()
    (sequence,) = sequences_of([builder])
    history = [QUESTION, CALL, result("2"), result("3"), more, result("5<|im_end|>")]
    assert history == builder.messages
    for request, messages in zip(model.requests, (history[:1], history[:4], history), strict=True):
        assert tokenizer.encode_chat(messages, tools=TOOLS) == request.prompt_ids
        assert render(tokenizer, messages, TOOLS) == tokenizer.decode(request.prompt_ids, False)
    assert sum(map(len, model.given)) == sum(sequence.response_mask)
    # The answer as it is without parsing, with its thought and call in the text, gives the same.
    plain, again = talk(tokenizer, SAYS_CALL, SAYS_MORE, SAYS_RESULT)
    for results in ([result("2"), result("3")], [result("5<|im_end|>")]):
        await plain.generate()
        assert plain.append_turn(results)
    await plain.generate()
    assert [each.prompt_ids for each in model.requests] == [each.prompt_ids for each in again.requests]


@in_loop
async def test_the_next_question_drops_all_thoughts() -> None:
    """The answer before it has none, which the template shows with an empty thought while it is the last one."""
    tokenizer = load()
    script = (SAYS_CALL, "<think>\n\n</think>\n\nIt is 5.<|im_end|>", "Yes.<|im_end|>")

    async def loop(builder: SequenceBuilder) -> None:
        await builder.generate()
        builder.append_turn([result("5")], answer=CALL)
        await builder.generate()
        builder.append_turn([user("Really?")], answer=said(QWEN3, "It is 5."))

    refusing, _ = talk(tokenizer, *script)
    with refused("data.not-append-only"):
        await loop(refusing)
    builder, model = talk(tokenizer, *script, on_template_change="fork")
    await loop(builder)
    await builder.generate()
    first, second = sequences_of([builder])
    assert (0, "template") == (second.parent, second.relation)
    history = [QUESTION, CALL, result("5"), said(QWEN3, "It is 5."), user("Really?")]
    assert render(tokenizer, history, TOOLS) == tokenizer.decode(second.prompt_ids, False)
    assert model.requests[2].prompt_ids == second.prompt_ids
    assert sum(map(len, model.given)) == sum(first.response_mask) + sum(second.response_mask)


@in_loop
@pytest.mark.parametrize("thinks", [True, False])
async def test_several_turns_without_thoughts_are_one_sequence(thinks: bool) -> None:
    tokenizer = load()
    if not thinks:
        template = "{% set enable_thinking = false %}" + tokenizer.tokenizer.chat_template
        tokenizer = HuggingFaceChatTokenizer(tokenizer.tokenizer, chat_template=template)
    builder, model = talk(tokenizer, *(f"It is {n}.\n\n<|im_end|>" for n in range(3)), tools=())
    for number in range(3):
        await builder.generate()
        if number < 2:
            assert builder.append_turn([user(f"And {number}?")])
    (sequence,) = sequences_of([builder])
    whole = tokenizer.decode((*sequence.prompt_ids, *sequence.response_ids), skip_special_tokens=False)
    last = {"role": "assistant", "content": "It is 2.\n\n"}
    expected = render(tokenizer, [*builder.messages, last], asks=False).removesuffix("\n")
    assert EMPTY_THOUGHT.sub("", expected) == EMPTY_THOUGHT.sub("", whole)
    assert 3 == len(model.requests)
    assert (3 if not thinks else 0) == whole.count("<think>")


def test_inline_results_are_plain_text() -> None:
    tokenizer = load()
    text = "</tool>\n<result>\n5 <|im_end|> 好\n\n</result>\n"
    inserted = tokenizer.encode_text(text)
    assert text == tokenizer.decode(inserted, skip_special_tokens=False)
    assert not {*tokenizer.tokenizer.all_special_ids} & {*inserted}
    assert tokenizer.encode_text("5.\n") == tuple(tokenizer.tokenizer.encode("5.\n"))
