"""Samples in checkpoints, and in JSONL and Parquet files for users and other programs: export and import.

A JSONL line or a Parquet record has a sample's key, group, task, tags and columns. Files that the queue wrote have each
column's type, and a round trip is bit-exact. Files of other programs may have the columns only; their types then
follow from the values.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.transfer_queue import Column
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.files import replacing
from jackfield.queue.meta import Lineage, NewGroup, RolloutReport, group_of
from jackfield.queue.records import BatchState, Group, Sample, State, Status
from jackfield.queue.store import STORE_FILE, VALUES_FOLDER, Store, read_checkpoint
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.queue.values import Values, leaving
from jackfield.sdk.archive import (
    BATCH_ROWS,
    SavedSample,
    batches,
    column_types,
    from_arrow,
    import_pyarrow,
    read_archive,
    to_arrow,
    write_archive,
)
from jackfield.sdk.cells import Cell, ColumnType, dtype_of, join, json_column, offsets_of, rows_of, split

_IMPORT = "import"  #: the explorer of imported samples, and the operation that made them
_SECONDS = 600.0  #: deadline of a wait for room in the queue
_KEYS = {field.name for field in attrs.fields(SavedSample)} - {"cells"} | {"columns", "types"}  #: of a JSONL line

#: Dtypes of well-known columns, for files without types.
_KNOWN = {"prompt_ids": "int64", "response_ids": "int64", "response_mask": "bool", "task": "json"}
_FLOATS = ("rollout_log_probs", "reward", "reward_dimensions", "old_log_probs", "ref_log_probs", "values", "advantages")
_KNOWN |= dict.fromkeys((*_FLOATS, "returns"), "float32")


def write_samples(file: Path, samples: Callable[[], Iterable[SavedSample]]) -> int:
    """Write a JSONL or, by the file's suffix, a Parquet file atomically; return the number of samples.

    Parquet's schema is written first, so ``samples`` is called twice; without pyarrow, raise ``plugin.requirement``.
    """
    count = 0
    with replacing(file) as partial:
        if file.suffix == ".parquet":
            import_pyarrow()
            from pyarrow import parquet

            types = column_types(samples())
            with parquet.ParquetWriter(partial, to_arrow([], types).schema, use_dictionary=False) as writer:
                for batch in batches(samples(), lambda sample: sample.bytes):
                    writer.write_batch(to_arrow(batch, types))
                    count += len(batch)
            return count
        with partial.open("w", encoding="utf-8") as lines:
            for sample in samples():
                count += 1
                record = attrs.asdict(sample, recurse=False, filter=lambda field, _: field.name != "cells")
                record["columns"] = {name: to_plain(cell) for name, cell in sample.cells.items()}
                record["types"] = {name: text for name, (text, _) in sample.cells.items()}
                lines.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
    return count


def read_samples(file: Path) -> Iterator[SavedSample]:
    """Yield the samples of a JSONL or Parquet file, or of an archive's files; ``queue.invalid`` if one is invalid."""
    if is_archive(file):
        return chain.from_iterable(map(_read_parquet, sorted(file.glob("*.parquet")) or [file]))
    if not file.is_file():
        raise QueueError("there is no such file", where=str(file), expected=".jsonl or .parquet", fix="check the path")
    return _read_lines(file)


def is_archive(path: Path) -> bool:
    """Return whether a path is a Parquet file, or a folder of such files."""
    return path.suffix == ".parquet" if path.is_file() else any(path.glob("*.parquet"))


def holds_samples(path: Path) -> bool:
    """Return whether a path is an archive whose files have columns of samples, by what ends its first file."""
    for file in [path] if path.is_file() else sorted(path.glob("*.parquet"))[:1]:
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - 8))
            opened.seek(max(0, size - 8 - int.from_bytes(opened.read(4), "little")))
            return is_archive(path) and b"columns.prompt_ids" in opened.read()  # the names of columns
    return False


def shape_of(cell: Cell) -> list[int]:
    """Return the shape of a sample; a jagged sample's shape begins with its length."""
    kind = ColumnType.parse(cell[0])
    return [*([] if kind.kind == "dense" else [kind.length(cell[1])]), *kind.shape]


def plain_values(cell: Cell) -> Any:
    """Return a cell as JSON: a JSON column's value, or lists of numbers; complex numbers are texts."""
    values = rows_of(join("", [cell]))[0]
    if not hasattr(values, "is_complex"):
        return values
    if values.is_complex():
        return [str(number) for number in values.reshape(-1).tolist()]
    return (values.double() if values.is_floating_point() else values).tolist()


