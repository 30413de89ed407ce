"""The training tasks of a run, after the operators of ``data.pipeline.tasks``."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import msgspec

from jackfield.abc.operator import OperatorContext
from jackfield.clock import Clock
from jackfield.compose.libraries import readers
from jackfield.config import RunConfig
from jackfield.config.data import DataSet, sets_of
from jackfield.data.formats import TaskFormat
from jackfield.data.tasks import TaskSet
from jackfield.errors import ConfigError, DataError
from jackfield.plugins.registry import Registry, discover
from jackfield.settings import structure
from jackfield_pipelines.client import prepare, sources_of
from jackfield_pipelines.loops import LoopThread
from jackfield_pipelines.pipeline import FilePipeline, Step
from jackfield_pipelines.process_operators import INTERPRETER, Interpreters, end_processes
from jackfield_pipelines.protocol import TaskJob
from jackfield_pipelines.row_sets import KEY, REMOVED, ROWS, SET_ASIDE, RowSet
from jackfield_pipelines.services import Services
from jackfield_pipelines.stages import Limits
from jackfield_pipelines.versions import set_at

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
        steps += [Step(record=record, settings=each, entry=number, where=place) for each in several]
    return steps


def prepare_tasks(config: RunConfig, *, answers: bool = False) -> TaskSet:
    """Apply the operators to the training tasks, as far as it has not been done, and open what they left.

    The tasks come in the order of the rows if an operator has put them into one. Sets with weights stay sets.
    """
    found, sets = pipeline_of(config, _tell), sets_of(config.data.train)
    orders = any("orders" in each.manifest for each in found)
    weights = [each.weight for each in sets if each.weight is not None]
    form, names = _formats(config, sets)[0], stems_of(sets)
    rows = found[-1].folder / ROWS
    if weights:
        parts = [TaskSet(file, form, answers=answers, name=name) for name, file in _split(found[-1], names).items()]
        tasks: TaskSet = readers().MixedSet(parts, weights, [], None)
    else:
        tasks = TaskSet(rows, form, answers=answers, name=names[0])
    tasks.shuffle = not orders
    told = ", ".join(str(each["name"]) for each in config.data.pipeline.tasks)
    tasks.notes = [f"{len(tasks)} of {len(found[0])} tasks after {told}"]
    return tasks


def stems_of(sets: Sequence[DataSet]) -> list[str]:
    """Return the beginnings of the keys of the rows of each set: its stem, or its path where stems are alike."""
    stems = [Path(each.path).stem for each in sets]
    return stems if len({*stems}) == len(stems) else [each.path for each in sets]


def _split(found: RowSet, names: Sequence[str]) -> dict[str, Path]:
    """Write the rows of each set into a file of its own, beside the rows; return the files by the sets' names."""
    folder = found.folder.with_name(f"{found.folder.name}-sets")
    files = {name: folder / f"{number}.jsonl" for number, name in enumerate(names)}
    if not folder.is_dir():
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        with ExitStack() as stack:
            opened = {name: stack.enter_context((partial / file.name).open("wb")) for name, file in files.items()}
            for record in found.records():
                opened[str(record[KEY]).partition(">")[0].rpartition(":")[0]].write(msgspec.json.encode(record) + b"\n")
        partial.rename(folder)
    return files


def _formats(config: RunConfig, sets: Sequence[DataSet]) -> list[TaskFormat]:
    """Return the formats of sets, which name their columns alike, or raise ``config.invalid-value``."""
    found = list[TaskFormat]()
    for each in sets:
        with readers().open_lines(each, _FIRST) as opened:
            known = readers().recognise(readers().first_records(opened), each.format or config.data.format)
            found.append(known.resolved())
    if any(form != found[0] for form in found):
        what = "operators pass several sets, whose records name their columns differently"
        raise config.refusal("data.train", what, "sets of one format; the operator format brings them into one")
    return found


