"""The command line. The commands are imported only when one is used.

Exit codes: 0 success; 1 a Jackfield error, printed on stderr (with ``--json``: as an object on stdout); 2 wrong usage;
130 interrupted by SIGINT.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import click

from jackfield import __version__
from jackfield.errors import JackfieldError, PluginError, RunError
from jackfield.imports import own_process

__all__ = ["COMMANDS", "LazyGroup", "config_arguments", "deadline_option", "json_option", "main", "report", "show"]

#: The object that implements each command, and the command's line in ``jackfield --help``.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("jackfield.cli.commands:run", "Run training from a config file."),
    "replicas": ("jackfield.cli.commands:replicas", "List, add or remove the replicas of an active run."),
    "checkpoint": ("jackfield.cli.commands:checkpoint", "List checkpoints and export models."),
    "queue": ("jackfield.cli.queue:queue", "Inspect, import, export and serve queues."),
    "config": ("jackfield.cli.commands:config", "Show, explain and validate a config file."),
    "plugins": ("jackfield.cli.commands:plugins", "List, check and create plugins."),
    "env": ("jackfield.cli.commands:env", "Create environments for workers."),
    "algorithms": ("jackfield.cli.commands:algorithms", "List algorithms and their parts."),
}

_JSON = "jackfield.json"


class LazyGroup(click.Group):
    """A click group that imports a command when it is called, and prints errors as text or JSON."""

    def __init__(self, *, commands: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(**options)
        self._lazy = commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        except ModuleNotFoundError as error:
            if error.name != "jackfield_conformance":
                raise
        needed, fix = "jackfield-conformance", f"{sys.executable} -m pip install jackfield-conformance"
        message, details = f"jackfield {ctx.info_name} {cmd_name} needs {needed}", {"where": sys.executable, "fix": fix}
        report(ctx, PluginError(message, expected=needed, found="not installed", **details), exit_code=2)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._lazy.items()])

    def invoke(self, ctx: click.Context) -> Any:
        own_process()
        try:
            return super().invoke(ctx)
        except JackfieldError as error:
            report(ctx, error)
        except OSError as error:  # a file argument cannot be read or written
            if error.filename is None:
                raise
            report(ctx, RunError(f"a file cannot be used: {error}", code="run.storage", where=str(error.filename)))
        except KeyboardInterrupt:  # the command does not handle the signal, or not yet
            click.echo("SIGINT: ending", err=True)
            ctx.exit(130)


def report(ctx: click.Context, error: Exception, *, exit_code: int = 1) -> NoReturn:
    """Print an error and exit. With ``--json``, print it as an object on stdout."""
    fields = error.as_dict() if isinstance(error, JackfieldError) else {"message": f"{type(error).__name__}: {error}"}
    if ctx.meta.get(_JSON):
        click.echo(json.dumps({"error": fields}, indent=2))
    else:
        click.echo(str(error) if "code" in fields else f"could not run: {fields['message']}", err=True)
    ctx.exit(exit_code)


def show(found: Any, *columns: str) -> None:
    """Print the result of a command: as JSON with ``--json``, else as YAML, or records as a table with ``columns``.

    The table leaves out columns without values. Objects in a column are printed as YAML below their record.
    """
    text = json.dumps(found, indent=2, ensure_ascii=False)
    if click.get_current_context().meta.get(_JSON):
        click.echo(text)
    elif not columns:
        click.echo(_yaml(json.loads(text)), nl=False)
    elif not found:
        click.echo("none")
    else:
        cells = {name: [name.replace("_", " ").upper(), *(_cell(one.get(name)) for one in found)] for name in columns}
        shown = [column for column in cells.values() if any(cell != "-" for cell in column[1:])]
        widths = [max(map(len, column)) for column in shown]
        for record, row in zip([{}, *found], zip(*shown, strict=True), strict=True):
            click.echo("  ".join(map(str.ljust, row, widths)).rstrip())
            if below := {name: record[name] for name in columns if isinstance(record.get(name), Mapping)}:
                click.echo(textwrap.indent(_yaml(below, flow=False), "    "), nl=False)


def _cell(value: Any) -> str:
    """Return a value as it is in a table; ``-`` if it is empty or printed below."""
    if value is None or isinstance(value, Mapping):
        return "-"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text.replace("\n", " ") or "-"


def _yaml(value: Any, *, flow: bool | None = None) -> str:
    """Format plain values as YAML without line breaks in texts. By default, objects of plain values are on one line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def represent_str(self, data: str) -> yaml.ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\n" in data else None)

    Dumper.add_representer(str, Dumper.represent_str)
    options: Any = {"allow_unicode": True, "default_flow_style": flow, "sort_keys": False, "width": math.inf}
    return str(yaml.dump(value, Dumper=Dumper, **options))


def config_arguments(command: click.decorators.FC) -> click.decorators.FC:
    """Add the arguments FILE and OVERRIDES, which :func:`jackfield.config.load_config` takes."""
    command = click.argument("overrides", nargs=-1)(command)
    return click.argument("file", type=click.Path(dir_okay=False))(command)


def deadline_option(default: float, help: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Return the option ``--deadline``, in seconds."""
    above_zero = click.FloatRange(min=0, min_open=True)
    return click.option("--deadline", type=above_zero, default=default, show_default=True, help=help)


def json_option(command: click.decorators.FC) -> click.decorators.FC:
    """Add ``--json`` to a command as ``as_json``; results and errors are then JSON."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[_JSON] = value
        return value

    return click.option("--json", "as_json", is_flag=True, callback=remember, help="Print JSON.")(command)


@click.group("jackfield", cls=LazyGroup, commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jackfield")
def main() -> None:
    """Reinforcement-learning post-training of language models, built from plugins."""
