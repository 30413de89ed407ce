"""Columns by expressions, and rows by a function of the user."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.errors import ConfigError, DataError, RunError
from jackfield_formatter import TaskRow, read_rows
from jackfield_formatter.mapping import Mapped

from .conftest import Form, Write, cli, lines_of

RECORD = {
    "q": "1 + 1?",
    "a": {"worked": "Add.\n#### 2", "items": [1, 2], "steps": ["Add", "End"]},
    "the level": 3,
    "packed": '{"x": [5]}',
}
CODE = '''"""Functions of a user."""
import os


def tasks(record):
    if record["n"] == 13:
        raise ValueError("unlucky")
    return {"prompt": f"{record['n']} + 1?", "ground_truth": str(record["n"] + 1)}


async def several(record):
    return [{"prompt": "?", "ground_truth": str(n)} for n in range(record["n"])] or None


def odd(record):
    return [None, 3, {"prompt": "?", "other": 1}, {"ground_truth": "1"}, {"prompt": float("nan")}][record["n"]]


def ends(record):
    if record["n"] == 1:
        os._exit(3)
    return {"prompt": str(record["n"]), "extra": {"process": os.getpid()}}


def hangs(record):
    while record["n"] == 1:
        pass
    return {"prompt": str(record["n"])}
'''


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text(CODE)
    return tmp_path / "code.py"


def test_columns_by_paths_and_expressions(form: Form) -> None:
    """Paths go into objects and lists; filters find answers; `row` has names that are no words."""
    columns = {
        "prompt": "q",
        "ground_truth": "a.worked | final('####')",
        "data_source": "'sums'",
        "extra.level": "row['the level'] * 2",
        "extra.second": "a.items[1]",
        "extra.steps": "a.steps | join(', ')",
        "extra.packed": "(packed | json).x",
        "extra.first": "a.worked | before('.')",
        "extra.last": "a.worked | after('####')",
    }
    _, (line,) = form([RECORD], "task", map=columns)
    extra = {"level": 6, "second": 2, "steps": "Add, End", "packed": [5], "first": "Add", "last": "2"}
    expected = {"prompt": "1 + 1?", "ground_truth": "2", "data_source": "sums", "id": "raw:1", **extra}
    assert {"_schema": "jackfield.task/1", **expected} == line


def test_a_mapping_from_a_file_and_from_options(write: Write, tmp_path: Path) -> None:
    """An option replaces the file's expression; what is not a text in the file is a value."""
    (mapping := tmp_path / "map.yaml").write_text("prompt: x\nground_truth: a.worked | final\nextra.level: 4\n")
    out = tmp_path / "out.jsonl"
    done = cli(write([RECORD]), out, "--as", "task", "--mapping", mapping, "--map", "prompt=q")
    assert 0 == done.exit_code, done.output
    assert [TaskRow(prompt="1 + 1?", ground_truth="2", id="raw:1", extra={"level": 4})] == [*read_rows(out, TaskRow)]


def test_a_mapping_adds_to_what_is_recognised(form: Form) -> None:
    """With some columns, the others are those of the shape."""
    record = {"question": "1?", "answer": "#### 1", "kind": "sum"}
    _, (line,) = form([record], "task", map={"data_source": "kind", "extra.kind": "kind"})
    assert ("1?", "1", "sum", "sum") == tuple(line[name] for name in ("prompt", "ground_truth", "data_source", "kind"))


def test_preferences_and_answers_are_mapped(form: Form) -> None:
    record = {"q": "?", "answers": [{"text": "a", "good": False}, {"text": "b", "good": True}]}
    best = "(answers | selectattr('good') | first).text"
    _, (line,) = form([record], "dpo", map={"prompt": "q", "chosen": best, "rejected": "answers[0].text"})
    assert ("?", "b", "a") == (line["prompt"], line["chosen"], line["rejected"])


