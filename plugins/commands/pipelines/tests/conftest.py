"""A pipeline service as a process of its own, operators that can be held, and what runs ask."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from jackfield.abc.operator import OperatorContext
from jackfield.config import RunConfig, make_config
from jackfield.plugins import discover
from jackfield_commands import Command, CommandServer
from jackfield_held import HeldCalls
from jackfield_pipelines.experiences import ExperiencePipeline
from jackfield_pipelines.row_sets import KEY, RowSet
from jackfield_pipelines.served_experiences import ServedPipeline
from jackfield_pipelines.tasks import pipeline_of

_OPERATORS = '''
import asyncio
import attrs
from jackfield.abc.operator import NewRow, Operator, OperatorResult
from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Config:
    folder: str = option("", "folder with the socket")
    asks: str = option("", "policy or reward")
    most: int = option(1_000_000, "largest number that is kept")


class _Held(Operator):
    """Writes down its starts, ends and requests; a request with a "held" text waits for the other end of a socket."""

    async def start(self):
        self.say("start")

    async def close(self):
        self.say("close")

    def say(self, what):
        if self.config.folder:
            with open(f"{self.config.folder}/said", "a") as said:
                said.write(f"{what}\\n")

    async def hold(self, request, column):
        self.say("ask")
        if any("held" in row.values[column] for row in request.rows):
            reader, writer = await asyncio.open_unix_connection(f"{self.config.folder}/held")
            try:
                writer.write(b"?")  # it can be cancelled from here on
                if not await reader.read(1):
                    raise RuntimeError("the other end is gone")
            except asyncio.CancelledError:
                self.say("cancelled")
                raise
            finally:
                writer.close()


class Number(_Held):
    """Numbers the rows that it has seen."""

    type = "filter"
    reads = ("question",)
    writes = ("number",)
    decides_by = ("most",)
    seen = 0

    async def process(self, request):
        await self.hold(request, "question")
        updates = {}
        for row in request.rows:
            self.seen += 1
            updates[row.key] = {"number": self.seen}
        self.context.count("tokens", len(request.rows))
        return OperatorResult(updates=updates)

    def decide(self, rows):
        return {row.key: "too late" for row in rows if row.values["number"] > self.config.most}

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = state["seen"]


class Ask(Operator):
    """Asks what its settings name."""

    type = "scorer"
    reads = ("*",)
    writes = ("score",)

    @property
    def uses(self):
        return (self.config.asks,)

    async def process(self, request):
        updates = {}
        for row in request.rows:
            if self.config.asks == "reward":
                updates[row.key] = {"score": await self.context.score(row.values, "4")}
            else:
                updates[row.key] = {"score": (await self.context.generate("policy", [])).text}
        return OperatorResult(updates=updates)


class Learn(_Held):
    """Counts the responses that it has seen."""

    type = "scorer"
    reads = ("response",)
    writes = ("count", "reward")
    seen = 0

    async def process(self, request):
        await self.hold(request, "response")
        self.seen += len(request.rows)
        self.context.count("seen", len(request.rows))
        return OperatorResult(updates={row.key: {"count": self.seen, "reward": 0.1} for row in request.rows})

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = state["seen"]


class Plain(_Held):
    """Learns nothing."""

    type = "scorer"
    reads = ("response",)
    writes = ("length",)

    async def process(self, request):
        self.say("plain")
        return OperatorResult(updates={row.key: {"length": len(row.values["response"])} for row in request.rows})


class Odd(Operator):
    """Gives each row the score that its text names."""

    type = "scorer"
    reads = ("question", "response")
    writes = ("score", "reward")
    scores = {"text": "high", "nan": float("nan"), "infinity": float("-inf"), "huge": 10**400, "list": [1.0]}
    scores |= {"none": None, "number": 0.5, "true": True}

    async def process(self, request):
        name = "score" if self.context.target == "tasks" else "reward"
        texts = {row.key: row.values.get("question") or row.values["response"] for row in request.rows}
        return OperatorResult(updates={key: {name: self.scores[text]} for key, text in texts.items()})


class Make(Operator):
    """Makes a row of each row: a sample, or what its setting says."""

    type = "synthesizer"
    reads = ("response",)

    @property
    def writes(self):
        return {"pairs": ("response", "chosen", "rejected"), "any": ("*",)}.get(self.config.asks, ("response",))

    async def process(self, request):
        pair = {"response": None, "chosen": "a", "rejected": "b"}
        values = pair if self.config.asks == "pairs" else {"response": "a"}
        return OperatorResult(made=tuple(NewRow(parents=(row.key,), values=values) for row in request.rows))


class End(_Held):
    """Raises what no operator may where its setting says, or with a row that names it."""

    type = "filter"
    reads = ("question", "response")
    writes = ("seen",)

    def __init__(self, config, context):
        super().__init__(config, context)
        self.end("made")

    def end(self, place):
        ends = {"exit": SystemExit(0), "interrupt": KeyboardInterrupt(), "cancel": asyncio.CancelledError()}
        for name, error in {**ends, "own": type("Own", (BaseException,), {})("boom")}.items():
            if place in (self.config.asks, name) or place == f"task {name}":
                raise error

    async def start(self):
        self.end("start")

    async def close(self):
        self.end("close")

    async def process(self, request):
        texts = {row.key: row.values.get("question") or row.values["response"] for row in request.rows}
        if any(text.startswith("held") for text in texts.values()):
            await self.hold(request, "question")
        for text in texts.values():
            self.end(text)
            if text.startswith("task "):
                await asyncio.gather(self.later(text))
        return OperatorResult(updates={key: {"seen": 1} for key in texts})

    async def later(self, text):
        self.end(text)

    def decide(self, rows):
        self.end("decide")
        return {}
'''
_NAMES = ("number", "ask", "learn", "plain", "odd", "end", "make")


def lay_out(folder: Path) -> None:
    """Lay the operators out as pip leaves a package."""
    package, about = folder / "served_operators", folder / "served_operators-1.0.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "__init__.py").write_text("")
    (package / "operators.py").write_text(_OPERATORS)
    for name in _NAMES:
        manifest = f"""
            name = "served_{name}"
            kind = "operator"
            abi = "1.0"
            object = "served_operators.operators:{name.title()}"
            config = "served_operators.operators:Config"
            description = "An operator of tests"
        """
        (package / f"{name}.toml").write_text(dedent(manifest))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: served-operators\nVersion: 1.0\n")
    points = "".join(f"served_{name} = served_operators:{name}.toml\n" for name in _NAMES)
    (about / "entry_points.txt").write_text(f"[jackfield.operators]\n{points}")


class Served:
    """A running `jackfield data serve`."""

    def __init__(self, command: Command) -> None:
        self.command, self.send = command, command.send

    async def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait for the end; return the exit code."""
        self.send(number)
        return (await asyncio.to_thread(self.command.wait, 60.0)).code


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@asynccontextmanager
async def _serving(jackfield: CommandServer, folder: Path, site: Path, **settings: Any) -> AsyncIterator[Served]:
    (folder / "serve.yaml").write_text(yaml.safe_dump({"folder": str(folder / "service"), **settings}))
    variables = {"PYTHONPATH": str(site)}
    command = jackfield.start("data", "serve", str(folder / "serve.yaml"), "--json", environment=variables)
    try:
        while not command.out.endswith("\n"):
            assert command.running, command.error
            await asyncio.sleep(0.01)
        yield Served(command)
    finally:
        command.kill()
        await asyncio.to_thread(command.wait, 60.0)


