"""The commands ``jackfield data run`` and ``jackfield data trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import click

from jackfield.cli.commands import json_option, show
from jackfield.config import load_config
from jackfield_pipelines.lineage import chains
from jackfield_pipelines.lineage import trace as trace_row
from jackfield_pipelines.row_sets import ROWS, RowSet
from jackfield_pipelines.tasks import pipeline_of


@click.command("run")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.argument("overrides", nargs=-1)
@json_option
def run(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Apply the operators of `data.pipeline.tasks` of a run's FILE to its training tasks, without a run.

    The rows after each stage stay in the folder, where the run finds them.
    """
    config = load_config(file, overrides)
    sets, seen = list[dict[str, Any]](), set[str]()

    def tell(made: RowSet, was_there: bool) -> None:
        counts = {name: int(count) for name, count in made.manifest["counts"].items()}
        sets.append({"stage": made.folder.name, **counts, "state": "there" if was_there else "made"})
        seen.add(made.folder.name)

    last = pipeline_of(config, tell)[-1]
    if as_json:
        show({"stages": sets, "rows": str(last.folder / ROWS)})
        return
    for each in sets:
        told = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in each.items() if isinstance(value, int))
        click.echo(f"{each['stage']}  {told}  ({each['state']})")
    click.echo(str(last.folder / ROWS))


@click.command("trace")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("row")
@json_option
def trace(folder: Path, row: str, as_json: bool) -> None:
    """Show from which raw line ROW comes, which operators changed it, and what was made of it.

    FOLDER is a run's folder or its folder `data`. ROW is a row's key: the `task` of a sample in the run's files.
    """
    found = [trace_row(chain, row) for chain in chains(folder / "data" if (folder / "data").is_dir() else folder)]
    if as_json:
        show([[attrs.asdict(event) for event in events] for events in found])
        return
    for events in found:
        for event in events:
            settings = ", ".join(f"{name}={value}" for name, value in event.settings.items() if value is not None)
            click.echo(f"{event.row}  {event.what} by {event.operator} {event.version}({settings}): {event.detail}")
