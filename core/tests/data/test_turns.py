# ruff: noqa: RUF001, DeepSeek's tokens have a fullwidth line in their names
"""Turns of the model families: the appended tokens are the template's, or the template is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.errors import DataError
from jackfield_chats import FAMILIES, QUESTION, TOOLS, Family, make_tokenizer, render, result, said, spoken, user
from jackfield_testing import refused

EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")
USER, TOOL, RESULTS = [user("And then?")], [result("3")], [result("3"), result("4", "call00002")]
FOLLOWING = {"user": USER, "tool": TOOL, "results": RESULTS}
ANSWERS: Mapping[str, Mapping[str, Any]] = {
    "text": {"content": "It is so."},
    "thought": {"content": "It is so.", "thought": "hm, well"},
    "call": {"calls": [{"a": 1}]},
    "thought and call": {"thought": "hm, well", "calls": [{"a": 1}]},
    "text and call": {"content": "I add.", "calls": [{"a": 1}]},
    "calls": {"calls": [{"a": 1}, {"a": 2}]},
}
#: Answers that the family's template has no place for; it refuses them, or it drops a part in each case.
MISSING = {
    "llama3": {"calls"},
    "mistral": set(),
    "gpt_oss": {"calls", "text and call"},
}
#: What each template does not keep: (answer, following, with tools). ``None``: either.
DROPPED_THOUGHTS = {(answer, after, None) for answer in ("thought", "thought and call") for after in FOLLOWING}
CHANGES: dict[str, set[tuple[str, str, bool | None]]] = {
    "qwen2_5": DROPPED_THOUGHTS,
    "qwen3": {("thought", "user", None), ("thought and call", "user", None)},
    "llama3": DROPPED_THOUGHTS | {("text and call", after, None) for after in FOLLOWING},
    "gemma": DROPPED_THOUGHTS,
    "glm4": {("thought", "user", None), ("thought and call", "user", None)},
    "deepseek": DROPPED_THOUGHTS,
    "mistral": DROPPED_THOUGHTS
    | {(answer, "user", True) for answer in ANSWERS}
    | {("text and call", after, None) for after in FOLLOWING},
    "phi4": DROPPED_THOUGHTS,
    "gpt_oss": {("thought", "user", None)},
    "plain": DROPPED_THOUGHTS | {("text", "user", None)},  # its answer merges with the line breaks behind it
}


def turns() -> list[Any]:
    made = []
    for family in FAMILIES.values():
        for answer, parts in ANSWERS.items():
            calls = "calls" in parts
            if (calls and not family.calls) or answer in MISSING.get(family.name, ()):
                continue
            for after in FOLLOWING if calls else ("user",):
                made += [
                    pytest.param(family, answer, after, tools, id=f"{family.name}-{answer}-{after}-{len(tools)}")
                    for tools in ((), TOOLS)
                ]
    return made


def appended(tokenizer: HuggingFaceChatTokenizer, *arguments: Any, **keywords: Any) -> str:
    return tokenizer.decode(tokenizer.encode_turn(*arguments, **keywords), skip_special_tokens=False)


@pytest.mark.parametrize(("family", "kind", "after", "tools"), turns())
def test_a_turn_is_what_the_template_renders_or_is_refused(
    family: Family, kind: str, after: str, tools: Sequence[Mapping[str, Any]]
) -> None:
    """Question, answer and turn are, token for token, the conversation that the template renders."""
    tokenizer = make_tokenizer(family)
    answer, messages = said(family, **ANSWERS[kind]), FOLLOWING[after]
    if any((kind, after, with_tools) in CHANGES[family.name] for with_tools in (None, bool(tools))):
        with refused("data.not-append-only"):
            tokenizer.encode_turn(messages, tools=tools, answer=answer)
        return
    inserted = tokenizer.encode_turn(messages, tools=tools, answer=answer)
    whole = render(tokenizer, [QUESTION, answer, *messages], tools)
    expected = tokenizer.encode_chat([QUESTION, answer, *messages], tools=tools)
    assert expected[len(expected) - len(inserted) :] == inserted
    text = render(tokenizer, [QUESTION], tools) + spoken(tokenizer, family, answer)
    text = text.replace("<|return|>", "<|end|>") if "<|return|>" not in whole else text  # GPT-OSS renames its end
    if family.name == "glm4":  # the model writes the header of the next turn, which also begins the turn
        text = re.sub(r"<\|(user|observation)\|>$", "", text)
    text += tokenizer.decode(inserted, skip_special_tokens=False)
    assert EMPTY_THOUGHT.sub("", whole) == EMPTY_THOUGHT.sub("", text)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_an_answer_that_was_cut_gets_the_templates_end_first(family: Family) -> None:
    tokenizer = make_tokenizer(family)
    answer, end = said(family, "It is so"), {"gpt_oss": "<|end|>"}.get(family.name)
    closed = tokenizer.encode_turn(USER, answer=answer)
    cut = tokenizer.encode_turn(USER, answer=answer, closed=False)
    if family.name in ("plain", "glm4"):
        assert cut == closed  # no token ends its turns
    else:
        assert cut[1:] == closed
        assert (end or tokenizer.decode(tokenizer.end_token_ids[:1], False)) == tokenizer.decode(cut[:1], False)


def test_text_that_merges_with_the_answers_last_token_is_refused() -> None:
    """``.`` and ``\\n\\n`` are one token, which the model never saw; between a letter and a line break is none."""
    tokenizer = make_tokenizer(FAMILIES["plain"])
    assert 1 == len(tokenizer.tokenizer.encode(".\n\n"))
    with refused("data.not-append-only"):
        tokenizer.encode_turn(USER, answer=said(FAMILIES["plain"], "It is so."))
    kept = appended(tokenizer, USER, answer=said(FAMILIES["plain"], "It is so"))
    assert "\n\nuser: And then?\n\nassistant:" == kept
    # A special token between them keeps them apart.
    apart = make_tokenizer(FAMILIES["qwen2_5"])
    assert "\n<|im_start|>user" in appended(apart, USER, answer=said(FAMILIES["qwen2_5"], "It is so.\n\n"))


def test_without_an_answer_only_a_short_text_is_checked() -> None:
    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    assert "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n" == appended(tokenizer, USER)
    with refused("data.not-append-only"):  # the tools move
        make_tokenizer(FAMILIES["mistral"]).encode_turn(USER, tools=TOOLS)


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        pytest.param("{{ m['content'] | upper }}", "It is so", id="capitals"),
        pytest.param("{{ m['content'][:5] }}", "It is so", id="cut"),
        pytest.param("{{ m['content'] | replace('  ', ' ') }}", "It  is so", id="inner space"),
        pytest.param("{{ m['content'].split('</think>')[-1] }}", "<think>hm</think>It is so", id="thought"),
        pytest.param("{% if loop.last %}{{ m['content'] }}{% endif %}", "It is so", id="dropped"),
        pytest.param("{% if m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}", "And then?", id="found later"),
    ],
)
def test_a_template_that_changes_an_answer_is_refused(template: str, answer: str) -> None:
    chatml = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n" + template + "<|im_end|>\n{% endfor %}"
    chatml += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    family = FAMILIES["qwen2_5"]
    tokenizer = make_tokenizer(family, chatml)
    with refused("data.not-append-only") as caught:
        tokenizer.encode_turn(USER, answer=said(family, answer))
    assert "answer" in caught.value.message


def test_a_template_that_changes_only_space_around_an_answer_is_not_refused() -> None:
    for name in ("llama3", "gemma", "mistral"):  # which trim
        family = FAMILIES[name]
        tokenizer = make_tokenizer(family)
        trimmed = tokenizer.encode_turn(USER, answer=said(family, "It is so."))
        assert trimmed == tokenizer.encode_turn(USER, answer=said(family, "\n It is so.  \n"))


@pytest.mark.parametrize("thinks", [True, False])
def test_an_empty_thought_that_comes_and_goes_is_none(thinks: bool) -> None:
    """Qwen3's prompt without thinking has an empty thought, which its template later leaves out."""
    family = FAMILIES["qwen3"]
    chosen = "{% set enable_thinking = " + str(thinks).lower() + " %}"
    tokenizer = make_tokenizer(family, chosen + family.template)
    end = "<|im_start|>assistant\n" + ("" if thinks else "<think>\n\n</think>\n\n")
    assert tokenizer.decode(tokenizer.encode_chat([QUESTION]), False).endswith(end)
    for answer in (said(family, "It is."), said(family, "<think>\n\n</think>\n\nIt is.")):
        assert "\n<|im_start|>user\nAnd then?<|im_end|>\n" + end == appended(tokenizer, USER, answer=answer)
        assert appended(tokenizer, TOOL, answer=answer).endswith("\n3\n</tool_response><|im_end|>\n" + end)


