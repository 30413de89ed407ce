"""The backend: values as objects of Ray, one for each put, and an index of them."""

from __future__ import annotations

import asyncio
import os
import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import ray
import torch
from ray import exceptions

from jackfield.abc.transfer_queue import (
    Column,
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
from jackfield.errors import QueueError
from jackfield.sdk import replace_file
from jackfield.sdk.archive import SavedSample, batches, read_archive, write_archive
from jackfield.sdk.cells import Cell, content_of, join, lacking_column, split_request, unknown_sample
from jackfield.sdk.ray_loopback import HOST, enter
from jackfield_transport_ray.config import Config
from jackfield_transport_ray.index import Entry, Found, Index

T = TypeVar("T")

FILE = "index.txt"  #: in the queue's folder: the name of the index, for processes that join
_NAMESPACE = "jackfield"
_THREADS = 4  #: concurrent requests to Ray
_SHOWN = 1 << 16  #: bytes; smaller columns are copied, so that they do not keep an object


class RayBackend(TransferQueueBackend):
    """A backend whose puts are objects of Ray's store: a byte array for each column. Rows end with the process that
    put them, or with the index."""

    durable: ClassVar[bool] = False
    joins: ClassVar[bool] = True

    def __init__(self, config: Config, context: TransferQueueContext) -> None:
        super().__init__(config, context)
        self._settings = config
        self._owner = uuid.uuid4().hex
        self._index: Any = None  #: of this process, or an actor
        self._threads: ThreadPoolExecutor | None = None
        self._own_cluster = False
        self._file: Path | None = None  #: of this process, if others may join

    async def start(self) -> None:
        """Join or start a cluster, and open or join the index; ``queue.unreachable`` if that fails."""
        settings = self._settings
        # in this thread: Ray's child processes would end with another one
        self._own_cluster = joined(settings.address, settings.object_store_bytes)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="jackfield-ray")
        name = settings.queue
        if name is None and self.context.joins:
            self._index = await self._in_thread(lambda: _joined_index(Path(str(self.context.folder), FILE)))
            return
        if name is None and self.context.folder and (settings.address or not self._own_cluster):  # others can be there
            name, self._file = self._owner, Path(self.context.folder, FILE)
        if name is None:
            self._index = Index()
            return
        options = {"name": f"queue {name}", "namespace": _NAMESPACE, "get_if_exists": True, "num_cpus": 0}
        self._index = await self._in_thread(lambda: ray.remote(Index).options(**options).remote())
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, name, durable=False)

    async def close(self) -> None:
        """Forget all samples; idempotent."""
        threads, self._threads = self._threads, None
        index, self._index = self._index, None
        file, self._file = self._file, None
        if file is not None:
            file.unlink(missing_ok=True)
            ray.kill(index)
        if threads is not None:
            threads.shutdown()
        if self._own_cluster:
            self._own_cluster = False
            ray.shutdown()

    def _open(self) -> ThreadPoolExecutor:
        if self._threads is None:
            raise QueueError("the ray backend is closed", code="queue.closed")
        return self._threads

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Call Ray in a thread; raise ``queue.full``, ``queue.unreachable``, or the error of ``work``."""
        try:
            return await asyncio.wrap_future(self._open().submit(work))
        except exceptions.ObjectStoreFullError as error:
            raise QueueError(f"Ray's object store is full: {error}", code="queue.full") from error
        except (exceptions.GetTimeoutError, exceptions.RayActorError, exceptions.RaySystemError) as error:
            text = str(error).splitlines()[0] if str(error) else ""
            raise QueueError(
                f"Ray does not answer: {type(error).__name__}: {text}",
                code="queue.unreachable",
                where=f"index of queue {self._settings.queue}" if self._settings.queue else "Ray's object store",
            ) from error

    async def _ask(self, method: str, *arguments: Any) -> Any:
        self._open()
        index = self._index
        if isinstance(index, Index):
            return getattr(index, method)(*arguments)
        seconds = self._settings.seconds
        return await self._in_thread(lambda: ray.get(getattr(index, method).remote(*arguments), timeout=seconds))

    async def put(self, request: PutRequest) -> PutResult:
        """Copy all columns into one object; ``queue.full`` if Ray's store is full and cannot spill."""
        self._open()
        keys, name = request.keys, uuid.uuid4().hex
        samples, entries = split_request(request), list[Entry]()
        starts = dict.fromkeys(request.columns, 0)
        for cells in samples:
            for number, (column, (text, content)) in enumerate(cells.items()):
                entries.append((text, name, number, starts[column], len(content)))
                starts[column] += len(content)
        arrays = [np.frombuffer(content_of(column), dtype=np.uint8) for column in request.columns.values()]
        reference = await self._in_thread(lambda: ray.put(arrays))
        names = list(request.columns)
        await self._ask("put", request.partition, list(keys), names, entries, {name: reference}, self._owner)
        return PutResult(bytes=sum(array.nbytes for array in arrays))

    async def get(self, request: GetRequest) -> GetResult:
        """Return columns in the order of the keys; ``queue.lost`` names rows lost with a process or node.

        Large columns whose rows were put together are views of Ray's store, and must not be written to.
        """
        keys, columns = list(request.keys), list(request.columns)
        found: Found = await self._ask("get", request.partition, keys, columns)
        _name_what_lacks(request, found)
        arrays = await self._fetched(found.objects, lambda names: _rows_of(found, names, keys, len(columns)), request)
        width = len(columns)
        return GetResult(
            columns={name: _column(name, found.entries[n::width], arrays) for n, name in enumerate(columns)}
        )

    async def _fetched(
        self, objects: Mapping[str, Any], rows_of: Callable[[set[str]], list[str]], request: GetRequest
    ) -> dict[str, list[Any]]:
        names, seconds = list(objects), self._settings.seconds
        try:
            arrays = await self._in_thread(lambda: ray.get([objects[name] for name in names], timeout=seconds))
        except exceptions.ObjectLostError:
            lost = await self._in_thread(lambda: _lost(objects, seconds))
            raise _rows_lost(request.partition, rows_of(lost)) from None
        return dict(zip(names, arrays, strict=True))

    async def keys(self, request: KeysRequest) -> KeysResult:
        """List existing rows, without cells that were lost with a process or node."""
        rows, objects = await self._ask("everything", self._owner)
        seconds = self._settings.seconds
        gone = await self._in_thread(lambda: _lost(objects, seconds)) if objects else set()
        return KeysResult(
            samples={
                place: tuple(name for name, entry in row.items() if entry[1] not in gone)
                for place, row in rows.items()
                if request.partition in (None, place[0])
            }
        )

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        """Delete rows; unknown keys are ignored. An object ends with its last cell and its last reader."""
        rows, size = await self._ask("delete", request.partition, list(request.keys))
        return DeleteResult(samples=rows, bytes=size)

    async def stats(self) -> StatsResult:
        """Return rows and bytes; ``details`` has the number of objects."""
        rows, size, objects = await self._ask("stats")
        return StatsResult(samples=rows, bytes=size, details={"objects": float(objects)})

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        """Write the rows of one moment; their objects cannot change, and stay until this has ended."""
        rows, objects = await self._ask("everything")
        seconds = self._settings.seconds
        return await self._in_thread(lambda: write_archive(Path(request.folder), _archived(rows, objects, seconds)))

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        """Replace everything by a checkpoint, at once."""
        rows, objects = await self._in_thread(lambda: _staged(Path(request.folder)))
        count, size = await self._ask("replace", rows, objects, self._owner)
        return SnapshotResult(samples=count, bytes=size)


