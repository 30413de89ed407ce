"""The commands of ``jackfield data`` on pipelines."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import attrs
import click

from jackfield.cli.commands import json_option, show
from jackfield.config import load_config
from jackfield_pipelines.lineage import chains
from jackfield_pipelines.lineage import trace as trace_row
from jackfield_pipelines.row_sets import ROWS, SET_ASIDE, RowSet
from jackfield_pipelines.samples import operators_of_samples, rows_of_samples, shapes_of_samples, steps_of_samples
from jackfield_pipelines.tasks import pipeline_of

_GRACE_SECONDS = 10.0  #: for closing operators after a signal
_ASK_SECONDS = 10.0  #: for a service to say what it does


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
        told = {"state": "there" if was_there else "made", "ended": made.manifest.get("ended"), "set_aside_why": ""}
        told["set_aside_why"] = next((each["why"] for each in made.records(SET_ASIDE)), "")
        sets.append({"stage": made.folder.name, **counts, **told})
        seen.add(made.folder.name)

    last = pipeline_of(config, tell)[-1]
    if as_json:
        show({"stages": sets, "rows": str(last.folder / ROWS)})
        return
    for each in sets:
        told = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in each.items() if isinstance(value, int))
        early = f"; ended early by data.pipeline.{each['ended']}" if each["ended"] else ""
        click.echo(f"{each['stage']}  {told}  ({each['state']}{early})")
        if each["set_aside_why"]:
            click.echo(f"  the first that was set aside: {each['set_aside_why']}")
    click.echo(str(last.folder / ROWS))


@click.command("trace")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("name")
@json_option
def trace(folder: Path, name: str, as_json: bool) -> None:
    """Show from which raw line NAME comes, which operators changed it, and what was made of it.

    FOLDER is a run's folder or its folder `data`. NAME is a row's key, or for a run a sample's, as in its ledger.
    """
    is_run = (folder / "data").is_dir()
    samples = rows_of_samples(folder) if is_run else {}
    row = samples.get(name, name)
    found = [trace_row(chain, row) for chain in chains(folder / "data" if is_run else folder)]
    family = {event.row for events in found for event in events}
    wanted = [key for key, own in samples.items() if own in family and name in (key, own, row)]
    trained = steps_of_samples(folder) if wanted else {}
    shapes = shapes_of_samples(folder, wanted) if wanted else {}
    made: list[dict[str, Any]] = [
        {"sample": key, "row": samples[key], "step": trained.get(key), "shaped": shapes.get(key)} for key in wanted
    ]
    operators = operators_of_samples(folder) if shapes else []
    if as_json:
        rows = [[attrs.asdict(event) for event in events] for events in found]
        show({"rows": rows, "samples": made, "operators": operators})
        return
    for events in found:
        for event in events:
            settings = ", ".join(f"{name}={value}" for name, value in event.settings.items() if value is not None)
            by = f"{event.operator} {event.version}".strip() + (f"({settings})" if settings else "")
            click.echo(f"{event.row}  {event.what} by {by}: {event.detail}")
    for each in made:
        when = "not trained on" if each["step"] is None else f"trained on at step {int(each['step']) + 1}"
        click.echo(f"{each['sample']}  made of {each['row']}, {when}")
        if each["shaped"] is not None:
            told = ", ".join(f"{name} {number:.6g}" for name, number in each["shaped"].items() if name != "unshaped")
            click.echo(f"{each['sample']}  shaped: reward {each['shaped']['unshaped']:.6g} before; {told}")
    for each in operators:
        settings = ", ".join(f"{name}={value}" for name, value in each["settings"].items() if value is not None)
        click.echo(f"shaped by {each['operator']} {each['version']}({settings})")


@click.command("sets")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option
def sets(folder: Path, as_json: bool) -> None:
    """List the sets of rows that stages have left in FOLDER, a run's folder or its folder `data`."""
    rows = list[dict[str, Any]]()
    for number, chain in enumerate(chains(folder / "data" if (folder / "data").is_dir() else folder), 1):
        for made in chain:
            about, counts = made.manifest, made.manifest["counts"]
            operator = f"{about['operator']} {about.get('version', '')}".strip()
            numbers = {name: int(counts[name]) for name in ("rows", "removed", "set_aside", "made")}
            size = sum(about["sizes"].values())
            told = {"ended": about.get("ended", ""), "counters": json.dumps(about.get("counters", {}))}
            rows.append(
                {"chain": number, "set": made.folder.name, "operator": operator, **numbers, "bytes": size, **told}
            )
    show(rows, "chain", "set", "operator", "rows", "removed", "set_aside", "made", "bytes", "ended", "counters")


@click.command("serve")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@json_option
def serve(file: Path, as_json: bool) -> None:
    """Serve pipelines to several runs, with the settings of FILE, until Ctrl-C or SIGTERM.

    Runs name the folder of the service, or the file with the address, which is printed, in data.pipeline.service.
    """
    from jackfield.compose.builder import Stop
    from jackfield_pipelines.serving import load, serving

    config, stop = load(file), Stop(_GRACE_SECONDS)

    async def main() -> None:
        """Serve until a signal arrives."""
        with stop.boundary(lambda: "with the requests that are under way given up"):
            async with serving(config) as (server, address):
                place = {"host": server.address.host, "port": server.address.port, "process": os.getpid()}
                found = {"address": str(address.absolute()), **place}
                said = f"serving pipelines; {found['address']} says where"
                click.echo(json.dumps(found) if as_json else said)
                sys.stdout.flush()
                await stop.requested.wait()

    with stop.listening():
        asyncio.run(stop.bounded(main()))
    sys.exit(stop.code)


@click.command("served")
@click.argument("address", type=click.Path(path_type=Path))
@json_option
def served(address: Path, as_json: bool) -> None:
    """Show what the service at ADDRESS, its folder or its address.json, is doing."""
    from jackfield.clock import Clock
    from jackfield_pipelines.client import PipelineClient

    async def ask() -> list[dict[str, Any]]:
        client = PipelineClient(place=address, run="jackfield data served", seconds=_ASK_SECONDS, clock=Clock())
        try:
            return await client.call(lambda service: service.overview())
        finally:
            await client.close()

    show(asyncio.run(ask()), "pipeline", "operators", "runs", "requests", "stages")


@click.command("label")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--by", default="label", show_default=True, help="Person or program that labelled.")
@json_option
def label(folder: Path, file: Path, by: str, as_json: bool) -> None:
    """Label rows of the set in FOLDER late, which makes a version of it.

    Each line of FILE (.jsonl) has the `key` of a row, and columns with their values. A run with `data.train: FOLDER`
    reads the newest version, one with the folder of a version just that.
    """
    from jackfield.clock import Clock
    from jackfield_pipelines.versions import label as add_labels

    made, count = asyncio.run(add_labels(folder, file, by, Clock()))
    if as_json:
        show({"version": str(made.folder), "rows": count})
        return
    rows = "row" if count == 1 else "rows"
    click.echo(f"{made.folder}: labels of {count} {rows} by {by}" if count else f"{made.folder} has these labels")
