"""``jackfield run FILE [--address HOST:PORT] [key.path=value ...]``."""

from __future__ import annotations

import click

__all__ = ["run"]


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.argument("overrides", nargs=-1)
@click.option("--address", metavar="HOST:PORT", help="Do it in this Ray cluster.")
def run(file: str, overrides: tuple[str, ...], address: str | None) -> None:
    """Do the run that FILE describes, after OVERRIDES such as schedule.steps=10."""
    from jackfield.compose import run as do_run
    from jackfield.config import load_config

    if address is not None:
        overrides = (*overrides, "runtime.name=ray", f"runtime.ray.address={address}")
    result = do_run(load_config(file, overrides))
    if result.finished_before:
        click.echo(
            f"{result.folder} holds the finished run; for more steps raise schedule.steps, else take another folder"
        )
    click.echo(f"{result.steps} steps done; model in {result.model}")
