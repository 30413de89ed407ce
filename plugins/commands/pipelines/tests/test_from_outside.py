"""What `jackfield data run` and `trace` say of bad rows, settings and folders, as a person sees it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult
from jackfield.cli import main
from jackfield.errors import DeadlineExceeded
from jackfield_pipelines.stages import OperatorStage
from jackfield_testing import in_loop

pytestmark = pytest.mark.timeout(120)

ROWS = [{"question": f"What is {n}+1?", "answer": str(n + 1)} for n in range(1, 5)]
Data = Callable[..., Any]


@attrs.frozen(kw_only=True)
class Config:
    """There are no settings."""


class Refused(Exception):
    """An error as it is printed."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        first, *others = output.splitlines()
        self.code, _, self.message = first.removeprefix("[").partition("] ")
        self.where = self.message.rpartition(" at ")[2]
        told = dict(line.strip().partition(": ")[::2] for line in others)
        self.found, self.fix = told.get("found", ""), told.get("fix", "")


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """``data(tasks, train, verb="run", …)``: apply operators to a file; return the output, or raise the error."""

    def do(tasks: Any, train: Any = None, verb: str = "run", *arguments: str, **pipeline: Any) -> str:
        given = {"folder": str(tmp_path / "out"), "model": {"path": "none"}}
        source = str(tmp_path / "raw.jsonl") if train is None else train
        given |= {"data": {"train": source, "pipeline": {"tasks": tasks, **pipeline}}}
        (tmp_path / "run.yaml").write_text(json.dumps(given))
        words = [str(tmp_path / "run.yaml")] if verb == "run" else [str(tmp_path / "out")]
        done = CliRunner().invoke(main, ["data", verb, *words, *arguments])
        if done.exit_code:
            raise Refused(done.output)
        return done.output

    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return do


def stage(folder: Path, name: str) -> Path:
    (found,) = (folder / "out" / "data").glob(f"{name}-*")
    return found


