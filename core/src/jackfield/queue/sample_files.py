"""Samples in checkpoints, and in JSONL and Parquet files for users and other programs.

A JSONL line or a Parquet record has a sample's key, group, task, tags and columns. Files that the queue wrote have each
column's type, and a round trip is bit-exact. Files of other programs may have the columns only; their types then
follow from the values.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import QueueError
from jackfield.files import replacing
from jackfield.queue.meta import Lineage, group_of
from jackfield.queue.store import STORE_FILE, VALUES_FOLDER, read_checkpoint, read_lineage
from jackfield.sdk.archive import (
    BATCH_ROWS,
    SavedSample,
    batches,
    column_types,
    from_arrow,
    import_pyarrow,
    read_archive,
    to_arrow,
)
from jackfield.sdk.cells import Cell, ColumnType, join, split
from jackfield.sdk.columns import column_from_rows, dense_column, json_column, rows_of

#: Dtypes of well-known columns, for files without types.
_KNOWN = {"prompt_ids": "int64", "response_ids": "int64", "response_mask": "bool", "task": "json"}
_FLOATS = ("rollout_log_probs", "reward", "reward_dimensions", "old_log_probs", "ref_log_probs", "values", "advantages")
_KNOWN |= dict.fromkeys((*_FLOATS, "returns"), "float32")

_EXAMPLE = '{"columns": {"prompt_ids": [1, 2], …}, "tags": {…}, "group": …, "task": …}'


def write_samples(file: Path, samples: Callable[[], Iterable[SavedSample]]) -> int:
    """Write a JSONL or, by the file's suffix, a Parquet file atomically; return the number of samples.

    ``samples`` is called twice for Parquet, whose schema is written first.

    Raises:
        QueueError: ``plugin.requirement`` if pyarrow is missing.
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
    """Yield the samples of a JSONL or Parquet file; ``queue.invalid`` if the file or one of its lines is invalid."""
    if not file.is_file():
        raise QueueError("there is no such file of rows", where=str(file), expected="a .jsonl or .parquet file")
    return _read_parquet(file) if file.suffix == ".parquet" else _read_lines(file)


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
        if from_plain(cell[0], json.loads(json.dumps(value, allow_nan=False)))[1] == cell[1]:
            return value
    return {"base64": base64.b64encode(cell[1]).decode()}


def from_plain(text: str, value: Any) -> Cell:
    """Return the cell that :func:`to_plain` wrote; ``queue.store`` or an error of torch if type and value differ."""
    import torch

    kind = ColumnType.parse(text)
    if isinstance(value, dict) and value.keys() == {"base64"}:
        content = base64.b64decode(value["base64"])
        kind.length(content)
        return text, content
    if kind.kind == "json":
        return cell_of("task", value)
    values = torch.tensor(value, dtype=getattr(torch, kind.dtype))
    if kind.kind == "dense":
        return _cell(dense_column(values.reshape(1, *kind.shape)))
    return _cell(column_from_rows([values.reshape(len(values), *kind.shape)]))


def cell_of(name: str, value: Any) -> Cell:
    """Return a cell of a column of unknown type: lists of numbers are jagged, numbers are dense.

    Integers are int64 and others float32, except in well-known columns; anything else is JSON.
    """
    import torch

    wanted = _KNOWN.get(name)
    if wanted == "json" or not _is_numeric(value):
        return _cell(json_column([value]))
    made = torch.tensor(value)
    if wanted is not None or made.is_floating_point():
        made = made.to(getattr(torch, wanted or "float32"))
    return _cell(dense_column(made.unsqueeze(0)) if made.dim() == 0 else column_from_rows([made]))


def _cell(column: Any) -> Cell:
    text, (content,) = split(column)
    return text, content


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_numeric(each) for each in value)
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def saved_samples(folder: Path) -> Iterator[SavedSample]:
    """Read the samples that :meth:`~jackfield.queue.TransferQueue.checkpoint` wrote to ``folder``.

    Raises:
        QueueError: ``queue.invalid`` if there is no complete checkpoint, or it has another format.
    """
    state, _ = read_checkpoint(folder / STORE_FILE)
    for sample in read_archive(folder / VALUES_FOLDER):
        group = state.groups.get(group_of(sample.key))
        if group is None or sample.key not in group.samples:
            yield attrs.evolve(sample, tags={})  # a consumed sample that was not deleted yet
            continue
        yield attrs.evolve(
            sample,
            batch=group.batch.number,
            group=group.name,
            task=group.task_id,
            tags={**group.tags, **group.samples[sample.key].tags},
            acked_by=tuple(sorted(each.name for each in group.batch.partition.ends() if each.name in group.uses)),
        )


def trace(key: str, checkpoint: Path | None, store: Path | None) -> dict[str, Any]:
    """Return the ancestors of a sample, which may have left the queue, as a tree of plain values.

    ``checkpoint`` has the queue's samples and their ancestors; the ``store`` file of the run has every derivation.

    Returns:
        ``key``, ``in_queue``, ``operation`` (None: not made from other samples, or unknown) and ``parents``.

    Raises:
        QueueError: ``queue.unknown-sample`` if neither has the sample; ``queue.ledger``, ``queue.invalid`` if damaged.
    """
    derived: dict[str, Lineage] = {} if store is None else read_lineage(store)
    living: set[str] = set()
    if checkpoint is not None:
        saved, lineage = read_checkpoint(checkpoint / STORE_FILE)
        derived |= lineage
        living = saved.keys()
    if key not in derived and key not in living and not any(key in made.parents for made in derived.values()):
        where = ", ".join(str(each) for each in (checkpoint, store) if each is not None)
        raise QueueError(f"the sample {key!r} is unknown", code="queue.unknown-sample", where=where)

    def ancestor(key: str, below: frozenset[str]) -> dict[str, Any]:
        made = derived.get(key)
        parents = () if made is None or key in below else made.parents  # an imported sample may have its parent's key
        return {
            "key": key,
            "operation": None if made is None else made.operation,
            "in_queue": key in living,
            "parents": [ancestor(parent, below | {key}) for parent in parents],
        }

    return ancestor(key, frozenset())


def _read_lines(file: Path) -> Iterator[SavedSample]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                with _refusing(f"{file}, line {number}", _EXAMPLE):
                    record = json.loads(line.decode("utf-8"))
                    types = record.get("types", {})
                    cells = {
                        name: from_plain(types[name], each) if name in types else cell_of(name, each)
                        for name, each in record["columns"].items()
                    }
                    names = {field.name for field in attrs.fields(SavedSample)} - {"cells", "acked_by"}
                    given = {name: record[name] for name in names & record.keys() if record[name] is not None}
                    sample = SavedSample(cells=cells, acked_by=tuple(record.get("acked_by", ())), **given)
                yield sample


def _read_parquet(file: Path) -> Iterator[SavedSample]:
    pyarrow = import_pyarrow()
    from pyarrow import parquet

    try:
        opened = parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise QueueError("the file is no Parquet file", where=str(file), found=error) from error
    with opened:
        names = opened.schema_arrow.names
        if not any(name.startswith("columns.") for name in names):
            found = ", ".join(names)
            raise QueueError("the file has no columns of rows", where=str(file), expected="columns.NAME", found=found)
        for batch in opened.iter_batches(batch_size=BATCH_ROWS):
            with _refusing(str(file), "columns.NAME"):
                samples = from_arrow(batch, cell_of)
            yield from samples


@contextmanager
def _refusing(where: str, expected: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, QueueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise QueueError("a record is no row of a queue", where=where, expected=expected, found=found) from error
