"""The operators at the beginning of a pipeline of tasks, through `jackfield data run` and `data trace`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield_formatter import DpoRow, SftRow, TaskRow, read_rows

from .conftest import Write, lines_of

TASK = "{prompt_key: prompt, answer_key: ground_truth}"
SFT = "{prompt_key: prompt, response_key: completion, answer_key: null}"
DPO = "{prompt_key: prompt, response_key: chosen, rejected_key: rejected, answer_key: null}"


def data(*words: object) -> str:
    """Run a command that succeeds; return its output."""
    done = CliRunner().invoke(main, ["data", *map(str, words)])
    assert 0 == done.exit_code, done.output
    return done.stdout


def run_file(folder: Path, source: Path, operators: Sequence[Any], form: str) -> Path:
    """Write a run's file with operators on its tasks."""
    file = folder / "run.yaml"
    file.write_text(
        f"name: piped\nfolder: {folder / 'run'}\nmodel: {{path: absent}}\n"
        f"data:\n  train: {source}\n  format: {form}\n  pipeline: {{tasks: {json.dumps(operators)}}}\n"
    )
    return file


def pipeline(folder: Path, source: Path, operators: Sequence[Any], form: str) -> tuple[Path, list[dict[str, Any]]]:
    """Apply operators to a file; return the file of the last stage and its rows."""
    data("run", run_file(folder, source, operators, form))
    last = max((folder / "run" / "data").glob("[0-9]*"), key=lambda each: int(each.name.partition("-")[0]))
    return last / "rows.jsonl", lines_of(last / "rows.jsonl")


def test_records_of_several_shapes_become_tasks(write: Write, tmp_path: Path) -> None:
    """Each is recognised alone; what cannot be is set aside with the reason; each row knows its raw line."""
    records = [
        {"question": "1?", "answer": "<think>Hm.</think>#### 1"},
        {"messages": [{"role": "user", "content": "2?"}], "ground_truth": "2"},
        {"x": 1},
        {"prompt": "4?", "answer": r"\boxed{4}"},
    ]
    file, rows = pipeline(tmp_path, write(records), [{"name": "format", "into": "task"}], TASK)
    assert [("1?", "1"), ("2?", "2"), ("4?", "4")] == [(row["prompt"], row["ground_truth"]) for row in rows]
    assert ["raw:1", "raw:2", "raw:4"] == [row["_row"] for row in rows]
    assert [None, "Hm."] == [rows[1]["messages"], rows[0]["reasoning"]]
    assert ["1?", "2?", "4?"] == [row.prompt for row in read_rows(file, TaskRow)]
    (aside,) = lines_of(file.with_name("set_aside.jsonl"))
    assert ("raw:3", "format") == (aside["_row"], aside["operator"])
    assert "x (int)" in aside["why"]
    shown = data("trace", tmp_path / "run", "raw:1")
    assert "changed by format" in shown
    assert "jackfield.task/1" in shown


def test_pairs_and_a_mapping(write: Write, tmp_path: Path) -> None:
    records = [{"q": "?", "good": "a", "bad": "b"}, {"q": "?", "good": "a", "bad": "a"}]
    operator = {"name": "format", "into": "dpo", "map": {"prompt": "q", "chosen": "good", "rejected": "bad"}}
    file, _ = pipeline(tmp_path, write(records), [operator], DPO)
    assert [("?", "a", "b")] == [(row.prompt, row.chosen, row.rejected) for row in read_rows(file, DpoRow)]
    assert "the two answers are the same" in file.with_name("set_aside.jsonl").read_text()


def test_a_function_in_a_pipeline(write: Write, tmp_path: Path) -> None:
    """A changed function is another stage; several rows of one record are set aside."""
    code = tmp_path / "code.py"
    text = "def f(record):\n    return [{'prompt': record['n'], 'ground_truth': '@'}] * len(record['n'])\n"
    for mark in "xy":
        code.write_text(text.replace("@", mark))
        operator = {"name": "format", "into": "task", "function": f"{code}:f"}
        file, rows = pipeline(tmp_path, write([{"n": "a"}, {"n": "bb"}]), [operator], TASK)
        stages = sorted((tmp_path / "run" / "data").glob("1-format-*"))
        assert len(stages) == "xy".index(mark) + 1
        newest = max(stages, key=lambda each: each.stat().st_mtime_ns)
        rows = lines_of(newest / "rows.jsonl")
        assert [("a", mark)] == [(row["prompt"], row["ground_truth"]) for row in rows]
        assert "it becomes 2 rows" in (newest / "set_aside.jsonl").read_text()
    assert file.is_file()


def test_texts_are_split(write: Write, tmp_path: Path) -> None:
    """Each piece is a row with its own key and its parent, and none has the whole text beside it."""
    texts = ["One line.\nAnother line.\nA third one.", "Short."]
    operator = {"name": "split_text", "size": 16}
    file, rows = pipeline(tmp_path, write([{"text": text, "kind": "k"} for text in texts]), [operator], SFT)
    by_text = {prefix: [row for row in rows if row["_row"].startswith(prefix)] for prefix in ("raw:1", "raw:2")}
    assert texts == ["".join(row["completion"] for row in found) for found in by_text.values()]
    assert ["raw:1", "raw:1>1.1", "raw:1>1.2"] == [row["_row"] for row in by_text["raw:1"]]
    assert all(row["text"] is None and row["kind"] == "k" for row in rows)
    assert ["raw:1"] * 2 == [parent for each in lines_of(file.with_name("lineage.jsonl")) for parent in each["parents"]]
    assert len(rows) == len([*read_rows(file, SftRow)])
    assert "raw:1" in data("trace", tmp_path / "run", "raw:1>1.2")


@pytest.mark.parametrize(
    ("operator", "form", "says"),
    [
        ({"name": "format", "into": "task"}, "{prompt_key: question}", TASK),
        ({"name": "format", "into": "sft"}, TASK, "response_key: completion"),
        ({"name": "format", "into": "dpo"}, DPO.replace("null", "answer"), "answer_key: null"),
        ({"name": "split_text"}, TASK, "response_key: completion"),
        ({"name": "format", "into": "experience"}, TASK, "task, sft or dpo"),
        ({"name": "format", "into": "taks"}, TASK, "did you mean 'task'"),
        ({"name": "format"}, TASK, "into"),
    ],
)
def test_pipelines_that_cannot_work_are_refused(
    write: Write, tmp_path: Path, operator: Any, form: str, says: str
) -> None:
    """Among others, those after which the run would read other columns than were written."""
    file = run_file(tmp_path, write([{"question": "?", "answer": "!"}]), [operator], form)
    done = CliRunner().invoke(main, ["data", "run", str(file)])
    assert 1 == done.exit_code
    assert "[config." in done.output
    assert says in done.output
