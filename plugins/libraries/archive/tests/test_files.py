"""Files of an archive: values come back bit for bit, each sample once, whatever is interrupted."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jackfield.queue import effective_acks, read_ledger
from jackfield.queue.store import STORE_FILE
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.sdk.archive import SavedSample
from jackfield.sdk.cells import Cell, column_from_rows, dense_column, json_column, split
from jackfield_archive import COLUMNS, Archive, files_of, read_samples, write_samples
from jackfield_queue_bench import Bench, Memory
from jackfield_virtual_clock import VirtualClock

DTYPES = [
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "int64", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "complex64", "float8_e4m3fn"),
]


def cell_of(column: Any) -> Cell:
    text, (content,) = split(column)
    return text, bytes(content)


@st.composite
def cells(draw: Any) -> Cell:
    """A value of any dtype and shape: dense, jagged with 0 to 3 rows, or JSON."""
    kind = draw(st.sampled_from(["dense", "jagged", "json"]))
    if kind == "json":
        return cell_of(json_column([draw(st.dictionaries(st.text(), st.integers(-9, 9) | st.text(), max_size=3))]))
    dtype, shape = getattr(torch, draw(st.sampled_from(DTYPES))), draw(st.lists(st.integers(0, 3), max_size=2))
    length = 1 if kind == "dense" else draw(st.integers(0, 3))
    values = torch.zeros(length, *shape).to(dtype)
    content = draw(st.binary(min_size=values.nbytes, max_size=values.nbytes))
    if dtype != torch.bool and content:
        values = torch.frombuffer(bytearray(content), dtype=dtype).reshape(values.shape)
    return cell_of(dense_column(values) if kind == "dense" else column_from_rows([values]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns=st.lists(st.dictionaries(st.sampled_from(["a", "b", "reward", "weight_versions"]), cells()), max_size=4))
def test_every_value_comes_back_bit_for_bit(tmp_path: Path, columns: list[dict[str, Cell]]) -> None:
    """Also columns that some samples lack, that have several types, or that are empty."""
    file = tmp_path / "rows.parquet"
    write_samples(file, [SavedSample(key=str(at), cells=own, status="trained") for at, own in enumerate(columns)])
    assert [file] == files_of(tmp_path)
    assert columns == [dict(sample.cells) for sample in read_samples(file)]


def test_all_files_have_the_same_columns(tmp_path: Path) -> None:
    """Or ``datasets`` would refuse to read them together."""
    from pyarrow import parquet

    schemas = []
    for at, own in enumerate(({}, {"reward": (COLUMNS["reward"], array("f", [1.0]).tobytes())})):
        write_samples(tmp_path / f"{at}.parquet", [SavedSample(cells=own)])
        schemas.append(parquet.read_schema(tmp_path / f"{at}.parquet"))
    assert schemas[0] == schemas[1]
    assert {f"columns.{name}" for name in COLUMNS} <= set(schemas[0].names)


def test_pandas_reads_a_folder(tmp_path: Path) -> None:
    import pandas

    reward = (COLUMNS["reward"], array("f", [0.5]).tobytes())
    write_samples(tmp_path / "0.parquet", [SavedSample(key="k", cells={"reward": reward}, steps=[3], tags={"a": 1})])
    frame = pandas.read_parquet(tmp_path)
    assert ["k"] == frame["key"].tolist()
    assert ([3], [0.5], {"a": 1}) == (
        frame["steps"][0].tolist(),
        frame["columns.reward"][0].tolist(),
        json.loads(frame["tags"][0]),
    )


class Killed(BaseException):
    """The process is gone: nothing after this is done."""


class Deadly(Archive):
    """An archive whose process dies before, in or after the writing of a file."""

    moment = ""

    async def write(self, backend: Any, samples: Any) -> Any:
        if Deadly.moment == "before a file":
            raise Killed
        made = await super().write(backend, samples)
        if Deadly.moment == "before its name":
            raise Killed
        return made

    def publish(self, *arguments: Any) -> str:
        name = super().publish(*arguments)
        if Deadly.moment == "after its name":
            raise Killed
        return name


MOMENTS = ("before a file", "before its name", "after its name", "before the commit", "after the commit")


class Life:
    """One process of a run after another, on the same folder: steps of two groups, and checkpoints.

    The values of the store ``Memory`` end with the process, those of a durable queue do not.
    """

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self.folder, self.durable, self.backend, self.step, self.saved = folder, durable, Memory(), 0, 0

    async def start(self, clock: VirtualClock) -> Bench:
        if not self.durable:
            self.backend = Memory()
        store = self.folder / "queue" / STORE_FILE
        archive = Deadly(self.folder / "archive", "queue")
        options: dict[str, Any] = {"store": store, "durable": self.durable, "archive": archive}
        bench = Bench(TransferQueue(self.backend, clock, **options), clock)
        await bench.queue.start()
        await bench.trainer()
        if self.saved:
            await bench.queue.restore(self.folder / str(self.saved), self.saved - 1)
        else:
            await bench.queue.clear()
        self.step = self.saved
        return bench

    async def train(self, bench: Bench, *, drop: bool) -> None:
        """Make the batch of a step, unless it is there, drop a group of it first or not, and ack it."""
        claimed = await bench.queue.claim_batch("train", "explorer-0", 2, below=self.step + 1)
        if claimed is not None and claimed.vacant:
            groups = await bench.publish(claimed)
            if drop:
                await bench.queue.drop_groups(groups[:1], "all rewards are equal")
                await bench.publish(claimed)
        await bench.queue.ack(await bench.lease(self.step), step=self.step)
        self.step += 1

    async def checkpoint(self, bench: Bench, moment: str) -> None:
        folder = self.folder / str(self.step)
        await bench.queue.checkpoint(folder)
        self.saved = self.step
        if moment == "before the commit":
            raise Killed
        Deadly.moment = moment
        try:
            await bench.queue.commit(self.step - 1)
        finally:
            Deadly.moment = ""
        if moment == "after the commit":
            raise Killed


Lives = st.lists(st.tuples(st.lists(st.sampled_from(["step", "drop", "save"]), max_size=4), st.sampled_from(MOMENTS)))


@pytest.mark.timeout(300)
@settings(max_examples=25, deadline=None)
@given(lives=Lives, durable=st.booleans())
def test_each_sample_is_there_once_whenever_the_process_dies(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[list[str], str]], durable: bool
) -> None:
    """Each life but the last ends with a death at a commit; then the archive is what the ledger has committed."""
    life = Life(tmp_path_factory.mktemp("life"), durable=durable)

    async def main() -> None:
        for actions, moment in [*lives, (["drop", "step"], "")]:
            bench = await life.start(clock)
            with suppress(Killed):
                for action in actions:
                    if action != "save":
                        await life.train(bench, drop=action == "drop")
                    elif life.step > life.saved:
                        await life.checkpoint(bench, "")
                await life.train(bench, drop=False)
                await life.checkpoint(bench, moment)
            await bench.queue.close()  # it writes nothing

    clock = VirtualClock()
    clock.run(main())
    files = [sample for file in files_of(life.folder / "archive") for sample in read_samples(file)]
    assert len(files) == len({sample.key for sample in files})
    found = {sample.key: list(sample.steps) for sample in files if sample.status == "trained"}
    assert {key: [step] for key, step in effective_acks(read_ledger(life.folder))["trainer"].items()} == found
    named = {entry["file"] for entry in read_ledger(life.folder) if entry["event"] == "archive"}
    assert {file.name for file in files_of(life.folder / "archive")} <= named
    dropped = [sample for sample in files if sample.status == "dropped"]
    assert len(dropped) >= 2, "those of the last life at least"
    assert {"all rewards are equal"} == {sample.tags["reason"] for sample in dropped}


_FULL = """
import resource, sys
from pathlib import Path
from jackfield.errors import QueueError
from jackfield.sdk.archive import SavedSample
from jackfield_archive import Archive, write_samples
folder = Path(sys.argv[1])
archive = Archive(folder, "queue")
archive.open(None)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # no file grows beyond it, as on a full disk
for work in (lambda: archive.open(None), lambda: write_samples(folder / "queue-1.parquet", [SavedSample(cells={})])):
    try:
        work()
    except QueueError as error:
        print(error.code, error.where)
print(sorted(path.name for path in folder.iterdir() if path.is_file()))
"""


def test_a_full_disk_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    """When the archive is opened, before the first step, and when a file is written."""
    words = [sys.executable, "-c", _FULL, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=True)
    assert [f"queue.store {tmp_path}"] * 2 + ["[]"] == done.stdout.splitlines()
