"""The command line. Each command is imported when it is used, so that ``--help`` and ``plugins list`` are quick.

Exit codes: 0 done; 1 a Jackfield error, printed on stderr (with ``--json``: as an object on stdout); 2 wrong usage;
130 interrupted by SIGINT.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import click

from jackfield import __version__
from jackfield.errors import JackfieldError
from jackfield.imports import own_process

__all__ = ["COMMANDS", "json_option", "main"]

#: Command to the object that implements it and its line of ``jackfield --help``.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("jackfield.cli.run:run", "Do the run that a configuration file describes."),
    "replicas": ("jackfield.cli.replicas:replicas", "Look at a run's replicas while it goes on; add or remove some."),
    "checkpoint": ("jackfield.cli.checkpoint:checkpoint", "Look at a run's checkpoints, and take models out of them."),
    "queue": ("jackfield.cli.queue:queue", "Look at the rows of a checkpointed queue; serve a queue's controller."),
    "config": ("jackfield.cli.config:config", "Look at a run's configuration."),
    "plugins": ("jackfield.cli.plugins:plugins", "Look at the installed plugins."),
    "env": ("jackfield.cli.env:env", "Make environments for workers with an interpreter of their own."),
    "algorithms": ("jackfield.cli.algorithms:algorithms", "Look at algorithms and their parts."),
}

_JSON = "jackfield.json"


class _LazyGroup(click.Group):
    """A group whose commands are imported when one is called, and whose errors are printed for people or programs."""

    def __init__(self, *, commands: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(**options)
        self._lazy = commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing them for their help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._lazy.items()])

    def invoke(self, ctx: click.Context) -> Any:
        own_process()
        try:
            return super().invoke(ctx)
        except JackfieldError as error:
            if ctx.meta.get(_JSON):
                click.echo(json.dumps({"error": error.as_dict()}, indent=2))
            else:
                click.echo(str(error), err=True)
            ctx.exit(1)
        except KeyboardInterrupt:  # where the command does not handle the signal, or not yet
            click.echo("SIGINT: ending", err=True)
            ctx.exit(130)


def json_option(command: click.decorators.FC) -> click.decorators.FC:
    """``--json`` for a command, which gets it as ``as_json``; errors then come as JSON, too."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[_JSON] = value
        return value

    return click.option("--json", "as_json", is_flag=True, callback=remember, help="Print JSON.")(command)


@click.group(
    name="jackfield",
    cls=_LazyGroup,
    commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="jackfield")
def main() -> None:
    """Reinforcement-learning post-training of language models, built from plugins."""
