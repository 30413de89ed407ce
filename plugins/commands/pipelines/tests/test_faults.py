"""Kills, damage and bad folders; requests at a time; late labels of sets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import attrs
import pytest
from click.testing import CliRunner

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, Selection
from jackfield.cli import main
from jackfield.config.data import DataSet
from jackfield.data.formats import TaskFormat
from jackfield.errors import DataError
from jackfield.plugins.registry import PluginRecord
from jackfield_datasets.sets import open_tasks
from jackfield_pipelines import row_sets, stages
from jackfield_pipelines.lineage import chains, trace
from jackfield_pipelines.pipeline import FilePipeline, Step
from jackfield_pipelines.row_sets import KEY, RowSet, RowSetWriter

pytestmark = pytest.mark.timeout(120)


@attrs.frozen(kw_only=True)
class Config:
    """There are no settings."""


class Scored(Operator):
    """A filter and a selector in one: scores n, keeps odd scores, the largest first."""

    type = "filter"
    reads = ("n",)
    writes = ("score",)
    selection = Selection(by="score", limit=4)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        return OperatorResult(updates={row.key: {"score": row.values["n"] * 7 % 10} for row in request.rows})

    def decide(self, rows: Any) -> Mapping[str, str]:
        return {row.key: "even" for row in rows if row.values["score"] % 2 == 0}


class Waits(Operator):
    """Ends no request before three are under way, and the first one last."""

    type = "mapper"
    reads = ("n",)
    writes = ("n", "at_a_time")
    under_way: ClassVar[int] = 0
    most: ClassVar[int] = 0
    three: ClassVar[asyncio.Event]
    later: ClassVar[asyncio.Event]

    async def process(self, request: OperatorRequest) -> OperatorResult:
        cls = type(self)
        cls.under_way += 1
        cls.most = max(cls.most, cls.under_way)
        if cls.under_way == 3:
            self.three.set()
        await self.three.wait()
        if request.batch == 0:
            await self.later.wait()
        self.later.set()
        cls.under_way -= 1
        return OperatorResult(updates={row.key: {"n": row.values["n"] + 100} for row in request.rows})


class Remembers(Operator):
    """Has a state: its requests come one after the other."""

    type = "mapper"
    reads = ("n",)
    writes = ("before",)
    before = 0
    under_way = 0

    async def process(self, request: OperatorRequest) -> OperatorResult:
        self.under_way += 1
        assert 1 == self.under_way
        await asyncio.sleep(0)
        updates = {row.key: {"before": self.before} for row in request.rows}
        self.before += len(request.rows)
        self.under_way -= 1
        return OperatorResult(updates=updates)

    def state(self) -> Any:
        return self.before

    def restore(self, state: Any) -> None:
        self.before = state


class Renames(Operator):
    """Writes what the settings of a test say."""

    type = "mapper"
    reads = ("n",)
    writes = ("*",)
    values: ClassVar[dict[str, Any]] = {}

    async def process(self, request: OperatorRequest) -> OperatorResult:
        return OperatorResult(updates={row.key: self.values for row in request.rows})


def step(cls: type[Operator]) -> Step:
    def build(given: Mapping[str, Any], context: OperatorContext, where: str) -> Operator:
        return cls(Config(), context)

    shared: Any = {"distribution": "here", "version": "1", "cls": cls, "settings_class": Config, "build": build}
    return Step(record=cast(PluginRecord, SimpleNamespace(name=cls.__name__.lower(), **shared)), settings={})


def run(folder: Path, *steps: Step, text: str | None = None, **more: Any) -> list[RowSet]:
    folder.mkdir(exist_ok=True)
    file = folder / "raw.jsonl"
    file.write_text(text or "".join(f'{{"n": {n}, "question": "How many?" }} \n' for n in range(12)))
    with file.open("rb") as opened:
        return asyncio.run(FilePipeline(folder=folder / "data", steps=steps, **more).run(opened, str(file), "raw"))


def killed(work: Callable[[], object]) -> None:
    """Do work in a fork of this process, which has to be killed in it."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert signal.SIGKILL == os.waitstatus_to_exitcode(status) * -1