def to_plain(cell: Cell) -> Any:
    """Return a cell as JSON without loss: a JSON column's value, nested lists, a number, or base64."""
    value = plain_values(cell)
    with suppress(ValueError, TypeError, RuntimeError, QueueError):
        if cell_of("", json.loads(json.dumps(value, allow_nan=False)), cell[0])[1] == cell[1]:
            return value
    return {"base64": base64.b64encode(cell[1]).decode()}


def cell_of(name: str, value: Any, text: str | None = None) -> Cell:
    """Return the cell of a value of :func:`to_plain` and its type, or of another program's value in a column.

    Without a type, lists of numbers and a reward are jagged, and other numbers are dense. Integers are int64 and others
    float32, except in well-known columns; anything else is JSON. If type and value differ, raise ``queue.store`` or an
    error of torch.
    """
    import torch

    kind = None if text is None else ColumnType.parse(text)
    if kind is not None and isinstance(value, dict) and value.keys() == {"base64"}:
        content = base64.b64decode(value["base64"])
        kind.length(content)
        return kind.text, content
    dtype = _KNOWN.get(name) if kind is None else kind.dtype
    if dtype == "json" or not _is_numeric(value) if kind is None else kind.kind == "json":
        column = json_column([value])
    else:
        if name == "reward" and kind is None and not isinstance(value, list):
            value = [value]  # as runs write it
        values = torch.tensor(value, dtype=None if dtype is None else dtype_of(dtype))
        is_dense, shape = (values.dim() == 0, values.shape[1:]) if kind is None else (kind.kind == "dense", kind.shape)
        length = 1 if is_dense else len(values)
        column = Column(values=values.reshape(length, *shape), offsets=None if is_dense else offsets_of([length]))
    found, (made,) = split(column)
    return found, bytes(made)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_numeric(each) for each in value)
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def saved_samples(folder: Path) -> Iterator[SavedSample]:
    """Read the samples that :meth:`~jackfield.queue.TransferQueue.checkpoint` wrote to ``folder``.

    If there is no complete checkpoint, or it has another format, raise ``queue.invalid``.
    """
    state, _ = read_checkpoint(folder / STORE_FILE)
    for sample in read_archive(folder / VALUES_FOLDER):
        group = state.groups.get(group_of(sample.key))
        if group is None or sample.key not in group.samples:
            yield attrs.evolve(sample, tags={})  # a consumed sample that was not deleted yet
            continue
        yield attrs.evolve(leaving(group, {sample.key: None})[0][0], cells=sample.cells, status=None)


def _read_lines(file: Path) -> Iterator[SavedSample]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                example = '{"columns": {"prompt_ids": [1, 2], …}, "tags": {…}, "group": …, "task": …}'
                with _refusing(f"{file}, line {number}", example):
                    record = json.loads(line.decode("utf-8"))
                    _check_known(record)
                    types = record.get("types", {})
                    cells = {name: cell_of(name, each, types.get(name)) for name, each in record["columns"].items()}
                    names = record.keys() - {"columns", "types"}
                    given = {name: record[name] for name in names if record[name] is not None}
                    yield SavedSample(cells=cells, **given)


def _read_parquet(file: Path) -> Iterator[SavedSample]:
    import_pyarrow()
    from pyarrow import parquet

    with _refusing(str(file), "columns.NAME"), parquet.ParquetFile(file) as opened:
        if not any(name.startswith("columns.") for name in opened.schema_arrow.names):
            raise ValueError(f"the columns are {', '.join(opened.schema_arrow.names)}")
        _check_known(re.sub(r"^(columns|types)\..*", r"\1", name) for name in opened.schema_arrow.names)
        for batch in opened.iter_batches(batch_size=BATCH_ROWS):
            yield from from_arrow(batch, cell_of)


def _check_known(names: Iterable[str]) -> None:
    if unknown := set(names) - _KEYS:
        raise ValueError(f"unknown keys {sorted(unknown)}; the known ones are {sorted(_KEYS)}")


