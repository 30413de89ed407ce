"""Replay and mixing as the configuration has them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from jackfield.compose.export import find_queue
from jackfield.config import MixConfig, MixingConfig, ReplayConfig
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
    return tuple(_source(name, partition, each) for name, partition, each in _configured(settings))


def check_rows(settings: MixingConfig, *, explores: bool) -> None:
    """Look at the first row of each file that is mixed in.

    Args:
        settings: what is mixed in.
        explores: whether the run has rewards, which rows from elsewhere need, too.

    Raises:
        ConfigError: there is no row, or it lacks what every row needs.
        QueueError: it is no file of rows.
    """
    for name, _, mixed in _mixed(settings):
        (first, *_) = [*islice(_read(mixed), 1), None]
        needed = ["prompt_ids", "response_ids"]
        if name == "human" and explores:
            needed += ["reward", "rollout_log_probs"]
        if first is None or not first.cells.keys() >= set(needed):
            raise ConfigError(
                "there are no samples in it",
                where=f"mixing.{name}.samples",
                expected=f"rows with the columns {', '.join(needed)} at least",
                found=mixed.samples if first is None else ", ".join(sorted(first.cells)) or "no columns",
            )


def mixed_samples(settings: MixingConfig, queue: TransferQueue, values: Values) -> tuple[ImportedSamples, ...]:
    """Fill the partitions that are mixed in: once, before the first step of a new run, and again where lost."""
    from jackfield.queue.importing import ImportedSamples

    return tuple(
        ImportedSamples(
            queue,
            values,
            partition,
            partial(_read, mixed),
            mixed.samples,
            partial(_completed, expert=partition == "expert"),
        )
        for _, partition, mixed in _mixed(settings)
    )


def _configured(settings: MixingConfig) -> Iterator[tuple[str, str, ReplayConfig | MixConfig]]:
    if settings.replay is not None:
        yield "replay", TRAIN, settings.replay
    yield from _mixed(settings)


def _mixed(settings: MixingConfig) -> Iterator[tuple[str, str, MixConfig]]:
    for name, mixed in (("expert", settings.expert), ("human", settings.human)):
        if mixed is not None:
            yield name, name, mixed


def _source(name: str, partition: str, settings: ReplayConfig | MixConfig) -> Source:
    make_sampler(settings.sampler.name, settings.sampler.options, f"mixing.{name}.sampler.options")  # refuses it here
    sampler = SamplerSpec(name=settings.sampler.name, options=settings.sampler.options)
    limits = {field.name: getattr(settings, field.name) for field in attrs.fields(Reuse)}
    return Source(partition=partition, ratio=settings.ratio, sampler=sampler, reuse=Reuse(**limits))


def _read(mixed: MixConfig) -> Iterator[SavedSample]:
    path = Path(mixed.samples)
    if path.is_dir():
        from jackfield.queue.browse import saved_samples

        return (sample for sample in saved_samples(find_queue(path)) if sample.batch is not None)
    return read_samples(path)


def _completed(row: SavedSample, *, expert: bool) -> SavedSample:
    """Tags that a run counts by, and of an expert's row the columns that an expert does not write.

    Versions of other runs' weights say nothing here.
    """
    length = shape_of(row.cells["response_ids"])[0]
    cells = dict(row.cells)
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
