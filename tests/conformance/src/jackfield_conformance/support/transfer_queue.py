"""For the suite of TransferQueue backends: columns, their comparison, and a process that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from jackfield_conformance.subject import Subject
from jackfield_conformance.support import expecting
from jackfield_conformance.support.processes import Host

PAGE = "docs/plugins/transfer_queue.md#"

_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
_SECONDS_TO_DIE = 25.0


# -- columns ---------------------------------------------------------------------------------------------------------


def dtypes() -> list[torch.dtype]:
    """Every dtype of whole bytes that this torch has."""
    return [getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)]


def pattern(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Any bytes at all as a tensor: among them are NaNs with payloads, subnormals and the largest integers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def numbers(first: int, *shape: int) -> torch.Tensor:
    """int64 ``first``, ``first + 1``, …"""
    return torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)


def dense(values: torch.Tensor) -> Column:
    """Rows of one shape."""
    return Column(values=values.contiguous())


def jagged(rows: Sequence[torch.Tensor]) -> Column:
    """Rows of any lengths; at least one."""
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    return Column(values=torch.cat(list(rows)), offsets=torch.tensor(offsets))


def json_texts(texts: Sequence[str]) -> Column:
    """Rows of JSON."""
    column = jagged([torch.tensor(list(text.encode()), dtype=torch.uint8) for text in texts])
    return Column(values=column.values, offsets=column.offsets, encoding="json")


def sample_columns(rows: int = 3, seed: int = 0) -> dict[str, Column]:
    """A column of each sort, for so many rows."""
    return {
        "prompt_ids": jagged([numbers(100 * seed + 10 * row, (row * 2) % 5) for row in range(rows)]),
        "reward": dense(pattern(torch.float32, rows, seed=seed)),
        "values": jagged([pattern(torch.bfloat16, row % 3, 2, seed=seed + row) for row in range(rows)]),
        "fields": json_texts([json.dumps({"row": row, "seed": seed}) for row in range(rows)]),
    }


def assert_same(expected: Column, found: Column, what: str) -> None:
    """The two are equal in kind, dtype, shape, offsets and every bit."""
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
    assert torch.equal(_bits(expected.values), _bits(found.values)), f"{what}: some bits came back changed"


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().reshape(-1).view(torch.uint8)


# -- backends --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def opened(
    subject: Subject, folder: Path | None = None, *, joins: bool = False
) -> AsyncIterator[TransferQueueBackend]:
    """A started backend in ``folder`` (default: the check's own), closed at the end."""
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
    """The check's own backend, with :func:`sample_columns` of the rows ``a``, ``b`` and ``c``."""
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
    """Reading these columns of these rows gives just that, bit for bit."""
    found = await get(backend, keys, list(columns), partition)
    for name, column in columns.items():
        assert_same(column, found[name], f"{name} of {', '.join(keys[:4])} in {partition!r}")


async def assert_holds(backend: TransferQueueBackend, rows: int, when: str, size: int | None = None) -> None:
    """``stats`` says so many rows, and bytes."""
    stats = await backend.stats()
    assert rows == stats.samples, f"expected {rows} rows, stats says {stats.samples}, after {when}"
    assert size in (None, stats.bytes), f"expected {size} bytes, stats says {stats.bytes}, after {when}"


def refused(code: str, *names: str) -> contextlib.AbstractContextManager[None]:
    """The block raises ``QueueError`` of this code, whose text holds the names."""
    return expecting.refused(QueueError, code, naming=names)


# -- kill -9 ---------------------------------------------------------------------------------------------------------


def put_and_be_killed(subject: Subject, folder: Path, rounds: int) -> None:
    """In another process: open the backend in ``folder``, put ``sample_columns`` of rows ``n-0 .. n-2`` for every round
    ``n``, delete row ``n-1`` of each, and die by SIGKILL as soon as the last call has returned."""
    host = _host()
    host.order({"subject": subject.plain(), "folder": str(folder), "rounds": rounds})
    answer = host.answer(_SECONDS_TO_DIE)
    if answer is None:
        host.end()
        raise AssertionError(f"a process that put rows did not end within {_SECONDS_TO_DIE:g} s")
    status, message = answer
    assert status == -signal.SIGKILL, f"the process that put ended early: {message or status}"


_HOSTS: list[Host] = []


def _host() -> Host:
    if not _HOSTS or not _HOSTS[0].alive:
        _HOSTS[:] = [Host(f"{__name__}:_obey")]
    return _HOSTS[0]


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
