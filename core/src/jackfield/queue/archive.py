"""A checkpoint's files, the same for every backend that writes them: a run may go on with another backend.

``index.json`` names the two others and their sizes; it comes last and appears whole, so that a checkpoint which was
broken off is none, and does no harm to the one before it. ``rows-*.jsonl`` has a line for each row: partition, key, the
headers of its cells by column with their digests, and its tags or null. ``values-*.bin`` has the cells' bytes in the
same order. The index has the digest of ``rows-*.jsonl`` and its own; each cell has one.

safetensors would not do: it lacks dtypes that torch has (complex128, float8_e8m0fnu), and names each tensor in one
header, where we have millions of rows.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import xxhash

from jackfield.abc.transfer_queue import SnapshotResult
from jackfield.errors import QueueError
from jackfield.files import replace_file, seal, unseal
from jackfield.queue.cells import Cell

__all__ = ["BATCH_BYTES", "BATCH_ROWS", "ArchiveWriter", "ArchivedRow", "batches", "read_archive", "write_archive"]

T = TypeVar("T")

BATCH_ROWS = 500
BATCH_BYTES = 1 << 25  #: of values

_INDEX = "index.json"
_FORMAT = 3


@attrs.frozen(kw_only=True, eq=False)
class ArchivedRow:
    """One row of a checkpoint."""

    partition: str
    key: str
    cells: Mapping[str, Cell]  #: by column
    tags: Mapping[str, Any] | None = None  #: where the backend shows them

    @property
    def bytes(self) -> int:
        """Of values."""
        return sum(len(cell.content) for cell in self.cells.values())


class ArchiveWriter:
    """Writes a checkpoint row by row; without :meth:`finish` there is none. A context manager."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        mark = uuid.uuid4().hex[:12]
        self._folder = folder
        self._row_count = self._byte_count = 0
        self._names = f"rows-{mark}.jsonl", f"values-{mark}.bin"
        self._rows = (folder / self._names[0]).open("w", encoding="utf-8")
        self._values = (folder / self._names[1]).open("wb")
        self._digest = xxhash.xxh3_128()  # of the rows
        self._finished = False

    def add(self, row: ArchivedRow) -> None:
        """Append a row."""
        headers = {
            name: [cell.kind, cell.dtype, cell.shape, cell.digest(row.partition, row.key, name)]
            for name, cell in row.cells.items()
        }
        entry = [row.partition, row.key, headers, row.tags]
        line = json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n"
        self._rows.write(line)
        self._digest.update(line.encode())
        for cell in row.cells.values():
            self._values.write(cell.content)
        self._row_count += 1
        self._byte_count += row.bytes

    def finish(self) -> SnapshotResult:
        """Make it durable, and the checkpoint of the folder."""
        for file in (self._rows, self._values):
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: (self._folder / name).stat().st_size for name in self._names}
        index = {
            "format": _FORMAT,
            "rows": self._row_count,
            "bytes": self._byte_count,
            "files": sizes,
            "rows_digest": self._digest.hexdigest(),
        }
        replace_file(self._folder / _INDEX, seal(json.dumps(index)))
        self._finished = True
        return SnapshotResult(samples=self._row_count, bytes=self._byte_count)

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove what is not the checkpoint: these files without :meth:`finish`, else those before them."""
        self._rows.close()
        self._values.close()
        for pattern in ("rows-*.jsonl", "values-*.bin"):
            for path in self._folder.glob(pattern):
                if (path.name in self._names) != self._finished:
                    path.unlink(missing_ok=True)


def write_archive(folder: Path, rows: Iterable[ArchivedRow]) -> SnapshotResult:
    """Write rows as the checkpoint of ``folder``, in the place of the one that is there."""
    with ArchiveWriter(folder) as writer:
        for row in rows:
            writer.add(row)
        return writer.finish()


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Items in order, so many together as a store is given at once: 500, or about 32 MiB."""
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


def read_archive(folder: Path) -> Iterator[ArchivedRow]:
    """The rows of a folder's checkpoint, one after the other.

    Raises:
        QueueError: ``queue.invalid``, before the first row, where there is no whole checkpoint, or another format's;
            ``queue.store`` where values are damaged.
    """
    rows, values = _files(folder)
    with rows.open(encoding="utf-8") as lines, values.open("rb") as content:
        for line in lines:
            partition, key, headers, tags = json.loads(line)
            cells = {}
            for name, (kind, dtype, shape, digest) in headers.items():
                cell = Cell(kind, dtype, tuple(shape), b"")
                cells[name] = attrs.evolve(cell, content=content.read(cell.size))
                if cells[name].digest(partition, key, name) != digest:
                    raise QueueError(
                        "a value of a queue's checkpoint is damaged",
                        code="queue.store",
                        where=f"{values}: {name} of {key}",
                        expected=f"bytes with the digest {digest}",
                        found="other bytes",
                    )
            yield ArchivedRow(partition=partition, key=key, cells=cells, tags=tags)


def _files(folder: Path) -> tuple[Path, Path]:
    """Those of the rows, whose digest is right, and of the values."""
    message = "the folder holds no checkpoint of a queue's values"
    try:
        content = (folder / _INDEX).read_bytes()
        if (found := json.loads(content).get("format")) != _FORMAT:
            what = "the checkpoint of a queue's values is of another format"
            raise QueueError(what, where=str(folder), expected=f"format {_FORMAT}", found=f"format {found}")
        index = unseal(content)
        rows, values = (folder / name for name in index["files"])
        sizes = {name: (folder / name).stat().st_size for name in index["files"]}
        digest = xxhash.xxh3_128_hexdigest(rows.read_bytes())
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise QueueError(message, where=str(folder), expected=_INDEX, found=error) from error
    if index["files"] != sizes:
        raise QueueError("the checkpoint is incomplete", where=str(folder), expected=index["files"], found=sizes)
    if index["rows_digest"] != digest:
        raise QueueError(message, where=str(rows), expected=f"the digest {index['rows_digest']}", found=digest)
    return rows, values
