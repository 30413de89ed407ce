"""Chat tokens: known end tokens, append-only turns, and what a tokenizer must have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jackfield.data.encoding import check_vocabulary, encode_prompt
from jackfield.data.formats import Task
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.errors import DataError
from jackfield_testing import refused

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Like Qwen3's: an empty thought in the last answer, and in the prompt when thinking is off.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think> </think>\n{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think> </think>\n{% endif %}{% endif %}"
)
WORDS = ["user", "assistant", "system", "tool", "what", "is", "1", "2", "3", "+", "=", "q", "####"]
WORDS += ["<think>", "</think>", "jackfield-answer"]
SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
NUMBERS = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
TEXTS = {number: word for word, number in NUMBERS.items()}


def make_tokenizer(chat_template: str | None = CHATML, eos: str | None = "<|im_end|>") -> Any:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(NUMBERS, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token=eos,
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def words(token_ids: tuple[int, ...]) -> str:
    return " ".join(TEXTS[token] for token in token_ids)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_chat_ends_where_the_model_has_to_answer() -> None:
    tokenizer = HuggingFaceChatTokenizer(make_tokenizer())
    prompt = tokenizer.encode_chat([{"role": "system", "content": "1"}, user("1 + 2")])
    expected = "<|im_start|> system 1 <|im_end|> <|im_start|> user 1 + 2 <|im_end|> <|im_start|> assistant"
    assert expected == words(prompt)
    assert "user 1 + 2 assistant" == " ".join(tokenizer.decode(prompt).split()[-5:])
    assert words(prompt).split() == tokenizer.decode(prompt, skip_special_tokens=False).split()


def test_runs_of_a_group_render_their_prompt_once() -> None:
    calls = []
    raw = make_tokenizer()
    tokenizer = HuggingFaceChatTokenizer(raw)
    render = raw.apply_chat_template
    raw.apply_chat_template = lambda *args, **keywords: calls.append(1) or render(*args, **keywords)
    assert tokenizer.encode_chat([user("1")]) == tokenizer.encode_chat([user("1")])
    assert 1 == len(calls)
    assert tokenizer.encode_chat([user("1")]) != tokenizer.encode_chat([user("2")])


def test_turns_append_exactly_what_the_template_would_render() -> None:
    """Prompt + answer + turn are the tokens of the whole conversation."""
    tokenizer = HuggingFaceChatTokenizer(make_tokenizer())
    question, answer, follow = user("1 + 2"), {"role": "assistant", "content": "3"}, user("what is 3")
    answered = tokenizer.encode_chat([question]) + tokenizer.encode_response("3")
    turn = tokenizer.encode_turn([follow])
    assert "<|im_start|> user what is 3 <|im_end|> <|im_start|> assistant" == words(turn)
    assert tokenizer.encode_chat([question, answer, follow]) == answered + turn
    several = tokenizer.encode_turn([{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}])
    both = "<|im_start|> tool 1 <|im_end|> <|im_start|> tool 2 <|im_end|> <|im_start|> assistant"
    assert both == words(several)


@pytest.mark.parametrize("thinking", [True, False])
def test_thoughts_that_a_template_drops_later_do_not_hinder_turns(thinking: bool) -> None:
    """History stays as the model saw it; only the text after the answer comes from the template."""
    chosen = "{% set enable_thinking = " + str(thinking).lower() + " %}"
    tokenizer = HuggingFaceChatTokenizer(make_tokenizer(chosen + THINKING))
    assert (not thinking) == ("<think>" in words(tokenizer.encode_chat([user("1")])))
    expected = "<|im_start|> user 2 <|im_end|> <|im_start|> assistant" + (" <think> </think>" if not thinking else "")
    assert expected == words(tokenizer.encode_turn([user("2")]))


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{% for m in messages %}{{ m['content'] }} {{ messages | length }}\n{% endfor %}", id="counts"),
        pytest.param("{% for m in messages | reverse %}{{ m['content'] }}<|im_end|>{% endfor %}", id="reversed"),
        pytest.param("{% for m in messages[-2:] %}{{ m['content'] }}<|im_end|>{% endfor %}", id="window"),
        pytest.param(
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}",
            id="drops answers",
        ),
    ],
)
def test_templates_that_change_earlier_turns_are_refused(template: str) -> None:
    tokenizer = HuggingFaceChatTokenizer(make_tokenizer(template))
    with pytest.raises(DataError) as caught:
        tokenizer.encode_turn([user("1"), user("2")])
    assert "data.not-append-only" == caught.value.code


def test_end_tokens_come_from_template_tokenizer_and_generation_config(tmp_path: Path) -> None:
    """A base model's tokenizer names another end than its template: both end an answer, the template's is taught."""
    tokenizer = HuggingFaceChatTokenizer(make_tokenizer(eos="<|endoftext|>"))
    assert (NUMBERS["<|im_end|>"], NUMBERS["<|endoftext|>"]) == tokenizer.end_token_ids
    assert "3 <|im_end|>" == words(tokenizer.encode_response("3"))
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert (3, 4) == HuggingFaceChatTokenizer.load(tmp_path).end_token_ids
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert (3, 4) == HuggingFaceChatTokenizer.load(tmp_path).end_token_ids


def test_a_template_without_end_token_uses_the_tokenizers() -> None:
    plain = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\n{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant {% endif %}"
    tokenizer = HuggingFaceChatTokenizer(make_tokenizer(plain))
    assert (NUMBERS["<|im_end|>"],) == tokenizer.end_token_ids
    assert "user 2 assistant" == words(tokenizer.encode_turn([user("2")]))
    with pytest.raises(DataError) as caught:
        HuggingFaceChatTokenizer(make_tokenizer(plain, eos=None))
    assert "data.no-end-token" == caught.value.code


def test_a_tokenizer_without_template_needs_one_from_the_configuration(tmp_path: Path) -> None:
    make_tokenizer(None).save_pretrained(tmp_path)
    with refused("data.no-chat-template", "data.chat_template") as caught:
        HuggingFaceChatTokenizer.load(tmp_path)
    assert "data.no-chat-template" == caught.value.code
    given = HuggingFaceChatTokenizer.load(tmp_path, chat_template=CHATML)
    own = HuggingFaceChatTokenizer(make_tokenizer())
    assert own.encode_chat([user("1 + 2")]) == given.encode_chat([user("1 + 2")])


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        HuggingFaceChatTokenizer.load(tmp_path)
    assert "data.missing" == caught.value.code
    assert str(tmp_path) in str(caught.value)


def test_what_a_template_refuses_is_named() -> None:
    strict = "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    strict += "{{ m['content'] }}<|im_end|>{% endfor %}"
    tokenizer = HuggingFaceChatTokenizer(make_tokenizer(strict))
    with pytest.raises(DataError) as caught:
        tokenizer.encode_chat([{"role": "tool", "content": "1"}])
    assert "data.malformed" == caught.value.code


def test_vocabulary_has_to_fit_the_model() -> None:
    tokenizer = HuggingFaceChatTokenizer(make_tokenizer())
    check_vocabulary(tokenizer, len(NUMBERS))
    check_vocabulary(tokenizer, len(NUMBERS) + 40)
    with refused("data.vocabulary", len(NUMBERS) - 1) as caught:
        check_vocabulary(tokenizer, len(NUMBERS) - 1)
    assert "data.vocabulary" == caught.value.code


def test_importing_the_module_loads_no_heavy_library() -> None:
    code = "import sys, jackfield.data.tasks, jackfield.data.tokens; "
    code += "print(sorted({'torch', 'numpy', 'transformers', 'ray', 'tensordict'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == done.stdout.strip()


#: Like Qwen3's: tools before the messages, and a variable.
TOOLS = "{% if tools %}{% for tool in tools %}{{ tool['name'] }} {% endfor %}{% endif %}" + THINKING
OFF = {"enable_thinking": False}


def test_variables_and_tools_of_a_template() -> None:
    plain = HuggingFaceChatTokenizer(make_tokenizer(TOOLS))
    given = plain.with_template([{"name": "tool"}], OFF)
    messages = [user("q")]
    assert "<|im_start|> user q <|im_end|> <|im_start|> assistant" == words(plain.encode_chat(messages))
    expected = "tool <|im_start|> user q <|im_end|> <|im_start|> assistant <think> </think>"
    assert expected == words(given.encode_chat(messages))
    assert expected.replace("tool", "what", 1) == words(given.encode_chat(messages, tools=[{"name": "what"}]))
    ids, mask = given.encode_completion(messages, [{"role": "assistant", "content": "1"}])
    assert ("1 <|im_end|>", (1, 1)) == (words(ids), mask)  # the empty thought is in the prompt
    with refused("data.malformed", "enable_thought"):
        plain.with_template((), {"enable_thought": False})


def test_a_task_has_its_own_tools_and_variables() -> None:
    tokenizer = HuggingFaceChatTokenizer(make_tokenizer(TOOLS))
    own = Task(id="t", messages=(user("q"),), response="1", tools=({"name": "tool"},), template_options=OFF)
    expected = "tool <|im_start|> user q <|im_end|> <|im_start|> assistant <think> </think>"
    assert expected == words(encode_prompt(tokenizer, own, None))
    assert tokenizer.of(own) is tokenizer.of(own)
    other = Task(id="o", messages=(user("q"),))
    assert tokenizer.of(other) is tokenizer
    assert "<think>" not in words(encode_prompt(tokenizer, other, None))
    wrong = Task(id="w", messages=(user("q"),), template_options={"thinking": True}, place="a.jsonl:3")
    with pytest.raises(DataError) as caught:
        encode_prompt(tokenizer, wrong, None)
    assert "a.jsonl:3" in str(caught.value.where)


def test_long_prompts_are_refused_or_cut_at_their_beginning() -> None:
    tokenizer, task = HuggingFaceChatTokenizer(make_tokenizer()), Task(id="t", messages=(user("1 + 2"),))
    assert "2 <|im_end|> <|im_start|> assistant" == words(encode_prompt(tokenizer, task, 4, cuts=True))
    with refused("data.prompt-too-long", "prompt_overflow"):
        encode_prompt(tokenizer, task, 4)
