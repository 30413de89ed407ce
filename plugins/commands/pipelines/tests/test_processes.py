"""Operators in processes of their own: results, states, what they ask, and processes that die, freeze or hang."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest

from jackfield.abc.operator import OperatorContext, OperatorRequest, OperatorResult, Row
from jackfield.abc.reward import GeneratedText, HttpAnswer
from jackfield.config import RunConfig, load_config
from jackfield.errors import ConfigError, JackfieldError, PluginError, WorkerLost
from jackfield.plugins.registry import Registry, discover
from jackfield_pipelines.experiences import ExperiencePipeline
from jackfield_pipelines.pipeline import FilePipeline, Step
from jackfield_pipelines.process_operators import ProcessOperator, end_processes
from jackfield_pipelines.row_sets import KEY, RowSet
from jackfield_pipelines.stages import OperatorStage
from jackfield_pipelines.tasks import steps_of

pytestmark = pytest.mark.timeout(120)

#: Its module cannot be imported without a module that only the other interpreter's process has, by a variable.
OPERATOR = '''
import asyncio, os, signal, time
from pathlib import Path
from foreign_config import Config
from jackfield.abc.operator import NewRow, Operator, OperatorResult, Selection
if not os.environ.get("FOREIGN_HERE"):
    raise ImportError("this is not the interpreter of the operator")

class Foreign(Operator):
    """What it does depends on its settings and on n."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.type, self.total, self.started = config.type, 0, False
        if config.build == "die":
            os._exit(9)
        if config.build == "raise":
            raise ValueError("it cannot be made")

    reads = ("n",)
    writes = ("n", "sum", "asked")
    decides_by = ("most",)
    version = property(lambda self: f"foreign {self.config.factor}")
    compares = property(lambda self: self.config.compares)

    @property
    def selection(self):
        return Selection(by="n", limit=2) if self.type == "selector" else None

    async def start(self):
        self.started = True

    async def process(self, request):
        assert self.started
        updates, made = {}, []
        for row in request.rows:
            n = row.values["n"]
            note = Path(os.environ["NOTES"], f"{n}")
            times = len(note.read_text()) if note.exists() else 0
            note.write_text("x" * (times + 1))
            if n == self.config.dies_at and times < self.config.times:
                os.kill(os.getpid(), signal.SIGKILL)
            if n == self.config.freezes_at and times < self.config.times:
                os.kill(os.getpid(), signal.SIGSTOP)
            if n == self.config.hangs_at and times < self.config.times:
                Path(os.environ["NOTES"], "hangs").touch()
                time.sleep(600)
            if n == 13:
                raise ArithmeticError("13")
            self.total += n
            self.context.count("rows", 1)
            updates[row.key] = {"sum": self.total}
            if self.config.asks:
                answer = await self.context.generate("policy", [{"role": "user", "content": str(n)}], max_tokens=3)
                score = await self.context.score({"n": n}, answer.text)
                got = await self.context.http.request("GET", "u")
                updates[row.key] = {"asked": [answer.text, score, got.status]}
            if self.type == "synthesizer":
                made.append(NewRow(parents=(row.key,), values={"n": -n}))
        return OperatorResult(updates=updates, made=tuple(made))

    def decide(self, rows):
        return {row.key: "too much" for row in rows if row.values["sum"] > self.config.most}

    def state(self):
        return self.total

    def restore(self, state):
        self.total = state
