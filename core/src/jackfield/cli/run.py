"""``jackfield run FILE [--address HOST:PORT] [--role explore|reward|train] [key.path=value ...]``."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from typing import Literal

import click

from jackfield.cli import config_arguments


@click.command()
@config_arguments
@click.option("--address", metavar="HOST:PORT", help="Run in this Ray cluster.")
@click.option(
    "--role",
    type=click.Choice(["explore", "reward", "train"]),
    help="Run this role alone; the others are launched separately, and `jackfield queue serve` first.",
)
def run(
    file: str, overrides: tuple[str, ...], address: str | None, role: Literal["explore", "reward", "train"] | None
) -> None:
    """Run training from the config FILE, after OVERRIDES such as schedule.steps=10."""
    from jackfield.config import load_config

    if address is not None:
        overrides = (*overrides, "cluster.name=ray", f"cluster.ray.address={address}")
    config = load_config(file, overrides)
    from jackfield.compose.stopping import Stop

    stop = Stop(config.checkpoint.grace_seconds)
    try:
        with stop.listening():
            from jackfield import compose

            result = compose.run(config, role=role or "all", stop=stop)
    except CancelledError:
        if stop.code is None:
            raise
        click.echo(f"ended; the same command goes on from the newest checkpoint in {config.folder}, if there is one")
        sys.exit(stop.code)
    if role == "explore":
        click.echo(f"explored up to weights {result.steps}; see {result.folder}")
    elif role == "reward":
        click.echo(f"{result.steps} groups rewarded; see {result.folder}")
    elif result.stopped:
        click.echo(f"stopped after {result.steps} steps; the same command goes on")
        sys.exit(stop.code)
    else:
        if result.finished_before:
            more = "for more steps raise schedule.steps, else take another folder"
            click.echo(f"{result.folder} holds the finished run; {more}")
        click.echo(f"{result.steps} steps done; model in {result.model}")
