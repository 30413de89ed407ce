"""``jackfield replicas FOLDER [COUNT]``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from jackfield.cli import deadline_option, json_option, show

if TYPE_CHECKING:
    from jackfield.cluster.replica import ReplicaState


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("count", type=int, required=False)
@deadline_option(3600.0, "Seconds to wait until the run has COUNT.")
@json_option
def replicas(folder: Path, count: int | None, deadline: float, as_json: bool) -> None:
    """List the replicas of the run that goes on in FOLDER; with COUNT, add or remove some until it has so many.

    A replica that is added gets requests once it has acknowledged the engine's weights. A replica that is removed gets
    no new requests and ends those that it has; after deadlines.drain seconds they are generated again on the others.
    """
    import attrs

    from jackfield.cluster.control import list_replicas, scale_replicas

    states = list_replicas(folder) if count is None else scale_replicas(folder, count, seconds=deadline)
    show([attrs.asdict(state) for state in states], map(_line, states))


def _line(state: ReplicaState) -> str:
    version = "" if state.weight_version is None else f"  weights of version {state.weight_version}"
    load = f"  {state.running} running, {state.waiting} waiting"
    restarts = f"  {state.restarts} restarts" if state.restarts else ""
    further = "".join(f"  {text}" for text in (state.address, state.detail) if text)
    return f"replica {state.replica}: {state.state}{version}{load}{restarts}{further}"
