"""Train a tiny vision-language model, made from a configuration, to answer questions about pictures.

python examples/vision/vision.py [--seed N] [--folder F] [key.path=value ...]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click
from make_task import make_task

from jackfield.compose import run
from jackfield.config import load_config
from jackfield.errors import JackfieldError
from jackfield.observe import plot_learning_curve

HERE = Path(__file__).parent
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@click.command()
@click.option("--seed", default=1, show_default=True, help="Seed of the whole example.")
@click.option("--folder", default="runs/vision", show_default=True, type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def main(seed: int, folder: Path, overrides: tuple[str, ...]) -> None:
    """Run the example; OVERRIDES such as schedule.steps=20 change the run."""
    started, made = time.monotonic(), folder / "made"
    own = [f"seed={seed}", f"folder={folder / 'grpo'}", "checkpoint.resume=false", f"model.path={made / 'model'}"]
    own += [f"data.train={made / 'problems.jsonl'}", f"data.eval={made / 'held_out.jsonl'}"]
    try:
        make_task(made, seed)
        run(load_config(HERE / "grpo.yaml", [*own, *overrides]))
    except JackfieldError as error:
        click.echo(error, err=True)
        sys.exit(1)
    picture = folder / "learning_curve.png"
    plot_learning_curve([[folder / "grpo" / "metrics.jsonl"]], picture, "Questions about pictures", target=0.9)
    click.echo(f"learning curve: {picture}")
    click.echo(f"whole example: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