def test_a_byte_order_mark_is_no_part_of_the_first_row(data: Data, tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_bytes(b"\xef\xbb\xbf" + raw.read_bytes())
    assert "4 rows, 0 removed, 0 set aside" in data([{"name": "length"}])


def test_why_rows_are_set_aside_and_what_ended_a_stage_is_printed(data: Data, tmp_path: Path) -> None:
    with (tmp_path / "raw.jsonl").open("a") as file:
        file.write("{not JSON\n")
    told = data([{"name": "length"}], maximum_rows=2)
    assert "1 set aside" in told
    assert "the first that was set aside: no JSON object" in told
    assert "ended early by data.pipeline.maximum_rows" in told


@pytest.mark.parametrize(
    ("operator", "why"),
    [
        ({"name": "length", "column": "nope"}, "4 set aside, 0 removed: there is no column 'nope'"),
        ({"name": "length", "maximum": 3}, "0 set aside, 4 removed: "),
    ],
)
def test_no_row_that_is_left_is_explained(data: Data, tmp_path: Path, operator: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused) as refused:
        data([operator])
    assert "data.empty" == refused.value.code
    assert str(tmp_path / "out" / "data" / "1-length-") in refused.value.where
    assert refused.value.found.startswith(why)
    assert "set_aside.jsonl" in refused.value.fix


def test_an_empty_file_is_named(data: Data, tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_text("\n")
    with pytest.raises(Refused) as refused:
        data([{"name": "length"}])
    assert "raw.jsonl" in refused.value.where
    assert "data.empty" == refused.value.code


@pytest.mark.parametrize(
    ("operator", "place"),
    [
        ({"name": "length", "minimum": 9, "maximum": 3}, "data.pipeline.tasks[1].maximum"),
        ({"name": "words", "words": []}, "data.pipeline.tasks[1]"),
        ({"name": "priority", "weights": {}}, "data.pipeline.tasks[1].weights"),
    ],
)
def test_a_wrong_setting_is_named_with_its_place_before_the_first_row(
    data: Data, tmp_path: Path, operator: dict[str, Any], place: str
) -> None:
    with pytest.raises(Refused) as refused:
        data([{"name": "length"}, operator])
    assert refused.value.where.startswith(place)
    assert not (tmp_path / "out" / "data").exists()


def test_keys_of_rows_are_no_column_that_operators_write(data: Data, tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("def renamed(row):\n    return {'_row': 'other:1', 'question': 'x'}\n")
    operator = {"name": "function_mapper", "path": f"{code}:renamed", "writes": ["_row", "question"]}
    with pytest.raises(Refused) as refused:
        data([operator])
    assert "operator.contract" == refused.value.code


@pytest.mark.parametrize("lost", ["rows.jsonl", "lineage.jsonl", "manifest.json"])
def test_a_set_without_one_of_its_files_is_damaged(data: Data, tmp_path: Path, lost: str) -> None:
    tasks = [{"name": "length"}, {"name": "exact_duplicates"}]
    before = data(tasks)
    folder = stage(tmp_path, "2-exact_duplicates")
    (folder / lost).unlink()
    with pytest.raises(Refused) as refused:
        data(tasks)
    assert ("data.row-set", str(folder)) == (refused.value.code, refused.value.where)
    assert lost in refused.value.found
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert before.splitlines()[-1] == data(tasks).splitlines()[-1], "it is made again, as the error says"


def test_other_bytes_of_the_same_length_are_noticed(data: Data, tmp_path: Path) -> None:
    data([{"name": "length"}])
    rows = stage(tmp_path, "1-length-kept") / "rows.jsonl"
    rows.write_bytes(rows.read_bytes().replace(b"What is 2", b"What is 7"))
    with pytest.raises(Refused) as refused:
        data([{"name": "length"}, {"name": "exact_duplicates"}])
    assert ("data.row-set", str(rows.parent)) == (refused.value.code, refused.value.where)
    assert not [*(tmp_path / "out" / "data").glob("2-exact_duplicates-*")]


def test_sets_by_weight_and_an_order_are_refused_without_a_run_too(data: Data, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_bytes((tmp_path / "raw.jsonl").read_bytes())
    sets = [{"path": str(tmp_path / name), "weight": 1.0} for name in ("raw.jsonl", "more.jsonl")]
    tasks = [{"name": "difficulty_rules"}, {"name": "priority", "weights": {"difficulty": -1.0}}]
    with pytest.raises(Refused) as refused:
        data(tasks, sets)
    assert ("config.invalid-value", "data.train") == (refused.value.code, refused.value.where)


def test_rows_of_a_labelled_set_keep_their_keys_and_their_past(data: Data, tmp_path: Path) -> None:
    """Another pipeline over the set: its rows lead back to the labels and to the raw line."""
    data([{"name": "length"}])
    first = stage(tmp_path, "1-length-kept")
    (tmp_path / "labels.jsonl").write_text(json.dumps({"key": "raw:2", "mark": 0.5}) + "\n")
    done = CliRunner().invoke(main, ["data", "label", str(first), str(tmp_path / "labels.jsonl"), "--by", "Ida"])
    assert "labels of 1 row by Ida" in done.output
    (tmp_path / "out").rename(tmp_path / "earlier")
    source = tmp_path / "earlier" / "data" / first.name
    rows = Path(data([{"name": "exact_duplicates"}], str(source)).splitlines()[-1])
    kept = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [f"raw:{n}" for n in range(1, 5)] == [row["_row"] for row in kept]
    assert [None, 0.5, None, None] == [row.get("mark") for row in kept]
    told = data([], None, "trace", "raw:2")
    assert f"read by source: {tmp_path / 'raw.jsonl'}:2" in told
    assert "labelled by labels" in told
    assert "changed by length" in told


OPERATOR = """
import attrs
from jackfield.abc.operator import Operator, OperatorResult

@attrs.frozen(kw_only=True)
class Config:
    '''There are no settings.'''

class Broken(Operator):
    type = "filter"
    reads = ("question",)
    writes = ("n",)

    async def process(self, request):
        return OperatorResult(updates={row.key: {"n": 1} for row in request.rows})

    def decide(self, rows):
        return {}
"""
FAULTS = {
    "a key that is not there": "    def decide(self, rows):\n        return {'raw:77': 'why'}\n",
    "a decision that raises": "    def decide(self, rows):\n        raise RuntimeError('boom')\n",
    "no decision": "    def decide(self, rows):\n        return None\n",
    "a start that raises": "    async def start(self):\n        raise RuntimeError('boom')\n",
    "an end that raises": "    async def close(self):\n        raise RuntimeError('boom')\n",
    "a setting that is not there": "    decides_by = ('nosuch',)\n",
    "no result": "    async def process(self, request):\n        return None\n",
    "a row twice": "    async def process(self, request):\n        each = {row.key: 'x' for row in request.rows}\n"
    "        return OperatorResult(removed=each, set_aside=each)\n",
}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``broken(code)``: lay out the operator ``broken`` with other methods, as pip leaves a package."""
    monkeypatch.syspath_prepend(tmp_path / "site")

    def do(code: str) -> None:
        package, about = tmp_path / "site" / "broken_operator", tmp_path / "site" / "broken_operator-1.0.dist-info"
        package.mkdir(parents=True)
        about.mkdir()
        (package / "__init__.py").write_text(OPERATOR + code)
        (package / "broken.toml").write_text(
            'name = "broken"\nkind = "operator"\nabi = "1.0"\nobject = "broken_operator:Broken"\n'
            'config = "broken_operator:Config"\ndescription = "An operator of tests"\n'
        )
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-operator\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text("[jackfield.operators]\nbroken = broken_operator:broken.toml\n")
        monkeypatch.delitem(sys.modules, "broken_operator", raising=False)

    return do


@pytest.mark.parametrize("fault", FAULTS)
def test_an_operator_that_breaks_its_contract_is_named(
    data: Data, broken: Callable[[str], None], tmp_path: Path, fault: str
) -> None:
    """It costs no other stage: nothing of its own is left in the folder."""
    broken(FAULTS[fault])
    with pytest.raises(Refused) as refused:
        data([{"name": "length"}, {"name": "broken"}])
    assert ("operator.contract", "broken") == (refused.value.code, refused.value.where), str(refused.value)
    assert "jackfield plugins check" in refused.value.fix
    assert [] == [*(tmp_path / "out" / "data").glob("2-broken-kept-*")]


@in_loop
async def test_an_operator_that_never_answers_ends_the_pipeline() -> None:
    """After so many deadlines in a row it is not the rows' fault, however many there are."""

    class Hangs(Operator):
        type = "mapper"
        reads = ("n",)
        writes = ("n",)
        asked = 0

        async def process(self, request: OperatorRequest) -> OperatorResult:
            self.asked += 1
            await asyncio.Event().wait()
            raise AssertionError

    operator = Hangs(Config(), OperatorContext())
    stage = OperatorStage(name="hangs", operator=operator, seconds=0.001)
    with pytest.raises(DeadlineExceeded):
        await stage.apply({f"r:{n}": {"n": n} for n in range(512)})
    assert 16 == operator.asked


def test_a_file_of_rows_beside_a_manifest_of_another_program_is_a_file(data: Data, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "rows.jsonl").write_bytes((tmp_path / "raw.jsonl").read_bytes())
    (folder / "manifest.json").write_text('{"made": "elsewhere"}')
    rows = Path(data([{"name": "length"}], str(folder / "rows.jsonl")).splitlines()[-1])
    assert "rows:1" == json.loads(rows.read_text().splitlines()[0])["_row"]


def test_a_file_that_is_no_address_is_refused_at_once(data: Data, tmp_path: Path) -> None:
    wrong = tmp_path / "address.json"
    wrong.write_text('{"x": 1}')
    with pytest.raises(Refused) as refused:
        data([{"name": "length"}], service=str(wrong))
    assert ("config.invalid-value", str(wrong)) == (refused.value.code, refused.value.where)
