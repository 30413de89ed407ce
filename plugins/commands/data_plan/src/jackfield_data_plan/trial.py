"""The dry run of a pipeline on some rows. It runs in a process of its own, with a deadline and without secrets.

Operators are built only here. ``python -m jackfield_data_plan.trial`` reads a request as JSON and prints what came out.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.operator import Operator, OperatorContext
from jackfield.errors import JackfieldError, did_you_mean
from jackfield.plugins.registry import installed
from jackfield_data_plan.asked import Asked
from jackfield_data_plan.distributions import ROW_KEY, Columns, lines_of
from jackfield_data_plan.parts import TASKS, pipeline_part, plain, shortened

_EXAMPLES = 3
_DECIDING = ("filter", "scorer", "selector", "deduplicator")  #: types that have no reason to change the data's columns


@attrs.frozen(kw_only=True)
class TrialRequest:
    """What a dry run is given, as JSON values."""

    tasks: Sequence[Mapping[str, Any]]
    file: str  #: JSON lines
    folder: str  #: for the rows after each stage
    stem: str
    columns: Sequence[str]  #: of the rows
    names: Mapping[str, str]
    trusted: bool = False  #: whether they may write results over columns of the data
    seed: int = 0
    seconds: float = 60.0  #: deadline of a request to an operator
    ask: Mapping[str, Any] | None = None  #: models by name, as in the section ``models``; None: nothing is asked


async def try_tasks(request: TrialRequest) -> dict[str, Any]:
    """Build the operators, check their columns, and apply them to the rows.

    Return ``problems``, which are empty if the pipeline is valid, ``notes`` and ``stages``.
    """
    steps = pipeline_part("tasks").steps_of(request.tasks, installed(), TASKS)
    asked = Asked(request.ask)
    trial = _Trial(request=request, asked=asked, context=asked.context(request.names, request.seed))
    try:
        operators, problems = trial.built(steps)
        notes = list[str]()
        if not problems:
            problems, notes = _columns(operators, request.columns, request.trusted)
        stages = [] if problems else await trial.run(steps, operators)
    finally:
        await asked.close()
    return {"problems": problems, "notes": notes if not problems else [], "stages": stages}


def _columns(operators: Sequence[Operator], given: Sequence[str], trusted: bool) -> tuple[list[str], list[str]]:
    """Return what operators read that is not there, and what they change that is."""
    known, everything, problems, notes = {*given}, False, list[str](), list[str]()
    for number, operator in enumerate(operators):
        place = f"{TASKS}[{number}]"
        for name in () if everything else sorted({*operator.reads} - known - {"*"}):
            there = ", ".join(sorted(known))
            problems.append(
                f"{place} reads the column {name!r}, which is not there{did_you_mean(name, known)}: {there}"
            )
        changed = sorted({*operator.writes} & {*given})
        if changed and operator.type in _DECIDING and not trusted:
            problems.append(f"{place} would write its result over the column {changed[0]!r} of the data")
        elif changed:
            notes.append(f"{place} changes {', '.join(changed)}")
        known |= {*operator.writes}
        everything = everything or "*" in operator.writes
        chosen = operator.selection
        if chosen is not None and chosen.by not in known and not everything:
            problems.append(f"{place} orders by the column {chosen.by!r}, which is not there")
    return problems, notes


@attrs.define(kw_only=True)
class _Trial:
    request: TrialRequest
    asked: Asked
    context: OperatorContext

    def built(self, steps: Sequence[Any]) -> tuple[list[Operator], list[str]]:
        operators, problems = list[Operator](), list[str]()
        for number, step in enumerate(steps):
            place = f"{TASKS}[{number}]"
            try:
                operators.append(step.record.build(step.settings, self.context, place))
            except JackfieldError as error:
                problems.append(plain(error, 600))
            except Exception as error:  # a plugin may raise anything
                problems.append(f"{place}: {step.name} cannot be built: {type(error).__name__}: {plain(error, 400)}")
        return operators, problems

    async def run(self, steps: Sequence[Any], operators: Sequence[Operator]) -> list[dict[str, Any]]:
        """Run one step after the other; those that ask a model are skipped unless that is allowed."""
        done, stages, missing = list[Any](), list[dict[str, Any]](), set[str]()
        sets = await self._sets(done)
        for step, operator in zip(steps, operators, strict=True):
            about, told, found = {"operator": step.name, "type": operator.type}, dict[str, Any](), None
            skipped = self._why_skipped(operator, missing)
            if skipped is None:
                told, found = await self._tried([*done, step], sets)
                skipped = None if self.asked.what is None else f"it asks {self.asked.what}"
            if skipped is not None:
                stages.append({**about, "skipped": skipped})
                missing |= {*operator.writes} - {*self.request.columns}
                continue
            stages.append({**about, **told})
            if found is None:
                break
            done, sets = [*done, step], found
            missing -= {*operator.writes}
        return stages

    def _why_skipped(self, operator: Operator, missing: set[str]) -> str | None:
        if lacking := sorted(missing & {*operator.reads}):
            return f"it reads {', '.join(lacking)}, which a skipped operator would write"
        uses = getattr(operator, "uses", ())
        return f"it asks the {uses[0]}" if uses and self.request.ask is None else None

    async def _tried(self, steps: Sequence[Any], sets: Sequence[Any]) -> tuple[dict[str, Any], list[Any] | None]:
        """Run steps of which all but the last are done; return what the last did, and the sets unless it failed."""
        self.asked.what = None
        try:
            found = await self._sets(steps)
        except JackfieldError as error:
            return {"error": error.as_dict()}, None
        except Exception as error:  # a plugin may raise anything
            return {"error": {"code": "operator.failed", "message": f"{type(error).__name__}: {error}"}}, None
        return _stage(sets[-1], found[len(sets) :]), found

    async def _sets(self, steps: Sequence[Any]) -> list[Any]:
        limits = pipeline_part("stages").Limits(set_aside=1.0)
        pipeline = pipeline_part("pipeline").FilePipeline(
            folder=Path(self.request.folder),
            steps=steps,
            seed=self.request.seed,
            limits=limits,
            seconds=self.request.seconds,
            context=lambda given: attrs.evolve(
                self.context, seed=given.seed, folder=given.folder, clock=given.clock, count=given.count
            ),
        )
        with Path(self.request.file).open("rb") as source:
            found: list[Any] = await pipeline.run(source, self.request.file, self.request.stem)
        return found


def _stage(before: Any, made: Sequence[Any]) -> dict[str, Any]:
    """Return what a stage did: counts, statistics of new numbers, and some rows before and after."""
    old = {record[ROW_KEY]: record for record in before.records()}
    computed = {record[ROW_KEY]: record for record in made[0].records()}
    new = {record[ROW_KEY]: record for record in made[-1].records()}
    columns, fresh = Columns(), sorted(_fresh(old, computed))
    for record in computed.values():
        columns.add({name: record[name] for name in fresh if name in record})
    gone = {name: [each for one in made for each in one.records(f"{name}.jsonl")] for name in ("removed", "set_aside")}
    statistics = columns.distributions()
    counts = {"read": len(old), "kept": len(new), "made": sum(int(one.manifest["counts"]["made"]) for one in made)}
    return {
        **counts,
        **{name: len(rows) for name, rows in gone.items()},
        "statistics": {name: attrs.asdict(each) for name, each in statistics.items()},
        "lines": lines_of(statistics, "    "),
        "examples": [*_changed(old, new), *_gone(gone, old)],
    }


def _fresh(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    found = set[str]()
    for key, record in new.items():
        before = old.get(key, {})
        found |= {name for name, value in record.items() if name not in before or before[name] != value}
    return found - {ROW_KEY}


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the first rows whose columns or place changed; rows that were removed before it move none."""
    places = {key: place for place, key in enumerate((key for key in old if key in new), 1)}
    shown = 0
    for place, (key, record) in enumerate(new.items(), 1):
        before = old.get(key, {})
        names = [name for name, value in record.items() if name != ROW_KEY and before.get(name, ...) != value]
        if (not names and places.get(key) == place) or shown == _EXAMPLES:
            continue
        shown += 1
        yield {
            "row": key,
            "place": {"before": places.get(key), "after": place},
            "before": {name: shortened(before[name], 120) for name in names if name in before},
            "after": {name: shortened(record[name], 120) for name in names},
        }


def _gone(gone: Mapping[str, Sequence[Mapping[str, Any]]], old: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, rows in gone.items():
        for each in rows[:_EXAMPLES]:
            before = {column: value for column, value in old.get(each[ROW_KEY], {}).items() if column != ROW_KEY}
            why = plain(each["why"])
            yield {"row": each[ROW_KEY], name: why, "before": shortened(dict([*before.items()][:3]), 120)}


def main() -> None:
    """Read a request from standard input and print what came out; what operators print goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    try:
        answer = asyncio.run(try_tasks(TrialRequest(**request)))
    except JackfieldError as error:
        answer = {"error": error.as_dict()}
    out.write(json.dumps(answer, default=str))
    out.close()


if __name__ == "__main__":
    main()
