"""Tasks: formats, errors that name the place, lazy files, and a seeded order that resumes anywhere."""

from __future__ import annotations

import collections
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.data import tasks as module
from jackfield.data.formats import Task, TaskFormat
from jackfield.data.tasks import SeededOrder, TaskSet
from jackfield.errors import ConfigError, DataError
from jackfield_testing import refused


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def problem(number: int) -> dict[str, object]:
    return {"question": f"What is {number} + 1?", "answer": f"Count on.\n#### {number + 1}"}


def test_gsm8k_format_is_the_default(tmp_path: Path) -> None:
    tasks = TaskSet(write(tmp_path / "train.jsonl", problem(1), problem(2)))
    expected = Task(
        id="train:2",
        messages=({"role": "user", "content": "What is 2 + 1?"},),
        ground_truth="Count on.\n#### 3",
        data_source="train",
        fields=problem(2),
        response="Count on.\n#### 3",
    )
    assert 2 == len(tasks)
    assert expected == tasks[1]
    assert expected == tasks[-1]
    assert [expected] == tasks[1:]


def task_of(folder: Path, record: object, task_format: TaskFormat) -> Task:
    """Return the only task of a file."""
    [task] = TaskSet(write(folder / "records.jsonl", record), task_format)
    return task


def test_keys_system_message_template_and_source_are_settings(tmp_path: Path) -> None:
    task_format = TaskFormat(
        prompt_key="input.text",
        answer_key="truth",
        response_key="worked",
        id_key="name",
        system="Be brief.",
        prompt_template="{prompt} Use \\boxed{} and {answer}.",
        data_source="mine",
    )
    record = {"input": {"text": "1+1 {prompt}?"}, "truth": 2, "worked": "two", "name": 7}
    task = task_of(tmp_path, record, task_format)
    assert "7" == task.id
    assert [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1 {prompt}? Use \\boxed{} and {answer}."},
    ] == list(task.messages)
    assert ("2", "mine", "two") == (task.ground_truth, task.data_source, task.response)


