"""Train a real language model on real problems on a CPU: supervised fine-tuning, then GRPO with a LoRA adapter.

    python examples/real_model/real_model.py [--data FOLDER] [--gpu] [--calculations N] [--folder F] [key.path=value]

The same command goes on where it was stopped. Overrides go to both runs. With ``--gpu``, the model is Qwen3-0.6B from
its hub and vLLM answers; that needs one GPU.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click
from get_model import get_model
from make_task import get_data, make_task

from jackfield.compose import run
from jackfield.config import load_config
from jackfield.errors import JackfieldError
from jackfield.observe import plot_learning_curve

HERE = Path(__file__).parent
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder with GSM8K's files; else they are downloaded.")
@click.option("--folder", default="runs/real_model", show_default=True, type=click.Path(path_type=Path))
@click.option("--calculations", default=2, show_default=True, help="Use problems of at most these many calculations.")
@click.option("--gpu", is_flag=True, help="Qwen3-0.6B and vLLM, on one GPU.")
@click.argument("overrides", nargs=-1)
def main(data: Path | None, folder: Path, calculations: int, gpu: bool, overrides: tuple[str, ...]) -> None:
    """Run the example; OVERRIDES such as schedule.steps=20 change both runs."""
    started, made = time.monotonic(), folder / "made"
    form = "gpu_{}.yaml" if gpu else "{}.yaml"
    files = [f"data.train={made / 'train.jsonl'}", f"data.eval={made / 'held_out.jsonl'}"]
    first = [f"folder={folder / 'sft'}", *files, *overrides]
    second = [f"folder={folder / 'grpo'}", f"model.path={folder / 'sft' / 'model'}", *files, *overrides]
    try:
        if data is None:
            get_data(data := folder / "gsm8k")
        make_task(data, made, calculations)
        if not gpu:
            get_model(made / "model")
            first.insert(0, f"model.path={made / 'model'}")
        metrics = [run(load_config(HERE / form.format("sft"), first)).folder / "metrics.jsonl"]
        metrics += [run(load_config(HERE / form.format("grpo"), second)).folder / "metrics.jsonl"]
    except JackfieldError as error:
        click.echo(error, err=True)
        sys.exit(1)
    picture = folder / "learning_curve.png"
    plot_learning_curve([metrics], picture, "GSM8K: supervised fine-tuning, then GRPO")
    click.echo(f"learning curve: {picture}")
    click.echo(f"whole example: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
