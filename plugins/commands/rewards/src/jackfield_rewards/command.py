"""The commands, which import what they need when they are run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from jackfield.cli.commands import LazyGroup, json_option, show

_GRACE_SECONDS = 10.0  #: for closing the rewards after a signal


class _Group(LazyGroup):
    """The group, with commands of another package."""

    lazy = {  # noqa: RUF012
        "push": ("jackfield_reward_service.command", "Give a sample that waits its reward."),
        "pending": ("jackfield_reward_service.command", "List samples that wait for a reward from outside."),
    }


@click.group(cls=_Group)
def rewards() -> None:
    """Share rewards among runs, try them, compute them again, and push them from outside."""


@rewards.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@json_option
def serve(file: Path, as_json: bool) -> None:
    """Serve the rewards of FILE to several runs, until Ctrl-C or SIGTERM.

    Runs name the file with the address, which is printed, in the settings of the reward `service`.
    """
    from jackfield.compose.builder import Stop
    from jackfield_rewards.serving import serving
    from jackfield_rewards.settings import load

    config, stop = load(file), Stop(_GRACE_SECONDS)

    async def main() -> None:
        """Serve until a signal arrives."""
        with stop.boundary(lambda: "with the scores that are under way given up"):
            async with serving(config) as (server, address):
                names = list(config.rewards)
                place = {"host": server.address.host, "port": server.address.port, "process": os.getpid()}
                found = {"address": str(address.absolute()), "rewards": names, **place}
                said = f"serving {', '.join(names)}; {found['address']} says where"
                click.echo(json.dumps(found) if as_json else said)
                sys.stdout.flush()
                await stop.requested.wait()

    with stop.listening():
        asyncio.run(stop.bounded(main()))
    sys.exit(stop.code)


@rewards.command()
@click.argument("address", type=click.Path(path_type=Path))
@json_option
def status(address: Path, as_json: bool) -> None:
    """Show what the service at ADDRESS, its folder or its address.json, is doing."""
    from jackfield_rewards.asking import ask

    rows = asyncio.run(ask(address))
    if not as_json:
        rows = [{**each, "waiting": _one_line(each["waiting"]), "counts": _one_line(each["counts"])} for each in rows]
    show(rows, "name", "version", "in_progress", "waiting", "scored", "again", "clients", "counts")


@rewards.command("try")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("data", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--rows", default=8, show_default=True, type=click.IntRange(1), help="Lines to score, from the first.")
@click.option("--response", "field", help="Field with the response; default: response or solution_str.")
@json_option
def try_(file: Path, data: Path, rows: int, field: str | None, as_json: bool) -> None:
    """Score the first lines of DATA (.jsonl) with the reward of FILE, a run's configuration.

    The lines have the fields of the run's tasks, recognised as in a run or named in data.format, and a response. If a
    line gets no score, the exit code is 1.
    """
    from jackfield_rewards.trying import score_lines

    found = asyncio.run(score_lines(file, data, rows, field))
    if not as_json:
        found = [{**each, "dimensions": _one_line(each["dimensions"])} for each in found]
    show(found, "line", "score", "status", "seconds", "tokens", "dimensions", "explanation", "error")
    if any(each["status"] != "ok" for each in found):
        sys.exit(1)


@rewards.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.option("--with", "file", type=click.Path(path_type=Path, dir_okay=False), help="File with another reward.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="New folder for the files.")
@click.option("--model", help="Folder or name of the model whose tokens an archive has.")
@click.option("--largest", default=10, show_default=True, type=click.IntRange(0), help="Changes to show.")
@json_option
def rescore(source: Path, file: Path | None, out: Path | None, model: str | None, largest: int, as_json: bool) -> None:
    """Compute the rewards of SOURCE again, and show what changes.

    SOURCE is the folder of a run, its folder scores or a file of it, or an archive (queue.archive). Without --with,
    the reward of the run's config.yaml scores again. With --out, the rows with the new scores in further columns are
    written there; SOURCE is not changed.
    """
    from jackfield_rewards.rescoring import rescore as compute
    from jackfield_rewards.rescoring import shown

    found: dict[str, Any] = asyncio.run(compute(source, file, out, model, largest))
    click.echo(json.dumps(found, indent=2, ensure_ascii=False) if as_json else shown(found), nl=False)
    if as_json:
        click.echo()


def _one_line(values: Mapping[str, float] | None) -> str | None:
    return ", ".join(f"{name}: {value:g}" for name, value in (values or {}).items()) or None