@pytest.mark.parametrize("name", [".0-source", ".1-scored-", "-kept", "-order"])
def test_a_kill_in_each_kind_of_stage_costs_nothing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies when the stage has written some of its rows, which are on the disk."""
    whole = run(tmp_path / "whole", step(Scored), rows=3)
    append = RowSetWriter.append_lines

    def dies(self: RowSetWriter, file: str, lines: list[bytes]) -> None:
        if name in f".{self.folder.name}" and file == row_sets.ROWS and lines:
            append(self, file, lines[:2])
            self._files[file].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        append(self, file, lines)

    with monkeypatch.context() as patched:
        patched.setattr(RowSetWriter, "append_lines", dies)
        killed(lambda: run(tmp_path / "cut", step(Scored), rows=3))
    left = next(each for each in (tmp_path / "cut" / "data").glob(".*.partial") if name in each.name)
    assert 2 == len((left / "rows.jsonl").read_bytes().splitlines())
    again = run(tmp_path / "cut", step(Scored), rows=3)
    assert [list(each.records()) for each in whole] == [list(each.records()) for each in again]
    assert [9, 7, 7, 5] == [each["score"] for each in again[-1].records()]
    assert ["even"] * 6 == [each["why"] for each in again[2].records("removed.jsonl")]


@pytest.mark.parametrize("damage", ["rows.jsonl", "progress.json"])
def test_a_partial_stage_that_is_damaged_begins_again(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_SAVED_SECONDS", 0.0)
    whole = run(tmp_path / "whole", step(Remembers), rows=3)
    write = stages.OperatorStage._write

    def dies(self: Any, writer: RowSetWriter, *rest: Any) -> None:
        if writer.counts["rows"] == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, writer, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(stages.OperatorStage, "_write", dies)
        killed(lambda: run(tmp_path / "cut", step(Remembers), rows=3))
    partial = next((tmp_path / "cut" / "data").glob(".1-*.partial"))
    assert 6 == json.loads((partial / "progress.json").read_text())["state"]["read"]
    os.truncate(partial / damage, (partial / damage).stat().st_size - 1)
    again = run(tmp_path / "cut", step(Remembers), rows=3)
    assert list(whole[-1].records()) == list(again[-1].records())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file in the place of the folder")
    with pytest.raises(DataError) as refused:
        run(tmp_path, step(Scored))
    assert ("data.row-set-write", str(tmp_path / "data")) == (refused.value.code, refused.value.where)


def test_requests_at_a_time_are_written_in_their_order(tmp_path: Path) -> None:
    async def both() -> list[RowSet]:
        Waits.three, Waits.later, Waits.under_way, Waits.most = asyncio.Event(), asyncio.Event(), 0, 0
        file = tmp_path / "raw.jsonl"
        file.write_text("".join(f'{{"n": {n}}}\n' for n in range(12)))
        with file.open("rb") as opened:
            steps = [step(Waits), step(Remembers)]
            made = FilePipeline(folder=tmp_path / "data", steps=steps, rows=2, concurrent=3)
            return await made.run(opened, "raw", "raw")

    sets = asyncio.run(both())
    assert 3 == Waits.most
    assert [*range(100, 112)] == [record["n"] for record in sets[1].records()]
    assert [n // 2 * 2 for n in range(12)] == [record["before"] for record in sets[2].records()]


def test_lines_keep_what_an_operator_does_not_read(tmp_path: Path) -> None:
    """Large numbers, nested values and the order of columns come out as they went in."""
    text = '  {"big": 123456789012345678901234567890, "n" : 1, "deep": {"a": [1.50, null]}, "score": 9 }\n{}\n'
    made = run(tmp_path, text=text)[0]
    first = b'{"big": 123456789012345678901234567890, "n" : 1, "deep": {"a": [1.50, null]}, "score": 9,"_row":"raw:1"}'
    assert [first, b'{"_row":"raw:2"}'] == [line.rstrip() for line in made.lines()]
    text = '{"score": 9, "n": 1}\n{"n": 2, "_row": "old:1"}\n'
    records = list(run(tmp_path, step(Scored), text=text)[1].records())
    assert [("raw:1", 7), ("raw:2", 4)] == [(each[KEY], each["score"]) for each in records]
    assert ["score", "n", KEY] == list(records[0]), "the column that was there has its new value once"


@pytest.mark.parametrize(("values", "what"), [({KEY: "other"}, "another key"), ({"a": object()}, "JSON cannot hold")])
def test_what_no_line_can_hold_is_refused(tmp_path: Path, values: dict[str, Any], what: str) -> None:
    Renames.values = values
    with pytest.raises(Exception, match=what) as refused:
        run(tmp_path, step(Renames))
    assert "operator.contract" == getattr(refused.value, "code", "")


def labelled(folder: Path, text: str, *more: str) -> Any:
    (folder / "labels.jsonl").write_text(text)
    target = next((folder / "data").glob("1-scored-order-*")) if not more else Path(more[0])
    return CliRunner().invoke(
        main, ["data", "label", str(target), str(folder / "labels.jsonl"), "--by", "Ida", "--json"]
    )


def test_labels_make_versions_that_runs_read(tmp_path: Path) -> None:
    last = run(tmp_path, step(Scored))[-1]
    first = json.loads(labelled(tmp_path, '{"key": "raw:8", "good": true, "question": "Better?"}\n').stdout)
    assert 1 == first["rows"]
    again = json.loads(labelled(tmp_path, '{"key": "raw:8", "good": true}\n', str(last.folder)).stdout)
    assert {"version": first["version"], "rows": 0} == again, "the same labels are no new version"
    second = json.loads(labelled(tmp_path, '{"key": "raw:8", "good": false}\n', str(last.folder)).stdout)
    made = RowSet.open(Path(second["version"]))
    assert made is not None
    before = RowSet.open(Path(first["version"]))
    assert before is not None
    assert (before.digest, {"by": "Ida"}) == (made.manifest["source"], made.manifest["settings"])
    assert last.digest == before.manifest["source"]

    def read(folder: str | Path) -> list[tuple[str, Any, str]]:
        tasks = open_tasks([DataSet(path=str(folder))], TaskFormat(answer_key=None))
        return [(task.id, task.fields.get("good"), task.fields["question"]) for task in tasks]

    assert ("raw:8", False, "Better?") in read(last.folder), "the newest version"
    assert ("raw:8", True, "Better?") in read(first["version"]), "the version that is named"
    assert 4 == len(read(last.folder)) == len(made)
    events = [event for chain in chains(tmp_path / "data") for event in trace(chain, "raw:8")]
    found = [(event.what, event.detail, event.settings) for event in events if event.operator == "labels"]
    by = {"by": "Ida"}
    assert [("labelled", {"good": True, "question": "Better?"}, by), ("labelled", {"good": False}, by)] == found


@pytest.mark.parametrize(
    ("text", "code", "found"),
    [
        ('{"key": "raw:80", "good": 1}\n', "data.missing", "raw:80"),
        ('{"key": "raw:8"}\n', "data.malformed", "raw:8"),
        ('{"good": 1}\n', "data.malformed", "good"),
        ('{"key": "raw:8", "good": 1}\n{"key": "raw:8", "good": 2}\n', "data.malformed", "raw:8"),
        ('{"key": "raw:8", "_row": "raw:9"}\n', "data.malformed", "raw:9"),
        ("[1\n", "data.malformed", "labels.jsonl:1"),
        ("\n", "data.malformed", "no labels"),
    ],
)
def test_labels_that_cannot_be_used_change_nothing(tmp_path: Path, text: str, code: str, found: str) -> None:
    run(tmp_path, step(Scored))
    before = sorted(each.name for each in (tmp_path / "data").iterdir())
    shown = labelled(tmp_path, text)
    assert 0 != shown.exit_code
    assert code in shown.output
    assert found in shown.output
    assert before == sorted(each.name for each in (tmp_path / "data").iterdir())


def test_a_folder_without_a_set_cannot_be_labelled(tmp_path: Path) -> None:
    shown = labelled(tmp_path, '{"key": "raw:8", "good": 1}\n', str(tmp_path))
    assert 0 != shown.exit_code
    assert "data.missing" in shown.output
