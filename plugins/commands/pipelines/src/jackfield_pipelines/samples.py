"""Which samples of a run were made from which rows, and which steps trained on them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jackfield.data.formats import ROW
from jackfield.queue.store import effective_acks, find_store, read_ledger
from jackfield_pipelines.made import OPERATORS


def rows_of_samples(run: Path) -> dict[str, str]:
    """Return the key of the row of each scored sample, by the sample's key: what the folder ``scores`` has.

    Without scores, the samples in the run's tables are looked at, which are some of all.
    """
    found = dict[str, str]()
    for key, row in (*_from_scores(run / "scores"), *_from_tables(run / "samples")):
        found.setdefault(key, row)
    return found


def shapes_of_samples(run: Path, keys: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return by key what operators on experiences did to samples: the score, that before, and the operators' numbers.

    There are none without scores, or without such operators.
    """
    if not (run / "made" / OPERATORS).exists():
        return {}
    found = dict[str, dict[str, Any]]()
    for key, score, metrics in _scores(run / "scores", ("score", "metrics")):
        numbers = json.loads(metrics) if isinstance(metrics, str) else metrics or {}
        if key in keys and "unshaped" in numbers:
            found[key] = {"reward": score, **numbers}
    return found


def operators_of_samples(run: Path) -> list[dict[str, Any]]:
    """Return name, version and settings of the operators on a run's experiences."""
    file = run / "made" / OPERATORS
    operators: list[dict[str, Any]] = json.loads(file.read_bytes()) if file.exists() else []
    return operators


def steps_of_samples(run: Path) -> Mapping[str, int | None]:
    """Return the last step that trained on each sample, from 0, by the ledger."""
    if find_store(run) is None:
        return {}
    trained = dict[str, int | None]()
    for consumer, keys in effective_acks(read_ledger(run)).items():
        if consumer.partition("/")[0] == "trainer":
            trained |= keys
    return trained


def _from_scores(folder: Path) -> Iterator[tuple[str, str]]:
    for key, record in _scores(folder, ("extra_info",)):
        values = json.loads(record) if isinstance(record, str) else record or {}
        if isinstance(row := values.get(ROW), str):
            yield key, row


def _scores(folder: Path, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of scored samples, with columns of the scores."""
    names = ("key", *columns)
    for file in sorted(folder.glob("*.parquet")):
        from pyarrow import parquet

        table = parquet.read_table(file, columns=list(names))
        yield from zip(*(table[name].to_pylist() for name in names), strict=True)
    for file in sorted(folder.glob(".*.jsonl")):  # of a process that still runs, or was killed
        with file.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    record = json.loads(line)
                    yield tuple(record.get(name) for name in names)


def _from_tables(folder: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(folder.glob("*.jsonl")):
        with file.open("rb") as lines:
            for line in lines:
                record = json.loads(line)
                if isinstance(row := record.get("tags", {}).get("task_id"), str):
                    yield record["key"], row