'''
DISTRIBUTION = "foreign_operator-1.0.dist-info"
CONFIG = """
import attrs

@attrs.frozen(kw_only=True)
class Config:
    factor: int = 2
    most: int = 10**9
    type: str = "mapper"
    compares: bool = False
    asks: bool = False
    build: str = ""
    dies_at: int | None = None
    freezes_at: int | None = None
    hangs_at: int | None = None
    times: int = 1
"""
MANIFEST = """
name = "foreign"
kind = "operator"
abi = "1.0"
object = "foreign_operator.operator:Foreign"
config = "foreign_config:Config"
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """An installed plugin whose class can be imported in its own process only."""
    site = tmp_path / "site"
    files = {
        "foreign_operator/__init__.py": "",
        "foreign_operator/plugin.toml": MANIFEST,
        "foreign_operator/operator.py": OPERATOR,
        "foreign_config.py": CONFIG,
        f"{DISTRIBUTION}/METADATA": "Metadata-Version: 2.1\nName: foreign-operator\nVersion: 1.0\n",
        f"{DISTRIBUTION}/entry_points.txt": "[jackfield.operators]\nforeign = foreign_operator:plugin.toml\n",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    (tmp_path / "notes").mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nFOREIGN_HERE=1 PYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    yield discover()
    for name in [name for name in sys.modules if name.startswith("foreign_")]:
        del sys.modules[name]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(*overrides: str) -> RunConfig:
        file = tmp_path / "run.yaml"
        file.write_text("model: {path: none}\n")
        return load_config(str(file), [f"folder={tmp_path / 'run'}", *overrides])

    return make


@attrs.define
class Pipeline:
    """A pipeline of one operator over numbers."""

    folder: Path
    registry: Registry
    config: RunConfig
    steps: Sequence[Step] = ()

    def run(self, numbers: Sequence[int], rows: int = 4, **settings: Any) -> list[RowSet]:
        entry = {"name": "foreign", "interpreter": str(self.folder / "python"), **settings}
        self.steps = steps_of([entry], self.registry, "data.pipeline.tasks", self.config)
        file = self.folder / "raw.jsonl"
        file.write_text("".join(json.dumps({"n": number}) + "\n" for number in numbers))
        with file.open("rb") as opened:
            pipeline = FilePipeline(folder=self.folder / "data", steps=self.steps, rows=rows, seconds=20.0)
            return asyncio.run(pipeline.run(opened, "raw", "raw"))

    def seen(self, number: int) -> int:
        """How often a row was processed."""
        note = self.folder / "notes" / str(number)
        return len(note.read_text()) if note.exists() else 0


@pytest.fixture
def pipeline(tmp_path: Path, registry: Registry, config: Callable[..., RunConfig]) -> Iterator[Pipeline]:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    yield Pipeline(tmp_path, registry, config("deadlines.heartbeat=1"))
    left = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
    assert not left, "no process is left"


def column(made: RowSet, name: str) -> list[Any]:
    return [record[name] for record in made.records()]


def test_it_runs_there_with_its_declarations_state_and_decisions(pipeline: Pipeline) -> None:
    sets = pipeline.run([1, 2, 3, 4, 5], rows=2, type="filter", most=9)
    assert [1, 3, 6, 10, 15] == column(sets[1], "sum"), "the state goes on from request to request"
    assert [1, 3, 6] == column(sets[2], "sum"), "it decides by its statistics"
    assert "foreign 2" == sets[1].manifest["operator_version"]
    assert {"rows": 5.0} == {name: sets[1].manifest["counts"][name] for name in ("rows",)}
    assert "foreign_operator.operator" not in sys.modules, "it was not imported here"
    again = pipeline.run([1, 2, 3, 4, 5], rows=2, type="filter", most=2)
    assert [1] == column(again[2], "sum")
    assert 1 == pipeline.seen(5), "another threshold needs no new computation"


def test_rows_that_it_makes_and_an_order_come_back(pipeline: Pipeline) -> None:
    made = pipeline.run([1, 2], type="synthesizer")[-1]
    assert ["raw:1", "raw:2", "raw:1>1.1", "raw:2>1.1"] == column(made, KEY)
    assert [3, 2] == column(pipeline.run([1, 3, 2], type="selector")[-1], "n")


def test_a_process_that_is_killed_costs_nothing(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    """The operator adds up what it sees: a row that was lost or came twice would show."""
    made = pipeline.run([*range(20, 32)], dies_at=26, times=2)[-1]
    assert [sum(range(20, number + 1)) for number in range(20, 32)] == column(made, "sum")
    assert [1, 3] == [pipeline.seen(21), pipeline.seen(26)], "only its request was repeated"
    warnings = [record.getMessage() for record in caplog.records if "died" in record.getMessage()]
    assert 2 == len(warnings)
    assert all("SIGKILL" in text and "worker.died" in text for text in warnings)


def test_a_row_that_kills_its_process_is_set_aside(pipeline: Pipeline) -> None:
    made = pipeline.run([*range(20, 32)], dies_at=26, times=10**6)[-1]
    rest = [number for number in range(20, 32) if number != 26]
    assert rest == column(made, "n")
    assert [sum(number for number in rest if number <= last) for last in rest] == column(made, "sum")
    (aside,) = made.records("set_aside.jsonl")
    assert "raw:7" == aside[KEY]
    assert "operator.process" in aside["why"]
    assert "SIGKILL" in aside["why"]
    assert str(pipeline.config.folder) in aside["why"], "it names the log"


def test_a_frozen_process_is_killed_and_its_request_repeated(pipeline: Pipeline) -> None:
    made = pipeline.run([1, 2, 3], freezes_at=2)[-1]
    assert [1, 3, 6] == column(made, "sum")
    assert 2 == pipeline.seen(2)


def test_what_compares_rows_ends_with_the_process_and_its_log(pipeline: Pipeline) -> None:
    with pytest.raises(WorkerLost) as lost:
        pipeline.run([1, 2, 3], dies_at=2, times=10**6, compares=True)
    error = lost.value
    assert ("worker.died", 3) == (error.code, pipeline.seen(2))
    assert "the process of the operator 'foreign' died" == error.message
    assert "process " in str(error.where)
    assert "operator-foreign.log" in str(error.fix)
    made = pipeline.run([1, 2, 3], dies_at=2, times=3, compares=True)[-1]
    assert [1, 3, 6] == column(made, "sum"), "the same command goes on"


def test_a_row_with_which_it_raises_is_set_aside(pipeline: Pipeline) -> None:
    made = pipeline.run([1, 13, 3, 4], factor=3)[-1]
    assert [1, 3, 4] == column(made, "n")
    assert ["13" in each["why"] for each in made.records("set_aside.jsonl")] == [True]


def test_a_request_that_hangs_is_set_aside_at_its_deadline(pipeline: Pipeline) -> None:
    """The process computes and cannot be asked to stop: it is killed, and the next request gets another one."""

    async def run() -> list[Any]:
        entry = {"name": "foreign", "interpreter": str(pipeline.folder / "python"), "hangs_at": 2, "times": 10**6}
        (step,) = steps_of([entry], pipeline.registry, "here", pipeline.config)
        operator: ProcessOperator = step.record.build(step.settings, OperatorContext(), "here")
        await operator.start()
        first, found = operator.owner.pid, list[Any]()
        for n in (1, 2, 3):
            stage = OperatorStage(name="foreign", operator=operator, seconds=2.0)
            found.append(await stage.apply({f"r:{n}": {"n": n}}))
        found.append(first != operator.owner.pid)
        await operator.close()
        end_processes([operator])
        return found

    one, two, three, another = asyncio.run(run())
    assert [{"sum": 1}, {"sum": 4}] == [one.updates["r:1"], three.updates["r:3"]], (
        "its state is that before the request"
    )
    assert "waited 2 s for operator 'foreign' with 1 rows from r:2" in two.set_aside["r:2"]
    assert another


def test_a_cancelled_request_leaves_nothing(pipeline: Pipeline) -> None:
    async def run() -> Any:
        entry = {"name": "foreign", "interpreter": str(pipeline.folder / "python"), "hangs_at": 2}
        (step,) = steps_of([entry], pipeline.registry, "here", pipeline.config)
        operator: ProcessOperator = step.record.build(step.settings, OperatorContext(), "here")
        await operator.start()
        rows = tuple(Row(key=f"r:{n}", values={"n": n}) for n in (1, 2, 3))
        task = asyncio.ensure_future(operator.process(OperatorRequest(rows=rows)))
        while not (pipeline.folder / "notes" / "hangs").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        found = await operator.process(OperatorRequest(rows=rows))
        await operator.close()
        end_processes([operator])
        return found.updates

    assert {"r:1": {"sum": 1}, "r:2": {"sum": 3}, "r:3": {"sum": 6}} == asyncio.run(run())


def test_it_asks_the_host_and_counts_once(pipeline: Pipeline) -> None:
    """What it asks is answered by the pipeline's context, also after its process died; counters count once."""
    counted = list[tuple[str, float]]()

    class Http:
        async def request(self, method: str, url: str, **more: Any) -> HttpAnswer:
            return HttpAnswer(status=204, text=f"{method} {url} {more['limit']}")

    async def generate(model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        return GeneratedText(text=f"{model} {messages[0]['content']} {sampling['max_tokens']}", tokens=4)

    async def score(values: Mapping[str, Any], response: str) -> float:
        return float(values["n"]) / 2

    async def run() -> OperatorResult:
        given: Any = {"http": Http(), "generate": generate, "score": score}
        context = OperatorContext(count=lambda name, value: counted.append((name, value)), **given)
        entry = {"name": "foreign", "interpreter": str(pipeline.folder / "python"), "asks": True, "dies_at": 2}
        (step,) = steps_of([entry], pipeline.registry, "here", pipeline.config)
        operator: ProcessOperator = step.record.build(step.settings, context, "here")
        await operator.start()
        found = await operator.process(OperatorRequest(rows=tuple(Row(key=f"{n}", values={"n": n}) for n in (1, 2))))
        await operator.close()
        end_processes([operator])
        return found

    updates = asyncio.run(run()).updates
    assert {"1": {"asked": ["policy 1 3", 0.5, 204]}, "2": {"asked": ["policy 2 3", 1.0, 204]}} == updates
    assert [("rows", 1.0)] * 2 == counted


def test_what_the_host_does_not_have_is_refused(pipeline: Pipeline) -> None:
    made = pipeline.run([1], asks=True)[-1]
    assert ["reward.context" in each["why"] for each in made.records("set_aside.jsonl")] == [True]


def test_experiences_pass_it(pipeline: Pipeline, config: Callable[..., RunConfig]) -> None:
    entry = json.dumps({"name": "foreign", "interpreter": str(pipeline.folder / "python"), "dies_at": 2})

    async def run() -> Any:
        settings = config(f"data.pipeline.experiences=[{entry}]")
        made = ExperiencePipeline.of_run(settings, pipeline.registry, OperatorContext(target="experiences"))
        await made.start()
        first = await made.shape({"a": {"n": 1}, "b": {"n": 2}}, 0)
        second = await made.shape({"c": {"n": 3}}, 1)
        await made.close()
        return [{**first.columns}, {**second.columns}]

    assert [{"a": {"sum": 1}, "b": {"sum": 3}}, {"c": {"sum": 6}}] == asyncio.run(run())


def test_a_killed_pipeline_leaves_no_process_and_goes_on(pipeline: Pipeline, tmp_path: Path) -> None:
    """A kill of the pipeline, in the middle of a stage whose operator hangs in its process, ends both."""
    import subprocess

    program = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[1:3]\n"
        "import test_processes as tests; from jackfield.plugins.registry import discover\n"
        "import jackfield_pipelines.stages as stages; stages._SAVED_SECONDS = 0.0\n"
        "from jackfield.config import load_config\n"
        "folder = Path(sys.argv[3]); config = load_config(str(folder / 'run.yaml'), [f'folder={folder}/run'])\n"
        "tests.Pipeline(folder, discover(), config).run([*range(20, 32)], hangs_at=27)\n"
    )
    arguments = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path / "site"), str(tmp_path)]
    running = subprocess.Popen(arguments, env=os.environ | {"PYTHONPATH": str(tmp_path / "site")})
    try:
        while not (tmp_path / "notes" / "hangs").exists():
            assert running.poll() is None
            asyncio.run(asyncio.sleep(0.02))
        (child,) = psutil.Process(running.pid).children()
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait(10)
    child.kill()  # it would notice the end of the pipeline, and end by itself, once it does not compute any more
    made = pipeline.run([*range(20, 32)], hangs_at=27)[-1]
    assert [sum(range(20, number + 1)) for number in range(20, 32)] == column(made, "sum")
    assert [1, 2] == [pipeline.seen(23), pipeline.seen(27)], "it went on with the request that was not finished"


@pytest.mark.parametrize(
    ("entry", "kind", "code", "found"),
    [
        ({"interpreter": "/nowhere/python"}, PluginError, "plugin.interpreter", "no such file"),
        ({"interpreter": "own"}, PluginError, "plugin.interpreter", "no such file"),
        ({"interpreter": 3}, ConfigError, "config.invalid-value", "3"),
        ({"interpreter": "/bin/true"}, PluginError, "plugin.interpreter", "ended with exit status 0"),
        ({"build": "die"}, WorkerLost, "worker.died", "ended with exit status 9"),
        ({"build": "raise"}, JackfieldError, "run.failed", None),
        ({"nothing": 1}, ConfigError, "config.unknown-key", "nothing"),
    ],
)
def test_what_cannot_be_made_is_refused_before_the_first_row(
    pipeline: Pipeline,
    config: Callable[..., RunConfig],
    entry: dict[str, Any],
    kind: type[JackfieldError],
    code: str,
    found: str | None,
) -> None:
    pipeline.config = config(f"environments={{own: {{folder: {pipeline.folder / 'own'}}}}}")
    with pytest.raises(kind) as refused:
        pipeline.run([1], **entry)
    assert code == refused.value.code
    assert found is None or found in str(refused.value.found)
    assert 0 == pipeline.seen(1)


def test_a_row_that_is_too_long_for_a_message_is_set_aside(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.runtime.operators.LONGEST_BYTES", 15)
    made = pipeline.run([1, 10**15, 3])[-1]
    assert [1, 3] == column(made, "n")
    assert ["too long" in each["why"] for each in made.records("set_aside.jsonl")] == [True]


def test_many_rows_go_in_parts(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.runtime.operators.PART_BYTES", 50)
    made = pipeline.run([*range(20, 70)], compares=True)[-1]
    assert [sum(range(20, number + 1)) for number in range(20, 70)] == column(made, "sum")
