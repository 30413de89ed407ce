"""Helpers for the suite of queue backends: columns, their comparison, and a process that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from jackfield.abc.transfer_queue import (
    Column,
    DeleteRequest,
    GetRequest,
    PutRequest,
    PutResult,
    TransferQueueBackend,
    TransferQueueContext,
)
from jackfield.errors import QueueError
from jackfield.sdk.cells import column_from_rows as jagged
from jackfield.sdk.cells import dense_column as dense
from jackfield_conformance.registry import Subject
from jackfield_conformance.support import expecting
from jackfield_conformance.support.processes import hosts

PAGE = "docs/plugins/transfer_queue.md#"

_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
_SECONDS_TO_DIE = 25.0


def dtypes() -> list[torch.dtype]:
    """Return every dtype of whole bytes that this torch has."""
    return [getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)]


def pattern(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return arbitrary bytes as a tensor: NaNs with payloads, subnormals and the largest integers are among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def numbers(first: int, *shape: int) -> torch.Tensor:
    """Return int64 ``first``, ``first + 1``, …"""
    return torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)


def json_texts(texts: Sequence[str]) -> Column:
    """Make a column of JSON texts."""
    rows = [torch.tensor(list(text.encode()), dtype=torch.uint8) for text in texts]
    return attrs.evolve(jagged(rows), encoding="json")


def sample_columns(rows: int = 3, seed: int = 0) -> dict[str, Column]:
    """Make a column of each kind, with this number of rows."""
    return {
        "prompt_ids": jagged([numbers(100 * seed + 10 * row, (row * 2) % 5) for row in range(rows)]),
        "reward": dense(pattern(torch.float32, rows, seed=seed)),
        "values": jagged([pattern(torch.bfloat16, row % 3, 2, seed=seed + row) for row in range(rows)]),
        "fields": json_texts([json.dumps({"row": row, "seed": seed}) for row in range(rows)]),
    }


def assert_same(expected: Column, found: Column, what: str) -> None:
    """Require equal kind, dtype, shape, offsets and bits."""
    assert expected.encoding == found.encoding, f"{what}: encoding {expected.encoding} came back as {found.encoding}"
    assert (expected.offsets is None) == (found.offsets is None), f"{what}: jagged and dense were confused"
    if expected.offsets is not None and found.offsets is not None:
        assert found.offsets.dtype == torch.int64, f"{what}: offsets came back as {found.offsets.dtype}"
        assert expected.offsets.tolist() == found.offsets.tolist(), f"{what}: the offsets came back changed"
    assert expected.values.dtype == found.values.dtype, f"{what}: dtype {expected.values.dtype} -> {found.values.dtype}"
    assert expected.values.shape == found.values.shape, (
        f"{what}: values of shape {list(expected.values.shape)} came back as {list(found.values.shape)}"
    )
    assert found.values.is_contiguous(), f"{what}: values came back as a tensor that is not contiguous"
    one, other = (column.values.detach().contiguous().reshape(-1).view(torch.uint8) for column in (expected, found))
    assert torch.equal(one, other), f"{what}: some bits came back changed"


@contextlib.asynccontextmanager
async def opened(
    subject: Subject, folder: Path | None = None, *, joins: bool = False
) -> AsyncIterator[TransferQueueBackend]:
    """Start a backend in ``folder`` (default: the check's own), and close it at the end."""
    folder = folder or subject.folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    backend: TransferQueueBackend = subject.make(TransferQueueContext(folder=str(folder), joins=joins))
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


@contextlib.asynccontextmanager
async def filled(subject: Subject) -> AsyncIterator[TransferQueueBackend]:
    """Start the check's own backend, with :func:`sample_columns` of the rows ``a``, ``b`` and ``c``."""
    async with opened(subject) as backend:
        await put(backend, ["a", "b", "c"], sample_columns())
        yield backend


async def put(
    backend: TransferQueueBackend, keys: Sequence[str], columns: Mapping[str, Column], partition: str = "train"
) -> PutResult:
    """Write columns of rows."""
    return await backend.put(PutRequest(partition=partition, keys=tuple(keys), columns=columns))


async def get(
    backend: TransferQueueBackend, keys: Sequence[str], columns: Sequence[str], partition: str = "train"
) -> Mapping[str, Column]:
    """Read columns of rows."""
    result = await backend.get(GetRequest(partition=partition, keys=tuple(keys), columns=tuple(columns)))
    return result.columns


async def assert_reads(
    backend: TransferQueueBackend, keys: Sequence[str], columns: Mapping[str, Column], partition: str = "train"
) -> None:
    """Require that reading these columns of these rows gives exactly these values."""
    found = await get(backend, keys, list(columns), partition)
    for name, column in columns.items():
        assert_same(column, found[name], f"{name} of {', '.join(keys[:4])} in {partition!r}")


async def assert_holds(backend: TransferQueueBackend, rows: int, when: str, size: int | None = None) -> None:
    """Require that ``stats`` reports these numbers of rows and bytes."""
    stats = await backend.stats()
    assert rows == stats.samples, f"expected {rows} rows, stats says {stats.samples}, after {when}"
    assert size in (None, stats.bytes), f"expected {size} bytes, stats says {stats.bytes}, after {when}"


def refused(code: str, *names: str) -> contextlib.AbstractContextManager[None]:
    """Require that the block raises ``QueueError`` of this code, whose text has the names."""
    return expecting.refused(QueueError, code, naming=names)


def put_and_be_killed(subject: Subject, folder: Path, rounds: int) -> None:
    """Put and delete rows in another process, which SIGKILL ends when the last call has returned.

    For each round ``n`` it puts ``sample_columns`` of rows ``n-0 .. n-2``, and deletes row ``n-1``.
    """
    (host,) = hosts(1, f"{__name__}:_obey")
    host.order({"subject": subject.plain(), "folder": str(folder), "rounds": rounds})
    answer = host.answer(_SECONDS_TO_DIE)
    if answer is None:
        host.end()
        raise AssertionError(f"a process that put rows did not end within {_SECONDS_TO_DIE:g} s")
    status, message = answer
    assert status == -signal.SIGKILL, f"the process that put ended early: {message or status}"


def _obey(order: Mapping[str, Any]) -> None:
    asyncio.run(_put_and_die(order))


async def _put_and_die(order: Mapping[str, Any]) -> None:
    folder = Path(order["folder"])
    context = TransferQueueContext(folder=str(folder))
    backend: TransferQueueBackend = Subject.of_plain(order["subject"], folder).make(context)
    await backend.start()
    for number in range(order["rounds"]):
        await put(backend, [f"{number}-{row}" for row in range(3)], sample_columns(seed=number))
        await backend.delete(DeleteRequest(partition="train", keys=(f"{number}-1",)))
    os.kill(os.getpid(), signal.SIGKILL)
