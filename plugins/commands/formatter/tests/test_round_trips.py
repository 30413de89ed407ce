"""Rows are read back as they were written, and rows of other versions and schemas are upgraded or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs
import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jackfield.data.formats import TaskFormat
from jackfield.errors import DataError
from jackfield.queue.sample_files import read_samples
from jackfield_datasets import recognise
from jackfield_formatter import DataModel, DpoRow, ExperienceRow, SftRow, TaskRow, read_rows
from jackfield_formatter.models import TAKEN

from .conftest import Write

pytest.importorskip("torch")  # before the time of a test begins

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(str.strip)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False, width=32)
VALUES = st.recursive(
    TEXTS | NUMBERS | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
)
SAID = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(("user", "system")), TEXTS)
PROMPTS = TEXTS | st.lists(SAID, min_size=1, max_size=3).map(tuple)
ANSWERS = TEXTS | TEXTS.map(lambda text: ({"role": "assistant", "content": text},))
NAMES = {field.name for model in (TaskRow, SftRow, DpoRow) for field in attrs.fields(model)} | TAKEN
EXTRA = st.dictionaries(TEXTS.filter(lambda name: name not in NAMES), VALUES, max_size=2)
COMMON: Mapping[str, Any] = {
    "prompt": PROMPTS,
    "id": st.none() | TEXTS,
    "data_source": st.none() | TEXTS,
    "tools": st.just(()) | st.just(({"type": "function", "function": {"name": "f"}},)),
    "chat_template_kwargs": st.dictionaries(TEXTS, VALUES, max_size=2),
    "extra": EXTRA,
}
TASKS = st.builds(
    TaskRow, ground_truth=st.text(st.characters(codec="utf-8"), max_size=9), reasoning=st.none() | TEXTS, **COMMON
)
SFT = st.builds(SftRow, completion=ANSWERS, ground_truth=TEXTS, **COMMON)


@st.composite
def pairs(draw: Callable[..., Any]) -> DpoRow:
    """Two answers that differ."""
    chosen, rejected = draw(ANSWERS), draw(ANSWERS)
    said = [each if isinstance(each, str) else each[0]["content"] for each in (chosen, rejected)]
    assume(said[0] != said[1])
    return DpoRow(chosen=chosen, rejected=rejected, **{name: draw(each) for name, each in COMMON.items()})


@st.composite
def experiences(draw: Callable[..., Any]) -> ExperienceRow:
    """Lists of one length for the tokens of the response."""
    tokens = st.lists(st.integers(0, 2**31), min_size=1, max_size=5).map(tuple)
    response = draw(tokens)
    size = len(response)
    floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
    of_each = [st.none() | st.lists(each, min_size=size, max_size=size).map(tuple) for each in (st.booleans(), floats)]
    return ExperienceRow(
        prompt_ids=draw(tokens),
        response_ids=response,
        response_mask=draw(of_each[0]),
        rollout_log_probs=draw(of_each[1]),
        reward=draw(st.none() | floats | of_each[1].filter(lambda each: each is None or size > 1)),
        task=draw(st.none() | TEXTS),
        group=draw(st.none() | TEXTS),
        data_source=draw(TEXTS),
        ground_truth=draw(TEXTS),
        extra_info=draw(st.dictionaries(TEXTS, VALUES, max_size=2)),
        tags=draw(st.dictionaries(TEXTS.filter(lambda name: name != "_schema"), NUMBERS, max_size=2)),
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows") / "rows.jsonl"


def written(file: Path, *rows: DataModel) -> Path:
    file.write_bytes(b"".join(msgspec.json.encode(row.record()) + b"\n" for row in rows))
    return file


@given(rows=st.lists(TASKS, min_size=1, max_size=3))
def test_tasks_are_read_back_and_used_as_they_are(file: Path, rows: list[TaskRow]) -> None:
    """By `read_rows`, and by a run, which recognises the columns."""
    assert rows == [*read_rows(written(file, *rows), TaskRow)]
    record = json.loads(file.read_text(encoding="utf-8").split("\n")[0])
    task = recognise([record], TaskFormat()).task(record, "default", "default")
    assert rows[0].ground_truth == task.ground_truth
    assert rows[0].id in (task.id, None)
    assert (rows[0].prompt, task.messages) in (
        (task.messages, task.messages),
        (task.messages[0]["content"], ({"role": "user", "content": rows[0].prompt},)),
    )


@given(rows=st.lists(SFT, min_size=1, max_size=3))
def test_answers_are_read_back_and_used_as_they_are(file: Path, rows: list[SftRow]) -> None:
    assert rows == [*read_rows(written(file, *rows), SftRow)]
    record = json.loads(file.read_text(encoding="utf-8").split("\n")[0])
    assert rows[0].completion == recognise([record], TaskFormat()).task(record, "default", "default").response


@given(row=pairs())
def test_preferences_are_read_back_and_used_as_they_are(file: Path, row: DpoRow) -> None:
    assert [row] == [*read_rows(written(file, row), DpoRow)]
    record = json.loads(file.read_text(encoding="utf-8"))
    task = recognise([record], TaskFormat()).task(record, "default", "default")
    assert (row.chosen, row.rejected) == (task.response, task.rejected)


@given(row=experiences())
def test_experiences_are_read_back_and_imported(file: Path, row: ExperienceRow) -> None:
    """The queue reads the same tokens, the mask and the reward."""
    assert [row] == [*read_rows(written(file, row), ExperienceRow)]
    (sample,) = read_samples(file)
    assert {"prompt_ids", "response_ids", "task"} <= sample.cells.keys()
    assert (row.reward is not None) == ("reward" in sample.cells)
    assert (row.task, row.group) == (sample.task, sample.group)
    assert "jackfield.experience/1" == sample.tags["_schema"]


@attrs.frozen(kw_only=True)
class Note(DataModel):
    """A model of which there was a version 0, with another name of its text, and a version 1 without a length."""

    schema: ClassVar[str] = "tests.note"
    version: ClassVar[int] = 2
    upgrades: ClassVar[Any] = {
        0: lambda values: {"text" if name == "words" else name: value for name, value in values.items()},
        1: lambda values: {**values, "length": len(values["text"])},
    }

    text: str
    length: int


def test_rows_of_older_versions_are_upgraded(write: Write) -> None:
    """Through each version in turn; rows of several versions may be in one file."""
    old = [{"_schema": "tests.note/0", "words": "abc"}, {"_schema": "tests.note/1", "text": "ab"}]
    file = write([*old, Note(text="a", length=1).record()])
    assert [Note(text="abc", length=3), Note(text="ab", length=2), Note(text="a", length=1)] == [*read_rows(file, Note)]


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"_schema": "jackfield.task/2", "prompt": "?"}, "data.schema"),
        ({"_schema": "jackfield.task/0", "prompt": "?"}, "data.schema"),
        ({"_schema": "jackfield.sft/1", "prompt": "?", "completion": "!"}, "data.schema"),
        ({"_schema": 1, "prompt": "?"}, "data.schema"),
        ({"prompt": "?"}, "data.schema"),
        ({"_schema": "jackfield.task/1", "prompt": 3}, "data.malformed"),
        ({"_schema": "jackfield.task/1"}, "data.malformed"),
        ({"_schema": "jackfield.task/1", "prompt": "?", "messages": []}, "data.malformed"),
        ([], "data.malformed"),
    ],
)
def test_other_rows_are_refused_with_their_place(write: Write, record: Any, code: str) -> None:
    """Those before it were read."""
    file = write([TaskRow(prompt="?").record(), record])
    rows = read_rows(file, TaskRow)
    assert TaskRow(prompt="?") == next(rows)
    with pytest.raises(DataError) as caught:
        next(rows)
    assert code == caught.value.code
    assert f"{file}:2" in str(caught.value.where)
    if record and record.get("_schema") == "jackfield.task/2":
        assert "newer" in caught.value.message


@pytest.mark.parametrize("name", sorted(TAKEN))
def test_further_columns_do_not_say_something_else(name: str) -> None:
    with pytest.raises(DataError) as caught:
        TaskRow(prompt="?", extra={name: 1})
    assert f"extra.{name}" == caught.value.where


def test_values_that_make_no_row() -> None:
    for wrong in (
        {"response_ids": ()},
        {"response_mask": (True,)},
        {"prompt_ids": (-1,)},
        {"rollout_log_probs": (0.0,)},
    ):
        with pytest.raises(DataError):
            ExperienceRow(**{"prompt_ids": (1,), "response_ids": (2, 3), **wrong})  # type: ignore[arg-type]
    for answer in ("", [], [{"role": "user", "content": "?"}]):
        with pytest.raises(DataError):
            SftRow(prompt="?", completion=answer)  # type: ignore[arg-type]
    with pytest.raises(DataError):
        DpoRow(prompt="?", chosen="a", rejected=({"role": "assistant", "content": "a"},))
