"""``jackfield run FILE [--address HOST:PORT] [--role explore|reward|train] [key.path=value ...]``."""

from __future__ import annotations

from typing import Literal

import click

__all__ = ["run"]


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
    from jackfield.compose import explore, reward
    from jackfield.compose import run as do_run
    from jackfield.config import load_config

    if address is not None:
        overrides = (*overrides, "runtime.name=ray", f"runtime.ray.address={address}")
    config = load_config(file, overrides)
    if role == "explore":
        explored = explore(config)
        click.echo(f"explored up to weights {explored.version}; see {explored.folder}")
        return
    if role == "reward":
        rewarded = reward(config)
        click.echo(f"{rewarded.groups} groups rewarded; see {rewarded.folder}")
        return
    result = do_run(config, role="all" if role is None else role)
    if result.finished_before:
        click.echo(
            f"{result.folder} holds the finished run; for more steps raise schedule.steps, else take another folder"
        )
    click.echo(f"{result.steps} steps done; model in {result.model}")
