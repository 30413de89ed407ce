"""A pipeline over files: which stages it has, what of them is there already, and running the others."""

from __future__ import annotations

import codecs
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import msgspec
import xxhash

from jackfield.abc.operator import Operator, OperatorContext
from jackfield.clock import Clock
from jackfield.errors import ConfigError
from jackfield.plugins.registry import PluginRecord
from jackfield.settings import structure
from jackfield_pipelines.contract import broken, stages_errors
from jackfield_pipelines.guards import disk_errors, locked
from jackfield_pipelines.lines import keyed
from jackfield_pipelines.process_operators import end_processes
from jackfield_pipelines.row_sets import KEY, ROWS, SET_ASIDE, RowSet, RowSetWriter
from jackfield_pipelines.services import Gate, Services
from jackfield_pipelines.stages import Limits, OperatorStage, decide, order


@attrs.frozen(kw_only=True)
class Step:
    """An operator of a pipeline, with its plain settings."""

    record: PluginRecord
    settings: Mapping[str, Any]
    entry: int = 0  #: its place in the settings, where one entry may stand for several operators
    where: str = ""  #: path of the entry in the configuration

    @property
    def name(self) -> str:
        """The operator's name."""
        return self.record.name

    @property
    def about(self) -> dict[str, Any]:
        """Return what rows say of the operator that made them: its name, version and settings."""
        settings = attrs.asdict(structure(self.record.settings_class, self.settings, self.where))
        return {"operator": self.name, "version": self.record.version, "settings": settings}

    def build(self, context: OperatorContext) -> Operator:
        """Make the operator. An error of its settings says where they are."""
        try:
            with stages_errors(self.name, "when it is made"):
                built: Operator = self.record.build(self.settings, context, self.where)
        except ConfigError as error:
            if not str(error.where or "").startswith(self.where):
                error.where = f"{self.where}.{error.where}" if error.where else self.where
            raise
        return built


