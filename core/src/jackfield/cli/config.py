"""The commands ``jackfield config``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from jackfield.cli.commands import config_arguments, json_option, show

if TYPE_CHECKING:
    from jackfield.algorithms.settings import ResolvedAlgorithm
    from jackfield.config import RunConfig
    from jackfield.plugins import Registry


@click.group()
def config() -> None:
    """Show, explain and validate a config file."""


@config.command("show")
@config_arguments
def show_config(file: str, overrides: tuple[str, ...]) -> None:
    """Print the whole resolved configuration as YAML, including defaults."""
    from jackfield import config

    shown = map(config.show, config.load_stages(file, overrides).values())
    click.echo("---\n".join(shown), nl=False)


@config.command("explain")
@config_arguments
def explain_config(file: str, overrides: tuple[str, ...]) -> None:
    """Say what the schedule does, and print every setting with its value and description, and a different default."""
    from jackfield import config
    from jackfield.compose.schedules import describe
    from jackfield.plugins import discover

    loaded, registry = config.load_config(file, overrides), discover()
    click.echo("\n".join([*describe(loaded, _algorithm(loaded, registry)), ""]))
    for path, value, default, text in config.explain(loaded, registry):
        changed = "" if value == default else f"  (default: {default!r})"
        click.echo(f"{path} = {value!r}{changed}" + (f"\n    {text}" if text else ""))


@config.command()
@config_arguments
@json_option
def validate(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check all settings, including those of plugins and components, and print the resolved algorithm.

    Paths need not exist.
    """
    from jackfield.config import load_config, plugin_settings
    from jackfield.plugins import discover

    loaded, registry = load_config(file, overrides), discover()
    plugin_settings(loaded, registry)
    algorithm = _algorithm(loaded, registry).as_plain()
    show({"file": file, "status": "valid", "algorithm": {**algorithm, "replica_bound": loaded.rollout_bound}})


def _algorithm(loaded: RunConfig, registry: Registry) -> ResolvedAlgorithm:
    """Return the algorithm of a run, with the parts of its plugins."""
    from jackfield.compose.checks import hooks_of
    from jackfield.compose.resolve import resolve_algorithm

    hooks_of(loaded, registry)
    return resolve_algorithm(loaded, registry.resolve(loaded.rollout.name, "rollout").usable())
