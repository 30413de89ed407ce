"""The commands ``jackfield queue ls|show|stats|ledger|trace|export|import|serve``."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jackfield.cli.commands import config_arguments, json_option
from jackfield.cli.commands import show as show_result
from jackfield.errors import QueueError, RunError

if TYPE_CHECKING:
    from jackfield.sdk.archive import SavedSample

_FOLDER = click.argument("folder", type=click.Path(path_type=Path))
_PARTITION = click.option("--partition", help="Only samples of this partition.")
_SHOWN = 8  #: how many elements of a tensor `show` prints


@click.group()
def queue() -> None:
    """Inspect, import, export and serve queues.

    FOLDER is a run's folder (its newest checkpoint is used), a checkpoint, the queue's folder in it, or an archive.
    """


@queue.command()
@_FOLDER
@_PARTITION
@json_option
def ls(folder: Path, partition: str | None, as_json: bool) -> None:
    """List samples with key, task, bytes, columns, and consumers that acknowledged them."""
    names = ("key", "partition", "batch", "task", "bytes", "acked_by")
    samples = [{**_plain(each, *names), "columns": sorted(each.cells)} for each in _samples(folder, partition)]
    show_result(samples, *names, "columns")


@queue.command()
@_FOLDER
@click.argument("key")
@json_option
def show(folder: Path, key: str, as_json: bool) -> None:
    """Show the tags and values of the sample KEY. Long tensors are cut, except with --json."""
    from jackfield.queue.sample_files import plain_values, shape_of
    from jackfield.sdk.cells import ColumnType

    sample = next((sample for sample in _samples(folder, None) if sample.key == key), None)
    if sample is None:
        raise QueueError(f"no sample {key!r} is in the checkpoint", code="queue.unknown-sample", where=str(folder))
    types, columns = {}, {}
    for name, cell in sorted(sample.cells.items()):
        kind, values = ColumnType.parse(cell[0]), plain_values(cell)
        if isinstance(values, list) and len(values) > _SHOWN and kind.kind != "json" and not as_json:
            values = [*values[:_SHOWN], "…"]
        types[name], columns[name] = f"{kind.kind}, {kind.dtype}, {shape_of(cell)}", values
    names = ("partition", "key", "group", "task", "batch", "tags", "acked_by")
    show_result({**_plain(sample, *names), "types": types, "columns": columns})


@queue.command()
@_FOLDER
@json_option
def stats(folder: Path, as_json: bool) -> None:
    """Show the number of samples and bytes of each partition, and of each column in it."""
    counts: dict[str, dict[str, Any]] = {}
    for sample in _samples(folder, None):
        partition = counts.setdefault(sample.partition, {"samples": 0, "bytes": 0, "columns": {}, "acked": Counter()})
        partition["samples"] += 1
        partition["bytes"] += sample.bytes
        partition["acked"].update(sample.acked_by)
        for name, (_, content) in sample.cells.items():
            partition["columns"].setdefault(name, Counter()).update(samples=1, bytes=len(content))
    show_result(counts)


@queue.command()
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
def ledger(folder: Path, as_json: bool) -> None:
    """List what the queue of the run in FOLDER did with samples (--json: one per line)."""
    from jackfield.queue import read_ledger

    for entry in read_ledger(folder):
        samples = f"  {len(entry['keys'])} samples" if "keys" in entry else ""
        shown = [f"{name} {value}" for name, value in entry.items() if name not in ("event", "time", "keys")]
        line = f"{entry['event']}  {', '.join(shown)}{samples}"
        click.echo(json.dumps(entry, ensure_ascii=False) if as_json else line)


@queue.command()
@_FOLDER
@click.argument("key")
@json_option
def trace(folder: Path, key: str, as_json: bool) -> None:
    """Print the provenance of the sample KEY as a tree, from checkpoint and ledger."""
    from jackfield.queue.store import find_store
    from jackfield.queue.store import trace as find_ancestors
    from jackfield.trainer.checkpoint import find_queue

    store, checkpoint = find_store(folder), None
    try:
        checkpoint = find_queue(folder)
    except RunError:
        if store is None:
            raise
    root = find_ancestors(key, checkpoint, store)
    show_result(root if as_json else [*_indented(root)], "sample", "operation", "in_queue")


@queue.command()
@_FOLDER
@click.argument("out", type=click.Path(path_type=Path))
@_PARTITION
def export(folder: Path, out: Path, partition: str | None) -> None:
    """Write the samples to OUT, a new .jsonl or .parquet file that `import` can read."""
    from jackfield.queue.sample_files import write_samples

    if out.is_file():
        expected, fix = "a file that does not exist yet", "give another name, or remove the file"
        raise RunError("there is a file of this name", code="run.storage", where=str(out), expected=expected, fix=fix)
    click.echo(f"{write_samples(out, lambda: _samples(folder, partition))} samples in {out}")


@queue.command(name="import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--partition", default="train", show_default=True, help="Partition for the samples.")
def import_(file: Path, folder: Path, partition: str) -> None:
    """Put the samples of FILE (.jsonl, .parquet) into the checkpointed queue FOLDER.

    FOLDER is created if needed, and no run's checkpoint is changed. Runs read it by mixing.expert or mixing.human.
    """
    from jackfield.queue.sample_files import import_file

    click.echo(f"{import_file(file, folder, partition)} samples in {folder}")


@queue.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--by", default="label", show_default=True, help="Person or program that labelled.")
def label(folder: Path, file: Path, by: str) -> None:
    """Label samples of the run in FOLDER late, also while it goes on.

    Each line of FILE (.jsonl) has the key of a sample, and numbers by name. The run takes them between two steps:
    `reward` replaces the sample's reward, others are tags reward/NAME, which samplers of replay see.
    """
    from jackfield_queue.labelling import write_labels

    made = write_labels(folder, file, by)
    click.echo(f"version {made.version}: labels of {len(made.numbers)} samples by {made.by}")


@queue.command()
@config_arguments
def serve(file: str, overrides: tuple[str, ...]) -> None:
    """Serve the queue's controller of FILE's run, for runs and roles in other processes.

    They use the same FILE. Ctrl-C or SIGTERM ends the command, which then reports the requests that it refused.
    """
    from jackfield.compose.builder import Stop
    from jackfield.compose.run import serve_queue
    from jackfield.config import load_config

    config = load_config(file, overrides, served=True)
    stop = Stop(config.checkpoint.grace_seconds)

    async def main() -> None:
        """Serve until a signal arrives."""
        with stop.boundary(lambda: "with what is under way"):
            async with serve_queue(config) as (server, address):
                click.echo(f"the queue is served; {address} says where")
                await stop.requested.wait()
        click.echo(f"ended; connections refused: {server.refused}")

    with stop.listening():
        asyncio.run(stop.bounded(main()))
    sys.exit(stop.code)


def _indented(sample: dict[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    yield {**sample, "sample": "  " * depth + sample["key"]}
    for parent in sample["parents"]:
        yield from _indented(parent, depth + 1)


def _plain(sample: SavedSample, *names: str) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in names}


def _samples(folder: Path, partition: str | None) -> Iterator[SavedSample]:
    from jackfield.queue.sample_files import is_archive, read_samples, saved_samples
    from jackfield.trainer.checkpoint import find_queue

    samples = read_samples(folder) if is_archive(folder) else saved_samples(find_queue(folder))
    return (sample for sample in samples if partition in (None, sample.partition))
