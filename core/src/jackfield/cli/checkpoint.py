"""``jackfield checkpoint list|export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jackfield.cli import json_option, show


@click.group()
def checkpoint() -> None:
    """List checkpoints and export models."""


@checkpoint.command("list")
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
def list_checkpoints(folder: Path, as_json: bool) -> None:
    """List the checkpoints of the run in FOLDER, the oldest first, and name those whose files are not all there."""
    from jackfield.compose.export import run_checkpoints
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
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--merge", is_flag=True, help="Merge the LoRA adapter into its base model, and write the whole model.")
def export(folder: Path, out: Path, merge: bool) -> None:
    """Write the model of a checkpoint to OUT, a Hugging Face folder for from_pretrained.

    FOLDER is a checkpoint, or a run's folder, whose newest whole checkpoint is taken. Of a run that trains an adapter,
    OUT is the adapter's folder, for PEFT, unless --merge is given.
    """
    from jackfield.compose.export import export_checkpoint, find_checkpoint

    found = find_checkpoint(folder)
    export_checkpoint(found, out, merge=merge)
    click.echo(f"model of step {found.step} in {out}")
