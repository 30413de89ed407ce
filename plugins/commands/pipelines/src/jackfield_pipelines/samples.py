"""Which samples of a run were made from which rows, and which steps trained on them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from jackfield.data.formats import ROW
from jackfield.queue.store import effective_acks, find_store, read_ledger


def rows_of_samples(run: Path) -> dict[str, str]:
    """Return the key of the row of each scored sample, by the sample's key: what the folder ``scores`` has.

    Without scores, the samples in the run's tables are looked at, which are some of all.
    """
    found = dict[str, str]()
    for key, row in (*_from_scores(run / "scores"), *_from_tables(run / "samples")):
        found.setdefault(key, row)
    return found


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
    for file in sorted(folder.glob("*.parquet")):
        from pyarrow import parquet

        table = parquet.read_table(file, columns=["key", "extra_info"])
        for key, record in zip(*(table[name].to_pylist() for name in ("key", "extra_info")), strict=True):
            values = json.loads(record) if isinstance(record, str) else record or {}
            if isinstance(row := values.get(ROW), str):
                yield key, row
    for file in sorted(folder.glob(".*.jsonl")):  # of a process that still runs, or was killed
        with file.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    record = json.loads(line)
                    if isinstance(row := (record.get("extra_info") or {}).get(ROW), str):
                        yield record["key"], row


def _from_tables(folder: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(folder.glob("*.jsonl")):
        with file.open("rb") as lines:
            for line in lines:
                record = json.loads(line)
                if isinstance(row := record.get("tags", {}).get("task_id"), str):
                    yield record["key"], row
