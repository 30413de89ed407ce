"""The store of an import: rows go straight into the files of a checkpoint, and no value stays in memory."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from jackfield.abc.transfer_queue import (
    DeleteRequest,
    DeleteResult,
    GetRequest,
    GetResult,
    KeysRequest,
    KeysResult,
    PutRequest,
    PutResult,
    SnapshotRequest,
    SnapshotResult,
    StatsResult,
    TransferQueueBackend,
    TransferQueueContext,
)
from jackfield.sdk.archive import BATCH_BYTES, BATCH_ROWS, ArchiveWriter, read_archive
from jackfield.sdk.arrow import SavedSample
from jackfield.sdk.cells import Cell, split_request, unknown_sample


class AppendingBackend(TransferQueueBackend):
    """Adds whole rows to the checkpoint of one folder: each row is put once, with all columns that it will have.

    Until :meth:`checkpoint` the folder's checkpoint is the one that was there.
    """

    durable: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: of the checkpoint's values.
        """
        super().__init__(None, TransferQueueContext())
        self._folder = folder
        self._restored: set[tuple[str, str]] = set()  #: samples that are there, and stay
        self._columns: dict[tuple[str, str], tuple[str, ...]] = {}  #: of all samples
        self._bytes = 0  #: that were put
        self._pending: list[SavedSample] = []  #: not written yet: fewer than 500, or about 32 MiB
        self._pending_bytes = 0
        self._open: ArchiveWriter | None = None

    def _write(self) -> ArchiveWriter:
        """Write what is pending, behind the samples that are there."""
        if self._open is None:
            self._open = ArchiveWriter(self._folder)
            if self._restored:
                kept = (each for each in read_archive(self._folder) if (each.partition, each.key) in self._restored)
                self._open.add(kept)
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        self._open.add(pending)
        return self._open

    async def put(self, request: PutRequest) -> PutResult:
        """Append samples to the file."""
        stored = 0
        for key, cells in zip(request.keys, split_request(request), strict=True):
            copied: dict[str, Cell] = {name: (text, bytes(content)) for name, (text, content) in cells.items()}
            self._pending.append(SavedSample(partition=request.partition, key=key, cells=copied))
            self._columns[request.partition, key] = tuple(copied)
            stored += self._pending[-1].bytes
        self._bytes += stored
        self._pending_bytes += stored
        if len(self._pending) >= BATCH_ROWS or self._pending_bytes >= BATCH_BYTES:
            self._write()
        return PutResult(bytes=stored)

    async def get(self, request: GetRequest) -> GetResult:
        """Refuse: samples are not read while others are imported.

        Raises:
            QueueError: ``queue.unknown-sample``.
        """
        raise unknown_sample(request.partition, request.keys[0])

    async def keys(self, request: KeysRequest) -> KeysResult:
        """List what was put, and what was there before."""
        return KeysResult(samples=self._columns)

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Leave samples out that are there. An import that gives up one of its own fails, and is no checkpoint."""
        for key in request.keys:
            self._restored.discard((request.partition, key))
            self._columns.pop((request.partition, key), None)
        return DeleteResult(samples=len(request.keys), bytes=0)

    async def stats(self) -> StatsResult:
        """Count what was put."""
        return StatsResult(samples=len(self._columns) - len(self._restored), bytes=self._bytes)

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Make what was put the folder's checkpoint."""
        return self._write().finish()

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Keep the samples that are there."""
        for sample in read_archive(self._folder):
            self._restored.add((sample.partition, sample.key))
            self._columns[sample.partition, sample.key] = tuple(sample.cells)
        return SnapshotResult(samples=0, bytes=0)

    async def close(self) -> None:
        """Remove what has become no checkpoint."""
        if self._open is not None:
            self._open.close()
