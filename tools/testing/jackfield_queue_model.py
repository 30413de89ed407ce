"""A queue backend against a plain dict, over random histories: one model for the backends of all packages."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jackfield.abc.transfer_queue import (
    Column,
    DeleteRequest,
    GetRequest,
    PutRequest,
    SnapshotRequest,
    TagsRequest,
    TransferQueueBackend,
    TransferQueueContext,
)
from jackfield.errors import QueueError
from jackfield.sdk.archive import write_archive
from jackfield.sdk.cells import column_from_rows, dense_column, join, json_column, split

PARTITIONS = st.sampled_from(["train", "other/ä"])
KEYS = st.lists(st.sampled_from(["a", "b", "b/0", "ü"]), unique=True, min_size=1, max_size=4)
NAMES = st.lists(st.sampled_from(["reward", "prompt_ids", "x:y"]), unique=True, min_size=1, max_size=3)
Row = dict[str, Column]


def check_against_model(
    make: Callable[[TransferQueueContext], TransferQueueBackend], examples: int = 10, steps: int = 20
) -> None:
    """Put (of some columns), get, delete, tags, checkpoint, restore, clear; where it is durable, restart and crash."""
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(lambda: _Machine(make), settings=options)


def _column(sort: str, rows: int, seed: int) -> Column:
    """Some column, whose bits follow from ``seed``."""
    lengths = [(seed + row) % 4 for row in range(rows)]
    if sort == "jagged":
        return column_from_rows([torch.arange(seed, seed + length) for length in lengths])
    if sort == "wide":
        return column_from_rows([torch.full((length, 2), seed / 7, dtype=torch.bfloat16) for length in lengths])
    if sort == "json":
        return json_column([{"seed": seed, "text": "ä" * length} for length in lengths])
    return dense_column(torch.arange(rows, dtype=torch.float32) + seed)


def _same(expected: Column, found: Column) -> bool:
    def parts(column: Column) -> Any:
        offsets = None if column.offsets is None else column.offsets.tolist()
        bits = column.values.contiguous().reshape(-1).view(torch.uint8).tolist()
        return column.encoding, offsets, column.values.dtype, tuple(column.values.shape), bits

    return bool(parts(expected) == parts(found))


class _Machine(RuleBasedStateMachine):
    """The backend and, beside it, ``rows``: (partition, key) to column to a column of that one row."""

    def __init__(self, make: Callable[[TransferQueueContext], TransferQueueBackend]) -> None:
        super().__init__()
        self.make = make
        self.temporary = tempfile.TemporaryDirectory(prefix="jackfield-model-")
        self.folder = Path(self.temporary.name)
        self.runner = asyncio.Runner()
        self.rows: dict[tuple[str, str], Row] = {}
        self.saved: dict[int, dict[tuple[str, str], Row]] = {}
        self.backend: TransferQueueBackend | None = None
        self.lost: list[TransferQueueBackend] = []  # crashed

    def do(self, action: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(action)

    @property
    def store(self) -> TransferQueueBackend:
        assert self.backend is not None
        return self.backend

    @initialize()
    def open(self) -> None:
        self.backend = self.make(TransferQueueContext(folder=str(self.folder / "queue")))
        self.do(self.backend.start())

    def teardown(self) -> None:
        for backend in [*self.lost, *filter(None, [self.backend])]:
            self.do(backend.close())
        self.runner.close()
        self.temporary.cleanup()

    @rule(
        partition=PARTITIONS,
        keys=KEYS,
        names=NAMES,
        sort=st.sampled_from(["jagged", "dense", "json", "wide"]),
        seed=st.integers(0, 99),
    )
    def put(self, partition: str, keys: list[str], names: list[str], sort: str, seed: int) -> None:
        self.put_columns(partition, keys, names, sort, seed)

    def put_columns(self, partition: str, keys: list[str], names: list[str], sort: str, seed: int) -> None:
        columns = {name: _column(sort, len(keys), seed + place) for place, name in enumerate(names)}
        stored = self.do(self.store.put(PutRequest(partition=partition, keys=tuple(keys), columns=columns)))
        assert sum(column.values.nbytes for column in columns.values()) == stored.bytes
        cells = {name: split(column) for name, column in columns.items()}
        for index, key in enumerate(keys):
            row = self.rows.setdefault((partition, key), {})
            row.update({name: join(name, [(text, parts[index])]) for name, (text, parts) in cells.items()})

    @rule(partition=PARTITIONS, keys=KEYS, names=NAMES)
    def get(self, partition: str, keys: list[str], names: list[str]) -> None:
        request = GetRequest(partition=partition, keys=tuple(keys), columns=tuple(names))
        expected = self._read(partition, keys, names)
        code, found = None, {}
        try:
            found = self.do(self.store.get(request)).columns
        except QueueError as error:
            code = error.code
        assert (expected if isinstance(expected, str) else None) == code
        if not isinstance(expected, str):
            assert all(_same(column, found[name]) for name, column in expected.items())

    def _read(self, partition: str, keys: list[str], names: list[str]) -> str | Row:
        """The columns, or the code of the error."""
        rows = [self.rows.get((partition, key)) for key in keys]
        there = [row for row in rows if row is not None]
        if len(there) < len(rows):
            return "queue.unknown-sample"
        if any(name not in row for row in there for name in names):
            return "queue.column"
        try:
            cells = {
                name: [(text, content) for row in there for text, (content,) in [split(row[name])]] for name in names
            }
            return {name: join(name, each) for name, each in cells.items()}
        except QueueError as error:
            return error.code

    @rule(partition=PARTITIONS, keys=KEYS)
    def delete(self, partition: str, keys: list[str]) -> None:
        gone = [self.rows.pop((partition, key)) for key in keys if (partition, key) in self.rows]
        freed = self.do(self.store.delete(DeleteRequest(partition=partition, keys=tuple(keys))))
        assert (len(gone), sum(map(_bytes, gone))) == (freed.samples, freed.bytes)

    @rule(partition=PARTITIONS, keys=KEYS)
    def tags(self, partition: str, keys: list[str]) -> None:
        tags = tuple({"key": key} for key in keys)
        self.do(self.store.put_tags(TagsRequest(partition=partition, keys=tuple(keys), tags=tags)))

    @rule(number=st.integers(0, 1))
    def checkpoint(self, number: int) -> None:
        written = self.do(self.store.checkpoint(SnapshotRequest(folder=str(self.folder / str(number)))))
        self.saved[number] = {place: dict(row) for place, row in self.rows.items()}
        assert (len(self.rows), sum(map(_bytes, self.rows.values()))) == (written.samples, written.bytes)

    @precondition(lambda self: self.saved)
    @rule(number=st.integers(0, 1))
    def restore(self, number: int) -> None:
        number = number if number in self.saved else 1 - number
        self.do(self.store.restore(SnapshotRequest(folder=str(self.folder / str(number)))))
        self.rows = {place: dict(row) for place, row in self.saved[number].items()}

    @rule()
    def clear(self) -> None:
        """What a run does that begins anew: the checkpoint of nothing, in the format that all backends share."""
        write_archive(self.folder / "empty", ())
        restored = self.do(self.store.restore(SnapshotRequest(folder=str(self.folder / "empty"))))
        assert (0, 0) == (restored.samples, restored.bytes)
        self.rows = {}

    @precondition(lambda self: self.backend is not None and self.backend.durable)
    @rule()
    def open_again(self) -> None:
        self.do(self.store.close())
        self.open()

    @precondition(lambda self: self.backend is not None and self.backend.durable)
    @rule()
    def crash(self) -> None:
        """Nobody closes it: another one is opened in the same folder, and this one is not asked again."""
        self.lost.append(self.store)
        self.open()

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), name=NAMES, seed=st.integers(0, 99))
    def put_a_column(self, data: st.DataObject, name: list[str], seed: int) -> None:
        """Further columns of some rows that are there, as a reward worker or an engine rank writes them."""
        partition = data.draw(st.sampled_from(sorted({partition for partition, _ in self.rows})))
        there = sorted(key for place, key in self.rows if place == partition)
        keys = data.draw(st.lists(st.sampled_from(there), unique=True, min_size=1))
        self.put_columns(partition, keys, name, "dense", seed)

    @invariant()
    def counts(self) -> None:
        if self.backend is not None:
            stats = self.do(self.store.stats())
            assert (len(self.rows), sum(map(_bytes, self.rows.values()))) == (stats.samples, stats.bytes)


def _bytes(row: Row) -> int:
    return sum(column.values.nbytes for column in row.values())
