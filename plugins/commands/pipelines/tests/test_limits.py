"""Limits of stages, files of operators, several sets, and a folder that two processes or a full disk spoil."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import attrs
import pytest

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult
from jackfield.clock import Clock
from jackfield.errors import ConfigError, DeadlineExceeded
from jackfield.plugins.registry import PluginRecord
from jackfield_pipelines.guards import locked
from jackfield_pipelines.pipeline import FilePipeline, Step
from jackfield_pipelines.row_sets import RowSet
from jackfield_pipelines.stages import Limits

pytestmark = pytest.mark.timeout(60)


@attrs.frozen(kw_only=True)
class Config:
    """There are no settings."""


class Counting(Operator):
    """Counts ten tokens and a cost of a half for each row, and keeps a file."""

    type = "scorer"
    reads = ("n",)
    writes = ("seen",)
    calls: ClassVar[list[int]] = []
    prices: ClassVar[bool] = True

    async def process(self, request: OperatorRequest) -> OperatorResult:
        self.calls.append(len(request.rows))
        assert self.context.folder is not None
        file = self.context.folder / "seen"
        seen = int(file.read_text()) if file.exists() else 0
        for _ in request.rows:
            seen += 1
            self.context.count("tokens", 10)
            if self.prices:
                self.context.count("cost", 0.5)
        file.write_text(str(seen))
        return OperatorResult(updates={row.key: {"seen": seen} for row in request.rows})


def step() -> Step:
    def build(given: Mapping[str, Any], context: OperatorContext, where: str) -> Operator:
        return Counting(Config(), context)

    shared: Any = {"distribution": "here", "version": "1", "cls": Counting, "settings_class": Config, "build": build}
    return Step(record=cast(PluginRecord, SimpleNamespace(name="counting", **shared)), settings={})


def source(folder: Path, name: str, count: int) -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(count)))
    return file


def run(folder: Path, *files: Path, **more: Any) -> list[RowSet]:
    opened = [(file.open("rb"), str(file), file.stem) for file in files]
    try:
        pipeline = FilePipeline(folder=folder / "data", steps=[step()], **more)
        return asyncio.run(pipeline.run(*opened[0], opened[1:]))
    finally:
        for file, _, _ in opened:
            file.close()


@pytest.mark.parametrize(
    ("limits", "rows", "ended"),
    [
        (Limits(counters={"tokens": 60}), 8, "maximum_tokens"),
        (Limits(counters={"tokens": 61, "cost": 2.0}), 4, "maximum_cost"),
        (Limits(rows=6), 6, "maximum_rows"),
        (Limits(rows=20), 20, None),
        (Limits(counters={"tokens": 200}), 20, None),
        (Limits(seconds=0.0), 4, "maximum_seconds"),
        (Limits(counters={"tokens": 1000}), 20, None),
    ],
)
def test_a_stage_ends_at_a_limit_and_says_so(tmp_path: Path, limits: Limits, rows: int, ended: str | None) -> None:
    """The rows so far go on; the request that reaches the limit is kept."""
    made = run(tmp_path, source(tmp_path, "raw", 20), rows=4, limits=limits)[-1]
    assert (rows, ended) == (len(made), made.manifest.get("ended"))
    assert {"tokens": 10.0 * rows, "cost": 0.5 * rows} == made.manifest["counters"]


def test_a_limit_of_the_cost_needs_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "prices", False)
    with pytest.raises(ConfigError) as refused:
        run(tmp_path, source(tmp_path, "raw", 20), rows=4, limits=Limits(counters={"cost": 2.0}))
    assert "data.pipeline.maximum_cost" == refused.value.where


def test_a_set_that_ended_early_is_no_other_limits_set(tmp_path: Path) -> None:
    file = source(tmp_path, "raw", 20)
    assert 6 == len(run(tmp_path, file, rows=4, limits=Limits(rows=6))[-1])
    assert 20 == len(run(tmp_path, file, rows=4)[-1])
    Counting.calls.clear()
    assert 6 == len(run(tmp_path, file, rows=4, limits=Limits(rows=6))[-1])
    assert [] == Counting.calls


def test_files_of_an_operator_go_with_its_stage(tmp_path: Path) -> None:
    made = run(tmp_path, source(tmp_path, "raw", 10), rows=4)[-1]
    assert [4, 4, 4, 4, 8, 8, 8, 8, 10, 10] == [record["seen"] for record in made.records()]
    assert {".lock", *(each.name for each in tmp_path.joinpath("data").glob("[01]-*"))} == {
        each.name for each in (tmp_path / "data").iterdir()
    }


def test_several_sets_pass_together(tmp_path: Path) -> None:
    """Keys begin with the set, and records without a source of data get the set as one."""
    first, second = source(tmp_path, "first", 2), source(tmp_path, "second", 1)
    second.write_text('{"n": 5, "data_source": "own"}\n')
    sets = run(tmp_path, first, second)
    records = [(each["_row"], each["n"], each["data_source"]) for each in sets[-1].records()]
    assert [("first:1", 0, "first"), ("first:2", 1, "first"), ("second:1", 5, "own")] == records
    assert {"first": str(first), "second": str(second)} == sets[0].manifest["files"]


def test_one_process_at_a_time_writes_a_folder(tmp_path: Path) -> None:
    """Another one waits, and after its deadline names the process that holds the folder."""
    file, folder = source(tmp_path, "raw", 4), tmp_path / "data"
    folder.mkdir()
    program = (
        "import fcntl, os, sys; f = open(sys.argv[1], 'a+'); fcntl.flock(f, fcntl.LOCK_EX); f.truncate(0); "
        "f.write(f'process {os.getpid()} on here'); f.flush(); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(folder / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert "held" == holder.stdout.readline().strip()
        with pytest.raises(DeadlineExceeded) as caught:
            run(tmp_path, file, lock_seconds=0.0)
        assert f"process {holder.pid} on here" in caught.value.message
        holder.stdin.close()
    assert 4 == len(run(tmp_path, file, lock_seconds=0.0)[-1])


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    """The second one enters when the first has left, within its deadline."""

    async def both() -> list[str]:
        order, inside = list[str](), asyncio.Event()

        async def first() -> None:
            async with locked(tmp_path, Clock(), 10.0):
                inside.set()
                await asyncio.sleep(0)
                order.append("first")

        async def second() -> None:
            await inside.wait()
            async with locked(tmp_path, Clock(), 10.0):
                order.append("second")

        await asyncio.gather(first(), second())
        return order

    assert ["first", "second"] == asyncio.run(both())


FULL = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.path.insert(0, sys.argv[2])
import test_limits
from pathlib import Path
from jackfield.errors import DataError
folder = Path(sys.argv[3])
try:
    test_limits.run(folder, folder / "raw.jsonl", rows=50)
except DataError as error:
    print(error.code, error.found)
    sys.exit(3)
"""


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """The system refuses to let files grow: the stage before stays, and the same command goes on."""
    source(tmp_path, "raw", 2000)
    run(tmp_path / "whole", tmp_path / "raw.jsonl", rows=50)
    arguments = [sys.executable, "-c", FULL, "30000", str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=50, check=False)
    assert 3 == done.returncode, done.stderr
    assert "data.row-set-write" in done.stdout
    assert "MB of the disk were free" in done.stdout
    made = run(tmp_path, tmp_path / "raw.jsonl", rows=50)[-1]
    whole = RowSet.open(next((tmp_path / "whole" / "data").glob("1-*")))
    assert whole is not None
    assert list(whole.records()) == list(made.records())
    assert 2000 == len(made)


def test_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    """Ten times the rows take as much memory, within some megabytes."""
    program = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_limits
from pathlib import Path
folder = Path(sys.argv[1])
test_limits.run(folder, folder / "raw.jsonl", rows=200)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    peaks = []
    for number, count in enumerate((20_000, 200_000)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with (folder / "raw.jsonl").open("w") as file:
            for n in range(count):
                file.write(f'{{"n": {n}, "text": "a line of text that is neither long nor short"}}\n')
        done = subprocess.run(
            [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=50, check=True
        )
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 24_000, f"{peaks} KiB"
