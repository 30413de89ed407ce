"""The training tasks of a run, after the operators of ``data.pipeline.tasks``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.compose.libraries import readers
from jackfield.config import RunConfig
from jackfield.config.data import sets_of
from jackfield.data.tasks import TaskSet
from jackfield.errors import ConfigError, DataError
from jackfield.plugins.registry import Registry, installed
from jackfield.settings import structure
from jackfield_pipelines.pipeline import FilePipeline, Step
from jackfield_pipelines.process_operators import INTERPRETER, Interpreters
from jackfield_pipelines.row_sets import ROWS, RowSet
from jackfield_pipelines.services import Services
from jackfield_pipelines.stages import Limits

_FIRST = 8  #: records that say what all are


def steps_of(
    given: Sequence[Mapping[str, Any]], registry: Registry, where: str, config: RunConfig | None = None
) -> list[Step]:
    """Return the operators that settings name; refuse unknown ones and wrong settings with their place.

    Settings whose class has a method ``stages`` stand for those that it returns, each a step of its own.
    """
    steps, interpreters = list[Step](), Interpreters(config)
    for number, settings in enumerate(given):
        place, own = f"{where}[{number}]", dict(settings)
        if not isinstance(name := own.pop("name", None), str):
            details = {"where": f"{place}.name", "expected": "the name of an operator", "found": repr(name)}
            raise ConfigError("an operator has no name", code="config.missing-key", **details)
        interpreter = own.pop(INTERPRETER, None)
        record = interpreters.record(registry, name, interpreter, f"{place}.{INTERPRETER}")
        made: Any = structure(record.settings_class, own, place)
        several = made.stages() if hasattr(made, "stages") else [own]
        steps += [Step(record=record, settings=each) for each in several]
    return steps


def prepare_tasks(config: RunConfig, *, answers: bool = False) -> TaskSet:
    """Apply the operators to the training tasks, as far as it has not been done, and open what they left.

    The tasks come in the order of the rows if an operator has put them into one.
    """
    found = pipeline_of(config, _tell)
    given = sets_of(config.data.train)[0]
    with readers().open_lines(given, _FIRST) as opened:
        form = readers().recognise(readers().first_records(opened), given.format or config.data.format).resolved()
    tasks = TaskSet(found[-1].folder / ROWS, form, answers=answers, name=Path(given.path).stem)
    tasks.shuffle = not any("orders" in each.manifest for each in found)
    names = ", ".join(str(each["name"]) for each in config.data.pipeline.tasks)
    tasks.notes = [f"{len(tasks)} of {len(found[0])} tasks after {names}"]
    return tasks


def pipeline_of(config: RunConfig, tell: Callable[[RowSet, bool], None]) -> list[RowSet]:
    """Apply the operators to the training tasks of a run; return the sets of all stages, the source's first.

    ``tell`` gets each set, and whether it was there already. Without a row that is left, ``data.empty`` is raised.
    """
    data, settings = config.data, config.data.pipeline
    sets = sets_of(data.train, "data.train")
    if len(sets) != 1:
        raise config.refusal("data.train", "operators pass one set of tasks", "one file or name")
    steps = steps_of(settings.tasks, installed(), "data.pipeline.tasks", config)
    with readers().open_lines(sets[0]) as opened:
        form = readers().recognise(readers().first_records(opened), sets[0].format or data.format).resolved()
        names = {"prompt": form.messages_key or form.prompt_key, "answer": form.answer_key}
        names |= {"response": form.response_key, "rejected": form.rejected_key}
        columns = {name: column for name, column in names.items() if column}
        limits = Limits(
            rows=settings.maximum_rows, seconds=settings.maximum_seconds, set_aside=settings.maximum_set_aside
        )
        pipeline = FilePipeline(
            folder=Path(settings.folder or Path(config.folder, "data")),
            steps=steps,
            seed=config.seed,
            limits=limits,
            rows=settings.rows_per_request,
            seconds=settings.seconds_per_request,
            context=lambda context: attrs.evolve(context, columns=columns),
            tell=tell,
        )
        name, stem = sets[0].path, Path(sets[0].path).stem

        async def run() -> list[RowSet]:
            clock = Clock()
            services = Services(config=config, registry=installed(), clock=clock, form=form)
            try:
                return await attrs.evolve(pipeline, clock=clock, services=services).run(opened, name, stem)
            finally:
                await services.close()

        with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
            found = thread.submit(lambda: asyncio.run(run())).result()
    if not len(found[-1]):
        details: Any = {"where": "data.pipeline.tasks", "expected": "one row or more"}
        raise DataError("no task is left after the pipeline", code="data.empty", found="none", **details)
    return found


def _tell(made: RowSet, was_there: bool) -> None:
    if not was_there:
        counts = ", ".join(f"{int(count)} {name}" for name, count in made.manifest["counts"].items() if count)
        logging.getLogger("jackfield").info("stage %s of the pipeline: %s", made.folder.name, counts or "no rows")
