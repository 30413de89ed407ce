"""The commands ``jackfield data plan``, ``statistics``, ``tighten`` and ``clean``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import yaml

from jackfield.cli.commands import json_option, show
from jackfield.config import RunConfig
from jackfield.errors import ConfigError, OperatorError
from jackfield.plugins.registry import installed
from jackfield_data_plan import files, shown, stage_reports
from jackfield_data_plan.cleaning import Cleaning
from jackfield_data_plan.parts import TASKS, as_yaml
from jackfield_data_plan.planning import ModelOptions, Planning
from jackfield_data_plan.sources import config_of, open_source
from jackfield_data_plan.thresholds import filter_stage

_SECONDS: Any = {"type": click.FloatRange(min=0, min_open=True), "default": 120.0, "show_default": True}
_ROWS: Any = {"type": click.IntRange(1, 1000), "default": 20, "show_default": True}
_ALLOW: Any = {"multiple": True, "metavar": "OPERATOR[.SETTING]"}
_FILE: Any = {"type": click.Path(dir_okay=False)}
_DATA = "The rows: a file, a folder of save_to_disk, or a name on the Hub."
_ALLOWED = "Let the model choose a setting that may name files, code, addresses or secrets. Can be repeated."
_OPTIONS: Sequence[Any] = (
    click.option("--data", metavar="FILE_OR_NAME", help=_DATA),
    click.option("--config", "file", **_FILE, help="A run's file, whose training tasks are the rows."),
    click.option("--model-url", metavar="URL", help="An OpenAI-compatible address, such as http://127.0.0.1:8000/v1."),
    click.option("--model", metavar="NAME", help="The model's name there. Without a model, keywords give a draft."),
    click.option("--key-variable", metavar="NAME", help="Environment variable with the key for the address."),
    click.option("--model-seconds", **_SECONDS, help="Deadline of one answer of the model."),
    click.option("--no-samples", is_flag=True, help="Show the model names of columns, and no rows."),
    click.option("--allow", **_ALLOW, help=_ALLOWED),
    click.option("--ask", is_flag=True, help="Let operators ask models in the dry run."),
    click.option("--dry-run-seconds", **_SECONDS, help="Deadline of the dry run."),
    click.option("--rows", **_ROWS, help="Rows of the dry run, the first ones."),
)


def _plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _model(given: Mapping[str, Any]) -> ModelOptions:
    return ModelOptions(
        url=given["model_url"],
        model=given["model"],
        key_variable=given["key_variable"],
        seconds=given["model_seconds"],
        samples=not given["no_samples"],
        allowed=given["allow"],
        ask=given["ask"],
        trial_seconds=given["dry_run_seconds"],
    )


@click.command("plan")
@click.argument("words")
@_plan_options
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the YAML into this new file.")
@json_option
def plan(words: str, write: Path | None, as_json: bool, **given: Any) -> None:
    """Make a pipeline from WORDS, such as "compute difficulty, easy first", check it, and try it on some rows.

    A model is asked for operators and settings, with the names of columns and three rows. What it answers is run only
    if it is valid. Without a model, keywords give a draft.
    """
    config = config_of(given["data"], given["file"])
    source = open_source(config, given["rows"])
    made = Planning(words=words, source=source, registry=installed(), options=_model(given)).plan()
    if not as_json:
        for line in shown.plan_lines(made):
            click.echo(line)
    _refuse_failed(made.trial)
    if write is not None:
        files.write_new(write, _file(given, source.path, made.tasks))
    if as_json:
        show({**made.as_dict(), "written": None if write is None else str(write)})
    elif write is None:
        click.echo("Put the section into a run's file; `jackfield data run FILE.yaml` applies it, and so does the run.")
    else:
        click.echo(f"{write} is written; `jackfield data run {write}` applies it, and so does the run.")


def _refuse_failed(trial: Mapping[str, Any]) -> None:
    for stage in trial["stages"]:
        if failed := stage.get("error"):
            fix = failed.get("fix") or "correct the rows, or say it in other words"
            details: Any = {"where": stage["operator"], "found": failed.get("found"), "fix": fix}
            what = f"an operator failed in the dry run: {failed['message']}"
            raise OperatorError(what, code=failed.get("code"), **details)


def _file(given: Mapping[str, Any], path: str, tasks: Sequence[Mapping[str, Any]], folder: str | None = None) -> str:
    """Return the text of a run's file with operators."""
    plain = [dict(task) for task in tasks]
    if given["file"] is None:
        head = "# Set model.path, and what else the run needs.\nmodel: {path: ''}\n"
        return head + as_yaml(plain, train=path)
    values = yaml.safe_load(Path(given["file"]).read_text(encoding="utf-8"))
    return str(yaml.safe_dump(files.changed(values, plain, folder), sort_keys=False, allow_unicode=True, width=120))


@click.command("statistics")
@click.argument("place", metavar="FOLDER_OR_FILE")
@click.option("--column", help="Only this column; of texts, the characters are counted, of lists the entries.")
@json_option
def statistics(place: str, column: str | None, as_json: bool) -> None:
    """Show the distribution of each column with numbers, and why stages removed rows or set them aside.

    FOLDER_OR_FILE is the folder of a run or of `jackfield data run`, the folder of one stage, or a set of tasks.
    """
    reports = stage_reports.report_of(place, column)
    if as_json:
        show(stage_reports.as_json(reports))
    else:
        for line in stage_reports.as_lines(reports):
            click.echo(line)


