"""Two agents that share a model learn to work together: what one writes is all that the other sees.

    python examples/two_agents/two_agents.py [--seed N] [--folder F] [key.path=value ...]

The problems are the quickstart's. Demonstrations teach both agents what to write, but the planner's often add where
the problem asks to subtract. Whether the solver's answer is right is the only reward, and both agents get it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from jackfield.compose import run
from jackfield.config import load_config
from jackfield.errors import JackfieldError
from jackfield.observe import plot_learning_curve

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "quickstart"))
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

SIZES = {"held_out": 240, "demonstrations": 4000, "problems": 4000}
SUBTRACTIONS = 0.6  #: share of the problems


@click.command()
@click.option("--seed", default=1, show_default=True, help="Seed of the whole example.")
@click.option("--folder", default="runs/two_agents", show_default=True, type=click.Path(path_type=Path))
@click.option("--warmup", multiple=True, metavar="KEY=VALUE", help="Change a setting of the warm-up. May be repeated.")
@click.argument("overrides", nargs=-1)
def main(seed: int, folder: Path, warmup: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Run the example; OVERRIDES such as schedule.steps=20 change the run with GRPO."""
    started = time.monotonic()
    try:
        two_agents(seed, folder, warmup, overrides)
    except JackfieldError as error:
        click.echo(error, err=True)
        sys.exit(1)
    click.echo(f"whole example: {time.monotonic() - started:.0f} s")


def two_agents(seed: int, folder: Path, warmup: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Make problems and a model, warm up, train, draw."""
    made = folder / "made"
    make_task(made, seed)
    own = [f"seed={seed}", "checkpoint.resume=false", f"agent.workflow={HERE / 'plan_and_solve.py'}:PlanAndSolve"]
    own += [f"data.eval={made / 'held_out.jsonl'}"]
    first = [f"folder={folder / 'warmup'}", f"model.path={made / 'model'}"]
    first += [f"data.train={made / 'demonstrations.jsonl'}"]
    run(load_config(HERE / "warmup.yaml", [*own, *first, *warmup]))
    grpo = [f"folder={folder / 'grpo'}", f"model.path={folder / 'warmup' / 'model'}"]
    run(load_config(HERE / "grpo.yaml", [*own, *grpo, f"data.train={made / 'problems.jsonl'}", *overrides]))
    curves = [folder / name / "metrics.jsonl" for name in ("warmup", "grpo")]
    picture = folder / "learning_curve.png"
    plot_learning_curve([curves], picture, "A planner and a solver: warm-up, then GRPO", target=0.9)
    click.echo(f"learning curve: {picture}")


def make_task(folder: Path, seed: int, sizes: Mapping[str, int] = SIZES) -> None:
    """Write ``held_out.jsonl``, ``problems.jsonl``, ``demonstrations.jsonl`` of both agents, and ``model/``."""
    from make_task import EASY, make_model, make_problems

    rng, seen = random.Random(seed), set[str]()
    folder.mkdir(parents=True, exist_ok=True)
    texts = list[str]()
    for name, size in sizes.items():
        records = list[dict[str, Any]]()
        for each in make_problems(rng, size, SUBTRACTIONS, seen, name == "demonstrations", EASY):
            plan, _, answer = each["answer"].partition("\n#### ")
            if name == "demonstrations":
                records += [{"question": each["question"], "answer": plan}, {"question": plan, "answer": answer}]
            else:
                records.append({"question": each["question"], "answer": answer})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        texts += [text for record in records for text in record.values()]
    make_model(folder / "model", texts, seed)


if __name__ == "__main__":
    main()
