"""Experiences of whole groups, which pass the operators of ``data.pipeline.experiences`` after they were scored."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.operator import OperatorContext, OperatorResult
from jackfield.config import RunConfig
from jackfield.errors import ConfigError
from jackfield.plugins.registry import Registry
from jackfield_pipelines.contract import refuse_many, stages_errors, without_odd_numbers
from jackfield_pipelines.lines import Record
from jackfield_pipelines.made import MadeRow, MadeRows, makes_samples, record_operators
from jackfield_pipelines.process_operators import end_processes
from jackfield_pipelines.row_sets import KEY
from jackfield_pipelines.stages import Limits, OperatorStage
from jackfield_pipelines.tasks import steps_of

_KEPT = 64  #: batches of which the states before them are kept


@attrs.frozen(kw_only=True)
class Shaped:
    """What became of the experiences of some groups."""

    columns: Mapping[str, Mapping[str, Any]]  #: by key, the columns that operators wrote
    removed: Mapping[str, str]  #: by key, why an experience is not trained on
    made: Sequence[MadeRow] = ()  #: what operators made, with the parents among the experiences


@attrs.define(kw_only=True)
class ExperiencePipeline:
    """Applies operators one after the other to the experiences of whole groups."""

    stages: Sequence[OperatorStage]
    steps: int  #: training steps of the run
    rows: MadeRows | None = None  #: the file of the rows that operators make
    set_aside: float = Limits().set_aside  #: most of the rows that an operator may set aside, as a share
    _counts: dict[int, tuple[int, int]] = attrs.field(factory=dict, init=False)  #: rows so far, and those set aside
    _newest: int = attrs.field(default=-1, init=False)  #: batch of which experiences have come
    _states: dict[int, list[Any]] = attrs.field(factory=dict, init=False)  #: of the operators, before batches

    @classmethod
    def of_run(
        cls, config: RunConfig, registry: Registry, context: OperatorContext, worker: int = 0
    ) -> ExperiencePipeline:
        """Make the operators of a run, which are not started, for one of its reward workers."""
        stages = list[OperatorStage]()
        steps = steps_of(config.data.pipeline.experiences, registry, "data.pipeline.experiences", config)
        for number, step in enumerate(steps, 1):
            operator = step.build(context)
            if operator.selection is not None:
                what, expected = f"{step.name} puts all rows into an order", "an operator that looks at groups"
                raise ConfigError(what, where="data.pipeline.experiences", expected=expected, found=step.name)
            seconds = config.data.pipeline.seconds_per_request
            shared: Any = {"name": step.name, "number": number, "clock": context.clock, "seconds": seconds}
            shared["about"] = step.about
            stages.append(OperatorStage(operator=operator, **shared))
        if config.mixing.made and all(stage.operator.type != "synthesizer" for stage in stages):
            details: Any = {"where": "mixing.made", "expected": "an operator that makes rows (a synthesizer)"}
            found = ", ".join(stage.name for stage in stages)
            fix = "add one to data.pipeline.experiences, such as repair, or leave out mixing.made"
            raise ConfigError("no operator makes rows", found=found, fix=fix, **details)
        if worker == 0:
            record_operators(Path(config.folder), [step.about for step in steps])
        rows, share = MadeRows.of_run(config, worker), config.data.pipeline.maximum_set_aside
        rows.warn(stage.name for stage in stages if makes_samples(stage.operator))
        return cls(stages=stages, steps=config.schedule.steps, rows=rows, set_aside=share)

    @property
    def reads(self) -> frozenset[str]:
        """Names of the columns that operators read."""
        return frozenset[str]().union(*(stage.reads for stage in self.stages))

    @property
    def generates(self) -> bool:
        """Return whether an operator generates with the run's replicas."""
        return any("policy" in stage.operator.uses for stage in self.stages)

    async def start(self) -> None:
        """Start all operators."""
        for stage in self.stages:
            with stages_errors(stage.name, "at its start"):
                await stage.operator.start()

    async def close(self) -> None:
        """Close all operators."""
        try:
            for stage in reversed(self.stages):
                with stages_errors(stage.name, "at its end"):
                    await stage.operator.close()
        finally:
            end_processes(stage.operator for stage in self.stages)

    def state_before(self, batch: int) -> list[Any]:
        """Return the states of the operators before the first experience of a batch, or a later one, came.

        They are exact where batches are scored one after the other.
        """
        later = [number for number in self._states if number >= batch]
        return self._states[min(later)] if later else self._state()

    def restore(self, states: Sequence[Any]) -> None:
        """Have the operators continue from states, before the first experience."""
        for stage, state in zip(self.stages, states, strict=True):
            stage.operator.restore(state)

    def _state(self) -> list[Any]:
        return [copy.deepcopy(stage.operator.state()) for stage in self.stages]

    def remember(self, batch: int) -> None:
        """Keep the states before the first experience of a batch."""
        if batch > self._newest:
            self._newest, self._states[batch] = batch, self._state()
            for number in sorted(self._states)[:-_KEPT]:
                del self._states[number]

    async def _applied(self, stage: OperatorStage, records: Mapping[str, Record], batch: int) -> OperatorResult:
        """Apply an operator; refuse that it sets aside more of all rows so far than it may."""
        result = await stage.apply(records, batch=batch, steps=self.steps)
        result = without_odd_numbers(result, stage.operator.type, rewards=True)
        seen, aside = self._counts.get(stage.number, (0, 0))
        seen, aside = self._counts[stage.number] = seen + len(records), aside + len(result.set_aside)
        if result.set_aside:
            refuse_many(stage.name, aside, seen, self.set_aside, next(iter(result.set_aside.values())))
        return result

    async def shape(self, records: Mapping[str, Record], batch: int) -> Shaped:
        """Apply the operators to experiences of whole groups of a batch."""
        self.remember(batch)
        left = {key: {**record, KEY: key} for key, record in records.items()}
        columns, removed, made = dict[str, dict[str, Any]](), dict[str, str](), dict[str, MadeRow]()
        for stage in self.stages:
            if not left:
                break
            result = await self._applied(stage, left, batch)
            for key, written in result.updates.items():
                left[key].update(written)
                columns.setdefault(key, {}).update(written)
            new = stage.made(result.made, left)
            gone = {**result.removed, **result.set_aside}
            if stage.operator.type == "filter":
                kept = {key: record for key, record in left.items() if key not in gone}
                gone.update(stage.decided(kept))
            for key, why in gone.items():
                removed[key] = f"{stage.name}: {why}"
                del left[key]
            for record, row in zip(new, result.made, strict=True):
                parents = dict.fromkeys(each for key in row.parents for each in _samples(key, made))
                left[record[KEY]] = record
                made[record[KEY]] = MadeRow(
                    key=record[KEY],
                    operator=stage.name,
                    version=str(stage.about.get("version", "")),
                    settings=stage.about.get("settings", {}),
                    parents=tuple(parents),
                    values=record,
                    answers="response" in row.values,
                )
        rows = [attrs.evolve(row, values=left[key]) for key, row in made.items() if key in left]
        if rows and self.rows is not None:
            self.rows.write(rows, batch)
        own = {key: value for key, value in columns.items() if key not in made}
        return Shaped(columns=own, removed={key: why for key, why in removed.items() if key not in made}, made=rows)


def _samples(key: str, made: Mapping[str, MadeRow]) -> Sequence[str]:
    """Return the samples from which a row comes: itself, or those of its parents."""
    return made[key].parents if key in made else (key,)
