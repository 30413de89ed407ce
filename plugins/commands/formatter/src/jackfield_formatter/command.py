"""The command ``jackfield data format``."""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import attrs
import click
import yaml

from jackfield.cli.commands import json_option, show
from jackfield.config.data import DataSet
from jackfield.errors import ConfigError
from jackfield.settings import structure
from jackfield_formatter.context import FormatSettings
from jackfield_formatter.files import FormatReport, format_file

_USES = {"task": "data.train={out}", "sft": "mode=offline algorithm.name=sft data.train={out}"}
_USES |= {
    "dpo": "mode=offline algorithm.name=dpo data.train={out}",
    "experience": "jackfield queue import {out} FOLDER",
}
_SHARE = "The most of the records that may be set aside, as a share; the first 20 are free."
_RECORDS = click.IntRange(min=1)


def _settings(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each setting that has no option of its own."""
    for field in reversed(attrs.fields(attrs.resolve_types(FormatSettings))):
        if field.name in ("into", "map"):
            continue
        name, text = "--" + field.name.replace("_", "-"), field.metadata["help"].replace("`", "")
        more: dict[str, Any] = {"is_flag": True} if field.type is bool else {"type": _kind(field.type)}
        told = "" if field.default in (None, False) else f" [default: {field.default!r}]"
        command = click.option(name, field.name, default=None, help=text[0].upper() + text[1:] + told, **more)(command)
    return command


def _kind(kind: Any) -> Any:
    """Return the type of an option."""
    if typing.get_origin(kind) is Literal:
        return click.Choice(typing.get_args(kind))
    return kind if kind in (int, float) else str


@click.command("format")
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--as", "into", required=True, help="The model: task, sft, dpo, experience, or one of another package.")
@click.option(
    "--map", "pairs", multiple=True, metavar="COLUMN=EXPRESSION", help="A column of the row; may be repeated."
)
@click.option("--mapping", type=click.Path(exists=True, dir_okay=False), help="YAML file with an expression by column.")
@_settings
@click.option("--split", help="The split of a set from the Hub or save_to_disk.")
@click.option("--config", help="The configuration of a set from the Hub.")
@click.option("-n", "--limit", type=_RECORDS, help="Only so many records.")
@click.option("--maximum-set-aside", type=click.FloatRange(0, 1), default=0.1, show_default=True, help=_SHARE)
@click.option("--replace", is_flag=True, help="Replace OUT if it is there.")
@json_option
def format_set(
    source: str,
    out: Path,
    into: str,
    pairs: tuple[str, ...],
    mapping: str | None,
    split: str | None,
    config: str | None,
    limit: int | None,
    maximum_set_aside: float,
    replace: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Write the records of SOURCE as typed rows to OUT, a new .jsonl file that a run reads as it is.

    SOURCE is a file (.jsonl, .json, .csv, .parquet, .arrow, .txt), a folder of save_to_disk or of .txt files, or a name
    on the Hub. Without --map, --mapping or --function, the records say what they are. Records that cannot be formatted
    are written to OUT's name with .set_aside.jsonl, each with the reason.
    """
    own: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    own |= {"into": into, "map": {**_mapping(mapping), **_pairs(pairs)}}
    given = DataSet(path=source, split=split, config=config)
    options: dict[str, Any] = {"limit": limit, "maximum_set_aside": maximum_set_aside, "replaces": replace}
    report = format_file(given, out, structure(FormatSettings, own), **options)
    if as_json:
        show({name: str(value) if isinstance(value, Path) else value for name, value in attrs.asdict(report).items()})
    else:
        click.echo(_told(report, into))


def _pairs(pairs: tuple[str, ...]) -> dict[str, str]:
    found = dict[str, str]()
    for pair in pairs:
        name, equals, expression = pair.partition("=")
        if not (name and equals and expression):
            raise ConfigError("a column has no expression", where="--map", expected="COLUMN=EXPRESSION", found=pair)
        found[name.strip()] = expression.strip()
    return found


def _mapping(file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        found = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("the mapping cannot be read", where=file, expected="YAML", found=str(error)[:300]) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        shown, expected = repr(found)[:200], "expressions by column, such as `prompt: question`"
        raise ConfigError("the mapping has no columns", where=file, expected=expected, found=shown)
    return found


def _told(report: FormatReport, into: str) -> str:
    made = f"{_counted(report.rows, 'row')} of {report.schema} in {report.out}"
    lines = [f"{made}, from {_counted(report.read, 'record')} ({report.shape})"]
    if report.left_out:
        lines.append(f"left out by the function: {_counted(report.left_out, 'record')}")
    if report.set_aside:
        lines.append(f"set aside: {_counted(report.set_aside, 'record')}; {report.set_aside_file} says why")
    if into in _USES:
        lines.append(f"use: {_USES[into].format(out=report.out)}")
    return "\n".join(lines)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


format = format_set
