"""The command ``jackfield bench``."""

from __future__ import annotations

import json
import sys
from asyncio import CancelledError
from functools import partial
from pathlib import Path

import click

from jackfield.cli.commands import config_arguments, json_option


@click.command()
@config_arguments
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Evaluate this checkpoint, run or model folder.")
@click.option("--all", "everything", is_flag=True, help="Evaluate all checkpoints of the run.")
@click.option("--newest", type=click.IntRange(min=1), metavar="N", help="Evaluate the newest N checkpoints.")
@click.option("--base", is_flag=True, help="Also evaluate the model that the run begins with.")
@click.option(
    "--follow",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Go on with the run's later checkpoints, each of which may take SECONDS to appear.",
)
@click.option("--set", "sets", multiple=True, metavar="NAME", help="Use only this set of tasks; may be repeated.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for results; default: bench/ in the run's folder.")
@json_option
def bench(
    file: str,
    overrides: tuple[str, ...],
    checkpoint: Path | None,
    everything: bool,
    newest: int | None,
    base: bool,
    follow: float | None,
    sets: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Evaluate checkpoints of the run of a config FILE on its sets of held-out tasks, and name the best.

    By default this is the run's newest checkpoint. OVERRIDES are settings such as evaluation.rollouts=4. The run may
    be under way. The same command goes on where an earlier one ended.
    """
    if sum((checkpoint is not None, everything, newest is not None)) > 1:
        raise click.UsageError("--checkpoint, --all and --newest exclude each other")
    if checkpoint is not None and follow is not None:
        raise click.UsageError("--follow is for the run of FILE, not for --checkpoint")
    from jackfield.compose.builder import Stop
    from jackfield.config import load_config
    from jackfield.files import replace_file
    from jackfield.plugins import discover
    from jackfield_bench.models import choose_models
    from jackfield_bench.tables import summary, text_table
    from jackfield_bench.work import BenchBuilder, Follow, Work, bench_config

    config, registry = load_config(file, overrides), discover()
    models = choose_models(config, checkpoint, everything=everything, newest=newest, base=base)
    own = bench_config(config, registry, out or Path(config.folder) / "bench", sets, models[-1])
    following = None if follow is None else Follow(folder=Path(config.folder), seconds=follow)
    work = Work(config=own, models=models, say=lambda text: click.echo(text, err=True), follow=following)
    left = sum(result is None for result in work.results().values())
    click.echo(f"{len(models)} models on {', '.join(work.sets)}: {left} evaluations to do", err=True)
    if left or following is not None:
        stop = Stop(own.checkpoint.grace_seconds)
        try:
            with stop.listening():
                from jackfield import compose

                compose.run(own, registry=registry, stop=stop, builder=partial(BenchBuilder, work=work))
        except CancelledError:
            if stop.code is None:
                raise
            click.echo("ended; the same command goes on with what is left", err=True)
            sys.exit(stop.code)
    results = [result for result in work.results().values() if result is not None]
    table, found = text_table(results), json.dumps(summary(results), indent=2)
    replace_file(Path(own.folder) / "bench.txt", table)
    replace_file(Path(own.folder) / "bench.json", found)
    click.echo(found if as_json else table, nl=as_json)
