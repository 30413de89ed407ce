"""The store of an import: rows go straight into the files of a checkpoint, and no value stays in memory."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from jackfield.abc.transfer_queue import (
    DeleteRequest,
    DeleteResult,
    GetRequest,
    GetResult,
    PutRequest,
    PutResult,
    SnapshotRequest,
    SnapshotResult,
    StatsResult,
    TransferQueueBackend,
    TransferQueueContext,
)
from jackfield.errors import QueueError
from jackfield.queue.archive import ArchivedRow, ArchiveWriter, read_archive
from jackfield.queue.cells import cells_of

__all__ = ["AppendingBackend"]


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
        self._restores = False
        self._forgotten: set[tuple[str, str]] = set()  #: rows that are there and will not be
        self._open: ArchiveWriter | None = None
        self._rows = self._bytes = 0  #: that were put

    def _writer(self) -> ArchiveWriter:
        """Made with the rows that are there."""
        if self._open is None:
            self._open = ArchiveWriter(self._folder)
            for row in read_archive(self._folder) if self._restores else ():
                if (row.partition, row.key) not in self._forgotten:
                    self._open.add(row)
        return self._open

    async def put(self, request: PutRequest) -> PutResult:
        """Append."""
        writer, before = self._writer(), self._bytes
        columns = {name: cells_of(column) for name, column in request.columns.items()}
        for index, key in enumerate(request.keys):
            cells = {name: rows[index] for name, rows in columns.items()}
            row = ArchivedRow(partition=request.partition, key=key, cells=cells)
            writer.add(row)
            self._bytes += row.bytes
        self._rows += len(request.keys)
        return PutResult(bytes=self._bytes - before)

    async def get(self, request: GetRequest) -> GetResult:
        """Nobody reads while rows are imported.

        Raises:
            QueueError: ``queue.unknown-sample``.
        """
        raise QueueError(
            "rows are imported, and cannot be read yet", code="queue.unknown-sample", where=request.partition
        )

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Leave rows out that are there. An import that gives up a row of its own fails, and is no checkpoint."""
        self._forgotten |= {(request.partition, key) for key in request.keys}
        return DeleteResult(samples=len(request.keys), bytes=0)

    async def stats(self) -> StatsResult:
        """Count what was put."""
        return StatsResult(samples=self._rows, bytes=self._bytes)

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Make what was put the folder's checkpoint."""
        return self._writer().finish()

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Keep the rows that are there."""
        self._restores = True
        return SnapshotResult(samples=0, bytes=0)

    async def close(self) -> None:
        """Remove what has become no checkpoint."""
        if self._open is not None:
            self._open.close()
