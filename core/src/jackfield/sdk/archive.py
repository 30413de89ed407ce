"""The files of a checkpoint. All backends share the format, so that a run may resume with another backend.

``samples-*.arrow`` is a sequence of Arrow IPC streams of one record batch each. ``index.json`` has its name, and the
size and digest of each stream. The index is written last and atomically, so that an interrupted write leaves the
previous checkpoint valid. The index has a digest of its own.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import xxhash

from jackfield.abc.transfer_queue import SnapshotResult
from jackfield.errors import QueueError
from jackfield.files import replace_file, seal, unseal
from jackfield.sdk.arrow import SavedSample, column_types, from_arrow, import_pyarrow, to_arrow

__all__ = [
    "BATCH_BYTES",
    "BATCH_ROWS",
    "NAME_FILE",
    "ArchiveWriter",
    "batches",
    "queue_name",
    "read_archive",
    "write_archive",
]

T = TypeVar("T")

BATCH_ROWS = 500
BATCH_BYTES = 1 << 25  #: bytes of values per record batch
NAME_FILE = "name.txt"

_INDEX = "index.json"
_FORMAT = 4


class ArchiveWriter:
    """A context manager that writes a checkpoint, which becomes valid with :meth:`finish`."""

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

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove obsolete files: this file if :meth:`finish` was not called, else the earlier ones."""
        self._file.close()
        for path in self._folder.glob("samples-*.arrow"):
            if (path == self._path) != self._finished:
                path.unlink(missing_ok=True)


def write_archive(folder: Path, samples: Iterable[SavedSample]) -> SnapshotResult:
    """Write samples as the checkpoint of ``folder`` and replace the previous one."""
    with ArchiveWriter(folder) as writer:
        writer.add(samples)
        return writer.finish()


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield items in order, in batches for a store: at most 500 items or about 32 MiB each."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= BATCH_BYTES or len(batch) >= BATCH_ROWS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def read_archive(folder: Path) -> Iterator[SavedSample]:
    """Yield the samples of a folder's checkpoint.

    Raises:
        QueueError: ``queue.invalid``, before the first sample, if there is no complete checkpoint or it has another
            format; ``queue.store`` if samples are damaged.
    """
    path, streams = _opened(folder)
    with path.open("rb") as file:
        for size, digest in streams:
            stream = file.read(size)
            if xxhash.xxh3_128_hexdigest(stream) != digest:
                expected = f"bytes with the digest {digest}"
                raise _damaged("samples of a queue's checkpoint are damaged", str(path), expected, "other bytes")
            yield from from_arrow(import_pyarrow().ipc.open_stream(stream).read_next_batch(), _refuse)


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


def _opened(folder: Path) -> tuple[Path, list[tuple[int, str]]]:
    """Return a checkpoint's file, whose size is checked, and the streams in it."""
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
    return path, streams


def _refuse(name: str, value: Any) -> NoReturn:
    raise _damaged("a column of a checkpoint has no type", name, "a type", value)


def _damaged(message: str, where: str, expected: str, found: object) -> QueueError:
    return QueueError(message, code="queue.store", where=where, expected=expected, found=found)
