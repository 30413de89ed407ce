"""Make a tiny language model, warm it up on demonstrations, and let GRPO teach it to ask an MCP server.

    python examples/mcp_tool/mcp_tool.py [--seed N] [--folder F] [key.path=value ...]

Overrides go to the GRPO run.
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
@click.option("--folder", default="runs/mcp_tool", show_default=True, type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def main(seed: int, folder: Path, overrides: tuple[str, ...]) -> None:
    """Run the example; OVERRIDES such as schedule.steps=20 change the GRPO run."""
    started = time.monotonic()
    try:
        example(seed, folder, overrides)
    except JackfieldError as error:
        click.echo(error, err=True)
        sys.exit(1)
    click.echo(f"whole example: {time.monotonic() - started:.0f} s")


def example(seed: int, folder: Path, overrides: tuple[str, ...]) -> None:
    """Make the task, warm up, train, draw."""
    made, own = folder / "made", [f"seed={seed}", "checkpoint.resume=false"]
    make_task(made, seed)
    warmup = [f"folder={folder / 'warmup'}", f"model.path={made / 'model'}"]
    run(load_config(HERE / "warmup.yaml", [*own, *warmup, f"data.train={made / 'demonstrations.jsonl'}"]))
    grpo = [f"folder={folder / 'grpo'}", f"model.path={folder / 'warmup' / 'model'}"]
    grpo += [f"data.train={made / 'questions.jsonl'}", f"data.eval={made / 'held_out.jsonl'}"]
    grpo += [f"tools.prices.mcp.command=[{sys.executable}, {HERE / 'prices.py'}]"]
    run(load_config(HERE / "grpo.yaml", [*own, *grpo, *overrides]))
    picture = folder / "learning_curve.png"
    plot_learning_curve([[folder / "grpo" / "metrics.jsonl"]], picture, "GRPO with an MCP server", target=0.9)
    click.echo(f"learning curve: {picture}")


if __name__ == "__main__":
    main()
