"""The commands ``jackfield serve`` and ``jackfield promote``."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from functools import partial
from pathlib import Path

import click

from jackfield.cli.commands import config_arguments


@click.command()
@config_arguments
@click.option("--explore", is_flag=True, help="Explore the run's tasks into its queue as with mode: explore, then end.")
def serve(file: str, overrides: tuple[str, ...], explore: bool) -> None:
    """Answer users with the replicas of a config FILE at addresses of OpenAI's API, until Ctrl-C or SIGTERM.

    OVERRIDES are settings such as rollout.openai.port=8000. The replicas begin with model.path and take over each model
    that `jackfield promote` names, one replica after another. Its files are in serve/ of the run's folder.
    """
    from jackfield import compose
    from jackfield.compose.builder import Stop
    from jackfield.config import load_config
    from jackfield_serve.promoting import ServeBuilder, serve_config, served_folder

    given = load_config(file, (*overrides, "mode=explore") if explore else overrides)
    config = given if explore else serve_config(given)
    stop = Stop(config.checkpoint.grace_seconds)
    builder = partial(ServeBuilder, say=click.echo, folder=served_folder(given.folder), explores=explore)
    try:
        with stop.listening():
            result = compose.run(config, stop=stop, builder=builder)
            if not result.stopped:
                click.echo(f"{result.steps} batches of samples in {result.folder}")
                return
    except CancelledError:
        if stop.code is None:
            raise
    click.echo("ended")
    sys.exit(stop.code)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("served", type=click.Path(path_type=Path))
@click.option("--score", type=float, required=True, help="Score that the last evaluation of RUN has to reach.")
def promote(run: Path, served: Path, score: float) -> None:
    """Let replicas take over the model of the finished run in the folder RUN, if its last evaluation is good enough.

    SERVED is the folder of the run whose FILE `jackfield serve` has.
    """
    from jackfield_serve.promoting import promote as promoted

    found = promoted(run, served, score)
    click.echo(f"promoted {found.model} as version {found.version}, with score {found.score:g}")