@contextmanager
def _refusing(where: str, expected: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError, QueueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise QueueError("a record is no row of a queue", where=where, expected=expected, found=found) from error


@attrs.define(eq=False)
class ImportedSamples:
    """The samples of a file or of a queue's folder, imported as the first batch of a partition.

    Samples of one group form one group again, each as a rollout of its own. A sample's parent is ``ORIGIN:KEY``, or
    ``ORIGIN`` if it had no key, and the parent's lineage is kept. Samples are read one by one; only the names of their
    groups stay in memory.
    """

    queue: TransferQueue  #: a started queue
    values: Values  #: of the queue's backend
    partition: str  #: the partition that gets the samples
    read: Callable[[], Iterable[SavedSample]]  #: reads all samples, each time in the same order
    origin: str  #: the file or folder of the samples
    _sizes: Counter[int] = attrs.field(factory=Counter, init=False)  # group sizes in the order of first samples

    async def keep(self) -> None:
        """Put groups again whose samples were lost with a part of the store. It runs until it is cancelled."""
        is_left = True
        while is_left:
            with suppress(DeadlineExceeded):
                is_left = await self.put()

    async def put(self) -> bool:
        """Put all groups that are missing; wait until one is. Return whether groups may be lost later."""
        self._sizes = self._sizes or Counter(place for place, _, _, _ in _placed(self.read()))
        if not self._sizes:
            return False
        size = len(self._sizes)
        batch = await self.queue.claim_batch(self.partition, _IMPORT, size, below=1, deadline_seconds=_SECONDS)
        if batch is None:
            return False  # all its groups were consumed
        async for keys in self.queue.groups_to_fill(batch, _SECONDS, until="published"):
            wanted = {key.index: key for key in keys}
            for place, rollout, task, sample in _placed(self.read()):
                if (group := wanted.get(place)) is None:
                    continue
                if not rollout:
                    await self.queue.open_groups([NewGroup(key=group, task_id=task, rollouts=self._sizes[place])])
                key = group.sample(rollout, 0)
                tags, lineage = _derived(sample, key, self.origin)
                columns = {name: join(name, [cell]) for name, cell in sample.cells.items()}
                written = await self.values.put(self.partition, [key], columns, [tags])
                report = RolloutReport(group=str(group), rollout=rollout, keys=(key,), written=written, lineage=lineage)
                await self.queue.end_rollouts([report])
        return True


def _placed(samples: Iterable[SavedSample]) -> Iterator[tuple[int, int, str, SavedSample]]:
    """Yield samples with the number of their group, their number in it, and its task."""
    places, sizes = dict[object, int](), Counter[int]()
    for number, sample in enumerate(samples):
        name = number if sample.group is None else (sample.partition, sample.group)
        place = places.setdefault(name, len(places))
        yield place, sizes[place], f"row-{place}" if sample.task is None else sample.task, sample
        sizes[place] += 1


def _derived(sample: SavedSample, key: str, origin: str) -> tuple[dict[str, Any], dict[str, Lineage]]:
    """Return the tags of an imported sample with its new ``key``, and the derivations of it and of its parent."""
    parent = f"{origin}:{sample.key}" if sample.key else origin
    lineage = {key: Lineage(_IMPORT, (parent,))}
    if "operation" in sample.tags and "parents" in sample.tags:
        lineage[parent] = Lineage(sample.tags["operation"], tuple(sample.tags["parents"]))
    return {**sample.tags, "operation": _IMPORT, "parents": [parent]}, lineage


def import_file(file: Path, folder: Path, partition: str) -> int:
    """Put the samples of a JSONL or Parquet file into a folder's checkpointed queue; return their number.

    The file may be larger than memory: values are copied batch by batch; tags and keys stay in memory. The folder's
    previous checkpoint stays valid until the new one is complete; a failed import into a new folder leaves nothing. If
    the file is not a file of samples, or the folder holds something other than a queue, raise ``queue.invalid``.
    """
    is_kept = (folder / STORE_FILE).is_file()
    if not is_kept and folder.is_dir() and any(folder.iterdir()):
        raise QueueError("the folder holds something else than a queue", where=str(folder), expected=STORE_FILE)
    state, lineage = read_checkpoint(folder / STORE_FILE) if is_kept else (State(), {})
    own = state.partition(partition)
    batch = BatchState(own, own.next_batch)

    def imported() -> Iterator[SavedSample]:
        for place, rollout, task, sample in _placed(read_samples(file)):
            if not rollout:
                batch.groups.append(Group(batch, place, Status.PUBLISHED, task_id=task))
            group = batch.groups[place]
            key = group.key.sample(rollout, 0)
            tags, derived = _derived(sample, key, str(file))
            lineage.update(derived)
            group.samples[key] = Sample(rollout, tags, frozenset(sample.cells), sample.bytes)
            group.ended[rollout], group.rollouts = None, rollout + 1
            yield SavedSample(partition=partition, key=key, cells=sample.cells)

    existed = folder.exists()
    try:
        kept = read_archive(folder / VALUES_FOLDER) if is_kept else ()
        write_archive(folder / VALUES_FOLDER, chain(kept, imported()))
        state.groups |= {str(group.key): group for group in batch.groups}
        if batch.groups:
            own.batches[batch.number], own.next_batch = batch, batch.number + 1
        state.mark(None)
        with closing(Store(None)) as store:
            store.derived = lineage
            store.write(state)
            store.save(folder / STORE_FILE, list(state.rows()), list(state.keys()))
    except BaseException:
        if not is_kept:  # a later import needs a new folder
            shutil.rmtree(folder / VALUES_FOLDER if existed else folder, ignore_errors=True)
        raise
    return sum(group.rollouts for group in batch.groups)
