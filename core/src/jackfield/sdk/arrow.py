"""Conversion of samples to Arrow record batches, for checkpoints and Parquet files.

Each column of samples is the field ``columns.NAME``. If its samples have one type, the field's metadata has that type;
numbers are stored as numbers, JSON as text. Other dtypes are bytes. If types differ, ``types.NAME`` has them by sample.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import attrs

from jackfield.errors import QueueError
from jackfield.sdk.cells import Cell, ColumnType

__all__ = ["SavedSample", "column_types", "from_arrow", "import_pyarrow", "to_arrow"]

_META = b"jackfield"
_NATIVE = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool")


@attrs.frozen(kw_only=True, eq=False)
class SavedSample:
    """One sample of a file or checkpoint."""

    cells: Mapping[str, Cell]  #: by column
    tags: Mapping[str, Any] = attrs.field(factory=dict)
    partition: str = ""
    key: str = ""  #: its key in the queue that wrote it
    batch: int | None = None  #: None in a checkpoint: the sample was consumed and is to be deleted
    group: str | None = None  #: samples of one group form one group again
    task: str | None = None
    acked_by: tuple[str, ...] = ()  #: consumers that have acked it

    @property
    def bytes(self) -> int:
        """The size of its values in bytes."""
        return sum(len(content) for _, content in self.cells.values())


def import_pyarrow() -> Any:
    """Import and return the package pyarrow.

    Raises:
        QueueError: ``plugin.requirement`` if it is missing.
    """
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        message = "pyarrow is not installed; checkpoints of samples and Parquet files need it"
        raise QueueError(message, code="plugin.requirement", fix="pip install 'jackfield[train]'") from error
    return pyarrow


def column_types(samples: Iterable[SavedSample]) -> dict[str, str | None]:
    """Return the type of each column's cells by name, or None if they differ."""
    found: dict[str, str | None] = {}
    for sample in samples:
        for name, (text, _) in sample.cells.items():
            if found.setdefault(name, text) != text:
                found[name] = None
    return found


def to_arrow(samples: Sequence[SavedSample], types: Mapping[str, str | None]) -> Any:
    """Return a record batch. Batches with equal ``types`` have the same schema."""
    pa = import_pyarrow()
    kinds = dict.fromkeys(("partition", "key", "group", "task"), pa.string())
    kinds |= {"batch": pa.int64(), "tags": pa.string(), "acked_by": pa.list_(pa.string())}
    plain = {name: [getattr(sample, name) for sample in samples] for name in kinds}
    plain["tags"] = [json.dumps(dict(tags), ensure_ascii=False) for tags in plain["tags"]]
    made = [(pa.field(name, kind), pa.array(plain[name], type=kind)) for name, kind in kinds.items()]
    for name, text in sorted(types.items()):
        cells = [sample.cells.get(name) for sample in samples]
        values = _array(pa, [None if cell is None else cell[1] for cell in cells], text)
        made.append((pa.field(f"columns.{name}", values.type, metadata=text and {_META: text}), values))
        if text is None:
            texts = pa.array([cell and cell[0] for cell in cells], type=pa.string())
            made.append((pa.field(f"types.{name}", texts.type), texts))
    return pa.record_batch([values for _, values in made], schema=pa.schema([field for field, _ in made]))


def from_arrow(batch: Any, foreign: Callable[[str, Any], Cell]) -> list[SavedSample]:
    """Return the samples of a record batch.

    Args:
        batch: A batch that :func:`to_arrow` or another program wrote.
        foreign: Converts a column name and a value to a cell, if the batch does not have the value's type.

    Raises:
        QueueError: ``queue.store`` for damaged types and values. Exceptions of pyarrow and ``foreign`` propagate.
    """
    names = [name.removeprefix("columns.") for name in batch.schema.names if name.startswith("columns.")]
    cells = {name: _cells(batch, name, foreign) for name in names}
    fields = {field.name for field in attrs.fields(SavedSample)} & set(batch.schema.names) - {"cells"}
    plain = {name: batch[name].to_pylist() for name in fields}
    samples = []
    for row in range(batch.num_rows):
        known = {name: values[row] for name, values in plain.items() if values[row] is not None}
        known["tags"], known["acked_by"] = json.loads(known.get("tags") or "{}"), tuple(known.get("acked_by", ()))
        own = {name: cell for name in names if (cell := cells[name][row]) is not None}
        samples.append(SavedSample(cells=own, **known))
    return samples


def _array(pa: Any, contents: Sequence[Any], text: str | None) -> Any:
    """Return an array of the cells' bytes; None is null."""
    kind = None if text is None else ColumnType.parse(text)
    is_native = kind is not None and kind.kind != "json" and kind.unit and kind.dtype in _NATIVE
    element = getattr(pa, kind.dtype.replace("bool", "uint8"))() if kind is not None and is_native else None
    there = pa.array([content is not None for content in contents], type=pa.bool_()).buffers()[1]
    if kind is not None and element is not None and kind.kind == "dense" and not kind.shape:
        data = b"".join(bytes(kind.unit) if content is None else content for content in contents)
        return pa.Array.from_buffers(element, len(contents), [there, pa.py_buffer(data)])
    width = 1 if element is None else element.bit_width // 8
    data = pa.py_buffer(b"".join(content or b"" for content in contents))
    offsets = pa.py_buffer(array("q", [0, *accumulate(len(content or b"") // width for content in contents)]))
    if element is None:
        shown = pa.large_string() if kind and kind.kind == "json" else pa.large_binary()
        return pa.Array.from_buffers(shown, len(contents), [there, offsets, data])
    values = pa.Array.from_buffers(element, data.size // width, [None, data])
    return pa.Array.from_buffers(pa.large_list(element), len(contents), [there, offsets], children=[values])


def _cells(batch: Any, name: str, foreign: Callable[[str, Any], Cell]) -> list[Cell | None]:
    values, metadata = batch[f"columns.{name}"], batch.schema.field(f"columns.{name}").metadata or {}
    if f"types.{name}" in batch.schema.names:
        texts = batch[f"types.{name}"].to_pylist()
    elif _META in metadata:
        texts = [metadata[_META].decode()] * len(values)
    else:
        return [None if value is None else foreign(name, value) for value in values.to_pylist()]
    found: list[Cell | None] = []
    for text, is_there, content in zip(texts, values.is_valid().to_pylist(), _contents(values), strict=True):
        if is_there:
            ColumnType.parse(text).length(content)
        found.append((text, content) if is_there else None)
    return found


def _contents(values: Any) -> list[memoryview]:
    """Return the bytes of each value of an array from :func:`_array`, without a copy."""
    buffers, inner = values.buffers(), values.values if values.type.num_fields else None
    if values.type.num_buffers == 2 and inner is None:  # numbers
        bounds = list(range(values.offset, values.offset + len(values) + 1))
        data, width, base = buffers[1], values.type.bit_width // 8, 0
    else:
        whole = memoryview(buffers[1] or bytes(8)).cast("q")
        bounds = whole[values.offset : values.offset + len(values) + 1].tolist()
        data, width, base = buffers[2], 1, 0
        if inner is not None:
            data, width, base = inner.buffers()[1], inner.type.bit_width // 8, inner.offset
    content = memoryview(data or b"").cast("B")
    return [content[(base + start) * width : (base + end) * width] for start, end in pairwise(bounds)]
