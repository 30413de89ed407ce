"""``jackfield config show|explain|validate FILE``."""

from __future__ import annotations

import click

from jackfield.cli import config_arguments, json_option, show


@click.group()
def config() -> None:
    """Show, explain and validate a config file."""


@config.command("show")
@config_arguments
def show_config(file: str, overrides: tuple[str, ...]) -> None:
    """Print the whole resolved configuration, defaults included, as YAML."""
    from jackfield import config

    click.echo(config.show(config.load_config(file, overrides)), nl=False)


@config.command("explain")
@config_arguments
def explain_config(file: str, overrides: tuple[str, ...]) -> None:
    """Print every setting with its value, what it does, and its default where the value differs."""
    from jackfield import config
    from jackfield.plugins import discover

    for path, value, default, text in config.explain(config.load_config(file, overrides), discover()):
        changed = "" if value == default else f"  (default: {default!r})"
        click.echo(f"{path} = {value!r}{changed}" + (f"\n    {text}" if text else ""))


@config.command()
@config_arguments
@json_option
def validate(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check all settings, those of plugins and of algorithm parts included. Paths in it need not exist.

    With --json, print what the algorithm is and what it needs, once every choice is made.
    """
    from jackfield.compose.checks import hooks_of
    from jackfield.compose.inputs import make_sources
    from jackfield.compose.resolve import resolve_algorithm, rollout_bound
    from jackfield.config import load_config, validate_plugins
    from jackfield.plugins import discover

    loaded, registry = load_config(file, overrides), discover()
    validate_plugins(loaded, registry)
    hooks_of(loaded, registry)
    make_sources(loaded.mixing)
    algorithm = resolve_algorithm(loaded, registry.find("rollout", loaded.rollout.name))
    described = {**algorithm.as_plain(), "replica_bound": rollout_bound(loaded)}
    show({"file": file, "algorithm": described}, [f"{file}: valid"])
