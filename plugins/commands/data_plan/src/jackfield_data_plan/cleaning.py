"""Cleans data in rounds: plan, run, look at the statistics, tighten, until as few rows are left as are wanted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from jackfield.compose.libraries import pipelines
from jackfield.config import RunConfig
from jackfield.errors import DataError, OperatorError
from jackfield_data_plan.distributions import Distribution
from jackfield_data_plan.parts import pipeline_part
from jackfield_data_plan.planning import Plan, Planning
from jackfield_data_plan.stage_reports import as_json, chain_report
from jackfield_data_plan.thresholds import filter_stage


@attrs.frozen(kw_only=True)
class Round:
    """One pass over all rows."""

    tasks: Sequence[Mapping[str, Any]]
    rows: int  #: that are left
    reports: Sequence[dict[str, Any]]
    changes: Sequence[str]  #: from the round before


@attrs.frozen(kw_only=True)
class Cleaned:
    """What came of the rounds."""

    rounds: Sequence[Round]
    ended: str  #: why there was no further round
    met: bool | None  #: whether the objective is met; None: there was none
    plan: Plan  #: the last one


@attrs.define(kw_only=True)
class Cleaning:
    """Runs a plan on all rows and changes it, until at most ``rows`` are left, or ``rounds`` are over.

    With a model, it changes the plan after it has seen the statistics; each change is checked and tried like the first
    plan. Without one, thresholds of filters are tightened, each by the same share.
    """

    planning: Planning
    rows: int | None  #: the objective; None: one round
    rounds: int
    tell: Callable[[str], None] = lambda line: None

    def run(self) -> Cleaned:
        """Return what came of it; raise ``operator.failed`` where the dry run failed."""
        plan, done = self.planning.plan(), list[Round]()
        tasks, changes = [dict(task) for task in plan.tasks], list[str]()
        while True:
            self._refuse(plan)
            done.append(self._round(tasks, changes))
            self.tell(f"round {len(done)}: {done[-1].rows} rows are left" + "".join(f"; {each}" for each in changes))
            if self.rows is None and self.planning.options.url is None:
                return Cleaned(rounds=done, ended="no objective was given", met=None, plan=plan)
            if self.rows is not None and done[-1].rows <= self.rows:
                return Cleaned(rounds=done, ended="the objective is met", met=True, plan=plan)
            if len(done) == self.rounds:
                return self._ended(done, "the rounds are over", plan)
            if self.planning.options.url is not None:
                plan = self.planning.again(self._request(done[-1]))
                after = [dict(task) for task in plan.tasks]
                changes = [f"the model changed the operators: {plan.explanation}"]
                why = "the model changed nothing more"
            else:
                after, changes = self._tightened(tasks, done[-1].rows)
                why = "no threshold can be tightened further"
            if after == tasks:
                return self._ended(done, why, plan)
            tasks = after

    def _ended(self, done: Sequence[Round], why: str, plan: Plan) -> Cleaned:
        return Cleaned(rounds=done, ended=why, met=None if self.rows is None else False, plan=plan)

    def config(self, tasks: Sequence[Mapping[str, Any]]) -> RunConfig:
        """Return the configuration with other operators."""
        config = self.planning.source.config
        pipeline = attrs.evolve(config.data.pipeline, tasks=tuple(tasks))
        return attrs.evolve(config, data=attrs.evolve(config.data, pipeline=pipeline))

    def _round(self, tasks: Sequence[Mapping[str, Any]], changes: Sequence[str]) -> Round:
        pipelines()
        try:
            sets = pipeline_part("tasks").pipeline_of(self.config(tasks), lambda made, was_there: None)
        except DataError as error:
            if error.code == "data.empty":
                error.fix = "say fewer or looser filters; `jackfield data statistics` shows what each stage removed"
            raise
        return Round(tasks=tasks, rows=len(sets[-1]), reports=chain_report(sets), changes=changes)

    def _refuse(self, plan: Plan) -> None:
        """Refuse to run on all rows what the dry run could not run."""
        for stage in plan.trial["stages"]:
            if why := stage.get("skipped"):
                fix = "allow it with --ask, or plan without it"
                raise OperatorError(f"{stage['operator']} was not tried: {why}", where=stage["operator"], fix=fix)
            if failed := stage.get("error"):
                raise OperatorError(failed["message"], code=failed.get("code"), where=stage["operator"])

    def _tightened(self, tasks: list[dict[str, Any]], rows: int) -> tuple[list[dict[str, Any]], list[str]]:
        """Return operators with stricter thresholds, of which each keeps the same share, and what was changed."""
        assert self.rows is not None, "without an objective there is one round"
        stages = [stage for number in range(len(tasks)) if (stage := self._filter(tasks, number)) is not None]
        changed, told = [dict(task) for task in tasks], list[str]()
        for stage in stages:
            with contextlib.closing(stage):
                old = tasks[stage.number]
                names = [name for name in stage.numbers() if name in old]
                if not names or not len(stage):
                    continue
                before = len(stage.removed({}))
                share = (self.rows / rows) ** (1 / len(stages)) * (1 - before / len(stage))
                try:
                    new = {name: value for name, value in stage.found(names, share).items() if value != old[name]}
                except DataError:
                    new = {}
                if not new or len(stage.removed(new)) <= before:
                    new = next(({name: value} for name in names if (value := stage.stricter(name)) is not None), {})
                changed[stage.number].update(new)
                told += [f"{stage.name}.{name}: {old[name]} → {value}" for name, value in new.items()]
        return changed, told

    def _filter(self, tasks: Sequence[Mapping[str, Any]], number: int) -> Any:
        record = self.planning.registry.load("operator", str(tasks[number]["name"]))
        cls: Any = record.cls
        if cls.type != "filter" or not cls.decides_by:
            return None
        return filter_stage(self.config(tasks), str(number + 1), self.planning.registry)

    def _request(self, last: Round) -> str:
        """Return what a model is given after a round."""
        shown = as_json([{**each, "columns": _small(each["columns"])} for each in last.reports])
        if not self.planning.options.samples:
            shown = [{**each, "reasons": {}} for each in shown]
        wanted = "" if self.rows is None else f" At most {self.rows} rows are to be left, and {last.rows} are."
        return (
            f"These operators were run on all rows. What their stages left:\n{json.dumps(shown)}\n"
            f"Wanted is still: {self.planning.words}.{wanted}\nAnswer with the whole JSON object: with "
            'changed operators, or with the same "tasks" if nothing is to be changed.'
        )


def _small(columns: Mapping[str, Distribution]) -> dict[str, Distribution]:
    return {name: attrs.evolve(each, histogram=[]) for name, each in columns.items()}
