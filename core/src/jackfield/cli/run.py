"""The commands ``jackfield run``, ``jackfield replicas`` and ``jackfield checkpoint``."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from pathlib import Path
from typing import Any, Literal

import click

from jackfield.cli import config_arguments, deadline_option, json_option, show

_FOLDER = click.argument("folder", type=click.Path(path_type=Path))


@click.command()
@config_arguments
@click.option("--address", metavar="HOST:PORT", help="Run in this Ray cluster.")
@click.option(
    "--role",
    type=click.Choice(["explore", "reward", "train"]),
    help="Run only this role. Start `jackfield queue serve` first, and the other roles separately.",
)
def run(
    file: str, overrides: tuple[str, ...], address: str | None, role: Literal["explore", "reward", "train"] | None
) -> None:
    """Run training from the config FILE with OVERRIDES such as schedule.steps=10."""
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


@click.command()
@_FOLDER
@click.argument("count", type=int, required=False)
@deadline_option(3600.0, "Seconds to wait until the run has COUNT.")
@json_option
def replicas(folder: Path, count: int | None, deadline: float, as_json: bool) -> None:
    """List replicas of the active run in FOLDER, or add and remove some until it has COUNT.

    A new replica gets requests once it has acknowledged the engine's weights. A removed replica gets no new requests
    and finishes its current ones; after deadlines.drain seconds, the rest are generated again on other replicas.
    """
    import attrs

    from jackfield.cluster.control import list_replicas, scale_replicas

    states = list_replicas(folder) if count is None else scale_replicas(folder, count, seconds=deadline)
    lines = []
    for state in states:
        version = "" if state.weight_version is None else f"  weights of version {state.weight_version}"
        restarts = f"  {state.restarts} restarts" if state.restarts else ""
        further = "".join(f"  {text}" for text in (state.address, state.detail) if text)
        load = f"  {state.running} running, {state.waiting} waiting"
        lines.append(f"replica {state.replica}: {state.state}{version}{load}{restarts}{further}")
    show([attrs.asdict(state) for state in states], lines)


@click.group()
def checkpoint() -> None:
    """List checkpoints and export models."""


@checkpoint.command("list")
@_FOLDER
@json_option
def list_checkpoints(folder: Path, as_json: bool) -> None:
    """List checkpoints of the run in FOLDER, oldest first; mark those with missing files."""
    from jackfield.compose.folder import run_checkpoints
    from jackfield.trainer import Checkpoint

    rows: list[dict[str, Any]] = []
    lines = []
    for step, each in run_checkpoints(folder).items():
        if isinstance(each, Checkpoint):
            rows.append({"step": step, "folder": str(each.folder), "bytes": each.bytes})
            lines.append(f"step {step}: {each.folder}, {each.bytes} bytes")
        else:
            damaged = {"where": str(each.where), "expected": each.expected, "found": each.found}
            rows.append({"step": step, "damaged": damaged})
            lines.append(f"step {step}: damaged: {each.where}: {each.found}, expected {each.expected}")
    show(rows, lines)


@checkpoint.command()
@_FOLDER
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--merge", is_flag=True, help="Merge the LoRA adapter into its base model and write the whole model.")
def export(folder: Path, out: Path, merge: bool) -> None:
    """Write the model of a checkpoint to OUT, a Hugging Face folder for from_pretrained.

    FOLDER is a checkpoint or a run's folder (its newest undamaged checkpoint is used). If the run trains an adapter,
    OUT holds the adapter for PEFT, unless --merge is given.
    """
    from jackfield.compose.folder import export_checkpoint, find_checkpoint

    found = find_checkpoint(folder)
    export_checkpoint(found, out, merge=merge)
    click.echo(f"model of step {found.step} in {out}")
