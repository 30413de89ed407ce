"""The memory backend stores bytes and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.abc.transfer_queue import (
    Column,
    DeleteRequest,
    GetRequest,
    PutRequest,
    SnapshotRequest,
    TransferQueueContext,
)
from jackfield.errors import QueueError
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.sdk.cells import column_from_rows, dense_column, json_column, rows_of
from jackfield_testing import refused

torch = pytest.importorskip("torch")

DTYPES = [torch.bool, torch.uint16, torch.int64, torch.bfloat16, torch.float32, torch.complex128, torch.float8_e8m0fnu]


def backend() -> MemoryBackend:
    return MemoryBackend(MemoryConfig(), TransferQueueContext())


async def put(store: MemoryBackend, keys: str, **columns: Column) -> None:
    await store.put(PutRequest(partition="p", keys=tuple(keys), columns=columns))


async def get(store: MemoryBackend, keys: str, *columns: str) -> dict[str, list[Any]]:
    result = await store.get(GetRequest(partition="p", keys=tuple(keys), columns=columns))
    return {
        name: [row.tolist() if isinstance(row, torch.Tensor) else row for row in rows_of(column)]
        for name, column in result.columns.items()
    }


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def raw(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), min_size=1, max_size=5), st.booleans(), st.integers(0, 99))
def test_every_dtype_survives_put_get_checkpoint_and_restore(
    dtype: torch.dtype, lengths: list[int], dense: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()

    def tensor(length: int) -> torch.Tensor:
        top = 2 if dtype == torch.bool else 256
        return (
            torch.randint(0, top, (length * 2 * size,), dtype=torch.uint8, generator=generator).view(dtype).view(-1, 2)
        )

    rows = [tensor(lengths[0]) for _ in lengths] if dense else [tensor(length) for length in lengths]
    column = dense_column(torch.stack(rows)) if dense else column_from_rows(rows)
    keys = "abcde"[: len(rows)]

    async def test(folder: Path) -> None:
        store = backend()
        await put(store, keys, c=column, j=json_column([{"n": index} for index in range(len(rows))]))
        await store.checkpoint(SnapshotRequest(folder=str(folder)))
        other = backend()
        await other.restore(SnapshotRequest(folder=str(folder)))
        for each in (store, other):
            result = await each.get(GetRequest(partition="p", keys=tuple(reversed(keys)), columns=("c", "j")))
            assert [raw(row) for row in reversed(rows)] == [raw(row) for row in rows_of(result.columns["c"])]
            assert [{"n": index} for index in reversed(range(len(rows)))] == rows_of(result.columns["j"])
            assert dense == (result.columns["c"].offsets is None)
        assert await store.stats() == await other.stats()

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run(test(Path(folder) / "snapshot"))


def test_a_put_keeps_other_columns_replaces_its_own_and_copies() -> None:
    async def test() -> None:
        store = backend()
        values = torch.tensor([1, 2])
        await put(store, "ab", x=dense_column(values), y=dense_column(torch.tensor([5, 6])))
        values += 100
        await put(store, "b", x=dense_column(torch.tensor([9])))
        assert {"x": [1, 9], "y": [5, 6]} == await get(store, "ab", "x", "y")
        assert (2, 32) == ((await store.stats()).samples, (await store.stats()).bytes)

    run(test())


def test_deleted_rows_free_their_bytes_and_unknown_ones_are_ignored() -> None:
    async def test() -> None:
        store = backend()
        await put(store, "abc", x=column_from_rows([torch.zeros(1), torch.zeros(0), torch.zeros(3)]))
        freed = await store.delete(DeleteRequest(partition="p", keys=("c", "nobody")))
        assert (1, 12) == (freed.samples, freed.bytes)
        assert (2, 4) == ((await store.stats()).samples, (await store.stats()).bytes)
        await store.delete(DeleteRequest(partition="q", keys=("a",)))  # another partition
        assert 2 == (await store.stats()).samples

    run(test())


def test_what_is_missing_is_named() -> None:
    async def test() -> None:
        store = backend()
        await put(store, "ab", x=dense_column(torch.zeros(2)))
        await put(store, "a", y=dense_column(torch.zeros(1)))
        with refused("queue.unknown-sample", "'z'") as caught:
            await get(store, "az", "x")
        assert caught.value.code == "queue.unknown-sample"
        with refused("queue.column", "'y'") as caught:
            await get(store, "ab", "y")
        assert caught.value.code == "queue.column"
        await put(store, "b", y=column_from_rows([torch.zeros(1)]))
        with refused("queue.column") as caught:
            await get(store, "ab", "y")
        assert caught.value.code == "queue.column"

    run(test())


def test_a_checkpoint_is_of_the_moment_of_the_call() -> None:
    """Values that are put while a large checkpoint is written are not in it and do not wait for it."""

    async def test(folder: str) -> None:
        store = backend()
        await put(store, "a", x=dense_column(torch.zeros(1, 1 << 22)))  # 16 MiB: written by a thread
        writing = asyncio.ensure_future(store.checkpoint(SnapshotRequest(folder=folder)))
        await asyncio.sleep(0)
        assert not writing.done()
        await put(store, "b", x=dense_column(torch.ones(1, 1 << 22)))
        await put(store, "a", y=dense_column(torch.ones(1)))
        assert 1 == (await writing).samples
        await store.restore(SnapshotRequest(folder=folder))
        assert 1 == (await store.stats()).samples
        with refused("queue.column", "'y'"):
            await get(store, "a", "y")

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run(test(folder))


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        store = backend()
        await put(store, "a", x=dense_column(torch.zeros(1, 4)))
        await store.checkpoint(SnapshotRequest(folder=str(tmp_path)))
        [values] = tmp_path.glob("samples-*.arrow")
        values.write_bytes(b"12")
        with refused("queue.invalid"):
            await store.restore(SnapshotRequest(folder=str(tmp_path)))
        with refused("queue.invalid"):
            await store.restore(SnapshotRequest(folder=str(tmp_path / "elsewhere")))

    run(test())


def test_a_closed_backend_says_so() -> None:
    async def test() -> None:
        store = backend()
        await store.close()
        await store.close()
        with pytest.raises(QueueError) as caught:
            await put(store, "a", x=dense_column(torch.zeros(1)))
        assert caught.value.code == "queue.closed"

    run(test())
