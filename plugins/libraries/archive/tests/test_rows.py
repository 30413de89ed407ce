"""Samples of archives and of a run's data of rewards, and further columns for them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from pyarrow import parquet

from jackfield.abc.reward import ScoreResult
from jackfield.errors import QueueError, RunError
from jackfield_archive import ArchiveFile, RecordFile, check_new, open_files, read_samples, write_samples
from jackfield_archive.records import COLUMNS, RewardRecords

from .test_learning import decode, sample

LINEAGE = {"reward": "judge", "version": "v7", "settings": {"model": "m"}, "source": "there"}


def row(number: int, **values: Any) -> dict[str, Any]:
    """Return a row of the data of rewards."""
    place = {"key": f"train/0/0/{number}r0", "group": "train/0/0", "data_source": "sums", "reward": "rules"}
    texts = {"prompt": "2+2?", "response": str(number), "ground_truth": "4", "extra_info": {"of": number}}
    return {**place, **texts, "status": "ok", "score": float(number), "time": 1.0, **values}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A file with two scores and a failure."""
    kept = RewardRecords(tmp_path / "scores", "worker-0")
    kept.add([row(0), row(1, explanation="good"), row(2, status="failed", score=None, error="no answer")])
    kept.close()
    return tmp_path / "scores" / "worker-0-00001.parquet"


def no_decoder() -> Any:
    raise AssertionError("there are no tokens")


def test_rows_of_rewards_become_requests(records: Path) -> None:
    """As the run has scored them."""
    (file,) = open_files([records], no_decoder)
    assert isinstance(file, RecordFile)
    rows = file.rows(7.0)
    assert [each.score for each in rows] == [0.0, 1.0, None]
    request = rows[1].request
    assert (request.idempotency_key, request.group_id, request.data_source) == ("train/0/0/1r0", "train/0/0", "sums")
    assert (request.prompt_str, request.solution_str, request.ground_truth) == ("2+2?", "1", "4")
    assert (request.extra_info, request.deadline_seconds, request.model_text) == ({"of": 1}, 7.0, "1")


def test_new_scores_become_columns_of_a_new_file(records: Path, tmp_path: Path) -> None:
    """The old ones stay; the file says where the new ones are from; once more, the columns have the next number."""
    (file,) = open_files([records], no_decoder)
    results = [
        ScoreResult(score=0.5, dimensions={"taste": 1.0}, explanation="fine", tokens=3),
        ScoreResult(status="failed", error="the judge is gone"),
        ScoreResult(score=1.0),
    ]
    (tmp_path / "out").mkdir()
    before, out = records.read_bytes(), tmp_path / "out" / records.name
    file.write(out, file.number(), results, LINEAGE)
    assert records.read_bytes() == before
    table = parquet.read_table(out)
    assert table.select(list(COLUMNS)).equals(parquet.read_table(records))
    assert table["score_2"].to_pylist() == [0.5, None, 1.0]
    assert table["status_2"].to_pylist() == ["ok", "failed", "ok"]
    assert table["error_2"].to_pylist() == [None, "the judge is gone", None]
    assert json.loads(table["dimensions_2"][0].as_py()) == {"taste": 1.0}
    assert (table["reward_2"][0].as_py(), table["version_2"][0].as_py(), table["tokens_2"][0].as_py()) == (
        "judge",
        "v7",
        3,
    )
    assert json.loads(table.schema.metadata[b"jackfield.rewards"]) == [{"columns": "*_2", **LINEAGE}]
    (again,) = open_files([out], no_decoder)
    assert again.number() == 3
    again.write(tmp_path / "out" / "again.parquet", 3, results, LINEAGE)
    table = parquet.read_table(tmp_path / "out" / "again.parquet")
    assert [each["columns"] for each in json.loads(table.schema.metadata[b"jackfield.rewards"])] == ["*_2", "*_3"]
    assert table["score_3"].to_pylist() == table["score_2"].to_pylist()


def test_an_archive_gets_a_further_column(tmp_path: Path) -> None:
    """Samples that were not trained on are left out; a failure has no new reward, and a reason."""
    path, out = tmp_path / "q-1.parquet", tmp_path / "out.parquet"
    write_samples(path, [sample("1", "a", 0.5), sample("2", "a", 1.0), sample("3", "a", 1.0, "dropped")])
    (file,) = open_files([path], lambda: decode)
    assert isinstance(file, ArchiveFile)
    rows = file.rows(60.0)
    assert [(each.request.solution_str, each.score) for each in rows] == [("1 1", 0.5), ("2 2", 1.0)]
    request = rows[0].request
    assert (request.response_mask, request.model_text, request.tool_text) == ((1, 0), "1", "1")
    results = [ScoreResult(score=0.25, metrics={"length": 2.0}), ScoreResult(status="failed", error="late")]
    file.write(out, file.number(), results, LINEAGE)
    first, second = read_samples(out)
    assert array("f", bytes(first.cells["reward_2"][1])).tolist() == [0.25]
    assert array("f", bytes(first.cells["reward"][1])).tolist() == [0.5]
    assert first.tags["reward_2/length"] == 2.0
    assert "reward_2" not in second.cells
    assert second.tags["reward_2/reason"] == "late"
    (again,) = open_files([out], lambda: decode)
    assert again.number() == 3


@pytest.mark.parametrize("content", [b"", b"PAR1", b"text"])
def test_a_file_without_rewards_is_refused(content: bytes, tmp_path: Path, records: Path) -> None:
    path = tmp_path / "wrong.parquet"
    path.write_bytes(content)
    other = tmp_path / "other.parquet"
    parquet.write_table(parquet.read_table(records, columns=["key", "score"]), other)
    for file in (path, other):
        with pytest.raises(QueueError) as refused:
            open_files([file], no_decoder)
        assert (refused.value.code, refused.value.where) == ("queue.invalid", str(file))


def test_nothing_is_overwritten(records: Path, tmp_path: Path) -> None:
    check_new(tmp_path / "nowhere", [records.name])
    with pytest.raises(RunError) as refused:
        check_new(records.parent, ["a.parquet", records.name])
    assert (refused.value.code, refused.value.found) == ("run.storage", records.name)


def test_the_data_of_rewards_loads_as_a_data_set(tmp_path: Path) -> None:
    """Several files are one data set, also if a column is null in one of them."""
    folder = tmp_path / "scores"
    for number in (1, 2):
        kept = RewardRecords(folder, "worker-0")
        kept.add([row(number, **({"explanation": "why", "metrics": {"a": 1.0}} if number == 2 else {}))])
        kept.close()
    options: Any = {"data_files": str(folder / "*.parquet"), "cache_dir": str(tmp_path / "cache"), "split": "train"}
    loaded: Sequence[Any] = datasets.load_dataset("parquet", **options)
    assert [each["score"] for each in loaded] == [1.0, 2.0]
    assert [each["explanation"] for each in loaded] == [None, "why"]
