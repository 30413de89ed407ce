"""The main job: make a tiny language model at random, fine-tune it on demonstrations (SFT), and train it with GRPO.

    python examples/quickstart/quickstart.py [--seed N] [--folder F] [key.path=value ...]

Overrides go to the GRPO run. ``model.path=<Hugging Face folder>`` trains that model (nothing is made, and there is no
SFT), ``data.train=<GSM8K train.jsonl>`` trains on those problems.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
from make_task import EASY, make_task

from jackfield.compose import run
from jackfield.config import load_config
from jackfield.errors import JackfieldError
from jackfield.observe import plot_learning_curve

HERE = Path(__file__).parent
PHASES = {"warmup": "SFT", "grpo": "GRPO"}  #: by the name of the folder
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the model is too small for several


@click.command()
@click.option("--seed", default=1, show_default=True, help="Seed of the whole example.")
@click.option("--folder", default="runs/quickstart", show_default=True, type=click.Path(path_type=Path))
@click.option("--warmup", multiple=True, metavar="KEY=VALUE", help="Change a setting of the SFT. May be repeated.")
@click.argument("overrides", nargs=-1)
def main(seed: int, folder: Path, warmup: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Run the example; OVERRIDES such as schedule.steps=20 change the GRPO run."""
    started = time.monotonic()
    try:
        quickstart(seed, folder, warmup, overrides)
    except JackfieldError as error:
        click.echo(error, err=True)
        sys.exit(1)
    click.echo(f"whole example: {time.monotonic() - started:.0f} s")


def quickstart(seed: int, folder: Path, warmup: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Make what is not given, run SFT and GRPO, and draw the learning curve after each."""
    made, curves = folder / "made", []
    given = {override.partition("=")[0] for override in overrides}
    own = [f"seed={seed}", f"folder={folder / 'grpo'}", "checkpoint.resume=false"]  # each try starts from step 0
    if not {"model.path", "data.train"} <= given:
        make_task(made, seed, difficulty=EASY)
    if "model.path" not in given:
        curves.append(warm_up(seed, folder, made, warmup))
        draw(curves, folder)
        own.append(f"model.path={folder / 'warmup' / 'model'}")
    if "data.train" not in given:
        own += [f"data.train={made / 'problems.jsonl'}", f"data.eval={made / 'held_out.jsonl'}"]
    elif "data.eval" not in given:
        own.append("evaluation.every=0")  # own problems come without held-out ones
    run(load_config(HERE / "grpo.yaml", [*own, *overrides]))
    if curves:
        draw([*curves, folder / "grpo" / "metrics.jsonl"], folder)
        click.echo(
            "SFT learned from noisy demonstrations; what rose after it, rose from rewards of 0 and 1 alone (GRPO)"
        )


def draw(curves: Sequence[Path], folder: Path) -> None:
    """Print the accuracy after each phase's evaluations, and draw it as an image."""
    spent = f"{time.process_time():.0f} s of processor time"
    click.echo(f"\nlearning curve after {spent}: accuracy (greedy pass@1) on held-out problems")
    for file in curves:
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        for line in (line for line in lines if line["kind"] == "evaluation"):
            bar = "█" * round(40 * line["score"])
            click.echo(f"{PHASES[file.parent.name]:>5}  step {line['step']:>3}  {line['score']:.3f}  {bar}")
    picture = folder / "learning_curve.png"
    plot_learning_curve([curves], picture, "SFT, then GRPO", target=0.9)
    click.echo(f"as an image: {picture}\n")


def warm_up(seed: int, folder: Path, made: Path, others: Sequence[str]) -> Path:
    """Supervised fine-tuning on the demonstrations, with other overrides; returns the metrics file."""
    overrides = [
        f"seed={seed}",
        f"folder={folder / 'warmup'}",
        "checkpoint.resume=false",
        f"model.path={made / 'model'}",
        f"data.train={made / 'demonstrations.jsonl'}",
        f"data.eval={made / 'held_out.jsonl'}",
        *others,
    ]
    return run(load_config(HERE / "warmup.yaml", overrides)).folder / "metrics.jsonl"


if __name__ == "__main__":
    main()