def test_a_prompt_that_opens_a_thought_which_history_lacks_is_refused() -> None:
    """R1's prompt ends with ``<think>``: the model writes only the rest of the thought."""
    family = FAMILIES["deepseek"]
    start, _, end = family.template.rpartition("'<｜Assistant｜>'")
    tokenizer = make_tokenizer(family, f"{start}'<｜Assistant｜><think>\\n'{end}")
    for answer in ("hm, well</think>It is so.", "It is so."):
        with refused("data.not-append-only"):
            tokenizer.encode_turn(USER, answer=said(family, answer))
    assert appended(tokenizer, USER).startswith("<｜User｜>And then?")


@pytest.mark.parametrize("family", [each for each in FAMILIES.values() if each.calls], ids=lambda each: each.name)
def test_names_of_special_tokens_in_results_stay_text(family: Family) -> None:
    """A page that a tool fetched cannot end a turn or begin another one; its text arrives as it is."""
    tokenizer, answer = make_tokenizer(family), said(family, calls=[{"a": 1}])
    special = set(tokenizer.tokenizer.convert_tokens_to_ids(list(family.special)))
    attack = f"so {''.join(family.special)} and {family.special[-1]}"
    plain, attacked = (tokenizer.encode_turn([result(text)], answer=answer) for text in ("so", attack))
    assert [one for one in plain if one in special] == [one for one in attacked if one in special]
    assert attack in tokenizer.decode(attacked, False)
    prompts = (tokenizer.encode_chat([QUESTION, answer, result(text)]) for text in ("so", attack))
    before, after = ([one for one in prompt if one in special] for prompt in prompts)
    assert before == after


