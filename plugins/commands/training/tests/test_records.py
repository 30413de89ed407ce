"""Records of a program become the data file of a run, which stays as it is once the run has begun."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import DataError, RunError
from jackfield_training.records import Records


def test_records_are_lines_of_json(tmp_path: Path) -> None:
    """Also values that JSON does not have: NumPy's and dates."""
    numpy = pytest.importorskip("numpy")
    given = [{"question": "é", "answer": numpy.int64(3), "seen": datetime.date(2026, 1, 2)}, {"question": [1.5, None]}]
    records = Records("train", given, tmp_path / "run" / "train.jsonl")
    (tmp_path / "run").mkdir()
    assert given[0] == records.first()
    records.write(kept=False)
    lines = [json.loads(line) for line in records.file.read_text(encoding="utf-8").splitlines()]
    assert [{"question": "é", "answer": 3, "seen": "2026-01-02"}, {"question": [1.5, None]}] == lines


@pytest.mark.parametrize("records", [[], {"train": [{}]}, 3, ["a text"], None])
def test_what_has_no_records_is_refused(records: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        Records("train", records, tmp_path / "train.jsonl").first()
    assert "data.malformed" == caught.value.code


def test_a_record_that_is_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        Records("eval", [{"answer": 1}, {"answer": float("nan")}], tmp_path / "eval.jsonl").write(kept=False)
    assert ("data.malformed", "eval[1]") == (caught.value.code, caught.value.where)
    assert not (tmp_path / "eval.jsonl").exists()


def test_the_records_of_a_run_that_has_begun_stay(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    Records("train", [{"a": 1}], file).write(kept=True)
    Records("train", [{"a": 1}], file).write(kept=True)
    with pytest.raises(RunError) as caught:
        Records("train", [{"a": 2}], file).write(kept=True)
    assert "run.changed" == caught.value.code
    assert {"a": 1} == json.loads(file.read_text(encoding="utf-8"))
