"""A worker's way to the values of rows: straight to the backend, past the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from jackfield.abc.transfer_queue import Column, GetRequest, PutRequest, TransferQueueBackend
from jackfield.queue.columns import check_column

__all__ = ["Rows", "Written", "check_columns"]


@attrs.frozen(kw_only=True)
class Written:
    """What a worker has written, without the values: what the controller has to know."""

    columns: tuple[str, ...]
    sizes: tuple[int, ...]  #: bytes of each row's new values


class Rows:
    """Reads and writes columns of rows by key. Who may do so when is the controller's concern."""

    def __init__(self, backend: TransferQueueBackend) -> None:
        self._backend = backend

    async def get(self, partition: str, keys: Sequence[str], names: Sequence[str]) -> dict[str, Column]:
        """Read columns, in the order of ``keys``.

        Raises:
            QueueError: ``queue.unknown-row``, ``queue.column``.
        """
        request = GetRequest(partition=partition, keys=tuple(keys), columns=tuple(names))
        return dict((await self._backend.get(request)).columns)

    async def put(self, partition: str, keys: Sequence[str], columns: Mapping[str, Column]) -> Written:
        """Write columns, one row for each key; the controller then hears of it (:meth:`TransferQueue.announce`).

        Raises:
            QueueError: ``queue.invalid`` for a column that breaks its contract.
        """
        sizes = check_columns(columns, len(keys))
        if keys:
            await self._backend.put(PutRequest(partition=partition, keys=tuple(keys), columns=columns))
        return Written(columns=tuple(columns), sizes=sizes)


def check_columns(columns: Mapping[str, Column], rows: int) -> tuple[int, ...]:
    """Refuse columns that break their contract; bytes of each row's values.

    Raises:
        QueueError: ``queue.invalid``, naming the column.
    """
    sizes = [0] * rows
    for name, column in columns.items():
        sizes = [total + size for total, size in zip(sizes, check_column(name, column, rows), strict=True)]
    return tuple(sizes)
