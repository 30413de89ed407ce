"""Experiences of whole groups, which pass the operators of ``data.pipeline.experiences`` after they were scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.operator import OperatorContext
from jackfield.config import RunConfig
from jackfield.errors import ConfigError
from jackfield.plugins.registry import Registry
from jackfield_pipelines.row_sets import KEY
from jackfield_pipelines.stages import OperatorStage, Record
from jackfield_pipelines.tasks import steps_of


@attrs.frozen(kw_only=True)
class Shaped:
    """What became of the experiences of some groups."""

    columns: Mapping[str, Mapping[str, Any]]  #: by key, the columns that operators wrote
    removed: Mapping[str, str]  #: by key, why an experience is not trained on


@attrs.define(kw_only=True)
class ExperiencePipeline:
    """Applies operators one after the other to the experiences of whole groups."""

    stages: Sequence[OperatorStage]
    steps: int  #: training steps of the run

    @classmethod
    def of_run(cls, config: RunConfig, registry: Registry, context: OperatorContext) -> ExperiencePipeline:
        """Make the operators of a run, which are not started."""
        stages = list[OperatorStage]()
        for step in steps_of(config.data.pipeline.experiences, registry, "data.pipeline.experiences"):
            operator = step.record.build(step.settings, context, step.name)
            if operator.selection is not None:
                what, expected = f"{step.name} puts all rows into an order", "an operator that looks at groups"
                raise ConfigError(what, where="data.pipeline.experiences", expected=expected, found=step.name)
            seconds = config.data.pipeline.seconds_per_request
            stages.append(OperatorStage(name=step.name, operator=operator, clock=context.clock, seconds=seconds))
        return cls(stages=stages, steps=config.schedule.steps)

    async def start(self) -> None:
        """Start all operators."""
        for stage in self.stages:
            await stage.operator.start()

    async def close(self) -> None:
        """Close all operators."""
        for stage in reversed(self.stages):
            await stage.operator.close()

    async def shape(self, records: Mapping[str, Record], batch: int) -> Shaped:
        """Apply the operators to experiences of whole groups of a batch."""
        left = {key: {**record, KEY: key} for key, record in records.items()}
        columns, removed = dict[str, dict[str, Any]](), dict[str, str]()
        for stage in self.stages:
            if not left:
                break
            result = await stage.apply(left, batch=batch, steps=self.steps)
            for key, written in result.updates.items():
                left[key].update(written)
                columns.setdefault(key, {}).update(written)
            gone = {**result.removed, **result.set_aside}
            if stage.operator.type == "filter":
                kept = {key: record for key, record in left.items() if key not in gone}
                gone.update(stage.decided(kept))
            for key, why in gone.items():
                removed[key] = f"{stage.name}: {why}"
                del left[key]
        return Shaped(columns=columns, removed=removed)