@pytest.fixture
def serve(jackfield: CommandServer, site: Path, tmp_path: Path) -> Serve:
    """``async with serve(**settings) as service``: a service in ``tmp_path/service``, killed at the end."""
    return partial(_serving, jackfield, tmp_path, site)


class Held(HeldCalls):
    """The other end of requests that are held, and what operators say."""

    @property
    def said(self) -> list[str]:
        """What operators have written down."""
        file = self.folder / "said"
        return file.read_text().split() if file.exists() else []


def config(folder: Path, name: str, pipeline: dict[str, Any], **more: Any) -> RunConfig:
    """Return the configuration of a run with ``folder/raw.jsonl``."""
    data = {"train": str(folder / "raw.jsonl"), "pipeline": pipeline}
    values = {"name": name, "folder": str(folder / name), "model": {"path": "none"}, "data": data, **more}
    return make_config(values)


async def stages(given: RunConfig) -> tuple[list[RowSet], list[bool]]:
    """Return the sets of a run's tasks, and whether each was there already."""
    was_there = list[bool]()
    found = await asyncio.to_thread(pipeline_of, given, lambda made, there: was_there.append(there))
    return found, was_there


def rows(found: RowSet) -> list[dict[str, Any]]:
    """Return the rows of a set."""
    return list(found.records())


def source(folder: Path, count: int, *, held: int = -1) -> None:
    """Write questions, one of which is held."""
    lines = [{"question": f"{'held' if n == held else 'q'} {n}", "answer": str(n)} for n in range(count)]
    (folder / "raw.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Counters:
    """What a pipeline on experiences counts, and the pipeline of a run, with a service or without."""

    def __init__(self, given: RunConfig) -> None:
        self.counted: list[tuple[str, float]] = []
        context = OperatorContext(
            seed=given.seed, target="experiences", count=lambda name, number: self.counted.append((name, number))
        )
        kind = ExperiencePipeline if given.data.pipeline.service is None else ServedPipeline
        self.pipeline = kind.of_run(given, discover(), context)


def experiences(batch: int, *texts: str) -> dict[str, dict[str, Any]]:
    """Return samples by key."""
    return {f"{batch}/{n}": {KEY: "", "response": text, "reward": 1.0 / 3.0} for n, text in enumerate(texts)}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the operators, which are installed here, too."""
    folder = tmp_path_factory.mktemp("site")
    lay_out(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        yield folder
