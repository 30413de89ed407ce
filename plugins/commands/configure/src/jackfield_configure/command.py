"""The commands ``jackfield init`` and ``jackfield config schema``."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import click

from jackfield.algorithms import names
from jackfield.algorithms.registry import unknown_part
from jackfield.compose.checks import check_file
from jackfield.errors import ConfigError
from jackfield.plugins import discover
from jackfield_configure.schema import run_schema
from jackfield_configure.template import commented, settings

_QUESTIONS = {
    "algorithm": ("Which algorithm? (`jackfield algorithms list` describes them)", "grpo"),
    "model": ("Which model? (a Hugging Face folder, or OWNER/NAME on the Hub)", None),
    "data": ("Which training data? (a file, a folder of save_to_disk, or a name on the Hub)", None),
}


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default="run.yaml")
@click.option("--algorithm", help="Name of the algorithm, such as grpo or sft.")
@click.option("--model", help="A Hugging Face folder, or OWNER/NAME on the Hub.")
@click.option("--data", help="Training data: a file, a folder of save_to_disk, or a name on the Hub.")
def init(file: Path, algorithm: str | None, model: str | None, data: str | None) -> None:
    """Write a config FILE (run.yaml) with a comment for each setting.

    On a terminal, what the options do not say is asked. Elsewhere, an option that is missing is an error. A file that
    is there already is never changed.
    """
    if os.path.lexists(file):
        fix = "name another file, or move this one away"
        raise ConfigError("the file is there already", where=str(file), expected="a new file", fix=fix)
    given = {"algorithm": algorithm, "model": model, "data": data}
    missing = [f"--{name}" for name, value in given.items() if not value]
    if missing and not sys.stdin.isatty():
        raise click.UsageError(f"without a terminal, nothing is asked: give {', '.join(missing)}")
    answers = {
        name: value or click.prompt(_QUESTIONS[name][0], default=_QUESTIONS[name][1]) for name, value in given.items()
    }
    if answers["algorithm"] not in names("algorithm"):
        raise unknown_part("algorithm", answers["algorithm"], names("algorithm"))
    name = re.sub(r"[^\w-]+", "-", file.stem).strip("-") or "run"
    write_checked(file, commented(settings(**answers, name=name), str(file)))
    click.echo(f"wrote {file}; next: jackfield run {file}")


def write_checked(file: Path, text: str) -> None:
    """Write a config file that ``jackfield config validate`` accepts, or raise what is wrong with it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{file.name}-", dir=file.parent) as folder:
        scratch = Path(folder, file.name)
        scratch.write_text(text, encoding="utf-8")
        check_file(str(scratch), (), "all")
        os.link(scratch, file)  # unlike a rename, it replaces no file


@click.command()
def schema() -> None:
    """Print the JSON Schema of config files, with the settings of the plugins that are installed here.

    Editors complete and check a YAML file by it. A plugin that cannot be used is left out, and named on stderr.
    """
    found, left_out = run_schema(discover())
    for label, error in left_out.items():
        click.echo(f"left out: {label}: {error.message}", err=True)
    click.echo(json.dumps(found, indent=1, ensure_ascii=False))
