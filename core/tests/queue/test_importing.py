"""Import of samples from files, which are read one by one, and again if they are lost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from jackfield.queue import sample_files
from jackfield.queue.sample_files import ImportedSamples, cell_of, read_samples, saved_samples, write_samples
from jackfield.sdk import archive
from jackfield.sdk.archive import BATCH_ROWS, SavedSample
from jackfield.sdk.cells import join

torch = pytest.importorskip("torch")

Run = Callable[..., None]


class Rows:
    """Two groups with interleaved rows and a single row; it counts how often they are read."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self) -> Iterator[SavedSample]:
        self.read += 1
        for number, group in enumerate(("a", "b", "a", None, "b", "a")):
            cells = {"ids": cell_of("ids", [number, number])}
            yield SavedSample(key=f"k{number}", group=group, task=f"task {group}", cells=cells)


async def contents(bench: Any) -> list[list[int]]:
    """The ids of each group's rows, group by group."""
    batch = await bench.lease(0, seconds=5)
    values = (await bench.values.read(batch, ["ids"]))["ids"].values[::2].tolist()
    found: dict[str, list[int]] = {}
    for group, value in zip(batch.groups, values, strict=True):
        found.setdefault(group, []).append(value)
    await bench.queue.release(batch)
    return list(found.values())


def test_groups_come_together_though_their_rows_lie_apart(run: Run) -> None:
    async def test(bench: Any) -> None:
        rows = Rows()
        await bench.trainer()
        imported = ImportedSamples(bench.queue, bench.values, "train", rows, "file.jsonl")
        await imported.put()
        assert 2 == rows.read, "once to count, once to put"
        assert [[0, 2, 5], [1, 4], [3]] == await contents(bench)

    run(test)


def test_what_was_lost_is_read_again(run: Run) -> None:
    """Only the lost groups are imported again."""

    async def test(bench: Any) -> None:
        rows = Rows()
        await bench.trainer()
        imported = ImportedSamples(bench.queue, bench.values, "train", rows, "file.jsonl")
        await imported.put()
        keeping = asyncio.ensure_future(imported.keep())
        assert ("train/0/1/0/0/0",) == await bench.queue.fail_lost(keys=["train/0/1/0/0/0"])
        assert [[0, 2, 5], [1, 4], [3]] == await contents(bench)
        assert 3 == rows.read
        keeping.cancel()

    run(test)


@pytest.mark.parametrize(("suffix", "together"), [("jsonl", 1), ("parquet", 500)])
def test_an_import_holds_no_more_rows_than_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, together: int
) -> None:
    """Each batch is in the folder and freed before the next one is read; existing samples are kept."""
    file, folder = tmp_path / f"rows.{suffix}", tmp_path / "made"
    count = 1100
    write_samples(file, lambda: (SavedSample(group=f"g{n % 7}", cells={"n": cell_of("n", [n])}) for n in range(count)))
    alive: WeakSet[SavedSample] = WeakSet()
    written: list[int] = []
    most, made = 0, archive.to_arrow

    def to_arrow(samples: list[SavedSample], types: Any) -> Any:
        written.extend(int(join("n", [sample.cells["n"]]).values) for sample in samples)
        return made(samples, types)

    def read(path: Path) -> Iterator[SavedSample]:
        nonlocal most
        before = len(written)
        for number, row in enumerate(read_samples(path)):
            assert number - (len(written) - before) <= BATCH_ROWS, "no more is held back than a batch"
            alive.add(row)
            most = max(most, len(alive))
            if number == count - 1 and len(written) < count:  # of the first import
                assert living_tensors() - tensors < 10
            yield row

    monkeypatch.setattr(archive, "to_arrow", to_arrow)
    monkeypatch.setattr(sample_files, "read_samples", read)
    tensors = living_tensors()
    for times in (1, 2):
        written.clear()
        assert count == sample_files.import_file(file, folder, "human")
        assert times * list(range(count)) == written
    assert most <= 2 * together + 2
    assert 2 * count == len(list(saved_samples(folder)))


def living_tensors() -> int:
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
