"""Records, and files of them in every format."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from jackfield.config.data import DataSet
from jackfield.data.formats import Task, TaskFormat
from jackfield_datasets import open_tasks

Records = Sequence[Mapping[str, Any]]
datasets.disable_progress_bars()


def _write(records: Records, file: Path) -> Path:
    """Write records in the format that a file's ending names; without an ending, with save_to_disk."""
    lines, name = "".join(json.dumps(each) + "\n" for each in records), file.name
    opened = gzip.open if name.endswith(".gz") else open
    kind = name.removesuffix(".gz").rpartition(".")[2]
    if "." not in name:
        datasets.Dataset.from_list(list(records)).save_to_disk(str(file))
    elif kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(list(records)), file, row_group_size=3)
    elif kind == "arrow":
        table = pa.Table.from_pylist(list(records))
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        with opened(file, "wt", encoding="utf-8", newline="") as out:
            if kind == "csv":
                rows = csv.DictWriter(out, list(records[0]))
                rows.writeheader()
                cells = lambda each: {k: v if isinstance(v, str) else json.dumps(v) for k, v in each.items()}  # noqa: E731
                rows.writerows(map(cells, records))
            else:
                out.write(json.dumps(records, ensure_ascii=False, indent=1) if kind == "json" else lines)
    return file


@pytest.fixture(scope="session")
def write() -> Callable[[Records, Path], Path]:
    """What writes records in the format of a file's ending, and returns the file."""
    return _write


@pytest.fixture
def tasks_of(tmp_path: Path) -> Callable[..., list[Task]]:
    """The tasks of records, written as a file and recognised."""

    def read(records: Records, name: str = "set.jsonl", **form: Any) -> list[Task]:
        file = _write(records, tmp_path / name)
        return list(open_tasks([DataSet(path=str(file))], TaskFormat(**form)))

    return read