def test_conversations_and_records_in_the_form_of_verl(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    record = {"prompt": messages, "data_source": "chat", "reward_model": {"ground_truth": "x"}, "messages": "shadowed"}
    task_format = TaskFormat(messages_key="prompt", answer_key="reward_model.ground_truth")
    task = task_of(tmp_path, record, task_format)
    assert (messages, "x", "chat") == (list(task.messages), task.ground_truth, task.data_source)
    fields = task.agent_fields()
    assert (messages, "records:1", "x") == (fields["messages"], fields["task_id"], fields["ground_truth"])


def test_tasks_without_answers(tmp_path: Path) -> None:
    task = task_of(tmp_path, {"question": "q"}, TaskFormat(answer_key=None))
    assert ("", None) == (task.ground_truth, task.response)


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        TaskFormat(prompt_template="no place")
    assert "prompt_template" in str(caught.value.where)
    with pytest.raises(ConfigError) as caught:
        TaskFormat(prompt_template="Q: {prompt}", messages_key="messages")
    assert "config.invalid-value" == caught.value.code


def test_missing_file_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        TaskSet(tmp_path / "nothing.jsonl")
    assert "data.missing" == caught.value.code
    with pytest.raises(DataError) as caught:
        TaskSet(tmp_path)
    assert "data.missing" == caught.value.code


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text(text)
    with pytest.raises(DataError) as caught:
        TaskSet(file)
    assert "data.empty" == caught.value.code


@pytest.mark.parametrize(
    "line",
    [
        b'{"question": "q", ',
        b"\xff\xfe",
        b"[1]",
        b'{"question": "q"}',
        b'{"answer": "a"}',
        b'{"question": 5, "answer": "a"}',
        b'{"question": [{"role": "user"}], "answer": "a"}',
        b'{"question": "q", "answer": "a", "id": true}',
        b'{"question": "q", "answer": "a", "self": 1}',
        b'{"question": "q", "answer": "a", "id": "bad:1"}',
    ],
)
def test_malformed_lines_name_file_and_line(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(json.dumps(problem(1)).encode() + b"\n\n" + line + b"\n")
    with refused("data.malformed") as caught:
        TaskSet(file)
    assert f"{file}:3" == caught.value.where


@pytest.mark.parametrize("value", [[], "text", [{"content": "x"}], [1]])
def test_malformed_conversations_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(DataError) as caught:
        task_of(tmp_path, {"messages": value, "answer": ""}, TaskFormat(messages_key="messages"))
    assert "data.malformed" == caught.value.code


def test_lines_beyond_the_checked_part_fail_when_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file larger than memory opens without parsing all of it."""
    monkeypatch.setattr(module, "CHECKED_BYTES", 10)
    tasks = TaskSet(write(tmp_path / "big.jsonl", problem(1), {"nothing": 0}))
    assert "big:1" == tasks[0].id
    with pytest.raises(DataError) as caught:
        tasks[1]
    assert "data.malformed" == caught.value.code
    assert "big.jsonl:2" in str(caught.value.where)


def test_a_digest_is_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", problem(1), problem(2))
    digest = TaskSet(file).digest
    assert digest == TaskSet(write(tmp_path / "copy.jsonl", problem(1), problem(2))).digest
    assert digest != TaskSet(write(file, problem(1), problem(4))).digest


def test_limit_and_index_errors(tmp_path: Path) -> None:
    tasks = TaskSet(write(tmp_path / "t.jsonl", problem(1), problem(2), {"bad": 1}), limit=2)
    assert 2 == len(list(tasks))
    with pytest.raises(IndexError):
        tasks[2]
    with pytest.raises(IndexError):
        tasks[-3]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=20), st.data())
def test_any_text_comes_back_from_a_file(tmp_path_factory: pytest.TempPathFactory, pairs, data) -> None:  # type: ignore[no-untyped-def]
    """Any Unicode text, with blank lines between and without a newline at the end, is read unchanged by number."""
    file = tmp_path_factory.mktemp("tasks") / "t.jsonl"
    lines = [json.dumps({"question": q, "answer": a}, ensure_ascii=data.draw(st.booleans())) for q, a in pairs]
    file.write_bytes("\n\n".join(lines).encode())
    tasks = TaskSet(file)
    number = data.draw(st.integers(0, len(pairs) - 1))
    assert len(pairs) == len(tasks)
    assert pairs[number] == (tasks[number].messages[0]["content"], tasks[number].response)
    assert f"t:{2 * number + 1}" == tasks[number].id


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(-5, 2**40), st.integers(0, 50))
def test_each_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = SeededOrder(size, seed)
    numbers = [order.index(position) for position in range(epoch * size, (epoch + 1) * size)]
    assert list(range(size)) == sorted(numbers)


@settings(deadline=None)
@given(st.integers(1, 10**12), st.integers(0, 2**63), st.integers(0, 10**15))
def test_any_position_of_a_walk_of_any_size_costs_the_same(size: int, seed: int, start: int) -> None:
    """The position is the only state."""
    order = SeededOrder(size, seed)
    numbers = [order.index(position) for position in range(start, start + 5)]
    assert numbers == [SeededOrder(size, seed).index(position) for position in range(start, start + 5)]
    assert all(0 <= number < size for number in numbers)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_permutations_of_a_small_set_come_about_equally_often(size: int) -> None:
    order = SeededOrder(size, seed=1)
    epochs = 3000
    seen = collections.Counter(
        tuple(order.index(epoch * size + place) for place in range(size)) for epoch in range(epochs)
    )
    permutations = list(itertools.permutations(range(size)))
    expected = epochs / len(permutations)
    assert len(permutations) == len(seen)
    assert all(abs(count - expected) < 5 * expected**0.5 for count in seen.values()), seen


def test_places_of_a_large_set_are_uniform_over_epochs() -> None:
    """Chi-square of where number 0 to 9 of 1000 land, in ten bins: 9 degrees of freedom, 99.9 % is below 27.9."""
    order = SeededOrder(1000, seed=3)
    for place in range(10):
        bins = collections.Counter(order.index(epoch * 1000 + place) // 100 for epoch in range(1000))
        assert 27.9 > sum((bins[index] - 100) ** 2 / 100 for index in range(10))


def test_the_order_is_the_same_in_every_version() -> None:
    """Runs resume with later versions: these numbers may not change."""
    assert [6, 1, 7, 5, 0, 4, 2, 9, 8, 3] == [SeededOrder(10, seed=42).index(position) for position in range(10)]
    assert 721142 == SeededOrder(1_000_000, seed=42).index(123_456_789)


def test_unshuffled_order_and_bad_arguments() -> None:
    assert [0, 1, 2, 0, 1] == [SeededOrder(3, shuffle=False).index(position) for position in range(5)]
    with pytest.raises(ValueError, match="size"):
        SeededOrder(0)
    with pytest.raises(IndexError):
        SeededOrder(3).index(-1)


@pytest.mark.parametrize(("name", "count"), [("train", 7473), ("test", 1319)])
@pytest.mark.needs_data("gsm8k")
def test_the_real_gsm8k(name: str, count: int, shared_data: Path) -> None:
    file = shared_data / "gsm8k" / f"{name}.jsonl"
    tasks = TaskSet(file)
    assert count == len(tasks)
    assert all("\n#### " in task.ground_truth for task in tasks)
    assert count == len({json.dumps(task.fields) for task in tasks})
