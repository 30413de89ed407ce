"""Pipelines over files: what comes out, what is used again, and what a kill leaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.abc.operator import NewRow, Operator, OperatorContext, OperatorRequest, OperatorResult, Row, Selection
from jackfield.errors import DataError, OperatorError
from jackfield.plugins.registry import PluginRecord
from jackfield_pipelines.pipeline import FilePipeline, Step
from jackfield_pipelines.row_sets import KEY, RowSet
from jackfield_pipelines.stages import Limits


@attrs.frozen(kw_only=True)
class Config:
    factor: int = 2
    most: int = 10**9


class Times(Operator):
    """Multiplies n; a filter by the product."""

    type = "filter"
    decides_by: ClassVar[tuple[str, ...]] = ("most",)
    reads = ("n",)
    writes = ("product",)
    calls: ClassVar[list[int]] = []

    async def process(self, request: OperatorRequest) -> OperatorResult:
        self.calls.append(len(request.rows))
        aside = {row.key: "n is negative" for row in request.rows if row.values["n"] < 0}
        if any(row.values["n"] == 13 for row in request.rows):
            raise ArithmeticError("13")
        updates = {row.key: {"product": self.config.factor * row.values["n"]} for row in request.rows}
        return OperatorResult(updates={key: one for key, one in updates.items() if key not in aside}, set_aside=aside)

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        return {row.key: "too much" for row in rows if row.values["product"] > self.config.most}


class Twice(Operator):
    """Makes a second row of each, and counts what it saw."""

    type = "synthesizer"
    reads = ("n",)
    writes = ("n", "seen")
    seen = 0

    async def process(self, request: OperatorRequest) -> OperatorResult:
        made = list[NewRow]()
        for row in request.rows:
            if str(row.values["n"]) == os.environ.get("KILLED_AT"):
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen += 1
            made.append(NewRow(parents=(row.key,), values={"n": row.values["n"] + 100, "seen": self.seen}))
        return OperatorResult(made=tuple(made))

    def state(self) -> Any:
        return self.seen

    def restore(self, state: Any) -> None:
        self.seen = state


class Last(Operator):
    """The largest first."""

    type = "selector"
    reads = ("n",)
    writes = ()
    selection = Selection(by="n", limit=3)

    async def process(self, request: OperatorRequest) -> OperatorResult:
        return OperatorResult()


class Wrong(Operator):
    """Breaks the contract in one of several ways."""

    type = "mapper"
    reads = ("n",)
    writes = ("n",)
    how: ClassVar[OperatorResult] = OperatorResult()

    async def process(self, request: OperatorRequest) -> OperatorResult:
        return self.how


def step(cls: type[Operator], **settings: Any) -> Step:
    def build(given: Mapping[str, Any], context: OperatorContext, where: str) -> Operator:
        return cls(Config(**given), context)

    name = cls.__name__.lower()
    record = SimpleNamespace(name=name, distribution="here", version="1", cls=cls, settings_class=Config, build=build)
    return Step(record=cast(PluginRecord, record), settings=settings)


def source(folder: Path, numbers: Sequence[int]) -> Path:
    file = folder / "raw.jsonl"
    file.write_text("".join(json.dumps({"n": number}) + "\n" for number in numbers))
    return file


def run(folder: Path, file: Path, *steps: Step, **more: Any) -> list[RowSet]:
    with file.open("rb") as opened:
        return asyncio.run(FilePipeline(folder=folder / "data", steps=steps, **more).run(opened, str(file), "raw"))


def numbers(made: RowSet, name: str = "n") -> list[int]:
    return [record[name] for record in made.records()]


def test_rows_are_changed_left_out_and_put_into_an_order(tmp_path: Path) -> None:
    sets = run(tmp_path, source(tmp_path, [3, 9, 5, 1, 7]), step(Times, most=16), step(Last))
    assert [7, 5, 3] == numbers(sets[-1])
    assert ["raw:5", "raw:3", "raw:1"] == [record[KEY] for record in sets[-1].records()]
    assert [{KEY: "raw:2", "why": "too much", "operator": "times"}] == [*sets[2].records("removed.jsonl")]
    assert ["n is 1, and 3 rows come before"] == [each["why"] for each in sets[-1].records("removed.jsonl")]


def test_another_threshold_computes_nothing_again(tmp_path: Path) -> None:
    file = source(tmp_path, [1, 2, 3, 4])
    run(tmp_path, file, step(Times, most=6))
    Times.calls.clear()
    assert [1, 2] == numbers(run(tmp_path, file, step(Times, most=4))[-1])
    assert [] == Times.calls
    assert [1, 2] == numbers(run(tmp_path, file, step(Times, factor=3, most=6))[-1])
    assert [4] == Times.calls


@given(st.lists(st.integers(-3, 12), min_size=1, max_size=30), st.integers(1, 8))
def test_results_do_not_depend_on_how_rows_are_cut(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], rows: int
) -> None:
    limits = Limits(set_aside=1.0)
    steps = [step(Times, most=14), step(Twice)]
    whole, cut = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut")
    one = run(whole, source(whole, values), *steps, limits=limits)[-1]
    other = run(cut, source(cut, values), *steps, limits=limits, rows=rows)[-1]
    by_key = [{record.pop(KEY): record for record in each.records()} for each in (one, other)]
    assert by_key[0] == by_key[1]


def test_a_row_that_cannot_be_processed_does_not_cost_its_neighbours(tmp_path: Path) -> None:
    sets = run(tmp_path, source(tmp_path, [1, 13, -4, 2]), step(Times))
    assert [1, 2] == numbers(sets[-1])
    aside = {record[KEY]: record["why"] for record in sets[1].records("set_aside.jsonl")}
    assert {"raw:2": "ArithmeticError: 13", "raw:3": "n is negative"} == aside


def test_lines_without_an_object_are_set_aside(tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_text('{"n": 1}\n[2]\n\n{"n": \n{"n": 3}\n')
    made = run(tmp_path, tmp_path / "raw.jsonl")[0]
    assert [("raw:1", 1), ("raw:5", 3)] == [(record[KEY], record["n"]) for record in made.records()]
    assert ["raw:2", "raw:4"] == [record[KEY] for record in made.records("set_aside.jsonl")]


def test_too_many_bad_rows_end_the_pipeline(tmp_path: Path) -> None:
    with pytest.raises(OperatorError) as refused:
        run(tmp_path, source(tmp_path, [-1] * 30 + [1] * 70), step(Times))
    assert "operator.set-aside" == refused.value.code
    assert "n is negative" == refused.value.found


@pytest.mark.parametrize(
    "result",
    [
        OperatorResult(updates={"other": {"n": 1}}),
        OperatorResult(updates={"raw:1": {"m": 1}}),
        OperatorResult(removed={"other": ""}),
        OperatorResult(made=(NewRow(parents=(), values={"n": 1}),)),
        OperatorResult(made=(NewRow(parents=("other",), values={"n": 1}),)),
        OperatorResult(made=(NewRow(parents=("raw:1",), values={"m": 1}),)),
    ],
)
def test_an_operator_that_breaks_its_contract_ends_the_pipeline(tmp_path: Path, result: OperatorResult) -> None:
    Wrong.how = result
    with pytest.raises(OperatorError) as refused:
        run(tmp_path, source(tmp_path, [1]), step(Wrong))
    assert "operator.contract" == refused.value.code


def test_made_rows_name_their_parents(tmp_path: Path) -> None:
    sets = run(tmp_path, source(tmp_path, [1, 2]), step(Twice), step(Twice))
    keys = [record[KEY] for record in sets[-1].records()]
    assert len(keys) == len({*keys}) == 8
    parents = {record[KEY]: record["parents"] for made in sets for record in made.records("lineage.jsonl")}
    assert 6 == len(parents)
    assert all(parent in keys for found in parents.values() for parent in found)


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_files
import jackfield_pipelines.stages as stages
stages._SAVED_SECONDS = 0.0
folder = Path(sys.argv[2])
test_files.run(folder, folder / "raw.jsonl", test_files.step(test_files.Twice), rows=3)
"""