def test_a_record_without_a_mapped_column_is_set_aside(form: Form, tmp_path: Path) -> None:
    """With the row, the column, what was expected and found, and the name that was meant."""
    report, lines = form([{"question": "1?"}, {"questoin": "2?"}, {"question": 3}], "task", map={"prompt": "question"})
    assert (1, 2) == (len(lines), report.set_aside)
    first, second = lines_of(tmp_path / "out.set_aside.jsonl")
    assert [2, 3] == [first["number"], second["number"]]
    assert "'prompt'" in first["message"]
    assert "did you mean 'questoin'" in first["message"]
    assert f"{tmp_path / 'raw.jsonl'}:2 (prompt)" == first["where"]
    assert "prompt" in second["where"]
    assert "3" in second["found"]


@pytest.mark.parametrize(
    ("columns", "where"),
    [
        ({"prompt": "q ||"}, "map.prompt"),
        ({"promt": "q"}, "map"),
        ({"prompt.x": "q"}, "map"),
    ],
)
def test_wrong_mappings_are_refused_before_anything_is_read(form: Form, columns: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        form([RECORD], "task", map=columns)
    assert where == caught.value.where


def test_expressions_cannot_leave_the_record(form: Form, tmp_path: Path) -> None:
    """They are sandboxed."""
    with pytest.raises(DataError):
        form([RECORD], "task", map={"prompt": "q.__class__.__mro__[1].__subclasses__()"})
    assert "unsafe" in (tmp_path / "out.set_aside.jsonl").read_text()


@given(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), st.integers() | st.text(), min_size=1))
def test_each_column_has_a_path(record: dict[str, Any]) -> None:
    """Whatever it is called: also like a method of dicts, a word of Jinja, or `row`."""
    for name, value in record.items():
        found = Mapped({"prompt": f"row['{name}']"}, {"prompt": True})
        assert {"prompt": value} == found.values({"row": 1, **record} if name == "row" else record)
        assert {"prompt": value} == Mapped({"prompt": f"inner.{name}"}, {"prompt": True}).values({"inner": record})


def test_a_function_makes_rows(form: Form, code: Path, tmp_path: Path) -> None:
    """A record with which it fails is set aside with the line of the code, and costs no other."""
    records = [{"n": n} for n in range(20)]
    report, lines = form(records, "task", function=f"{code}:tasks")
    assert [str(n + 1) for n in range(20) if n != 13] == [line["ground_truth"] for line in lines]
    (aside,) = lines_of(tmp_path / "out.set_aside.jsonl")
    assert 14 == aside["number"]
    assert f"ValueError: unlucky ({code}:7)" in aside["found"]
    assert "function" == report.shape
    assert json.loads((tmp_path / "out.manifest.json").read_text())["function_digest"]


def test_a_function_makes_several_rows_or_none(form: Form, code: Path) -> None:
    report, lines = form([{"n": 0}, {"n": 2}, {"n": 1}], "task", function=f"{code}:several")
    assert ["raw:2.1", "raw:2.2", "raw:3"] == [line["id"] for line in lines]
    assert (1, 3, 0) == (report.left_out, report.rows, report.set_aside)


def test_what_a_function_may_not_return(form: Form, code: Path, tmp_path: Path) -> None:
    """Each is set aside, and nothing else is."""
    with pytest.raises(DataError) as caught:
        form([{"n": n} for n in range(5)], "task", function=f"{code}:odd")
    assert "data.set-aside" == caught.value.code
    found = [f"{each['message']} {each['found']}" for each in lines_of(tmp_path / "out.set_aside.jsonl")]
    for text, said in zip(("returned int", "'other'", "no 'prompt'", "ValueError"), found, strict=True):
        assert text in said


@pytest.mark.parametrize("name", ["ends", "hangs"])
def test_a_function_that_ends_its_process(form: Form, code: Path, name: str) -> None:
    report, lines = form([{"n": n} for n in range(3)], "task", function=f"{code}:{name}", seconds=1.0)
    assert ["0", "2"] == [line["prompt"] for line in lines]
    assert 1 == report.set_aside
    assert all(line.get("process") != os.getpid() for line in lines)


@pytest.mark.parametrize("target", ["absent.py:tasks", "code.py:absent", "code.py"])
def test_a_function_that_is_not_there(form: Form, code: Path, target: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, RunError)):
        form([{"n": 1}], "task", function=str(tmp_path / target))
    assert not (tmp_path / "out.jsonl").exists()
