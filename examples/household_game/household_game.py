"""A model that is made from nothing learns to do errands in a text game, from demonstrations and then from rewards.

    python examples/household_game/household_game.py [--seed N] [--folder F] [key.path=value ...]

Overrides go to the run with GiGPO. Each step of an episode is a sequence of its own, with a reward of its own.
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
@click.option("--folder", default="runs/household_game", show_default=True, type=click.Path(path_type=Path))
@click.option("--warmup", multiple=True, metavar="KEY=VALUE", help="Change a setting of the warm-up. May be repeated.")
@click.argument("overrides", nargs=-1)
def main(seed: int, folder: Path, warmup: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Run the example; OVERRIDES such as schedule.steps=20 change the run with GiGPO."""
    started = time.monotonic()
    try:
        household_game(seed, folder, warmup, overrides)
    except JackfieldError as error:
        click.echo(error, err=True)
        sys.exit(1)
    click.echo(f"whole example: {time.monotonic() - started:.0f} s")


def household_game(seed: int, folder: Path, warmup: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Make houses and a model, warm up, train, draw."""
    made = folder / "made"
    make_task(made, seed)
    own = [f"seed={seed}", "checkpoint.resume=false", f"data.eval={made / 'held_out.jsonl'}"]
    first = [f"folder={folder / 'warmup'}", f"model.path={made / 'model'}"]
    first += [f"data.train={made / 'demonstrations.jsonl'}"]
    run(load_config(HERE / "warmup.yaml", [*own, *first, *warmup]))
    gigpo = [f"folder={folder / 'gigpo'}", f"model.path={folder / 'warmup' / 'model'}"]
    run(load_config(HERE / "gigpo.yaml", [*own, *gigpo, f"data.train={made / 'errands.jsonl'}", *overrides]))
    curves = [folder / name / "metrics.jsonl" for name in ("warmup", "gigpo")]
    picture = folder / "learning_curve.png"
    plot_learning_curve([curves], picture, "Errands done in houses not seen before: warm-up, then GiGPO", target=0.9)
    click.echo(f"learning curve: {picture}")


if __name__ == "__main__":
    main()
