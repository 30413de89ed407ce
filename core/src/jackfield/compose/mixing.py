"""Replay and mixing as the configuration has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from jackfield.compose.export import find_queue
from jackfield.config.sections import MixConfig, MixingConfig, ReplayConfig
from jackfield.errors import ConfigError
from jackfield.queue import Reuse, SamplerSpec, TransferQueue, Values, make_sampler
from jackfield.queue.sample_files import cell_of, read_samples, shape_of
from jackfield.runtime.samples import TRAIN
from jackfield.sdk.arrow import SavedSample
from jackfield.trainer import Source

if TYPE_CHECKING:
    from jackfield.queue.importing import ImportedSamples


def make_sources(settings: MixingConfig) -> tuple[Source, ...]:
    """List what each batch has beside its own groups.

    Raises:
        QueueError: an unknown sampler.
        ConfigError: options that a sampler does not have.
    """
    named: Mapping[str, ReplayConfig | MixConfig | None] = attrs.asdict(settings, recurse=False)
    return tuple(_source(name, mixed) for name, mixed in named.items() if mixed is not None)


def _source(name: str, settings: ReplayConfig | MixConfig) -> Source:
    chosen, partition = settings.sampler, TRAIN if name == "replay" else name
    make_sampler(chosen.name, chosen.options, f"mixing.{name}.sampler.options")  # refuses what there is not
    sampler = SamplerSpec(name=chosen.name, options=chosen.options)
    limits = {field.name: getattr(settings, field.name) for field in attrs.fields(Reuse)}
    return Source(partition=partition, ratio=settings.ratio, sampler=sampler, reuse=Reuse(**limits))


def check_rows(settings: MixingConfig, *, explores: bool) -> None:
    """Look at the first row of each file that is mixed in.

    Args:
        settings: what is mixed in.
        explores: whether the run has rewards, which rows from elsewhere need, too.

    Raises:
        ConfigError: there is no row, or it lacks what every row needs.
        QueueError: it is no file of rows.
    """
    for name, file in _files(settings).items():
        needed = ["prompt_ids", "response_ids"]
        if name == "human" and explores:
            needed += ["reward", "rollout_log_probs"]
        first = next(_read(file), None)
        if first is None or not first.cells.keys() >= set(needed):
            raise ConfigError(
                "there are no samples in it",
                where=f"mixing.{name}.samples",
                expected=f"rows with the columns {', '.join(needed)} at least",
                found=file if first is None else ", ".join(sorted(first.cells)) or "no columns",
            )


def mixed_samples(settings: MixingConfig, queue: TransferQueue, values: Values) -> list[ImportedSamples]:
    """List what fills the partitions that are mixed in: before the first step of a new run, and again where lost."""
    from jackfield.queue.importing import ImportedSamples

    return [
        ImportedSamples(queue, values, name, partial(_read, file), file, partial(_completed, expert=name == "expert"))
        for name, file in _files(settings).items()
    ]


def _files(settings: MixingConfig) -> dict[str, str]:
    """Return the files that are mixed in, by their partitions."""
    return {name: mixed.samples for name in ("expert", "human") if (mixed := getattr(settings, name)) is not None}


def _read(file: str) -> Iterator[SavedSample]:
    path = Path(file)
    if path.is_dir():
        from jackfield.queue.browse import saved_samples

        return (sample for sample in saved_samples(find_queue(path)) if sample.batch is not None)
    return read_samples(path)


def _completed(row: SavedSample, *, expert: bool) -> SavedSample:
    """Add the tags that a run counts by, and to an expert's row the columns that an expert does not write.

    Versions of other runs' weights say nothing here.
    """
    cells, length = dict(row.cells), shape_of(row.cells["response_ids"])[0]
    cells.setdefault("response_mask", cell_of("response_mask", [True] * length))
    if expert:
        cells.setdefault("rollout_log_probs", cell_of("rollout_log_probs", [0.0] * length))
        cells.setdefault("reward", cell_of("reward", 0.0))
    counts = {
        "prompt_tokens": shape_of(row.cells["prompt_ids"])[0],
        "response_tokens": length,
        "model_tokens": sum(bytes(cells["response_mask"][1])),
    }
    kept = {name: value for name, value in row.tags.items() if not name.startswith("weight_version_")}
    return attrs.evolve(row, cells=cells, tags={**kept, **counts, **({"expert": True} if expert else {})})
