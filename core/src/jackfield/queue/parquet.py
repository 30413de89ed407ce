"""Rows of a queue as Parquet, through pyarrow: numbers, lists of numbers and texts, in columns ``columns.NAME``.

Each data column says its encoding, dtype and trailing shape in its field's metadata. Where rows of one column differ in
them, or Parquet lacks the dtype, the bytes are kept as they are, with a header beside them (``headers.NAME``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jackfield.errors import QueueError
from jackfield.queue.archive import batches
from jackfield.queue.cells import Cell
from jackfield.queue.sample_files import StoredSample, cell_of

__all__ = ["read_parquet", "write_parquet"]

_META = "jackfield"
_NATIVE = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_TEXTS = ("partition", "key", "group", "task")

Layout = tuple[str, str, tuple[int, ...]]  #: kind, dtype, shape without a jagged row's length


def write_parquet(file: Path, rows: Callable[[], Iterable[StoredSample]]) -> int:
    """Write rows; see :func:`jackfield.queue.sample_files.write_samples`."""
    pyarrow = _pyarrow()
    from pyarrow import parquet

    layouts: dict[str, set[Layout]] = {}
    for row in rows():
        for name, cell in row.cells.items():
            layouts.setdefault(name, set()).add(_layout(cell))
    native = {name: next(iter(found)) for name, found in layouts.items() if len(found) == 1 and _is_native(found)}
    fields = [
        *(pyarrow.field(name, pyarrow.string()) for name in _TEXTS),
        pyarrow.field("batch", pyarrow.int64()),
        pyarrow.field("tags", pyarrow.string()),
        pyarrow.field("acked_by", pyarrow.list_(pyarrow.string())),
    ]
    for name in sorted(layouts):
        if name in native:
            metadata = {_META: json.dumps(native[name])}
            fields.append(pyarrow.field(f"columns.{name}", _arrow_type(native[name]), metadata=metadata))
        else:
            fields.append(pyarrow.field(f"columns.{name}", pyarrow.large_binary()))
            fields.append(pyarrow.field(f"headers.{name}", pyarrow.string()))
    schema, count = pyarrow.schema(fields), 0
    with parquet.ParquetWriter(file, schema, use_dictionary=False) as writer:
        for batch in batches(rows(), lambda row: row.bytes):
            writer.write_batch(_record_batch(batch, schema, sorted(layouts), native))
            count += len(batch)
    return count


def read_parquet(file: Path) -> Iterator[StoredSample]:
    """The rows of a Parquet file; see :func:`jackfield.queue.sample_files.read_samples`."""
    pyarrow = _pyarrow()
    from pyarrow import parquet

    try:
        opened = parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise QueueError("the file is no Parquet file", where=str(file), found=error) from error
    with opened:
        names = [name.removeprefix("columns.") for name in opened.schema_arrow.names if name.startswith("columns.")]
        if not names:
            found = ", ".join(opened.schema_arrow.names)
            raise QueueError("the file has no columns of rows", where=str(file), expected="columns.NAME", found=found)
        for batch in opened.iter_batches(batch_size=500):
            try:
                rows = _rows_of(batch, names)
            except (ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
                found = f"{type(error).__name__}: {error}"
                raise QueueError("a record is no row of a queue", where=str(file), found=found) from error
            yield from rows


def _rows_of(batch: Any, names: Sequence[str]) -> list[StoredSample]:
    cells = {name: _cells(batch, name) for name in names}
    plain = {name: batch[name].to_pylist() for name in batch.schema.names if not name.count(".")}
    return [
        StoredSample(
            cells={name: cell for name in names if (cell := cells[name][index]) is not None},
            tags=json.loads(plain["tags"][index] or "{}") if "tags" in plain else {},
            acked_by=tuple(plain["acked_by"][index] or ()) if "acked_by" in plain else (),
            **{name: plain[name][index] for name in (*_TEXTS, "batch") if name in plain},
        )
        for index in range(batch.num_rows)
    ]


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise QueueError(
            "Parquet files need pyarrow, which is not installed",
            code="plugin.requirement",
            fix="pip install 'jackfield[parquet]', or use a .jsonl file",
        ) from error
    return pyarrow


def _layout(cell: Cell) -> Layout:
    return cell.kind, cell.dtype, cell.shape if cell.kind == "dense" else cell.shape[1:]


def _is_native(found: set[Layout]) -> bool:
    (layout,) = found
    return layout[0] == "json" or (layout[1] in _NATIVE and 0 not in layout[2])


def _element(dtype: str) -> Any:
    import pyarrow

    return {"bool": pyarrow.bool_()}.get(dtype) or getattr(pyarrow, dtype)()


def _arrow_type(layout: Layout) -> Any:
    import pyarrow

    kind, dtype, shape = layout
    if kind == "json":
        return pyarrow.large_string()
    return _element(dtype) if kind == "dense" and not shape else pyarrow.large_list(_element(dtype))


def _record_batch(rows: Sequence[StoredSample], schema: Any, names: Sequence[str], native: dict[str, Layout]) -> Any:
    import pyarrow

    columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in (*_TEXTS, "batch")}
    columns["tags"] = [json.dumps(dict(row.tags), ensure_ascii=False) for row in rows]
    columns["acked_by"] = [list(row.acked_by) for row in rows]
    for name in names:
        cells = [row.cells.get(name) for row in rows]
        if name in native:
            columns[f"columns.{name}"] = _array(cells, native[name])
        else:
            columns[f"columns.{name}"] = [None if cell is None else bytes(cell.content) for cell in cells]
            columns[f"headers.{name}"] = [None if cell is None else cell.header for cell in cells]
    arrays = [
        made if isinstance(made := columns[field.name], pyarrow.Array) else pyarrow.array(made, type=field.type)
        for field in schema
    ]
    return pyarrow.record_batch(arrays, schema=schema)


def _array(cells: Sequence[Cell | None], layout: Layout) -> Any:
    """An Arrow array of the cells' own bytes: NaN payloads and signs of zeros are kept."""
    import pyarrow

    kind, dtype, shape = layout
    absent = [cell is None for cell in cells]
    if kind == "json":
        texts = [None if cell is None else bytes(cell.content).decode() for cell in cells]
        return pyarrow.array(texts, type=pyarrow.large_string())
    scalar = kind == "dense" and not shape
    width = 1 if dtype == "bool" else _element(dtype).bit_width // 8
    contents = [(b"\0" * width if scalar else b"") if cell is None else bytes(cell.content) for cell in cells]
    content = b"".join(contents)
    if dtype == "bool":
        values = pyarrow.array([byte != 0 for byte in content], type=pyarrow.bool_())
    else:
        values = pyarrow.Array.from_buffers(_element(dtype), len(content) // width, [None, pyarrow.py_buffer(content)])
    if scalar:
        return pyarrow.compute.if_else(pyarrow.array(absent), pyarrow.scalar(None, values.type), values)
    offsets = [0]
    for part in contents:
        offsets.append(offsets[-1] + len(part) // width)
    return pyarrow.LargeListArray.from_arrays(
        pyarrow.array(offsets, pyarrow.int64()), values, mask=pyarrow.array(absent)
    )


def _cells(batch: Any, name: str) -> list[Cell | None]:
    field, values = batch.schema.field(f"columns.{name}"), batch[f"columns.{name}"]
    if f"headers.{name}" in batch.schema.names:
        headers = batch[f"headers.{name}"].to_pylist()
        return [
            None if header is None else Cell.parse(header, content)
            for header, content in zip(headers, values.to_pylist(), strict=True)
        ]
    if field.metadata is None or _META.encode() not in field.metadata:  # written by somebody else
        return [None if value is None else cell_of(name, value) for value in values.to_pylist()]
    kind, dtype, shape = json.loads(field.metadata[_META.encode()])
    if kind == "json":
        texts = [None if text is None else text.encode() for text in values.to_pylist()]
        return [None if text is None else Cell("json", "uint8", (len(text),), text) for text in texts]
    if kind == "dense" and not shape:
        numbers = values.fill_null(False if dtype == "bool" else 0).to_numpy(zero_copy_only=False)
        parts = [number.tobytes() for number in numbers]
    else:
        numbers, bounds = values.values.to_numpy(zero_copy_only=False), values.offsets.to_pylist()
        parts = [numbers[start:end].tobytes() for start, end in pairwise(bounds)]
    unit = (1 if dtype == "bool" else _element(dtype).bit_width // 8) * math.prod(shape)
    return [
        None if absent else Cell.checked(kind, dtype, shape if kind == "dense" else (len(part) // unit, *shape), part)
        for absent, part in zip(values.is_null().to_pylist(), parts, strict=True)
    ]