def _joined_index(file: Path) -> Any:
    """Return the index of another process of the cluster; ``queue.unreachable`` if there is none."""
    try:
        return ray.get_actor(f"queue {file.read_text(encoding='utf-8')}", namespace=_NAMESPACE)
    except (OSError, ValueError) as error:
        raise QueueError(
            "no queue of this cluster can be joined",
            code="queue.unreachable",
            where=str(file),
            found=error,
            fix="have both processes in one cluster (transfer_queue.address), and the one with the queue start first",
        ) from error


def _cell(entry: Entry, arrays: Mapping[str, Sequence[Any]]) -> Cell:
    text, name, number, start, size = entry
    return text, memoryview(arrays[name][number])[start : start + size]


def _column(name: str, entries: Sequence[Entry], arrays: Mapping[str, Sequence[Any]]) -> Column:
    _, first, number, start, _ = entries[0]
    end, together = start, True
    for entry in entries:
        together = together and entry[1:4] == (first, number, end)
        end += entry[4]

    def memory(size: int) -> torch.Tensor | None:
        if size < _SHOWN or not together:
            return None
        return torch.from_numpy(np.asarray(_Shown(arrays[first][number], start, size)))

    return join(name, [_cell(entry, arrays) for entry in entries], memory)


class _Shown:
    """Some bytes of an object. Ray's arrays cannot be written to; torch would warn of that at each of them."""

    def __init__(self, array: Any, start: int, size: int) -> None:
        self._array = array
        address = array.ctypes.data + start
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def _archived(
    rows: Mapping[tuple[str, str], Mapping[str, Entry]], objects: Mapping[str, Any], seconds: float
) -> Iterator[SavedSample]:
    for (partition, key), row in rows.items():
        names = list(dict.fromkeys(entry[1] for entry in row.values()))
        try:
            found = ray.get([objects[name] for name in names], timeout=seconds)
        except exceptions.ObjectLostError:
            raise _rows_lost(partition, [key]) from None
        arrays = dict(zip(names, found, strict=True))
        cells = {column: _cell(entry, arrays) for column, entry in row.items()}
        yield SavedSample(partition=partition, key=key, cells=cells)


