"""The layouts that are recognised without ``data.format``, and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.config.data import DataSet
from jackfield.data.formats import Task, TaskFormat
from jackfield.data.tasks import TaskSet
from jackfield.errors import DataError
from jackfield_datasets import open_tasks

USER, SAID, WORSE = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
TEXT = ({"role": "user", "content": "q"},)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"n": 1}}}

#: record, messages, response, rejected, ground truth
LAYOUTS: dict[str, tuple[dict[str, Any], Any, Any, Any, str]] = {
    "trl prompt": ({"prompt": "q"}, TEXT, None, None, ""),
    "trl prompt and solution": ({"prompt": [USER], "solution": "4", "question": "q"}, TEXT, "4", None, "4"),
    "trl prompt-completion": ({"prompt": "q", "completion": "a"}, TEXT, "a", None, ""),
    "trl conversational": ({"prompt": [USER], "completion": [SAID]}, TEXT, (SAID,), None, ""),
    "trl preference": ({"prompt": "q", "chosen": "a", "rejected": "b"}, TEXT, "a", "b", ""),
    "trl implicit": ({"chosen": [USER, SAID], "rejected": [USER, WORSE]}, TEXT, (SAID,), (WORSE,), ""),
    "trl messages": ({"messages": [USER, SAID]}, TEXT, (SAID,), None, ""),
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": [USER],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"split": "train", "index": 0, "answer": "long"},
        },
        *(TEXT, "72", None, "72"),
    ),
    "gsm8k": ({"question": "q", "answer": "#### 1"}, TEXT, "#### 1", None, "#### 1"),
    "math": ({"problem": "q", "solution": "long", "answer": "4"}, TEXT, "4", None, "4"),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
        *(({"role": "system", "content": "s"}, *TEXT), (SAID,), None, ""),
    ),
    "sharegpt calls": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "a"},
            ]
        },
        TEXT,
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, SAID),
        *(None, ""),
    ),
    "sharegpt preference": (
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        *(TEXT, (SAID,), (WORSE,), ""),
    ),
    "alpaca": (
        {"instruction": "q", "input": "more", "output": "a", "system": "s", "history": [["q0", "a0"]]},
        (
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q0"},
            {"role": "assistant", "content": "a0"},
            {"role": "user", "content": "q\nmore"},
        ),
        *("a", None, ""),
    ),
    "alpaca without input": ({"instruction": "q", "input": "", "output": "a", "text": "x"}, TEXT, "a", None, ""),
    "alpaca preference": ({"instruction": "q", "chosen": "a", "rejected": "b"}, TEXT, "a", "b", ""),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("file", ["set.jsonl", "set.parquet"])
def test_layouts_are_recognised(tasks_of: Callable[..., list[Task]], name: str, file: str) -> None:
    record, messages, response, rejected, ground_truth = LAYOUTS[name]
    (task,) = tasks_of([record], file)
    found = (task.messages, task.response, task.rejected, task.ground_truth)
    assert (messages, response, rejected, ground_truth) == found
    assert record.get("data_source", "set") == task.data_source
    assert record.keys() == task.fields.keys()


def test_what_was_recognised_is_said(tmp_path: Path) -> None:
    (file := tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "q", "completion": "a", "tools": [TOOL]}))
    tasks = open_tasks([DataSet(path=str(file))], TaskFormat())
    said = "TRL's prompts and completions (prompt: prompt, answer: completion, tools: tools)"
    assert [f"{file} has {said}"] == tasks.notes
    assert (TOOL,) == tasks[0].tools


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_a_record_has_tools_and_variables_of_the_template(tasks_of: Callable[..., list[Task]], tools: Any) -> None:
    record = {"prompt": "q", "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    (task,) = tasks_of([record])
    assert ((TOOL,), {"enable_thinking": False}) == (task.tools, task.template_options)


def test_a_format_that_is_given_wins(tasks_of: Callable[..., list[Task]]) -> None:
    record = {"prompt": "p", "completion": "c", "question": "q", "label": "l"}
    (task,) = tasks_of([record], prompt_key="question", answer_key="label")
    assert (TEXT, "l") == (task.messages, task.ground_truth)
    (task,) = tasks_of([{"prompt": "q", "completion": "c"}], system="s")  # this is no key
    assert ({"role": "system", "content": "s"}, *TEXT) == task.messages


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "some text"}, "response_key: text"),
        ({"a": 1, "b": [2]}, "a (int), b (list)"),
        ({"prompt": "q", "messages": [USER, SAID]}, "{answer_key: null, messages_key: messages}"),
        ({"prompt": "q", "completion": "a", "chosen": "a", "rejected": "b"}, "several ways"),
        ({"prompt": "q", "completion": "a", "label": True}, "pairs"),
    ],
)
def test_unknown_and_ambiguous_layouts_list_the_columns(
    tasks_of: Callable[..., list[Task]], record: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError) as caught:
        tasks_of([record])
    assert "data.format" == caught.value.code
    assert said in str(caught.value)
    assert all(name in str(caught.value.found) for name in record)


@pytest.mark.parametrize(("name", "stem"), [("a.b.jsonl", "a.b"), ("a.b.json.gz", "a.b"), ("a.parquet", "a")])
def test_ids_begin_with_the_name_without_its_ending(tasks_of: Callable[..., list[Task]], name: str, stem: str) -> None:
    (task,) = tasks_of([{"question": "q", "answer": "a"}], name)
    assert (f"{stem}:1", stem) == (task.id, task.data_source)


@pytest.mark.needs_data("gsm8k")
def test_gsm8k_itself(shared_data: Path) -> None:
    """The real file, with and without the library, has the same tasks."""
    file = shared_data / "gsm8k" / "test.jsonl"
    tasks = open_tasks([DataSet(path=str(file))], TaskFormat())
    plain = TaskSet(file)
    assert (1319, plain.digest) == (len(tasks), tasks.digest)
    assert list(plain) == list(tasks)