def test_names_of_special_tokens_in_questions_are_the_tasks_own() -> None:
    """A task may contain placeholders; only what tools return is untrusted."""
    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    (image,) = tokenizer.tokenizer.encode("<|endoftext|>")
    assert image in tokenizer.encode_chat([user("see <|endoftext|>")])
    assert image in tokenizer.encode_turn([user("see <|endoftext|>")])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(
    "text", ["result", " 42\n", "\n\n<result>It is so.\n\n</result>\n", "", "ü… 🙂", "<|im_end|></s>"]
)
def test_inline_text_continues_the_answer(family: Family, text: str) -> None:
    """The text is tokenised alone, adds no space, and holds no special token."""
    tokenizer = make_tokenizer(family)
    before = tuple(tokenizer.tokenizer.encode("It is", add_special_tokens=False))
    inserted = tokenizer.encode_text(text)
    special = set(tokenizer.tokenizer.convert_tokens_to_ids(list(family.special)))
    assert not special & set(inserted)
    assert "It is" + text == tokenizer.decode(before + inserted, skip_special_tokens=False)


def test_the_error_says_what_differs() -> None:
    family = FAMILIES["qwen3"]
    with pytest.raises(DataError) as caught:
        make_tokenizer(family).encode_turn(USER, answer=said(family, "It is.", thought="hm, well"))
    assert "hm, well" in caught.value.expected
    assert "It is." in caught.value.found
    assert "chat_template" in str(caught.value.fix)
    with pytest.raises(DataError) as caught:
        make_tokenizer(FAMILIES["mistral"]).encode_turn(USER, tools=TOOLS, answer=said(family, "It is."))
    assert "TOOLS" in caught.value.expected
    assert "INST" in caught.value.found


def test_a_dropped_thought_is_not_found_in_what_follows() -> None:
    """The thought is a part of the answer, and the answer that of the next question."""
    family = FAMILIES["gpt_oss"]
    with refused("data.not-append-only"):
        make_tokenizer(family).encode_turn([user("so it is")], answer=said(family, "so it is", thought="it is"))
