"""The command ``jackfield trace``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from jackfield.cli.commands import json_option


@click.command()
@click.argument("run", type=click.Path(path_type=Path, exists=True))
@click.argument("sample", required=False)
@click.option("--step", type=int, help="Only samples of this step (of an evaluation: this weight version).")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write one HTML page to this file.")
@click.option("--export", "kind", type=click.Choice(["sharegpt", "otel"]), help="Print JSON for other programs.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File for --export instead of stdout.")
@click.option("--model", help="Folder or name of the model whose tokens these are; default: that of the run.")
@click.option("--whole", is_flag=True, help="Print long prompts to their end.")
@json_option
def trace(
    run: Path,
    sample: str | None,
    step: int | None,
    html: Path | None,
    kind: str | None,
    out: Path | None,
    model: str | None,
    whole: bool,
    as_json: bool,
) -> None:
    """Show the rollout SAMPLE of RUN: its turns, tokens, tool calls and rewards.

    RUN is the folder of a run, or an archive (queue.archive). SAMPLE is the key of a sample or of a rollout. Without
    it, list what can be shown, or with --export, export all of it.
    """
    from jackfield_trace.sources import Source

    if out is not None and kind is None:
        raise click.UsageError("--out needs --export")
    if html is not None and sample is None:
        raise click.UsageError("--html needs a SAMPLE")
    source = Source(run, model)
    if sample is None and kind is None:
        _list(source, step, as_json)
        return
    found = [source.find(sample, step)] if sample is not None else [source.read(one) for one in source.listed(step)]
    if html is not None:
        from jackfield.files import replace_file
        from jackfield_trace.page import page

        replace_file(html, page(found[0]))
    if kind is not None:
        _export(found, kind, out)
    elif html is not None:
        click.echo(f"{found[0].key} in {html}")
    elif as_json:
        import attrs

        click.echo(_json(attrs.asdict(found[0])))
    else:
        from rich.console import Console

        from jackfield_trace.terminal import print_rollout

        print_rollout(found[0], Console(file=sys.stdout, highlight=False, markup=False, emoji=False), whole=whole)


def _list(source: Any, step: int | None, as_json: bool) -> None:
    from jackfield_trace.terminal import print_list, summary

    found = source.listed(step)
    if as_json:
        click.echo(_json([summary(each) for each in found]))
    else:
        from rich.console import Console

        print_list(found, Console(file=sys.stdout, highlight=False, markup=False, emoji=False))


def _export(found: list[Any], kind: str, out: Path | None) -> None:
    from jackfield.files import replace_file
    from jackfield_trace.exports import otlp, sharegpt

    text = (sharegpt if kind == "sharegpt" else otlp)(found)
    if out is None:
        click.echo(text)
    else:
        replace_file(out, text + "\n")
        click.echo(f"{len(found)} rollouts in {out}")


def _json(value: Any) -> str:
    from jackfield_trace.texts import plain_json

    return plain_json(json.dumps(value, indent=2, ensure_ascii=False))
