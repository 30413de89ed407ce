"""A program that uses OpenAI's client is trained as it is: its requests go to the run's replicas through the gateway.

    python examples/openai_program/openai_program.py [--seed N] [--folder F] [key.path=value ...]

The quickstart's model is made and warmed up first. Overrides go to the GRPO run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

HERE = Path(__file__).parent
LONGER = ("data.groups_per_batch=64", "optimizer.lr=2.0e-3", "evaluation.every=100")
sys.path.insert(0, str(HERE.parent / "quickstart"))

from make_task import make_task  # noqa: E402 - it is beside the quickstart
from quickstart import warm_up  # noqa: E402

from jackfield.compose import run  # noqa: E402
from jackfield.config import load_config  # noqa: E402
from jackfield.errors import JackfieldError  # noqa: E402
from jackfield.observe import plot_learning_curve  # noqa: E402


@click.command()
@click.option("--seed", default=1, show_default=True, help="Seed of the whole example.")
@click.option("--folder", default="runs/openai_program", show_default=True, type=click.Path(path_type=Path))
@click.option("--warmup-steps", default=None, type=int, help="Shorten the warm-up, to try something out.")
@click.argument("overrides", nargs=-1)
def main(seed: int, folder: Path, warmup_steps: int | None, overrides: tuple[str, ...]) -> None:
    """Run the example; OVERRIDES such as schedule.steps=20 change the GRPO run."""
    try:
        train(seed, folder, warmup_steps, overrides)
    except JackfieldError as error:
        click.echo(error, err=True)
        sys.exit(1)


def train(seed: int, folder: Path, warmup_steps: int | None, overrides: tuple[str, ...]) -> None:
    """Make model and tasks, warm up, train the program, draw."""
    made = folder / "made"
    make_task(made, seed)
    # harder problems than the quickstart's take more supervised steps
    curve = warm_up(seed, folder, made, warmup_steps or 400, LONGER)
    own = [
        f"seed={seed}",
        f"folder={folder / 'grpo'}",
        "checkpoint.resume=false",
        f"model.path={folder / 'warmup' / 'model'}",
        f"data.train={made / 'problems.jsonl'}",
        f"data.eval={made / 'held_out.jsonl'}",
        f"agent.program.call={HERE / 'program.py'}:solve",
    ]
    run(load_config(HERE / "grpo.yaml", [*own, *overrides]))
    picture = folder / "learning_curve.png"
    title = "Warm-up, then GRPO through the gateway"
    plot_learning_curve([[curve, folder / "grpo" / "metrics.jsonl"]], picture, title, target=0.9)
    click.echo(f"learning curve: {picture}")


if __name__ == "__main__":
    main()
