"""``jackfield env create NAME FILE``."""

from __future__ import annotations

import time

import click

__all__ = ["env"]


@click.group()
def env() -> None:
    """Make environments for workers that have an interpreter of their own."""


@env.command()
@click.argument("name")
@click.argument("file", type=click.Path(dir_okay=False))
@click.argument("overrides", nargs=-1)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Seconds for all of it.",
)
def create(name: str, file: str, overrides: tuple[str, ...], deadline: float) -> None:
    """Make the environment NAME of the configuration FILE with venv and pip, and try its workers' plugins there.

    Jackfield, the plugins that run there and the checkpoint engine are installed as they are here. An environment that
    is there as described is left as it is.
    """
    from jackfield.compose.environments import check_environment, make_environment
    from jackfield.config import load_config
    from jackfield.plugins import discover

    config, registry, started = load_config(file, overrides), discover(), time.monotonic()
    folder, made = make_environment(config, registry, name, deadline)
    seconds = time.monotonic() - started
    click.echo(f"{folder}: made in {seconds:.0f} s" if made else f"{folder}: there already")
    for label in check_environment(config, registry, name):
        click.echo(f"ok      {label} can run there")
