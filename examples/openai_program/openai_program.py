"""A program that uses OpenAI's client is trained as it is: its requests go to the run's replicas through the gateway.

    python examples/openai_program/openai_program.py [--seed N] [--folder F] [key.path=value ...]

The quickstart's model is made and warmed up first. Overrides go to the GRPO run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "quickstart"
LONGER = ["data.groups_per_batch=64", "optimizer.lr=2.0e-3", "evaluation.every=100"]  # its problems are harder
LONGER += ["schedule.steps=400", "optimizer.total_steps=400"]
sys.path.insert(0, str(QUICKSTART))

from make_task import make_task  # noqa: E402 - it is beside the quickstart

from jackfield.compose import run  # noqa: E402
from jackfield.config import load_config  # noqa: E402
from jackfield.errors import JackfieldError  # noqa: E402
from jackfield.observe import plot_learning_curve  # noqa: E402


@click.command()
@click.option("--seed", default=1, show_default=True, help="Seed of the whole example.")
@click.option("--folder", default="runs/openai_program", show_default=True, type=click.Path(path_type=Path))
@click.option("--warmup", multiple=True, metavar="KEY=VALUE", help="Change a setting of the warm-up. May be repeated.")
@click.argument("overrides", nargs=-1)
def main(seed: int, folder: Path, warmup: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Run the example; OVERRIDES such as schedule.steps=20 change the GRPO run."""
    try:
        train(seed, folder, warmup, overrides)
    except JackfieldError as error:
        click.echo(error, err=True)
        sys.exit(1)


def train(seed: int, folder: Path, warmup: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Make model and tasks, warm up, train the program, draw."""
    made = folder / "made"
    make_task(made, seed)
    own = [f"seed={seed}", "checkpoint.resume=false", f"data.eval={made / 'held_out.jsonl'}"]
    first = [f"folder={folder / 'warmup'}", f"model.path={made / 'model'}"]
    first += [f"data.train={made / 'demonstrations.jsonl'}"]
    run(load_config(QUICKSTART / "warmup.yaml", [*own, *first, *LONGER, *warmup]))
    grpo = [f"folder={folder / 'grpo'}", f"model.path={folder / 'warmup' / 'model'}"]
    grpo += [f"data.train={made / 'problems.jsonl'}", f"agent.program.call={HERE / 'program.py'}:solve"]
    run(load_config(HERE / "grpo.yaml", [*own, *grpo, *overrides]))
    curves = [folder / name / "metrics.jsonl" for name in ("warmup", "grpo")]
    picture = folder / "learning_curve.png"
    title = "Warm-up, then GRPO through the gateway"
    plot_learning_curve([curves], picture, title, target=0.9)
    click.echo(f"learning curve: {picture}")


if __name__ == "__main__":
    main()
