"""The files of a checkpoint. All backends share the format, so that a run may resume with another backend.

**Samples** become Arrow record batches, here and in Parquet files. Each column of samples is the field
``columns.NAME``. If its samples have one type, the field's metadata has that type; numbers are stored as numbers, JSON
as text. Other dtypes are bytes. If types differ, ``types.NAME`` has them by sample.

``samples-*.arrow`` is a sequence of Arrow IPC streams of one record batch each. ``index.json`` has its name, and the
size and digest of each stream. The index is written last and atomically, so that an interrupted write leaves the
previous checkpoint valid. The index has a digest of its own.
"""

from __future__ import annotations

import json
import os
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import attrs
import xxhash

from jackfield.abc.transfer_queue import SnapshotResult
from jackfield.errors import QueueError
from jackfield.files import replace_file, seal, unseal
from jackfield.sdk.cells import Cell, ColumnType

_T = TypeVar("_T")

BATCH_ROWS = 500
BATCH_BYTES = 1 << 25  #: bytes of values per record batch
NAME_FILE = "name.txt"

_INDEX = "index.json"
_FORMAT = 4
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
    acked_by: Sequence[str] = attrs.field(default=(), converter=tuple)  #: consumers that have acked it
    steps: Sequence[int] = attrs.field(default=(), converter=tuple)  #: in an archive: the steps that trained on it
    status: str | None = None  #: in an archive: trained, retired, failed or dropped

    @property
    def bytes(self) -> int:
        """The size of its values in bytes."""
        return sum(len(content) for _, content in self.cells.values())


def import_pyarrow() -> Any:
    """Return the package pyarrow; ``plugin.requirement`` if it is missing."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        message = "pyarrow is not installed; checkpoints of samples and Parquet files need it"
        raise QueueError(message, code="plugin.requirement", fix="pip install 'jackfield[train]'") from error
    return pyarrow


class ArchiveWriter:
    """A writer of a checkpoint, which becomes valid with :meth:`finish`. Close it afterwards."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / f"samples-{uuid.uuid4().hex[:12]}.arrow"
        self._file = self._path.open("wb")
        self._streams: list[tuple[int, str]] = []  #: bytes and digest
        self._count = self._bytes = 0
        self._finished = False

    def add(self, samples: Iterable[SavedSample]) -> None:
        """Append samples to the archive."""
        pyarrow = import_pyarrow()
        for batch in batches(samples, lambda sample: sample.bytes):
            made, sink = to_arrow(batch, column_types(batch)), pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, made.schema) as writer:
                writer.write_batch(made)
            stream = memoryview(sink.getvalue())
            self._file.write(stream)
            self._streams.append((len(stream), xxhash.xxh3_128_hexdigest(stream)))
            self._count += len(batch)
            self._bytes += sum(sample.bytes for sample in batch)

    def finish(self) -> SnapshotResult:
        """Make the files durable and make them the checkpoint of the folder."""
        self._file.flush()
        os.fsync(self._file.fileno())
        index = {"format": _FORMAT, "rows": self._count, "bytes": self._bytes, "file": self._path.name}
        replace_file(self._folder / _INDEX, seal(json.dumps({**index, "streams": self._streams})))
        self._finished = True
        return SnapshotResult(samples=self._count, bytes=self._bytes)

    def close(self) -> None:
        """Remove obsolete files: this file if :meth:`finish` was not called, else the earlier ones."""
        self._file.close()
        for path in self._folder.glob("samples-*.arrow"):
            if (path == self._path) != self._finished:
                path.unlink(missing_ok=True)


def write_archive(folder: Path, samples: Iterable[SavedSample]) -> SnapshotResult:
    """Write samples as the checkpoint of ``folder`` and replace the previous one."""
    with closing(ArchiveWriter(folder)) as writer:
        writer.add(samples)
        return writer.finish()


