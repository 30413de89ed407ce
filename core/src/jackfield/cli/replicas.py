"""``jackfield replicas FOLDER [COUNT]``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from jackfield.cli import json_option

__all__ = ["replicas"]


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("count", type=int, required=False)
@click.option(
    "--deadline", type=float, default=3600.0, show_default=True, help="Seconds to wait until the run has COUNT."
)
@json_option
def replicas(folder: Path, count: int | None, deadline: float, as_json: bool) -> None:
    """List the replicas of the run that goes on in FOLDER; with COUNT, add or remove some until it has so many.

    One that is added gets requests once it has acknowledged the engine's weights. One that is removed gets none any
    more, and ends those that it has; after deadlines.drain seconds they are generated again on the others.
    """
    from jackfield.runtime.control import list_replicas, scale_replicas
    from jackfield.settings import unstructure

    states = list_replicas(folder) if count is None else scale_replicas(folder, count, seconds=deadline)
    if as_json:
        click.echo(json.dumps(unstructure(states), indent=2))
        return
    for state in states:
        version = "" if state.weight_version is None else f"  weights of version {state.weight_version}"
        load = f"  {state.running} running, {state.waiting} waiting"
        restarts = f"  {state.restarts} restarts" if state.restarts else ""
        further = "".join(f"  {text}" for text in (state.address, state.detail) if text)
        click.echo(f"replica {state.replica}: {state.state}{version}{load}{restarts}{further}")