@attrs.define(kw_only=True)
class FilePipeline:
    """Applies operators one after the other to a file of JSON lines; each stage leaves a set of rows in ``folder``.

    A set is named by what it was made from: the rows, the operator, its version and settings, and the seed. What is
    there is used again; a stage that was killed continues.
    """

    folder: Path
    steps: Sequence[Step]
    seed: int = 0
    clock: Clock = attrs.field(factory=Clock)
    limits: Limits = attrs.field(factory=Limits)
    rows: int = 512  #: of a request
    seconds: float = 600.0  #: deadline of a request
    concurrent: int = 1  #: requests at a time, of operators without a state that compare nothing
    before: Mapping[str, str] | None = None  #: folder and digest of the set that the only source is
    lock_seconds: float = 3600.0  #: to wait for another process that writes in ``folder``
    context: Callable[[OperatorContext], OperatorContext] = lambda context: context  #: adds names of columns
    services: Services | None = None  #: what operators may ask; None: nothing
    tell: Callable[[RowSet, bool], None] = lambda made, was_there: None  #: gets each stage that is complete

    async def run(
        self, source: BinaryIO, name: str, stem: str, others: Sequence[tuple[BinaryIO, str, str]] = ()
    ) -> list[RowSet]:
        """Run all stages over a file of JSON lines, or several as one; return the sets, the source's first.

        ``name`` is what a person knows a file by, and ``stem`` the beginning of its rows' keys. With several, records
        without a ``data_source`` get the stem as one.
        """
        with disk_errors(self.folder):
            try:
                async with locked(self.folder, self.clock, self.lock_seconds):
                    sets = [self._source([(source, name, stem), *others])]
                    for number, step in enumerate(self.steps, 1):
                        sets += await self._step(step, number, sets[-1])
            finally:
                end_processes(step.record for step in self.steps)
        return sets

    def _source(self, files: Sequence[tuple[BinaryIO, str, str]]) -> RowSet:
        digest = xxhash.xxh3_128()
        for file, _, stem in files:
            digest.update(f"{stem}\0".encode())
            file.seek(0)
            while part := file.read(1 << 20):
                digest.update(part)
        digest.update(b"" if self.before is None else f"keys of {self.before['digest']}".encode())
        named = {stem: name for _, name, stem in files}
        about: dict[str, Any] = {"operator": "source", "files": named, "digest": digest.hexdigest()}
        about |= {} if self.before is None else {"before": dict(self.before)}

        def copy(writer: RowSetWriter) -> None:
            for file, _, stem in files:
                more = {"data_source": stem} if len(files) > 1 else {}
                _copy(file, stem, writer, more, has_keys=self.before is not None)

        return self._made("0-source", about, copy)

    async def _step(self, step: Step, number: int, source: RowSet) -> list[RowSet]:
        about: dict[str, Any] = {"operator": step.name, "distribution": step.record.distribution}
        about |= {"version": step.record.version, "seed": self.seed, "source": source.digest}
        place, counters = f"{number}-{step.name}", dict[str, float]()
        if limits := self.limits.given:
            about["limits"] = limits
        shared: Any = {"clock": self.clock, "seed": self.seed, "target": "tasks"}
        named = _digest({**about, "given": step.settings})[:12]
        scratch = self.folder / f".{place}-{named}.scratch"  # a killed stage finds it again
        scratch.mkdir(parents=True, exist_ok=True)
        context = self.context(OperatorContext(folder=scratch, count=partial(_add, counters), **shared))
        gate = None if self.services is None else Gate(step.name, self.services)
        given = context if gate is None else gate.given(context)
        operator = step.build(given)
        plain = attrs.asdict(structure(step.record.settings_class, step.settings, step.name))
        if unknown := {*operator.decides_by} - {*plain}:
            raise broken(step.name, "settings to decide by that it does not have", str([*plain]), str(sorted(unknown)))
        later = {name: plain.pop(name) for name in operator.decides_by}
        about |= {"settings": plain, "operator_version": operator.version}
        if gate is not None and operator.uses:
            gate.operator = operator
            about["uses"] = gate.services.identity(operator.uses)
        found = [await self._processed(place, number, about, operator, source, counters)]
        shutil.rmtree(scratch, ignore_errors=True)
        if operator.type == "filter":
            own = {**about, "settings": later, "source": found[-1].digest, "decides": True}
            before = found[-1]
            found.append(self._made(f"{place}-kept", own, lambda to: decide(operator, before.lines(), to, step.name)))
        if (selection := operator.selection) is not None:
            own = {**about, "settings": attrs.asdict(selection), "source": found[-1].digest, "orders": True}
            ordered = found[-1]
            found.append(self._made(f"{place}-order", own, lambda to: order(selection, ordered, to, step.name)))
        return found

    async def _processed(
        self,
        place: str,
        number: int,
        about: Mapping[str, Any],
        operator: Operator,
        source: RowSet,
        counters: dict[str, float],
    ) -> RowSet:
        digest = _digest(about)
        folder = self.folder / f"{place}-{digest[:12]}"
        if (there := RowSet.open(folder)) is not None:
            self.tell(there, True)
            return there
        stage = OperatorStage(
            name=str(about["operator"]),
            number=number,
            operator=operator,
            clock=self.clock,
            rows=self.rows,
            seconds=self.seconds,
            concurrent=self.concurrent,
            counters=counters,
        )
        with contextlib.closing(RowSetWriter(folder)) as writer:
            async with _started(operator, stage.name):
                await stage.run(source.lines(), writer, self.limits, len(source))
            used: dict[str, Any] = {"counters": stage.counters} if stage.counters else {}
            used |= {"ended": stage.ended} if stage.ended else {}
            made = writer.commit({**about, **used, "digest": digest})
        self.tell(made, False)
        return made

    def _made(self, place: str, about: Mapping[str, Any], write: Callable[[RowSetWriter], None]) -> RowSet:
        """Return a set that is there, or write it at once."""
        digest = about.get("digest") or _digest(about)
        folder = self.folder / f"{place}-{digest[:12]}"
        if (there := RowSet.open(folder)) is not None:
            self.tell(there, True)
            return there
        with contextlib.closing(RowSetWriter(folder)) as writer:
            write(writer)
            made = writer.commit({**about, "digest": digest})
        self.tell(made, False)
        return made


@contextlib.asynccontextmanager
async def _started(operator: Operator, name: str) -> AsyncIterator[None]:
    with stages_errors(name, "at its start"):
        await operator.start()
    try:
        yield
    finally:
        with stages_errors(name, "at its end"):
            await operator.close()


def _add(counters: dict[str, float], name: str, number: float) -> None:
    counters[name] = counters.get(name, 0.0) + number


def _digest(about: Mapping[str, Any]) -> str:
    text = json.dumps(about, sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _copy(file: BinaryIO, stem: str, writer: RowSetWriter, more: Mapping[str, str], *, has_keys: bool) -> None:
    """Write the records of a file of JSON lines with their keys (stem and line) and the columns that they lack."""
    decode, part = msgspec.json.Decoder().decode, list[bytes]()
    file.seek(0)
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        key = f"{stem}:{number}"
        try:
            record = decode(line)
            if not isinstance(record, dict):
                raise ValueError(f"a JSON object was expected, and this is {type(record).__name__}")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            why = f"no JSON object: {error}"[:300]
            writer.append(SET_ASIDE, [{KEY: key, "why": why, "operator": "source"}])
            continue
        part.append(line if has_keys else keyed(line, record, key, more))
        if len(part) == 4096:
            writer.append_lines(ROWS, part)
            part = []
    writer.append_lines(ROWS, part)