def batches(items: Iterable[_T], size: Callable[[_T], int], most: int = BATCH_BYTES) -> Iterator[list[_T]]:
    """Yield items in order, in batches for a store: at most 500 items or about ``most`` bytes each."""
    batch: list[_T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= most or len(batch) >= BATCH_ROWS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def read_archive(folder: Path) -> Iterator[SavedSample]:
    """Yield the samples of a folder's checkpoint; damaged ones raise ``queue.store``.

    If there is no complete checkpoint or it has another format, raise ``queue.invalid`` before the first sample.
    """
    try:
        content = (folder / _INDEX).read_bytes()
        if (found := json.loads(content).get("format")) != _FORMAT:
            what = "the checkpoint of a queue's values is of another format"
            raise QueueError(what, where=str(folder), expected=f"format {_FORMAT}", found=f"format {found}")
        index = unseal(content)
        path, streams = folder / index["file"], index["streams"]
        size = path.stat().st_size
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        message = "the folder holds no checkpoint of a queue's values"
        raise QueueError(message, where=str(folder), expected=_INDEX, found=error) from error
    if size != (expected := sum(size for size, _ in streams)):
        raise QueueError("the checkpoint is incomplete", where=str(path), expected=f"{expected} bytes", found=size)
    with path.open("rb") as file:
        for size, digest in streams:
            stream = file.read(size)
            if xxhash.xxh3_128_hexdigest(stream) != digest:
                message, expected = "samples of a queue's checkpoint are damaged", f"bytes with the digest {digest}"
                raise QueueError(message, code="queue.store", where=str(path), expected=expected)
            yield from from_arrow(import_pyarrow().ipc.open_stream(stream).read_next_batch())


def queue_name(folder: str | None) -> str:
    """Return the name of the queue in ``folder`` on a server that several runs share.

    The first process that opens the queue creates the name and writes it to ``name.txt`` for all others. It begins
    with the name of the run's folder, for readability, and has a random end: a folder that was removed and created
    again is another queue. Without a folder each call creates a new name.
    """
    mark = uuid.uuid4().hex[:8]
    if folder is None:
        return f"queue-{mark}"
    place = Path(folder).absolute()
    run = place.parent.name if place.name == "queue" else place.name
    place.mkdir(parents=True, exist_ok=True)
    partial = place / f"{NAME_FILE}.{mark}"
    partial.write_text(f"{run}-{mark}", encoding="utf-8")
    try:
        os.link(partial, place / NAME_FILE)  # fails if another process was first
    except FileExistsError:
        pass
    finally:
        partial.unlink()
    return (place / NAME_FILE).read_text(encoding="utf-8", errors="replace")


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
    kinds = dict.fromkeys(("partition", "key", "group", "task", "status", "tags"), pa.string())
    kinds |= {"batch": pa.int64(), "steps": pa.list_(pa.int64()), "acked_by": pa.list_(pa.string())}
    plain = {name: [getattr(sample, name) for sample in samples] for name in kinds}
    plain["tags"] = [json.dumps(dict(tags), ensure_ascii=False) for tags in plain["tags"]]
    made = [(pa.field(name, kind), pa.array(plain[name], type=kind)) for name, kind in kinds.items()]
    for name, text in sorted(types.items()):
        cells = [sample.cells.get(name) for sample in samples]
        # bytes, because pyarrow never releases a memoryview that it has read, nor the shared memory behind it
        values = _array(pa, [None if cell is None else bytes(cell[1]) for cell in cells], text)
        made.append((pa.field(f"columns.{name}", values.type, metadata=text and {_META: text}), values))
        if text is None:
            texts = pa.array([cell and cell[0] for cell in cells], type=pa.string())
            made.append((pa.field(f"types.{name}", texts.type), texts))
    return pa.record_batch([values for _, values in made], schema=pa.schema([field for field, _ in made]))


def from_arrow(batch: Any, foreign: Callable[[str, Any], Cell] | None = None) -> list[SavedSample]:
    """Return the samples of a record batch that :func:`to_arrow` or another program wrote.

    ``foreign`` converts a column name and a value to a cell, if the batch does not have the value's type. Its errors
    and those of pyarrow propagate; missing and damaged types, and damaged values, raise ``queue.store``.
    """
    names = [name.removeprefix("columns.") for name in batch.schema.names if name.startswith("columns.")]
    cells = {name: _cells(batch, name, foreign) for name in names}
    fields = {field.name for field in attrs.fields(SavedSample)} & set(batch.schema.names) - {"cells"}
    plain = {name: batch[name].to_pylist() for name in fields}
    samples = []
    for row in range(batch.num_rows):
        known = {name: values[row] for name, values in plain.items() if values[row] is not None}
        known["tags"] = json.loads(known.get("tags") or "{}")
        own = {name: cell for name in names if (cell := cells[name][row]) is not None}
        samples.append(SavedSample(cells=own, **known))
    return samples


def _array(pa: Any, contents: Sequence[bytes | None], text: str | None) -> Any:
    """Return an array of the cells' bytes; None is null."""
    kind, raw = None if text is None else ColumnType.parse(text), pa.array(contents, type=pa.large_binary())
    if kind is None or kind.kind == "json" or not kind.unit or kind.dtype not in _NATIVE:
        return raw.cast(pa.large_string()) if kind is not None and kind.kind == "json" else raw
    element = getattr(pa, kind.dtype.replace("bool", "uint8"))()
    if kind.kind == "dense" and not kind.shape:
        return pa.array(contents, type=pa.binary(kind.unit)).view(element)
    there, bounds, data = raw.buffers()
    width, data = element.bit_width // 8, data or pa.py_buffer(b"")
    bounds = array("q", [bound // width for bound in memoryview(bounds).cast("q")[: len(raw) + 1]])
    values = pa.Array.from_buffers(element, data.size // width, [None, data])
    return pa.Array.from_buffers(pa.large_list(element), len(raw), [there, pa.py_buffer(bounds)], children=[values])


def _cells(batch: Any, name: str, foreign: Callable[[str, Any], Cell] | None) -> list[Cell | None]:
    values, metadata = batch[f"columns.{name}"], batch.schema.field(f"columns.{name}").metadata or {}
    if f"types.{name}" in batch.schema.names:
        texts = batch[f"types.{name}"].to_pylist()
    elif _META in metadata:
        texts = [metadata[_META].decode()] * len(values)
    elif foreign is None:
        raise QueueError("a column of a checkpoint has no type", code="queue.store", where=name)
    else:
        return [None if value is None else foreign(name, value) for value in values.to_pylist()]
    found: list[Cell | None] = []
    for text, content in zip(texts, _contents(import_pyarrow(), values), strict=True):
        if content is not None:
            ColumnType.parse(text).length(content)
        found.append(None if content is None else (text, content))
    return found


def _contents(pa: Any, values: Any) -> list[bytes | None]:
    """Return the bytes of each value of an array that :func:`_array` made; None is null."""
    found: list[bytes | None] = []
    if not values.type.num_fields:
        is_number = pa.types.is_primitive(values.type)
        binary = values.view(pa.binary(values.type.bit_width // 8)) if is_number else values
        found += binary.cast(pa.large_binary()).to_pylist()
        return found
    flat, width = values.flatten(), values.type.value_type.bit_width // 8
    data, end = memoryview(flat.buffers()[1] or b""), flat.offset * width
    for length in values.value_lengths().to_pylist():
        start, end = end, end + (length or 0) * width
        found.append(None if length is None else bytes(data[start:end]))
    return found