def test_a_stage_that_was_killed_continues(tmp_path: Path) -> None:
    """The operator numbers what it sees: a row that was processed twice, or a state that was lost, would show."""
    file = source(tmp_path, [*range(20, 40)])
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = [*run(whole, file, step(Twice), rows=3)[-1].records()]
    arguments = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(tmp_path)]
    for number in ("24", "31", "39"):
        done = subprocess.run(arguments, check=False, timeout=60, env={**os.environ, "KILLED_AT": number})
        assert -signal.SIGKILL == done.returncode
        with pytest.raises(StopIteration):
            next((tmp_path / "data").glob("1-twice-*"))
    progress = next((tmp_path / "data").glob(".1-twice-*.partial/progress.json"))
    assert 18 == json.loads(progress.read_text())["state"]["read"]
    assert expected == [*run(tmp_path, file, step(Twice), rows=3)[-1].records()]


def test_a_damaged_set_is_refused_with_its_folder(tmp_path: Path) -> None:
    file = source(tmp_path, [1, 2])
    made = run(tmp_path, file)[0]
    (made.folder / "rows.jsonl").write_bytes(b"")
    with pytest.raises(DataError) as refused:
        run(tmp_path, file)
    assert ("data.row-set", str(made.folder)) == (refused.value.code, refused.value.where)
