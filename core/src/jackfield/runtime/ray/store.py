"""The queue's backend in a worker of its own: other workers read and write samples there, as cells, by the RPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TypeAlias, cast

import attrs

from jackfield.abc.transfer_queue import GetRequest, GetResult, PutRequest, PutResult, TransferQueueBackend
from jackfield.rpc import Connection, Contract, Service, stub
from jackfield.sdk.cells import join, split, split_request

_PIECE_BYTES = 16 * 2**20  #: of the values in one message; a larger sample has one of its own

_Sample: TypeAlias = dict[str, tuple[str, bytes]]  #: cells by column, as they travel


@attrs.frozen
class _Samples:
    """Puts and gets of the backend, in pieces."""

    _backend: TransferQueueBackend

    async def put(self, partition: str, keys: list[str], samples: list[_Sample]) -> int:
        """Store samples. Returns the bytes of their values."""
        columns = {name: join(name, [sample[name] for sample in samples]) for name in samples[0]}
        stored = await self._backend.put(PutRequest(partition=partition, keys=tuple(keys), columns=columns))
        return stored.bytes

    async def get(self, request: GetRequest) -> AsyncIterator[list[_Sample]]:
        """Yield the samples, in order, some at a time."""
        columns = (await self._backend.get(request)).columns
        cells = {name: split(column) for name, column in columns.items()}
        samples = [
            {name: (text, cast(bytes, contents[index])) for name, (text, contents) in cells.items()}
            for index in range(len(request.keys))
        ]
        for start, end in _pieces(samples):
            yield samples[start:end]


_BACKEND = Contract(TransferQueueBackend, without=("put", "get", "close"))
_SAMPLES = Contract(_Samples)


def store_services(backend: TransferQueueBackend) -> dict[str, Service]:
    """Return what a process serves that has a backend."""
    return {
        "backend": Service(target=backend, contract=_BACKEND),
        "samples": Service(target=_Samples(backend), contract=_SAMPLES),
    }


def remote_backend(connection: Connection, seconds: float) -> TransferQueueBackend:
    """Return the backend of the process at the other end, each of whose calls may take ``seconds``."""
    made: TransferQueueBackend = stub(connection, "backend", _BACKEND, TransferQueueBackend, seconds)  # type: ignore[type-abstract]
    samples = stub(connection, "samples", _SAMPLES, _Samples, seconds)

    async def put(request: PutRequest) -> PutResult:
        split_up, size = cast(list[_Sample], split_request(request)), 0  # of any bytes-like objects
        for start, end in _pieces(split_up):
            size += await samples.put(request.partition, list(request.keys[start:end]), split_up[start:end])
        return PutResult(bytes=size)

    async def get(request: GetRequest) -> GetResult:
        found = [sample async for piece in samples.get(request) for sample in piece]
        return GetResult(columns={name: join(name, [sample[name] for sample in found]) for name in request.columns})

    async def close() -> None:
        """Its process closes it."""

    vars(made).update(put=put, get=get, close=close, durable=False, joins=False)
    return made


def _pieces(samples: Sequence[_Sample]) -> Iterator[tuple[int, int]]:
    """Cut samples into ranges of about equal size."""
    start = size = 0
    for end, sample in enumerate(samples, 1):
        size += sum(len(content) for _, content in sample.values())
        if size >= _PIECE_BYTES or end == len(samples):
            yield start, end
            start, size = end, 0
