"""The data of rewards: rows in a journal, which become Parquet files exactly once, also after a kill."""

from __future__ import annotations

import json
import logging
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from jackfield.errors import RunError
from jackfield_archive import records as reward_records
from jackfield_archive.records import COLUMNS, RewardRecords


def row(number: int, **values: Any) -> dict[str, Any]:
    """Return the row of the sample ``train/NUMBER``."""
    return {"key": f"train/{number}", "status": "ok", "score": number / 2, **values}


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all Parquet files."""
    return [each for file in sorted(folder.glob("*.parquet")) for each in parquet.read_table(file).to_pylist()]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rows_become_a_file_with_all_columns(tmp_path: Path) -> None:
    """Values come back as they were; absent ones are null; objects are JSON."""
    records = RewardRecords(tmp_path / "scores", "worker-0")
    assert not (tmp_path / "scores").exists()
    full = {"run": "a", "group": "g", "rollout": 3, "time": 1.5, "data_source": "gsm8k", "prompt": "2+2?", "raw": "é "}
    full |= {"response": "4\n", "ground_truth": "4", "explanation": "right", "error": None, "reward": "judge"}
    full |= {
        "extra_info": {"of": [1]},
        "version": "v1",
        "tokens": 7,
        "seconds": 0.25,
        "cached": True,
        "dimensions": {"taste": 1.0},
        "metrics": {},
    }
    records.add([row(0, **full), row(1)])
    records.add([row(2, score=np.float32(0.5), response="half \udc80", error="nan", metrics={"n": float("nan")})])
    records.close()
    records.close()
    assert names_in(tmp_path / "scores") == ["worker-0-00001.parquet"]
    first, second, third = rows_in(tmp_path / "scores")
    assert list(first) == list(COLUMNS)
    assert first.pop("time").timestamp() == 1.5
    texts = [json.loads(first.pop(name)) for name in ("dimensions", "metrics", "extra_info")]
    assert texts == [{"taste": 1.0}, {}, {"of": [1]}]
    assert first == {name: value for name, value in row(0, **full).items() if name in first}
    assert second == dict.fromkeys(COLUMNS) | row(1)
    assert (third["score"], third["response"], json.loads(third["metrics"])) == (0.5, "half ?", {"n": None})


def test_files_have_the_given_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever there are enough rows a file is made; the next opening goes on with the next number."""
    monkeypatch.setattr(reward_records, "_ROWS", 3)
    for start in (0, 7):
        records = RewardRecords(tmp_path, "worker-0")
        for number in range(start, start + 7):
            records.add([row(number)])
        records.close()
    counts = [parquet.read_metadata(tmp_path / name).num_rows for name in names_in(tmp_path)]
    assert counts == [3, 3, 1, 3, 3, 1]
    assert [each["key"] for each in rows_in(tmp_path)] == [f"train/{number}" for number in range(14)]


_CHILD = """
import sys
from pathlib import Path
from jackfield_archive.records import RewardRecords
records = RewardRecords(Path(sys.argv[1]), "worker-0")
for number in range(100):
    records.add([{"key": str(number)}])
print("written", flush=True)
sys.stdin.read()
"""


@contextmanager
def writer(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that writes 100 rows and then waits; kill it at the end."""
    command = [sys.executable, "-c", _CHILD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "written\n"
            yield child
        finally:
            child.send_signal(signal.SIGKILL)


def test_a_killed_process_loses_no_row(tmp_path: Path) -> None:
    """The next opening makes a file of the journal, without its torn last line, and not while its process lives."""
    with writer(tmp_path):
        RewardRecords(tmp_path, "worker-0").close()
        RewardRecords(tmp_path, "worker").close()
        assert names_in(tmp_path) == [".worker-0-00001.jsonl"]
    with (tmp_path / ".worker-0-00001.jsonl").open("ab") as journal:
        journal.write(b'{"key":"100","resp')
    records = RewardRecords(tmp_path, "worker-0")
    records.add([{"key": "new"}])
    records.close()
    assert names_in(tmp_path) == ["worker-0-00001.parquet", "worker-0-00002.parquet"]
    assert [each["key"] for each in rows_in(tmp_path)] == [*map(str, range(100)), "new"]


def test_a_kill_between_file_and_journal_repeats_no_row(tmp_path: Path) -> None:
    """A journal whose file exists is removed."""
    records = RewardRecords(tmp_path, "worker-0")
    records.add([row(1)])
    journal = (tmp_path / ".worker-0-00001.jsonl").read_bytes()
    records.close()
    (tmp_path / ".worker-0-00001.jsonl").write_bytes(journal)
    RewardRecords(tmp_path, "worker-0").close()
    assert names_in(tmp_path) == ["worker-0-00001.parquet"]
    assert len(rows_in(tmp_path)) == 1


def test_without_pyarrow_the_journal_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says so, and a later opening with pyarrow makes the file."""
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "jackfield"):
        patched.setitem(sys.modules, "pyarrow", None)
        records = RewardRecords(tmp_path, "worker-0")
        records.add([row(1)])
        records.close()
    assert names_in(tmp_path) == [".worker-0-00001.jsonl"]
    assert "remains a journal" in caplog.text
    assert "pip install" in caplog.text
    RewardRecords(tmp_path, "worker-0").close()
    assert len(rows_in(tmp_path)) == 1


@contextmanager
def file_size(most: int) -> Iterator[None]:
    """Limit the size of files that this process writes."""
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_an_error_and_tears_no_line(tmp_path: Path) -> None:
    """Rows that are refused are not there in part, and later ones can be added."""
    records = RewardRecords(tmp_path, "worker-0")
    records.add([row(1)])
    with file_size(200), pytest.raises(RunError) as refused:
        records.add([row(2, response="x" * 1000)])
    assert refused.value.code == "run.storage"
    records.add([row(3)])
    records.close()
    assert [each["key"] for each in rows_in(tmp_path)] == ["train/1", "train/3"]
