"""Shapes that are recognised without a mapping, and what rows they become."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.errors import ConfigError, DataError

from .conftest import Form

USER = [{"role": "user", "content": "Why?"}]
BECAUSE = [{"role": "assistant", "content": "Because."}]
SO = [{"role": "assistant", "content": "So."}]

TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GSM8K": (
        {"question": "1 + 1?", "answer": "Add them.\n#### 2"},
        {"prompt": "1 + 1?", "ground_truth": "2"},
    ),
    "boxed": (
        {"problem": "1/2?", "solution": r"Thus \boxed{\frac{1}{2}}."},
        {"prompt": "1/2?", "ground_truth": r"\frac{1}{2}"},
    ),
    "tags": (
        {"question": "1 + 1?", "answer": "<think>One more.</think>\n<answer> 2 </answer>"},
        {"prompt": "1 + 1?", "ground_truth": "2", "reasoning": "One more."},
    ),
    "thoughts": (
        {"question": "1 + 1?", "answer": "<think>One more.</think> 2"},
        {"prompt": "1 + 1?", "ground_truth": "2", "reasoning": "One more."},
    ),
    "plain": ({"question": "Who?", "answer": "Ada"}, {"prompt": "Who?", "ground_truth": "Ada"}),
    "verl": (
        {"prompt": [{"role": "system", "content": "Be short."}, *USER], "reward_model": {"ground_truth": "x"}},
        {"prompt": [{"role": "system", "content": "Be short."}, *USER], "ground_truth": "x"},
    ),
    "named": (
        {"id": 7, "data_source": "sums", "question": "1?", "answer": "1"},
        {"id": "7", "data_source": "sums", "prompt": "1?", "ground_truth": "1"},
    ),
}
ANSWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "messages": ({"messages": [*USER, *BECAUSE]}, {"prompt": "Why?", "completion": BECAUSE}),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        {"prompt": "Why?", "completion": BECAUSE},
    ),
    "TRL": ({"prompt": "Why?", "completion": "Because."}, {"prompt": "Why?", "completion": "Because."}),
    "response": ({"prompt": "Why?", "response": "Because."}, {"prompt": "Why?", "completion": "Because."}),
    "Alpaca": (
        {"instruction": "Add.", "input": "1 and 1", "output": "2"},
        {"prompt": "Add.\n1 and 1", "completion": "2"},
    ),
    "thoughts": (
        {"question": "1 + 1?", "answer": "<think>One more.</think>2"},
        {"prompt": "1 + 1?", "completion": "<think>One more.</think>2", "ground_truth": "2"},
    ),
}
PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Why?", "chosen": "Because.", "rejected": "So."},
    "conversations": {"chosen": [*USER, *BECAUSE], "rejected": [*USER, *SO]},
    "answers": {"prompt": USER, "chosen": BECAUSE, "rejected": SO},
    "transcripts": {
        "chosen": "\n\nHuman: Why?\n\nAssistant: Because.",
        "rejected": "\n\nHuman: Why?\n\nAssistant: So.",
    },
    "lines": {"chosen": "Why?\nBecause.", "rejected": "Why?\nSo."},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "Why?"}],
        "chosen": {"from": "gpt", "value": "Because."},
        "rejected": {"from": "gpt", "value": "So."},
    },
}


@pytest.mark.parametrize("name", TASKS)
def test_tasks(form: Form, name: str) -> None:
    record, expected = TASKS[name]
    report, lines = form([record], "task")
    assert [{"_schema": "jackfield.task/1", "id": "raw:1", **expected}] == lines
    assert "jackfield.task/1" == report.schema


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_to_imitate(form: Form, name: str) -> None:
    record, expected = ANSWERS[name]
    _, lines = form([record], "sft")
    assert [{"_schema": "jackfield.sft/1", "id": "raw:1", "ground_truth": "", **expected}] == lines


@pytest.mark.parametrize("name", PAIRS)
def test_preferences(form: Form, name: str) -> None:
    _, (line,) = form([PAIRS[name]], "dpo")
    said = [each if isinstance(each, str) else each[0]["content"] for each in (line["chosen"], line["rejected"])]
    assert ["jackfield.dpo/1", "Why?", ["Because.", "So."]] == [line["_schema"], line["prompt"], said]


def test_each_turn_of_a_conversation(form: Form) -> None:
    """With `turns: all`, each answer has what precedes it as its prompt; tools and system messages stay."""
    system, tool = {"role": "system", "content": "S"}, {"type": "function", "function": {"name": "f"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    first = [call, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "One."}]
    record = {"messages": [system, *USER, *first, *USER, *SO], "tools": [tool]}
    _, lines = form([record], "sft", turns="all")
    assert [[system, *USER], [system, *USER, *first, *USER]] == [line["prompt"] for line in lines]
    assert [first, SO] == [line["completion"] for line in lines]
    assert [[tool], [tool]] == [line["tools"] for line in lines]
    assert ["raw:1.1", "raw:1.2"] == [line["id"] for line in lines]


def test_thoughts_may_be_dropped(form: Form) -> None:
    record = {"prompt": "Why?", "completion": "<think>Hm.</think>Because."}
    assert "Because." == form([record], "sft", thinking="drop")[1][0]["completion"]
    pair = {"prompt": "Why?", "chosen": "<think>Hm.</think>Because.", "rejected": "<think>Oh.</think>So."}
    _, (line,) = form([pair], "dpo", thinking="drop")
    assert ("Because.", "So.") == (line["chosen"], line["rejected"])


def test_answers_are_marked_alike(form: Form) -> None:
    """If the first records mark their answers in one way, one without the mark is set aside with its row."""
    records: list[dict[str, Any]] = [{"question": "?", "answer": f"So\n#### {n}"} for n in range(9)]
    report, lines = form([*records, {"question": "?", "answer": "I do not know"}], "task")
    assert [str(n) for n in range(9)] == [line["ground_truth"] for line in lines]
    assert report.set_aside_file is not None
    assert "raw.jsonl:10" in report.set_aside_file.read_text()
    _, lines = form(records[:1], "task", answers="whole")
    assert "So\n#### 0" == lines[0]["ground_truth"]


@pytest.mark.parametrize("unit", ["question", "a", "label"])
def test_records_that_no_shape_fits_are_refused(form: Form, unit: str) -> None:
    """The columns that were found, and what may be done."""
    with pytest.raises(DataError) as caught:
        form([{"x": unit, "y": 1}], "task")
    assert "data.format" == caught.value.code
    assert "x (str), y (int)" in str(caught.value.found)
    assert "--map" in str(caught.value.fix)


def test_a_shape_is_named(form: Form) -> None:
    """Where records could be read in two ways, the user says which."""
    record = {"text": "A text.", "prompt": "Why?", "response": "Because."}
    assert ["Because."] == [line["completion"] for line in form([record], "sft")[1]]
    assert ["A text."] == [line["completion"] for line in form([record], "sft", shape="texts")[1]]
    with pytest.raises(ConfigError) as caught:
        form([record], "sft", shape="text")
    assert "texts" in str(caught.value)


def test_a_model_that_there_is_not(form: Form) -> None:
    with pytest.raises(ConfigError) as caught:
        form([{"prompt": "?"}], "tasks")
    assert "task" in str(caught.value.expected)
    assert "did you mean 'task'" in caught.value.message


def test_samples_of_a_queue_keep_their_tokens(form: Form) -> None:
    """Lines of `queue export` and flat ones, with a reward for the response or for each token."""
    tokens = {"prompt_ids": [1, 2], "response_ids": [3, 4], "rollout_log_probs": [-0.5, -1.0]}
    exported = {"columns": {**tokens, "reward": [1.0], "task": {"ground_truth": "x"}}, "group": "g", "task": "t"}
    _, lines = form([exported, {**tokens, "reward": [0.5, 0.25], "group": 2}, {**tokens, "reward": 2}], "experience")
    assert [[1.0], [0.5, 0.25], [2.0]] == [line["columns"]["reward"] for line in lines]
    assert [1.0, 0.75, 2.0] == [line["columns"]["task"]["reward"] for line in lines]
    assert [("g", "t"), ("2", "raw:2"), (None, "raw:3")] == [(line.get("group"), line["task"]) for line in lines]
    assert {"_schema": "jackfield.experience/1"} == lines[0]["tags"]
    assert tokens == {name: lines[0]["columns"][name] for name in tokens}


def test_experiences_need_a_model(form: Form) -> None:
    with pytest.raises(ConfigError) as caught:
        form([{"prompt": "?", "response": "!", "reward": 1.0}], "experience")
    assert ("config.missing-key", "model") == (caught.value.code, caught.value.where)