def _staged(folder: Path) -> tuple[dict[tuple[str, str], dict[str, Entry]], dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Entry]] = {}
    objects: dict[str, Any] = {}
    for batch in batches(read_archive(folder), lambda row: row.bytes):
        name, content, start = uuid.uuid4().hex, [], 0
        for row in batch:
            entries = rows.setdefault((row.partition, row.key), {})
            for column, (text, value) in row.cells.items():
                entries[column] = (text, name, 0, start, len(value))
                content.append(value)
                start += len(value)
        if content:
            objects[name] = ray.put([np.frombuffer(b"".join(content), dtype=np.uint8)])
    return rows, objects


def _lost(objects: Mapping[str, Any], seconds: float) -> set[str]:
    found = set()
    for name, reference in objects.items():
        try:
            ray.get(reference, timeout=seconds)
        except exceptions.ObjectLostError:
            found.add(name)
    return found


def _rows_of(found: Found, names: set[str], keys: Sequence[str], width: int) -> list[str]:
    return [
        key
        for number, key in enumerate(keys)
        if any(entry[1] in names for entry in found.entries[number * width : (number + 1) * width])
    ]


def _rows_lost(partition: str, keys: Sequence[str]) -> QueueError:
    return QueueError(
        f"the process or node that had put {len(keys)} rows died: {', '.join(keys[:8])}{', …' * (len(keys) > 8)}",
        code="queue.lost",
        where=f"{partition}: {keys[0]}",
        found=list(keys),
        fix="make these rows again; all others are there",
    )


def _name_what_lacks(request: GetRequest, found: Found) -> None:
    if not request.keys:
        raise QueueError("no rows are named", expected="one key at least")
    if found.unknown:
        raise unknown_sample(request.partition, found.unknown[0])
    if found.lacking:
        _, name, there = found.lacking[0]
        keys = [key for key, other, _ in found.lacking if other == name]
        raise lacking_column(request.partition, name, keys, there)


def joined(address: str | None, object_store_bytes: int | None) -> bool:
    """Join or start a cluster; return whether the process was not in one before.

    Without an address, use the cluster that the process is in, or a new one on this machine. Raises
    ``queue.unreachable`` if the cluster cannot be joined.
    """
    if ray.is_initialized():
        return False
    own: dict[str, Any] = {}
    if address is None:
        own = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": object_store_bytes}
        own["_node_ip_address"] = HOST
        if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray would write one into the home folder
    try:
        enter(address, own)
    except Exception as error:  # whatever Ray raises
        raise QueueError(
            f"Ray cannot be reached: {type(error).__name__}: {error}",
            code="queue.unreachable",
            where=address,
            fix="look whether the cluster runs (`ray status`), and set RAY_AUTH_TOKEN to its token",
        ) from error
    return True
