"""``jackfield run FILE [--address HOST:PORT] [--role explore|reward|train] [key.path=value ...]``."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from typing import TYPE_CHECKING, Literal

import click

if TYPE_CHECKING:
    from jackfield.compose.stopping import Stop
    from jackfield.config import RunConfig


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.argument("overrides", nargs=-1)
@click.option("--address", metavar="HOST:PORT", help="Do it in this Ray cluster.")
@click.option(
    "--role",
    type=click.Choice(["explore", "reward", "train"]),
    help="Do this part of it; the others are launched separately, and `jackfield queue serve` first.",
)
def run(
    file: str, overrides: tuple[str, ...], address: str | None, role: Literal["explore", "reward", "train"] | None
) -> None:
    """Do the run that FILE describes, after OVERRIDES such as schedule.steps=10."""
    from jackfield.config import load_config

    if address is not None:
        overrides = (*overrides, "cluster.name=ray", f"cluster.ray.address={address}")
    config = load_config(file, overrides)
    from jackfield.compose.stopping import Stop

    stop = Stop(config.checkpoint.grace_seconds)
    try:
        with stop.listening():
            _do(config, role, stop)
    except CancelledError:
        if stop.code is None:
            raise
        click.echo(f"ended; the same command goes on from the newest checkpoint in {config.folder}, if there is one")
        sys.exit(stop.code)


def _do(config: RunConfig, role: Literal["explore", "reward", "train"] | None, stop: Stop) -> None:
    from jackfield import compose

    result = compose.run(config, role=role or "all", stop=stop)
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