def pipeline_of(config: RunConfig, tell: Callable[[RowSet, bool], None]) -> list[RowSet]:
    """Apply the operators to the training tasks of a run; return the sets of all stages, the source's first.

    ``tell`` gets each set, and whether it was there already. Without a row that is left, ``data.empty`` is raised.
    """
    settings, sets = config.data.pipeline, sets_of(config.data.train, "data.train")
    registry = discover()
    steps = [] if settings.service else steps_of(settings.tasks, registry, "data.pipeline.tasks", config)
    form = _formats(config, sets)[0]
    names = {"prompt": form.messages_key or form.prompt_key, "answer": form.answer_key}
    names |= {"response": form.response_key, "rejected": form.rejected_key}
    columns = {name: column for name, column in names.items() if column}
    _check(steps, OperatorContext(columns=columns, target="tasks"))
    before = set_at(Path(sets[0].path)) if len(sets) == 1 else None
    counters = {"tokens": settings.maximum_tokens, "cost": settings.maximum_cost}
    pipeline = FilePipeline(
        before=None if before is None else {"folder": str(before.folder.absolute()), "digest": before.digest},
        folder=Path(settings.folder or Path(config.folder, "data")),
        steps=steps,
        seed=config.seed,
        limits=Limits(
            rows=settings.maximum_rows,
            seconds=settings.maximum_seconds,
            set_aside=settings.maximum_set_aside,
            counters={name: limit for name, limit in counters.items() if limit is not None},
        ),
        rows=settings.rows_per_request,
        seconds=settings.seconds_per_request,
        concurrent=settings.concurrent_requests,
        context=lambda context: attrs.evolve(context, columns=columns),
        tell=tell,
    )

    async def run(files: Sequence[tuple[BinaryIO, str, str]]) -> list[RowSet]:
        clock = Clock()
        services = Services(config=config, registry=registry, clock=clock, form=form)
        try:
            return await attrs.evolve(pipeline, clock=clock, services=services).run(*files[0], files[1:])
        finally:
            await services.close()

    async def served(files: Sequence[tuple[BinaryIO, str, str]]) -> list[RowSet]:
        shared: Any = {
            name: getattr(pipeline, name) for name in ("seed", "limits", "rows", "seconds", "concurrent", "before")
        }
        job = TaskJob(operators=settings.tasks, files=sources_of(files), form=form, columns=columns, **shared)
        return await prepare(config, job, [file for file, _, _ in files], pipeline.folder, tell)

    with ExitStack() as stack:
        opened = [stack.enter_context(readers().open_lines(each)) for each in sets]
        files = list(zip(opened, (each.path for each in sets), stems_of(sets), strict=True))
        work = run(files) if settings.service is None else served(files)
        thread = LoopThread("tasks")  # the caller may be in an event loop
        stack.callback(thread.end, waits=True)
        found = thread.run(work)
    _check_found(found, sets)
    return found


def _check(steps: Sequence[Step], context: OperatorContext) -> None:
    """Refuse settings of all operators before the first row."""
    try:
        for step in steps:
            step.build(context)
    except BaseException:
        end_processes(step.record for step in steps)
        raise


def _check_found(found: Sequence[RowSet], sets: Sequence[DataSet]) -> None:
    """Refuse that no row is left, and an order of sets that come by their weights."""
    if not len(found[-1]):
        raise _empty(found)
    if any("orders" in each.manifest for each in found) and any(each.weight is not None for each in sets):
        what = "an operator puts all tasks into an order, and sets come by their weights"
        details: Any = {"where": "data.train", "expected": "sets without weights", "found": "sets with weights"}
        raise ConfigError(what, fix="leave out the weights, or the operator that orders", **details)


def _empty(found: Sequence[RowSet]) -> DataError:
    """Say which stage left no row, and why the first ones went."""
    made = next(each for each in found if not len(each))
    if made is found[0] and not made.manifest["counts"]["set_aside"]:
        files = ", ".join(made.manifest.get("files", {}).values())
        expected, fix = "one record or more", "correct data.train, or the program that wrote it"
        return DataError("there are no records", code="data.empty", where=files, expected=expected, fix=fix)
    why = [each["why"] for name in (SET_ASIDE, REMOVED) for each in itertools.islice(made.records(name), 1)]
    counts = f"{made.manifest['counts']['set_aside']:.0f} set aside, {made.manifest['counts']['removed']:.0f} removed"
    fix = f"correct the rows or the settings; {SET_ASIDE} and {REMOVED} in that folder have all reasons"
    details: Any = {"where": str(made.folder), "expected": "one row or more", "fix": fix}
    return DataError(
        "no task is left after the pipeline",
        code="data.empty",
        found=f"{counts}: {why[0] if why else made.manifest.get('ended')}",
        **details,
    )


def _tell(made: RowSet, was_there: bool) -> None:
    if not was_there:
        counts = ", ".join(f"{int(count)} {name}" for name, count in made.manifest["counts"].items() if count)
        if (limit := made.manifest.get("ended")) is not None:
            counts += f"; ended early by data.pipeline.{limit}"
        logging.getLogger("jackfield").info("stage %s of the pipeline: %s", made.folder.name, counts or "no rows")
