"""The archive: Parquet files to which the queue's controller writes samples before it deletes their values.

The ledger names each file. A file without its entry is of a commit that a crash or an older checkpoint has undone.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from jackfield.abc.transfer_queue import Column, KeysRequest, TransferQueueBackend
from jackfield.files import replace_file, sync
from jackfield.queue.records import LedgerEnd
from jackfield.queue.sample_files import ARCHIVED, write_samples
from jackfield.queue.store import translated_errors
from jackfield.queue.values import Values
from jackfield.sdk.archive import SavedSample
from jackfield.sdk.cells import split


@attrs.frozen
class Archive:
    """The files ``QUEUE-ENTRY.parquet`` of one queue; the methods raise ``queue.store`` if they are not writable."""

    folder: Path  #: several queues may share it
    queue: str  #: the queue's name

    def open(self, end: LedgerEnd | None) -> None:
        """Check that the folder can be written, and remove the files after an end of the ledger; None: all."""
        with translated_errors(self.folder):
            shutil.rmtree(self.folder / f".{self.queue}", ignore_errors=True)
            replace_file(self.folder / f".{self.queue}" / "room", bytes(1 << 16))
            for path in self.folder.glob(f"{self.queue}-*.parquet"):
                if int(path.stem.rpartition("-")[2]) > (0 if end is None else end.number):
                    path.unlink()

    async def write(self, backend: TransferQueueBackend, samples: Sequence[SavedSample]) -> tuple[Path, list[str]]:
        """Write the samples that the backend still has; return the file, which is not valid yet, and their keys."""
        there, alike = (await backend.keys(KeysRequest())).samples, dict[tuple[str, ...], list[SavedSample]]()
        for sample in samples:
            if columns := there.get((sample.partition, sample.key)):
                alike.setdefault((sample.partition, *sorted(columns)), []).append(sample)
        get, read = Values(backend).get, list[tuple[list[SavedSample], Mapping[str, Column]]]()
        for (partition, *names), some in alike.items():
            read.append((some, await get(partition, [sample.key for sample in some], names)))
        file = self.folder / f".{self.queue}" / f"{uuid.uuid4().hex}.parquet"
        with translated_errors(self.folder):
            await asyncio.to_thread(_write, file, read)
        return file, [sample.key for some, _ in read for sample in some]

    def publish(self, file: Path, end: LedgerEnd | None, place: int) -> str:
        """Give a file its name, which becomes valid with the entry that comes ``place`` after the end; return it."""
        name = f"{self.queue}-{(0 if end is None else end.number) + place:010d}.parquet"
        with translated_errors(self.folder):
            file.rename(self.folder / name)
            sync(self.folder)
        return name


def _write(file: Path, read: Sequence[tuple[Sequence[SavedSample], Mapping[str, Column]]]) -> None:
    made = []
    for samples, columns in read:
        cells: list[dict[str, tuple[str, memoryview]]] = [{} for _ in samples]
        for name, column in columns.items():
            text, contents = split(column)  # a number has the bytes of a list of one number
            text = known if (known := ARCHIVED.get(name)) == text.replace("dense", "jagged") else text
            for own, content in zip(cells, contents, strict=True):
                own[name] = text, content
        made += [attrs.evolve(sample, cells=own) for sample, own in zip(samples, cells, strict=True)]
    write_samples(file, lambda: made, ARCHIVED)
