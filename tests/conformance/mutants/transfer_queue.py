"""A TransferQueue backend in a dict with a log on disk, and its mutants."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch

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
    TagsRequest,
    TransferQueueBackend,
    TransferQueueContext,
)
from jackfield.errors import QueueError
from mutants import harness
from mutants.harness import Reference

Where = tuple[str, str]
Cell = tuple[str, torch.Tensor]  # dense, jagged or json; the row's values
Row = dict[str, Cell]


@attrs.frozen(kw_only=True)
class Config:
    """No settings."""


class ReferenceBackend(TransferQueueBackend):
    """Rows in a dict; every change is appended to ``log`` in the context's folder and read back at the next start.

    Who joins has the dict of the instance that opened the folder: all of them live in one process here.
    """

    durable: ClassVar[bool] = True
    joins: ClassVar[bool] = True
    living: ClassVar[dict[Path, ReferenceBackend]] = {}

    def __init__(self, config: Config, context: TransferQueueContext) -> None:
        super().__init__(config, context)
        assert context.folder is not None
        self.folder = Path(context.folder)
        self.rows: dict[Where, Row] = {}
        self.log: Any = None
        self.closed = False

    async def start(self) -> None:
        path = self.folder / "log"
        if self.context.joins:
            self.rows = self.join_rows(self.living[self.folder])
        elif path.exists():
            for where, row in _records(path.read_bytes()):
                if row is None:
                    self.rows.pop(where, None)
                else:
                    self.rows.setdefault(where, {}).update(row)
        if not self.context.joins:
            self.living[self.folder] = self
        self.log = path.open("ab", buffering=0)

    def join_rows(self, first: ReferenceBackend) -> dict[Where, Row]:
        return first.rows

    def check_open(self) -> None:
        if self.closed:
            raise QueueError("the backend is closed", code="queue.closed")

    def where(self, partition: str, key: str) -> Where:
        return partition, key

    async def put(self, request: PutRequest) -> PutResult:
        self.check_open()
        stored = 0
        columns = {name: self.split(column) for name, column in request.columns.items()}
        for index, key in enumerate(request.keys):
            row = {name: (cells[0], self.copy(cells[1][index])) for name, cells in columns.items()}
            await self.write(self.where(request.partition, key), row)
            stored += sum(self.size(values) for _, values in row.values())
        return PutResult(bytes=stored)

    async def write(self, where: Where, row: Row) -> None:
        self.rows.setdefault(where, {}).update(row)
        self.append(where, row)

    def append(self, where: Where, row: Row | None) -> None:
        self.log.write(_record(where, row))

    def split(self, column: Column) -> tuple[str, Sequence[torch.Tensor]]:
        if column.offsets is None:
            return "dense", list(column.values)
        bounds = pairwise(column.offsets.tolist())
        return ("json" if column.encoding == "json" else "jagged"), [column.values[start:end] for start, end in bounds]

    def copy(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def size(self, values: torch.Tensor) -> int:
        return values.nbytes

    async def get(self, request: GetRequest) -> GetResult:
        self.check_open()
        rows = [self.find(self.where(request.partition, key)) for key in request.keys]
        return GetResult(columns={name: self.column(rows, request.keys, name) for name in request.columns})

    def find(self, where: Where) -> Row:
        try:
            return self.rows[where]
        except KeyError:
            raise QueueError(f"there is no row {where[1]!r}", code="queue.unknown-sample") from None

    def column(self, rows: Sequence[Row], keys: Sequence[str], name: str) -> Column:
        for key, row in zip(keys, rows, strict=True):
            if name not in row:
                raise QueueError(f"row {key!r} has no column {name!r}", code="queue.column")
        return self.join([row[name] for row in rows], name)

    def join(self, cells: Sequence[Cell], name: str) -> Column:
        sorts = {(sort, values.dtype, values.shape if sort == "dense" else values.shape[1:]) for sort, values in cells}
        if len(sorts) > 1:
            raise QueueError(f"rows of column {name!r} do not fit together", code="queue.column")
        sort, tensors = cells[0][0], [values for _, values in cells]
        if sort == "dense":
            return Column(values=torch.stack(tensors))
        return self.join_jagged(tensors, "json" if sort == "json" else "tensor")

    def join_jagged(self, tensors: Sequence[torch.Tensor], encoding: Any) -> Column:
        offsets = [0]
        for values in tensors:
            offsets.append(offsets[-1] + len(values))
        return Column(values=torch.cat(list(tensors)), offsets=torch.tensor(offsets), encoding=encoding)

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        self.check_open()
        rows, freed = 0, 0
        for key in request.keys:
            row = self.forget(self.where(request.partition, key))
            if row is not None:
                rows, freed = rows + 1, freed + sum(values.nbytes for _, values in row.values())
        return DeleteResult(samples=rows, bytes=freed)

    def forget(self, where: Where) -> Row | None:
        row = self.rows.pop(where, None)
        if row is not None:
            self.append(where, None)
        return row

    async def keys(self, request: KeysRequest) -> KeysResult:
        self.check_open()
        wanted = request.partition
        return KeysResult(
            samples={place: self.names(row) for place, row in self.rows.items() if wanted in (None, place[0])}
        )

    def names(self, row: Row) -> tuple[str, ...]:
        return tuple(row)

    async def stats(self) -> StatsResult:
        self.check_open()
        return StatsResult(samples=len(self.rows), bytes=self.bytes())

    def bytes(self) -> int:
        return sum(values.nbytes for row in self.rows.values() for _, values in row.values())

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        self.check_open()
        folder = Path(request.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "snapshot").write_bytes(b"".join(_record(where, row) for where, row in self.rows.items()))
        return SnapshotResult(samples=len(self.rows), bytes=self.bytes())

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        self.check_open()
        path = Path(request.folder) / "snapshot"
        if not path.exists():
            raise QueueError("the folder holds no checkpoint", where=request.folder)
        for where in list(self.rows):
            self.forget(where)
        for where, row in _records(path.read_bytes()):
            await self.write(where, row or {})
        return SnapshotResult(samples=len(self.rows), bytes=self.bytes())

    async def close(self) -> None:
        self.closed = True
        self.log.close()
        self.rows = {}
        if self.living.get(self.folder) is self:
            del self.living[self.folder]


def _record(where: Where, row: Row | None) -> bytes:
    columns, payload = {}, b""
    for name, (sort, values) in (row or {}).items():
        columns[name] = [sort, str(values.dtype).removeprefix("torch."), list(values.shape)]
        payload += values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    header = json.dumps([*where, None if row is None else columns]).encode()
    return struct.pack("<QQ", len(header), len(payload)) + header + payload


def _records(content: bytes) -> list[tuple[Where, Row | None]]:
    found: list[tuple[Where, Row | None]] = []
    place = 0
    while place < len(content):
        header_size, payload_size = struct.unpack_from("<QQ", content, place)
        begin = place + 16
        partition, key, columns = json.loads(content[begin : begin + header_size])
        place = begin + header_size
        row: Row = {}
        start = place
        for name, (sort, dtype, shape) in (columns or {}).items():
            values = torch.empty(shape, dtype=getattr(torch, dtype))
            values.reshape(-1).view(torch.uint8).numpy()[:] = memoryview(content)[start : start + values.nbytes]
            row[name], start = (sort, values), start + values.nbytes
        found.append(((partition, key), None if columns is None else row))
        place += payload_size
    return found


REFERENCE = Reference(cls=ReferenceBackend, config_class=Config, capabilities={"durable": "full", "joins": "full"})


class CastsBfloat16(ReferenceBackend):
    def copy(self, values: torch.Tensor) -> torch.Tensor:
        return values.float().bfloat16() if values.dtype == torch.bfloat16 else values.clone()


class CastsIntegers(ReferenceBackend):
    def copy(self, values: torch.Tensor) -> torch.Tensor:
        return values.double().long() if values.dtype == torch.int64 else values.clone()


class LosesTheSignOfZero(ReferenceBackend):
    def copy(self, values: torch.Tensor) -> torch.Tensor:
        return torch.where(values == 0, 0, values) if values.dtype == torch.float32 else values.clone()


class TruncatesJaggedRows(ReferenceBackend):
    """It believes that the row before an empty one ends one element early."""

    def split(self, column: Column) -> tuple[str, Sequence[torch.Tensor]]:
        sort, rows = super().split(column)
        if sort == "dense" or len(rows) < 4:
            return sort, rows
        return sort, [row[:-1] if len(after) == 0 and len(row) > 2 else row for row, after in pairwise(rows)] + [
            rows[-1]
        ]


class FlattensTrailingDimensions(ReferenceBackend):
    def join_jagged(self, tensors: Sequence[torch.Tensor], encoding: Any) -> Column:
        column = super().join_jagged(tensors, encoding)
        if column.values.dim() < 3 or not column.values.numel():
            return column
        return attrs.evolve(column, values=column.values.flatten(1))


class SqueezesDenseRows(ReferenceBackend):
    def join(self, cells: Sequence[Cell], name: str) -> Column:
        column = super().join(cells, name)
        if column.offsets is None and column.values.shape[1:] == (1,):
            return Column(values=column.values.squeeze(1))
        return column


class ForgetsTheDtypeOfNothing(ReferenceBackend):
    def join_jagged(self, tensors: Sequence[torch.Tensor], encoding: Any) -> Column:
        column = super().join_jagged(tensors, encoding)
        if column.values.numel() or column.values.dim() > 1 or len(tensors) == 1:
            return column
        return attrs.evolve(column, values=torch.empty(0))


class ReencodesJson(ReferenceBackend):
    def split(self, column: Column) -> tuple[str, Sequence[torch.Tensor]]:
        sort, rows = super().split(column)
        if sort != "json":
            return sort, rows
        texts = [json.dumps(json.loads(bytes(row.tolist()))) for row in rows]
        return sort, [torch.tensor(list(text.encode()), dtype=torch.uint8) for text in texts]


class ForgetsThatItIsJson(ReferenceBackend):
    def join_jagged(self, tensors: Sequence[torch.Tensor], encoding: Any) -> Column:
        objects = encoding == "tensor" or all(bytes(row[:1].tolist()) == b"{" for row in tensors)
        return super().join_jagged(tensors, encoding if objects else "tensor")


class LosesTheEndOfLargeRows(ReferenceBackend):
    def copy(self, values: torch.Tensor) -> torch.Tensor:
        copied = values.clone()
        copied.reshape(-1)[1 << 18 :] = 0
        return copied


class DropsJson(ReferenceBackend):
    async def write(self, where: Where, row: Row) -> None:
        known = self.rows.get(where, {})
        self.rows[where] = {name: cell for name, cell in known.items() if cell[0] != "json"}
        await super().write(where, row)


class KeepsWhatFits(ReferenceBackend):
    async def write(self, where: Where, row: Row) -> None:
        known = self.rows.get(where, {})
        longer = {name for name, (_, values) in row.items() if name in known and values.nbytes > known[name][1].nbytes}
        await super().write(where, {name: cell for name, cell in row.items() if name not in longer})


class KeepsTheCallersTensors(ReferenceBackend):
    def copy(self, values: torch.Tensor) -> torch.Tensor:
        return values


class KeepsASingleRow(ReferenceBackend):
    """It copies by taking rows apart, and there is nothing to take apart in one row."""

    def split(self, column: Column) -> tuple[str, Sequence[torch.Tensor]]:
        sort, rows = super().split(column)
        return sort, rows if len(rows) == 1 else [row.clone() for row in rows]

    def copy(self, values: torch.Tensor) -> torch.Tensor:
        return values


class MixesPartitions(ReferenceBackend):
    def where(self, partition: str, key: str) -> Where:
        return partition.replace("evaluation", "train"), key


class DeletesInEveryPartition(ReferenceBackend):
    def forget(self, where: Where) -> Row | None:
        row = super().forget(where)
        for other in [other for other in self.rows if other[1] == where[1]] if row is not None else []:
            super().forget(other)
        return row


class IgnoresCase(ReferenceBackend):
    def where(self, partition: str, key: str) -> Where:
        return partition, key.lower()


class JoinsNames(ReferenceBackend):
    def where(self, partition: str, key: str) -> Where:
        return "", f"{partition}/{key}"

    def find(self, where: Where) -> Row:
        try:
            return super().find(where)
        except QueueError:
            raise QueueError(f"there is no row {where[1].partition('/')[2]!r}", code="queue.unknown-sample") from None


class RacesWithItself(ReferenceBackend):
    async def write(self, where: Where, row: Row) -> None:
        changed = {**self.rows.get(where, {}), **row}
        await asyncio.sleep(0)
        self.rows[where] = changed
        self.append(where, row)


class SortsKeys(ReferenceBackend):
    async def get(self, request: GetRequest) -> GetResult:
        return await super().get(attrs.evolve(request, keys=tuple(sorted(request.keys))))


class KeepsTheOrderOfPuts(ReferenceBackend):
    async def get(self, request: GetRequest) -> GetResult:
        order = {where: place for place, where in enumerate(self.rows)}
        keys = sorted(request.keys, key=lambda key: order.get((request.partition, key), -1))
        return await super().get(attrs.evolve(request, keys=tuple(keys)))


class ReturnsEveryColumn(ReferenceBackend):
    async def get(self, request: GetRequest) -> GetResult:
        result = await super().get(request)
        rows = [self.rows[request.partition, key] for key in request.keys]
        common = set.intersection(*({*row} for row in rows)) - {*request.columns, "mixed"}
        return GetResult(columns={**result.columns, **{name: self.column(rows, request.keys, name) for name in common}})


class WearsOut(ReferenceBackend):
    """A row is gone after four reads."""

    async def get(self, request: GetRequest) -> GetResult:
        result = await super().get(request)
        for key in request.keys if "values" in request.columns and len(request.columns) > 1 else ():
            row = self.rows[request.partition, key]
            _, count = row.get("#reads", ("dense", torch.zeros(0)))
            row["#reads"] = "dense", torch.zeros(len(count) + 1, 0)
            if len(count) == 3:
                self.forget((request.partition, key))
        return result


class WritesInPlace(ReferenceBackend):
    """Readers of a single row get the stored tensor, and a later put of the same shape writes into it."""

    async def write(self, where: Where, row: Row) -> None:
        for name, (_, values) in self.rows.get(where, {}).items():
            new = row.get(name, (None, None))[1]
            if new is not None and (new.shape, new.dtype) == (values.shape, values.dtype):
                values.copy_(new)
                row = {**row, name: (row[name][0], values)}
        await super().write(where, row)

    def join(self, cells: Sequence[Cell], name: str) -> Column:
        if len(cells) == 1 and cells[0][0] == "dense":
            return Column(values=cells[0][1][None])
        return super().join(cells, name)


class LeavesUnknownRowsOut(ReferenceBackend):
    async def get(self, request: GetRequest) -> GetResult:
        known = tuple(key for key in request.keys if (request.partition, key) in self.rows)
        return await super().get(attrs.evolve(request, keys=known or request.keys))


class RaisesKeyErrors(ReferenceBackend):
    async def get(self, request: GetRequest) -> GetResult:
        result = None if len(request.columns) > 1 else await super().get(request)
        if result is not None:
            return result
        rows = [self.find(self.where(request.partition, key)) for key in request.keys]
        return GetResult(columns={name: self.join([row[name] for row in rows], name) for name in request.columns})


class FillsMissingColumns(ReferenceBackend):
    def column(self, rows: Sequence[Row], keys: Sequence[str], name: str) -> Column:
        there = [row[name] for row in rows if name in row]
        if not there or len(there) == len(rows):
            return super().column(rows, keys, name)
        return self.join([row.get(name, (there[0][0], torch.zeros_like(there[0][1]))) for row in rows], name)


class PromotesDtypes(ReferenceBackend):
    def join(self, cells: Sequence[Cell], name: str) -> Column:
        dtypes = {values.dtype for _, values in cells}
        if dtypes == {torch.int64, torch.float64}:
            cells = [(sort, values.double()) for sort, values in cells]
        return super().join(cells, name)


class MixesEncodings(ReferenceBackend):
    def join(self, cells: Sequence[Cell], name: str) -> Column:
        sorts = {sort for sort, _ in cells}
        return super().join([("jagged", values) for _, values in cells] if len(sorts) > 1 else cells, name)


class RevivesDeletedRows(ReferenceBackend):
    """It hides a deleted row, and shows it again when a column is put."""

    def __init__(self, config: Config, context: TransferQueueContext) -> None:
        super().__init__(config, context)
        self.hidden: dict[Where, Row] = {}

    def forget(self, where: Where) -> Row | None:
        row = super().forget(where)
        if row is not None:
            self.hidden[where] = row
        return row

    async def write(self, where: Where, row: Row) -> None:
        await super().write(where, {**self.hidden.pop(where, {}), **row})

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        for where in list(self.rows):
            self.forget(where)
        self.hidden.clear()
        return await super().restore(request)


class RaisesOnUnknownDeletes(ReferenceBackend):
    async def delete(self, request: DeleteRequest) -> DeleteResult:
        for key in request.keys:
            if len(request.keys) > 2:
                self.find(self.where(request.partition, key))
        return await super().delete(request)


class CountsWhatItDidNotDelete(ReferenceBackend):
    async def delete(self, request: DeleteRequest) -> DeleteResult:
        return attrs.evolve(await super().delete(request), samples=len(request.keys))


class NeverCountsDown(ReferenceBackend):
    """The counter of bytes forgets what a put replaces."""

    replaced = 0

    async def write(self, where: Where, row: Row) -> None:
        known = self.rows.get(where, {})
        self.replaced += sum(known[name][1].nbytes for name in row if name in known)
        await super().write(where, row)

    async def stats(self) -> StatsResult:
        stats = await super().stats()
        return attrs.evolve(stats, bytes=stats.bytes + self.replaced)


class LeaksDeletedBytes(ReferenceBackend):
    deleted = 0

    async def delete(self, request: DeleteRequest) -> DeleteResult:
        result = await super().delete(request)
        self.deleted += result.bytes
        return result

    async def stats(self) -> StatsResult:
        stats = await super().stats()
        return attrs.evolve(stats, bytes=stats.bytes + self.deleted)


class CountsElements(ReferenceBackend):
    def size(self, values: torch.Tensor) -> int:
        return values.numel()


class SavesOnePartition(ReferenceBackend):
    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        everything = self.rows
        self.rows = {where: row for where, row in everything.items() if where[0] == "train"}
        try:
            return await super().checkpoint(request)
        finally:
            self.rows = everything


class SavesInSinglePrecision(ReferenceBackend):
    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        everything = self.rows
        self.rows = {
            where: {
                name: (sort, values.float().double() if values.dtype == torch.float64 else values)
                for name, (sort, values) in row.items()
            }
            for where, row in everything.items()
        }
        try:
            return await super().checkpoint(request)
        finally:
            self.rows = everything


class MergesWhenRestoring(ReferenceBackend):
    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        before = {where: dict(row) for where, row in self.rows.items() if where[1] in ("d", "b") and "late" in row}
        result = await super().restore(request)
        for where, row in before.items():
            await self.write(where, {**row, **self.rows.get(where, {})})
        return result


class RefusesProducersMeanwhile(ReferenceBackend):
    busy = False

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        self.busy = True
        await asyncio.sleep(0)
        self.busy = False
        return await super().checkpoint(request)

    async def put(self, request: PutRequest) -> PutResult:
        if self.busy:
            raise QueueError("a checkpoint is being written", code="queue.full")
        return await super().put(request)


class SavesTheFuture(ReferenceBackend):
    """The checkpoint is written when somebody asks for it, or at the end."""

    due: SnapshotRequest | None = None

    async def settle(self) -> None:
        due, self.due = self.due, None
        if due is not None:
            await super().checkpoint(due)

    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        await self.settle()
        self.check_open()
        self.due = request
        return SnapshotResult(samples=len(self.rows), bytes=self.bytes())

    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        await self.settle()
        return await super().restore(request)

    async def close(self) -> None:
        if not self.closed:
            await self.settle()
        await super().close()


class AddsToOldCheckpoints(ReferenceBackend):
    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        path = Path(request.folder) / "snapshot"
        old = path.read_bytes() if path.exists() else b""
        result = await super().checkpoint(request)
        path.write_bytes(old + path.read_bytes())
        return result


class RestoresNothing(ReferenceBackend):
    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        if not self.closed and not (Path(request.folder) / "snapshot").exists():
            for where in list(self.rows):
                self.forget(where)
            return SnapshotResult(samples=0, bytes=0)
        return await super().restore(request)


class AnswersWhenClosed(ReferenceBackend):
    async def stats(self) -> StatsResult:
        return StatsResult(samples=len(self.rows), bytes=self.bytes())


class ClosesOnce(ReferenceBackend):
    async def close(self) -> None:
        if self.closed and not self.folder.joinpath("closed").exists():
            self.folder.joinpath("closed").touch()
            raise QueueError("the backend is closed", code="queue.closed")
        await super().close()


class LeavesATask(ReferenceBackend):
    async def start(self) -> None:
        await super().start()
        self.task = asyncio.create_task(asyncio.Event().wait(), name="flusher")


_ENDINGS: list[threading.Event] = []


class LeavesAThread(ReferenceBackend):
    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        _ENDINGS.append(threading.Event())
        threading.Thread(target=_ENDINGS[-1].wait, name="writer", daemon=True).start()
        return await super().restore(request)


class LeavesAFileOpen(ReferenceBackend):
    async def close(self) -> None:
        OPEN.append(self.log)
        self.closed = True
        self.rows = {}


OPEN: list[Any] = []  #: what leaky mutants leave, for the tests to close


class LeavesATemporaryFile(ReferenceBackend):
    async def checkpoint(self, request: SnapshotRequest) -> SnapshotResult:
        descriptor, _ = tempfile.mkstemp()
        os.close(descriptor)
        return await super().checkpoint(request)


class LeavesAProcess(ReferenceBackend):
    async def restore(self, request: SnapshotRequest) -> SnapshotResult:
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=True)
        atexit.register(process.communicate)
        return await super().restore(request)


class SharesItsRows(ReferenceBackend):
    shared: ClassVar[dict[str, dict[Where, Row]]] = {}

    async def start(self) -> None:
        await super().start()
        if self.folder.name in ("one", "two"):  # everything in one process, otherwise in order
            self.rows = self.shared.setdefault(str(self.folder.parent), {})


class MakesRowsOfTags(ReferenceBackend):
    async def put_tags(self, request: TagsRequest) -> None:
        for key, tags in zip(request.keys, request.tags, strict=True):
            text = torch.tensor(list(json.dumps(dict(tags)).encode()), dtype=torch.uint8)
            await self.write(self.where(request.partition, key), {"#tags": ("json", text)})


class ClearsItsFolder(ReferenceBackend):
    async def close(self) -> None:
        await super().close()
        shutil.rmtree(self.folder, ignore_errors=True)


class WritesAtTheEnd(ReferenceBackend):
    """What it appends stays in a buffer until it is closed."""

    def append(self, where: Where, row: Row | None) -> None:
        self.__dict__.setdefault("buffer", []).append(_record(where, row))

    async def close(self) -> None:
        if not self.closed:
            self.log.write(b"".join(self.__dict__.get("buffer", [])))
        await super().close()


class JoinsACopy(ReferenceBackend):
    def join_rows(self, first: ReferenceBackend) -> dict[Where, Row]:
        return dict(first.rows)


class TakesItsRowsAlong(ReferenceBackend):
    async def close(self) -> None:
        if self.context.joins and not self.closed:
            for where in list(self.rows):
                self.forget(where)
        await super().close()


class ForgetsDeletes(ReferenceBackend):
    """Deletes are not in the log."""

    def append(self, where: Where, row: Row | None) -> None:
        if row is not None:
            super().append(where, row)


class ForgetsColumns(ReferenceBackend):
    """It lists the first column of each row alone."""

    def names(self, row: Row) -> tuple[str, ...]:
        return tuple(row)[:1]


class ListsEveryPartition(ReferenceBackend):
    """It lists the rows of all partitions."""

    async def keys(self, request: KeysRequest) -> KeysResult:
        return await super().keys(KeysRequest())


mutant = partial(harness.mutant, "transfer_queue")

MUTANTS = harness.named(
    mutant(CastsBfloat16, "bfloat16 goes through float32 and loses the payloads of NaNs", "010"),
    mutant(CastsIntegers, "int64 goes through float64", "010 033"),
    mutant(LosesTheSignOfZero, "-0.0 becomes 0.0", "010"),
    mutant(TruncatesJaggedRows, "a jagged row before an empty one loses its last element", "011"),
    mutant(FlattensTrailingDimensions, "jagged rows of matrices come back as rows of vectors", "011"),
    mutant(SqueezesDenseRows, "dense rows of one element come back as scalars", "012"),
    mutant(ForgetsTheDtypeOfNothing, "a column of empty rows comes back as float32", "013"),
    mutant(ReencodesJson, "JSON is parsed and written again", "014"),
    mutant(ForgetsThatItIsJson, "JSON comes back as plain bytes", "014"),
    mutant(LosesTheEndOfLargeRows, "the end of a large row is zero", "015"),
    mutant(DropsJson, "putting a column drops the row's JSON", "016 046"),
    mutant(KeepsWhatFits, "a value is not replaced by a longer one", "017"),
    mutant(KeepsTheCallersTensors, "the caller's tensors are kept", "018"),
    mutant(KeepsASingleRow, "the caller's tensor is kept where it has a single row", "018"),
    mutant(MixesPartitions, "rows for evaluation are put among those for training", "019"),
    mutant(DeletesInEveryPartition, "a delete reaches into other partitions", "019"),
    mutant(IgnoresCase, "keys that differ in case are one", "020"),
    mutant(JoinsNames, "partition and key are joined with a slash", "020 046"),
    mutant(RacesWithItself, "two puts of one row at a time lose a column", "021"),
    mutant(SortsKeys, "rows come back in the order of sorted keys", "022"),
    mutant(KeepsTheOrderOfPuts, "rows come back in the order in which they were put", "022"),
    mutant(ReturnsEveryColumn, "every column is returned", "023"),
    mutant(WearsOut, "a row is gone after four reads", "024"),
    mutant(WritesInPlace, "a later put writes into what a reader holds", "025"),
    mutant(LeavesUnknownRowsOut, "unknown rows are left out of the result", "026"),
    mutant(RaisesKeyErrors, "a missing column among several is a KeyError", "027"),
    mutant(FillsMissingColumns, "a row without the column gets zeros", "027"),
    mutant(PromotesDtypes, "rows of different dtypes are promoted to one", "028"),
    mutant(MixesEncodings, "JSON and plain bytes are read together", "028"),
    mutant(RevivesDeletedRows, "a deleted row comes back with the next put of its key", "029"),
    mutant(RaisesOnUnknownDeletes, "deleting an unknown row is an error", "030"),
    mutant(CountsWhatItDidNotDelete, "delete counts the rows that it was asked for", "030"),
    mutant(NeverCountsDown, "replaced bytes are still counted", "031"),
    mutant(LeaksDeletedBytes, "deleted bytes are still counted", "031"),
    mutant(CountsElements, "put reports elements for bytes", "032"),
    mutant(SavesOnePartition, "a checkpoint holds one partition", "033"),
    mutant(SavesInSinglePrecision, "a checkpoint holds float64 as float32", "033"),
    mutant(MergesWhenRestoring, "restoring keeps what was put since", "034"),
    mutant(RefusesProducersMeanwhile, "puts are refused while a checkpoint is written", "035"),
    mutant(SavesTheFuture, "a checkpoint is written after it was acknowledged", "032 034 035 036"),
    mutant(AddsToOldCheckpoints, "a checkpoint written over another keeps its rows", "036"),
    mutant(RestoresNothing, "a folder without a checkpoint restores an empty queue", "037"),
    mutant(AnswersWhenClosed, "stats answers after close", "038"),
    mutant(ClosesOnce, "a second close raises", "039"),
    mutant(LeavesATask, "a task goes on after close", "040"),
    mutant(LeavesAThread, "a thread goes on after close", "040"),
    mutant(LeavesAFileOpen, "its log stays open", "040"),
    mutant(LeavesATemporaryFile, "a temporary file stays", "040"),
    mutant(LeavesAProcess, "a child process stays", "040"),
    mutant(SharesItsRows, "two instances share their rows", "041"),
    mutant(MakesRowsOfTags, "tags become a column", "042"),
    mutant(ClearsItsFolder, "closing clears the folder", "043"),
    mutant(WritesAtTheEnd, "what was put is on disk when the backend is closed", "044"),
    mutant(ForgetsDeletes, "deleted rows are back after a restart", "043 044"),
    mutant(JoinsACopy, "who joins has a copy of what was there then", "045"),
    mutant(ForgetsColumns, "the columns of a row are listed in part", "046"),
    mutant(ListsEveryPartition, "rows of other partitions are listed", "046"),
    mutant(TakesItsRowsAlong, "who has joined deletes everything when it closes", "045"),
)
