"""Every format gives the tasks of the same records in a JSONL file; damaged files name file and row."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from jackfield.config.data import DataSet
from jackfield.data.formats import Task, TaskFormat
from jackfield.data.tasks import TaskSet
from jackfield.errors import DataError
from jackfield_datasets import open_tasks

FORMATS = ("set.json", "set.jsonl.gz", "set.json.gz", "set.csv", "set.csv.gz", "set.parquet", "set.arrow", "set")
RECORDS = [
    {
        "id": f"r{n}",
        "prompt": [{"role": "user", "content": f'What is {n} + 1? "é", 漢\n'}],
        "completion": [{"role": "assistant", "content": f"{n + 1}"}],
        "source": "sums",
    }
    for n in range(11)
]


def plain(tasks: list[Task]) -> list[Task]:
    """Return tasks without what CSV cannot say: the types of a record's fields."""
    return [attrs.evolve(task, fields={}) for task in tasks]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_tasks(tasks_of: Callable[..., list[Task]], name: str) -> None:
    expected, found = tasks_of(RECORDS), tasks_of(RECORDS, name)
    if ".csv" in name:
        expected, found = plain(expected), plain(found)
    assert expected == found
    assert {f"{n}" for n in range(1, 12)} == {task.place.rpartition(":")[2] for task in found}


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=4))
def test_texts_are_the_same_in_every_format(texts: list[str], tmp_path: Path, write: Any) -> None:
    records = [{"id": f"{n}", "question": text, "answer": text[::-1]} for n, text in enumerate(texts)]
    expected = list(TaskSet(write(records, tmp_path / "set.jsonl"), TaskFormat(prompt_key="question")))
    for name in ("set.json", "set.csv", "set.parquet", "set.jsonl.gz"):
        if ".csv" in name and any("\0" in text for text in texts):
            continue  # Python's csv module writes none
        found = list(open_tasks([DataSet(path=str(write(records, tmp_path / name)))], TaskFormat()))
        assert expected == found, name


def test_a_table_adds_no_fields_to_messages(tasks_of: Callable[..., list[Task]]) -> None:
    """Arrow gives all messages the same fields."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    records = [{"messages": [{"role": "user", "content": "q"}, call]}]
    assert [records[0]["messages"][1]] == list(tasks_of(records, "set.parquet")[0].response or ())


def refused(path: Path, code: str = "data.malformed", **given: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        list(open_tasks([DataSet(path=str(path), **given)], TaskFormat()))
    assert code == caught.value.code
    return caught.value


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("a.json", b'[{"question": "q", "answer": "a"},\n{"question": ', 2),
        ("a.json", b'[{"question": "q", "answer": NaN}]', 1),
        ("a.json", b'[{"question": "q", "answer": "a"}, 5]', 2),
        ("a.csv", b"question,answer\nq,a\nq\n", 2),
        ("a.csv", b'question,answer\nq,a\nq,"a\n', 2),
        ("a.csv", b"question,answer\nq,a\nq,a,b\n", 2),
        ("a.csv", b"question,answer\nq,\xff\n", 1),
        ("a.jsonl.gz", gzip.compress(json.dumps({"question": "q", "answer": "a"}).encode())[:-9], 1),
        ("a.jsonl.gz", b"no gzip", 1),
        ("a.parquet", b"no parquet", 1),
        ("a.arrow", b"ARROW1 and no more", 1),
    ],
)
def test_damage_names_file_and_row(tmp_path: Path, name: str, content: bytes, row: int) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert f"{file}:{row}" in str(refused(file).where)


def test_a_wrong_record_of_a_table_names_its_row(tmp_path: Path, write: Any) -> None:
    records = [{"question": "q", "answer": "a"}, {"question": None, "answer": "a"}]
    file = write(records, tmp_path / "a.parquet")
    assert f"{file}:2" == refused(file).where


def test_splits_of_save_to_disk(tmp_path: Path) -> None:
    import datasets

    splits = {"train": datasets.Dataset.from_list(RECORDS), "test": datasets.Dataset.from_list(RECORDS[:2])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "set"))
    sizes = {"set": 11, "set:test": 2, "set:train": 11}
    for name, size in sizes.items():
        assert size == len(open_tasks([DataSet(path=str(tmp_path / name))], TaskFormat()))
    assert 2 == len(open_tasks([DataSet(path=str(tmp_path / "set"), split="test")], TaskFormat()))
    assert "train, test" in str(refused(tmp_path / "set", split="dev").expected)


def test_what_cannot_be_read_is_refused(tmp_path: Path, write: Any) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "set.txt").write_text("x")
    for name in ("folder", "set.txt", "missing.parquet"):
        refused(tmp_path / name, "data.missing")
    refused(write(RECORDS, tmp_path / "set.parquet"), split="test")  # it would have no effect


_CHILD = """
import resource, sys
from jackfield.config.data import DataSet
from jackfield.data.formats import TaskFormat
from jackfield_datasets import open_tasks
import pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tasks = open_tasks([DataSet(path=sys.argv[1])], TaskFormat())
order = tasks.order(0)
assert all(tasks[order.index(n)].messages for n in range(100))
print(len(tasks), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1024, reason="ru_maxrss is in KiB on Linux")
def test_memory_does_not_grow_with_the_set(tmp_path: Path) -> None:
    """160 MB of records are read with less than 60 MB of memory."""
    file, text = tmp_path / "large.parquet", "x" * 4000
    schema = pa.schema([("id", pa.string()), ("question", pa.string()), ("answer", pa.string())])
    with parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, 40_000, 1000):
            rows = [{"id": f"{n}", "question": f"{n} {text}", "answer": "1"} for n in range(start, start + 1000)]
            writer.write_table(pa.Table.from_pylist(rows, schema))
    command = [sys.executable, "-c", _CHILD, str(file)]
    size, kibibytes = map(int, subprocess.run(command, capture_output=True, check=True, timeout=50).stdout.split())
    assert 40_000 == size
    assert kibibytes < 60_000
