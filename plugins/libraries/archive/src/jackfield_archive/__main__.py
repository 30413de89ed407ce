"""``python -m jackfield_archive tasks|rescore``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from jackfield.errors import JackfieldError
from jackfield_archive.learning import write_tasks
from jackfield_archive.scoring import load_reward, rescore

_ARCHIVE = click.argument("archive", type=click.Path(path_type=Path))


class Group(click.Group):
    """A click group that prints Jackfield's errors without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except JackfieldError as error:
            click.echo(error, err=True)
            sys.exit(1)


@click.group("jackfield_archive", cls=Group)
def main() -> None:
    """Use the archive that a run with queue.archive has written. ARCHIVE is its folder, or one of its files."""


@main.command()
@_ARCHIVE
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--min-reward", type=float, help="Leave out groups whose best reward is lower.")
def tasks(archive: Path, out: Path, min_reward: float | None) -> None:
    """Write the best sample of each group to OUT, a file of JSON lines for data.train (sft)."""
    click.echo(f"{write_tasks(archive, out, min_reward=min_reward)} tasks in {out}")


@main.command("rescore")
@_ARCHIVE
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--model", required=True, help="Folder of the model whose tokens these are.")
@click.option("--reward", required=True, help="The section reward of a configuration, such as '{name: rules}'.")
@click.option("--seconds", default=60.0, show_default=True, help="Deadline of a score.")
def rescore_(archive: Path, out: Path, model: str, reward: str, seconds: float) -> None:
    """Write the samples with the rewards of another reward plugin to the folder OUT."""
    from transformers import AutoTokenizer

    settings = yaml.safe_load(reward)
    if not isinstance(settings, dict):
        raise click.BadParameter("expected a mapping such as '{name: rules, method: exact}'", param_hint="--reward")
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=Path(model).is_dir())

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    counts = asyncio.run(rescore(archive, out, load_reward(settings), decode, deadline_seconds=seconds))
    click.echo(f"{counts.total()} samples in {out}" + "".join(f", {number} {name}" for name, number in counts.items()))


if __name__ == "__main__":
    main()
