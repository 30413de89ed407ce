"""The queue's backend in its own worker, where others read and write samples by RPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TypeAlias, cast

import attrs

from jackfield.abc.transfer_queue import GetRequest, GetResult, PutRequest, PutResult, TransferQueueBackend
from jackfield.rpc import Connection, Contract, Service, stub
from jackfield.sdk.archive import batches
from jackfield.sdk.cells import join, split_request

_PIECE_BYTES = 16 * 2**20  #: a message is complete once its values reach this size

_Sample: TypeAlias = dict[str, tuple[str, bytes]]  #: encoded cells by column


@attrs.frozen
class _Samples:
    """The service that puts and gets samples in pieces of limited size."""

    _backend: TransferQueueBackend

    async def put(self, partition: str, keys: list[str], samples: list[_Sample]) -> int:
        """Store samples. Return the size of their values in bytes."""
        columns = {name: join(name, [sample[name] for sample in samples]) for name in samples[0]}
        stored = await self._backend.put(PutRequest(partition=partition, keys=tuple(keys), columns=columns))
        return stored.bytes

    async def get(self, request: GetRequest) -> AsyncIterator[list[_Sample]]:
        """Yield the samples in order, several at a time."""
        columns = (await self._backend.get(request)).columns
        numbers = tuple(map(str, range(len(request.keys))))
        for piece in _pieces(PutRequest(partition=request.partition, keys=numbers, columns=columns)):
            yield piece


_BACKEND = Contract(TransferQueueBackend, without=("put", "get", "close"))
_SAMPLES = Contract(_Samples)


def store_services(backend: TransferQueueBackend) -> dict[str, Service]:
    """Return the services of a process that holds a backend."""
    return {
        "backend": Service(target=backend, contract=_BACKEND),
        "samples": Service(target=_Samples(backend), contract=_SAMPLES),
    }


def remote_backend(connection: Connection, seconds: float) -> TransferQueueBackend:
    """Return a stub of the backend at the other end, with a deadline of ``seconds`` per call."""
    made: TransferQueueBackend = stub(connection, "backend", _BACKEND, TransferQueueBackend, seconds)  # type: ignore[type-abstract]
    samples = stub(connection, "samples", _SAMPLES, _Samples, seconds)

    async def put(request: PutRequest) -> PutResult:
        size, first = 0, 0
        for piece in _pieces(request):
            size += await samples.put(request.partition, list(request.keys[first : first + len(piece)]), piece)
            first += len(piece)
        return PutResult(bytes=size)

    async def get(request: GetRequest) -> GetResult:
        found = [sample async for piece in samples.get(request) for sample in piece]
        return GetResult(columns={name: join(name, [sample[name] for sample in found]) for name in request.columns})

    async def close() -> None:
        """Do nothing: the backend's own process closes it."""

    vars(made).update(put=put, get=get, close=close, durable=False, joins=False)
    return made


def _pieces(request: PutRequest) -> Iterator[list[_Sample]]:
    samples = cast(Sequence[_Sample], split_request(request))  # of any bytes-like objects
    return batches(samples, lambda sample: sum(len(content) for _, content in sample.values()), _PIECE_BYTES)