@click.command("tighten")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("operator")
@click.argument("settings", nargs=-1, metavar="[SETTING=VALUE | SETTING]...")
@click.option(
    "--keep",
    type=click.FloatRange(0, 1, min_open=True),
    help="Find thresholds with which this share of the rows stays: of the SETTINGs, or of the only one.",
)
@click.option("--write", is_flag=True, help="Write the thresholds into FILE, whose comments stay.")
@json_option
def tighten(
    file: Path, operator: str, settings: tuple[str, ...], keep: float | None, write: bool, as_json: bool
) -> None:
    """Show what other thresholds of a filter would remove, from the statistics that `jackfield data run` left.

    FILE is the run's file, OPERATOR the filter's name or its number in `data.pipeline.tasks`, from 1. Nothing is
    computed again.
    """
    given, names = _thresholds(settings, keep)
    with contextlib.closing(filter_stage(config_of(None, str(file)), operator, installed())) as stage:
        stage.check(given)
        if keep is not None:
            given = stage.found(names, keep)
        found = stage.tightened(given)
    if write and stage.several:
        details: Any = {
            "where": f"{TASKS}[{stage.number}]",
            "expected": "an entry for one operator",
            "found": stage.name,
        }
        fix = "change the thresholds in the recipe, or leave --write out"
        raise ConfigError("an entry stands for several operators", fix=fix, **details)
    if write:
        files.set_thresholds(file, found.number, found.after)
    if as_json:
        show({**attrs.asdict(found), "written": write})
    else:
        for line in shown.tightened_lines(found):
            click.echo(line)
        click.echo(f"{file} is changed." if write else f"Nothing is written; --write puts this into {file}.")


def _thresholds(settings: Sequence[str], keep: float | None) -> tuple[dict[str, Any], list[str]]:
    """Return thresholds with values, and the names of those that are looked for."""
    given, names = dict[str, Any](), list[str]()
    for each in settings:
        name, equals, value = each.partition("=")
        if bool(equals) == (keep is not None):
            expected = "SETTING=VALUE" if keep is None else "SETTING, as --keep finds its value"
            raise ConfigError("a threshold cannot be read", code="config.override", expected=expected, found=each)
        try:
            given[name] = yaml.safe_load(value) if equals else None
        except yaml.YAMLError as error:
            details: Any = {"expected": "a value of YAML", "found": each}
            raise ConfigError("a threshold cannot be read", code="config.override", **details) from error
        names.append(name)
    if not settings and keep is None:
        details = {"expected": "SETTING=VALUE, or --keep SHARE", "found": "neither"}
        raise ConfigError("there is no threshold", code="config.missing-key", **details)
    return ({}, names) if keep is not None else (given, [])


@click.command("clean")
@click.argument("words")
@_plan_options
@click.option("--folder", type=click.Path(file_okay=False), help="Where the rows after each stage are kept.")
@click.option("--at-most", type=click.IntRange(min=1), metavar="N", help="Go on until at most so many rows are left.")
@click.option("--rounds", type=click.IntRange(1, 20), default=3, show_default=True, help="Most rounds over all rows.")
@click.option(
    "--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the last pipeline into this file."
)
@json_option
def clean(
    words: str,
    folder: str | None,
    at_most: int | None,
    rounds: int,
    write: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Plan a pipeline from WORDS, run it on all rows, look at the statistics, and tighten it, in rounds.

    With a model, it changes the pipeline after each round; what is not valid is not run. Without one, thresholds of
    filters are tightened until at most N rows are left. It ends with exit code 1 if they are not.
    """
    config = _with_folder(config_of(given["data"], given["file"]), folder)
    planning = Planning(
        words=words, source=open_source(config, given["rows"]), registry=installed(), options=_model(given)
    )
    quiet = (lambda line: None) if as_json else click.echo
    found = Cleaning(planning=planning, rows=at_most, rounds=rounds, tell=quiet).run()
    last = found.rounds[-1]
    if write is not None:
        files.write_new(write, _file(given, planning.source.path, last.tasks, folder))
    if as_json:
        told = [{"rows": each.rows, "tasks": each.tasks, "changes": each.changes} for each in found.rounds]
        stages = stage_reports.as_json(last.reports)
        show({"rounds": told, "stages": stages, "ended": found.ended, "met": found.met, "planner": found.plan.planner})
    else:
        for line in [*shown.plan_lines(found.plan), *shown.cleaned_lines(found)]:
            click.echo(line)
        click.echo(as_yaml([dict(task) for task in last.tasks]).rstrip())
    if found.met is False:
        click.get_current_context().exit(1)


def _with_folder(config: RunConfig, folder: str | None) -> RunConfig:
    if folder is None and not config.model.path:
        what, fix = "the rows need a folder", "give --folder, where they are kept after each stage"
        raise ConfigError(what, code="config.missing-key", where="--folder", expected="a folder", fix=fix)
    if folder is None:
        return config
    pipeline = attrs.evolve(config.data.pipeline, folder=folder)
    return attrs.evolve(config, data=attrs.evolve(config.data, pipeline=pipeline))
