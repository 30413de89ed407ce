"""A worker's way to the values of rows: straight to the backend, past the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from jackfield.abc.transfer_queue import Column, GetRequest, PutRequest, TransferQueueBackend
from jackfield.queue.columns import check_column, concatenate, take
from jackfield.queue.meta import BatchMeta

__all__ = ["Rows", "Written", "check_columns", "in_order"]


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
            QueueError: ``queue.unknown-sample``, ``queue.column``.
        """
        request = GetRequest(partition=partition, keys=tuple(keys), columns=tuple(names))
        return dict((await self._backend.get(request)).columns)

    async def read(self, batch: BatchMeta, names: Sequence[str]) -> dict[str, Column]:
        """Read columns of a batch, in its order, whatever partitions its rows are of.

        Raises:
            QueueError: ``queue.unknown-sample``, ``queue.column``.
        """
        places = batch.by_partition()
        parts = [
            await self.get(partition, [batch.keys[index] for index in rows], names)
            for partition, rows in places.items()
        ]
        return in_order(list(places.values()), parts)

    async def write(self, batch: BatchMeta, columns: Mapping[str, Column]) -> Written:
        """Write columns of a batch; see :meth:`put`."""
        sizes = check_columns(columns, len(batch))
        for partition, rows in batch.by_partition().items():
            keys = [batch.keys[index] for index in rows]
            some = columns if len(rows) == len(batch) else {name: take(each, rows) for name, each in columns.items()}
            await self._backend.put(PutRequest(partition=partition, keys=tuple(keys), columns=some))
        return Written(columns=tuple(columns), sizes=sizes)

    async def put(self, partition: str, keys: Sequence[str], columns: Mapping[str, Column]) -> Written:
        """Write columns, one row for each key; the controller then hears of it (:meth:`TransferQueue.announce`).

        Raises:
            QueueError: ``queue.invalid`` for a column that breaks its contract.
        """
        sizes = check_columns(columns, len(keys))
        if keys:
            await self._backend.put(PutRequest(partition=partition, keys=tuple(keys), columns=columns))
        return Written(columns=tuple(columns), sizes=sizes)


def in_order(places: Sequence[Sequence[int]], parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Columns that were read in parts, as one: row ``i`` of part ``p`` comes to place ``places[p][i]``."""
    if len(parts) == 1:
        return dict(parts[0])
    inverse = {place: index for index, place in enumerate(place for rows in places for place in rows)}
    order = [inverse[place] for place in range(len(inverse))]
    return {name: take(concatenate([part[name] for part in parts]), order) for name in parts[0]}


def check_columns(columns: Mapping[str, Column], rows: int) -> tuple[int, ...]:
    """Refuse columns that break their contract; bytes of each row's values.

    Raises:
        QueueError: ``queue.invalid``, naming the column.
    """
    sizes = [0] * rows
    for name, column in columns.items():
        sizes = [total + size for total, size in zip(sizes, check_column(name, column, rows), strict=True)]
    return tuple(sizes)
