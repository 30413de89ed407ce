"""The Parquet files of an archive: how a queue's controller writes them exactly once, and how they are read.

A file is written under a hidden name, and gets its own at the moment at which the ledger of the queue records it. A
file whose entry is not in the ledger is of a commit that a crash, or the return to an older checkpoint, has undone.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import attrs

from jackfield.abc.transfer_queue import Column, GetRequest, KeysRequest, TransferQueueBackend
from jackfield.errors import QueueError
from jackfield.sdk.archive import SavedSample, batches, column_types, from_arrow, import_pyarrow, to_arrow
from jackfield.sdk.cells import Cell, split

_ROWS = 500  #: rows that are read together
_ROOM = 1 << 16  #: bytes that the folder must have room for when it is opened
_CODES = {"int64": "q", "int32": "i", "float32": "f", "bool": "B"}
_FLOATS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "log_probs", "values", "reward", "reward_dimensions")
_DTYPES = {"prompt_ids": "int64", "response_ids": "int64", "response_mask": "bool", "weight_versions": "int32"}
_DTYPES |= dict.fromkeys((*_FLOATS, "advantages", "returns", "rollout_weights"), "float32")
#: The columns that every file has, with the types of their values. A file has further ones if samples have them.
COLUMNS: Mapping[str, str] = {name: f'["jagged","{dtype}",[]]' for name, dtype in _DTYPES.items()} | {
    "task": '["json","uint8",[]]'
}


class Numbered(Protocol):
    """The end of a ledger."""

    @property
    def number(self) -> int:
        """The number of its last entry."""


@attrs.frozen
class Archive:
    """The files ``QUEUE-ENTRY.parquet`` of one queue in a folder.

    All methods raise ``queue.store`` if the folder cannot be written.
    """

    folder: Path  #: several queues may share it
    queue: str  #: the queue's name

    def open(self, end: Numbered | None) -> None:
        """Check that the folder can be written, and remove the files after an end of the ledger, or all without one."""
        last = 0 if end is None else end.number
        with _writing(self.folder):
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
            room = self._partial / "room"
            room.write_bytes(bytes(_ROOM))
            _sync(room)
            room.unlink()
            for path in self.folder.glob(f"{self.queue}-*.parquet"):
                if int(path.stem.rpartition("-")[2]) > last:
                    path.unlink()

    async def write(self, backend: TransferQueueBackend, samples: Sequence[SavedSample]) -> tuple[Path, list[str]]:
        """Write those of the samples that the backend still has.

        Return the file, which :meth:`publish` makes a part of the archive, and the keys of its samples.
        """
        there = (await backend.keys(KeysRequest())).samples
        alike: dict[tuple[str, ...], list[SavedSample]] = {}
        for sample in samples:  # in a folder of several queues, groups need unique names
            sample = attrs.evolve(sample, group=f"{self.queue}:{sample.group}")
            if columns := there.get((sample.partition, sample.key)):
                alike.setdefault((sample.partition, *sorted(columns)), []).append(sample)
        read = list[tuple[list[SavedSample], Mapping[str, Column]]]()
        for (partition, *names), some in alike.items():
            keys = tuple(sample.key for sample in some)
            got = await backend.get(GetRequest(partition=partition, keys=keys, columns=tuple(names)))
            read.append((some, got.columns))
        file = self._partial / f"{uuid.uuid4().hex}.parquet"
        await asyncio.to_thread(_write_columns, file, read)
        return file, [sample.key for some, _ in read for sample in some]

    def publish(self, file: Path, end: Numbered | None, place: int) -> str:
        """Give a file its name, which is valid once the ledger has its entry, ``place`` after the end; return it."""
        entry = place + (0 if end is None else end.number)
        with _writing(self.folder):
            target = file.rename(self.folder / f"{self.queue}-{entry:010d}.parquet")
            _sync(self.folder)
        return target.name

    @property
    def _partial(self) -> Path:
        return self.folder / f".{self.queue}"


def _write_columns(file: Path, read: Sequence[tuple[Sequence[SavedSample], Mapping[str, Column]]]) -> None:
    """Write samples with the columns that were read of them."""
    made = list[SavedSample]()
    for samples, columns in read:
        cells: list[dict[str, Cell]] = [{} for _ in samples]
        for name, column in columns.items():
            text, contents = split(column)
            if COLUMNS.get(name) == text.replace("dense", "jagged"):  # a number has the bytes of a list of one number
                text = COLUMNS[name]
            for own, content in zip(cells, contents, strict=True):
                own[name] = text, bytes(content)
        made += [attrs.evolve(sample, cells=own) for sample, own in zip(samples, cells, strict=True)]
    write_samples(file, made)


def write_samples(file: Path, samples: Sequence[SavedSample]) -> None:
    """Write samples to a file that has all of :data:`COLUMNS`; it is complete or absent.

    If the disk refuses, raise ``queue.store``.
    """
    from pyarrow import parquet

    types = {**COLUMNS, **column_types(samples)}
    partial = file.with_name(f".{file.name}.tmp")
    with _writing(file.parent):
        try:
            with parquet.ParquetWriter(partial, to_arrow([], types).schema, use_dictionary=False) as writer:
                for batch in batches(samples, lambda sample: sample.bytes):
                    writer.write_batch(to_arrow(batch, types))
            _sync(partial)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


def files_of(archive: Path) -> list[Path]:
    """Return the files of an archive's folder in order, or the file itself; without any, raise ``queue.invalid``."""
    found = sorted(archive.glob("*.parquet")) if archive.is_dir() else [archive] * archive.is_file()
    if not found:
        expected = "a folder of .parquet files, which a run with queue.archive has written, or one of them"
        raise QueueError("there is no archive", where=str(archive), expected=expected, found="none")
    return found


def read_samples(file: Path) -> Iterator[SavedSample]:
    """Yield the samples of a file.

    It may have been written by another program, which has kept the names of the columns. If it has no columns of
    samples, or has damaged values, raise ``queue.invalid``.
    """
    pyarrow = import_pyarrow()
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            if "columns.response_ids" not in opened.schema_arrow.names:
                raise ValueError(f"the columns are {', '.join(opened.schema_arrow.names)}")
            for batch in opened.iter_batches(batch_size=_ROWS):
                yield from from_arrow(batch, _cell)
    except (ValueError, TypeError, pyarrow.ArrowException, OSError, QueueError) as error:
        expected, found = "columns.prompt_ids, columns.response_ids and so on", f"{type(error).__name__}: {error}"
        raise QueueError("a file is none of an archive", where=str(file), expected=expected, found=found) from error


def _cell(name: str, value: Any) -> Cell:
    """Return the cell of a value in a file that has lost the types, or raise an error of the value."""
    text = COLUMNS.get(name, COLUMNS["reward"])
    if isinstance(value, str | bytes):
        return COLUMNS["task"], value if isinstance(value, bytes) else value.encode()
    numbers = value if isinstance(value, list) else [value]
    return text, array(_CODES[_DTYPES.get(name, "float32")], numbers).tobytes()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        expected, fix = "room on the disk, and permission to write", "make room, or set queue.archive to another folder"
        details: dict[str, Any] = {"where": str(folder), "expected": expected, "found": error, "fix": fix}
        raise QueueError("the archive cannot be written", code="queue.store", **details) from error


def _sync(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def trained(samples: Iterable[SavedSample]) -> Iterator[SavedSample]:
    """Leave out samples that failed or whose group was dropped."""
    return (sample for sample in samples if sample.status not in ("failed", "dropped"))
