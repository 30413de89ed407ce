"""A process reads each value of a batch once, and never one that it has written; other leases begin anew."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch

from jackfield.abc.transfer_queue import GetRequest, GetResult, TransferQueueContext
from jackfield.errors import QueueError
from jackfield.queue import BatchMeta, Values
from jackfield.queue.meta import Lease
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.runtime.samples import StepValues
from jackfield.sdk.cells import column_from_rows, dense_column, rows_of

SAMPLES = 6


class CountingBackend(MemoryBackend):
    """A backend that counts how often each value is read."""

    def __init__(self) -> None:
        super().__init__(MemoryConfig(), TransferQueueContext())
        self.read: Counter[tuple[str, str]] = Counter()

    async def get(self, request: GetRequest) -> GetResult:
        found = await super().get(request)
        self.read.update((key, name) for key in request.keys for name in request.columns)
        return found


def batch(rows: Sequence[int] = range(SAMPLES), epoch: int = 1) -> BatchMeta:
    return BatchMeta(
        keys=tuple(f"train/0/{row}/0/0/0" for row in rows),
        tags=({},) * len(rows),
        groups=tuple(f"train/0/{row}/0" for row in rows),
        leases=(Lease("train", "trainer", epoch),) * len(rows),
    )


def ids(rows: Sequence[int], add: int = 0) -> Any:
    return column_from_rows([torch.arange(row, 2 * row + 1) + add for row in rows])


def lists(column: Any) -> list[list[int]]:
    return [row.tolist() for row in rows_of(column)]


def stored() -> tuple[CountingBackend, StepValues]:
    """A backend with two columns of all samples."""
    backend = CountingBackend()
    columns = {"prompt_ids": ids(range(SAMPLES)), "reward": dense_column(torch.arange(float(SAMPLES)))}
    asyncio.run(_put(backend, columns))
    return backend, StepValues(backend)


async def _put(backend: MemoryBackend, columns: dict[str, Any]) -> None:
    await Values(backend).put("train", batch().keys, columns)


def test_a_value_is_read_once_in_whatever_parts_it_is_asked_for() -> None:
    """Mini-batches in another order, a column more, and rows that another rank had before: only what is new is read."""
    backend, values = stored()

    async def main() -> None:
        for rows in ((4, 1, 3), (1, 3), (5, 4, 3, 2, 1, 0), range(SAMPLES), (0, 5)):
            found = await values.read(batch(rows), ("prompt_ids",))
            assert lists(ids(rows)) == lists(found["prompt_ids"])
            assert torch.int64 == found["prompt_ids"].values.dtype
        both = await values.read(batch((2, 0)), ("prompt_ids", "reward"))
        assert [2.0, 0.0] == both["reward"].values.tolist()
        assert both["reward"].offsets is None

    asyncio.run(main())
    expected = {(key, "prompt_ids"): 1 for key in batch().keys}
    assert {**expected, **{(key, "reward"): 1 for key in batch((0, 2)).keys}} == backend.read


def test_what_was_written_here_is_not_read() -> None:
    """The newest of it counts, in the store as well as here."""
    backend, values = stored()

    async def main() -> None:
        for add in (10, 20):
            columns = {name: ids(range(SAMPLES), add) for name in ("old_log_probs", "log_probs")}
            await values.write(batch(), columns)
            await values.write(batch((1, 2)), {"log_probs": ids((1, 2), add + 5)})
            found = await values.read(batch((3, 2)), ("old_log_probs", "log_probs"))
            assert lists(ids((3, 2), add)) == lists(found["old_log_probs"])
            assert [lists(ids((3,), add))[0], lists(ids((2,), add + 5))[0]] == lists(found["log_probs"])
        assert not backend.read
        there = await Values(backend).read(batch((2,)), ("log_probs",))
        assert lists(ids((2,), 25)) == lists(there["log_probs"])

    asyncio.run(main())


def test_columns_that_others_write_for_each_mini_batch_are_read_each_time() -> None:
    backend, values = stored()

    async def main() -> None:
        for add in (1, 2):
            await _put(backend, {"log_probs": ids(range(SAMPLES), add)})
            assert lists(ids(range(SAMPLES), add)) == lists((await values.read(batch(), ("log_probs",)))["log_probs"])

    asyncio.run(main())
    assert {2} == set(backend.read.values())


def test_values_of_another_lease_are_read_again() -> None:
    """A sample that was lost, or is replayed, has new values under the key that it had."""
    backend, values = stored()

    async def main() -> None:
        await values.read(batch(), ("prompt_ids",))
        await values.write(batch(), {"old_log_probs": ids(range(SAMPLES), 7)})
        await _put(backend, {"prompt_ids": ids(range(SAMPLES), 3), "old_log_probs": ids(range(SAMPLES), 4)})
        mixed = attrs.evolve(batch((0, 1)), leases=(Lease("train", "trainer", 1), Lease("train", "trainer", 2)))
        for again in (batch(epoch=2), mixed):
            found = await values.read(again, ("prompt_ids", "old_log_probs"))
            rows = [int(key.split("/")[2]) for key in again.keys]
            assert lists(ids(rows, 3)) == lists(found["prompt_ids"])
            assert lists(ids(rows, 4)) == lists(found["old_log_probs"])
        kept = {key for cells in values._cells.values() for key in cells}
        assert set(mixed.keys) == kept, "one batch is kept at most"

    asyncio.run(main())


def test_a_lost_sample_is_named_though_others_were_read() -> None:
    backend, values = stored()

    async def main() -> None:
        await values.read(batch((0, 1)), ("prompt_ids",))
        for row in (0, 5):
            del backend._cells["train", batch((row,)).keys[0]]
        with pytest.raises(QueueError) as caught:
            await values.read(batch(), ("prompt_ids",))
        assert batch((5,)).keys[0] in str(caught.value)

    asyncio.run(main())
