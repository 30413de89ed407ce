"""The samples of the initial model that a rank keeps, with its log-probs, in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from jackfield.errors import JackfieldError, RunError
from jackfield.files import replace_file
from jackfield.settings import structure

#: prompt tokens, response tokens, 1 where the model sampled a token of the response, log-probs of the response
InitialSample: TypeAlias = tuple[list[int], list[int], list[int], list[float]]

_FILE = "initial-{}.json"  #: of a data-parallel rank


def write_initial(folder: Path, rank: int, samples: Sequence[InitialSample]) -> None:
    """Write what a data-parallel rank keeps."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / _FILE.format(rank), json.dumps(samples))


def read_initial(folder: Path, rank: int, size: int) -> list[InitialSample]:
    """Return what one of ``size`` data-parallel ranks keeps, whatever number of ranks wrote it.

    Raise ``run.checkpoint-damaged`` for a file without such samples.
    """
    kept = [_read(folder / _FILE.format(at)) for at in range(len(list(folder.glob(_FILE.format("*")))))]
    if len(kept) == size:
        return kept[rank]
    rows = [row for part in kept for row in part]
    return rows[rank::size] or rows[:1]  # each rank has some


def _read(file: Path) -> list[InitialSample]:
    try:
        samples = structure(list[InitialSample], json.loads(file.read_bytes()))
        if not samples or any(not (len(sample[1]) == len(sample[2]) == len(sample[3])) for sample in samples):
            raise ValueError("no samples, or a response, its mask and its log-probs differ in length")
    except (OSError, ValueError, RecursionError, JackfieldError) as error:
        details = {"where": str(file), "expected": "samples of the initial model", "found": str(error)}
        fix = (
            "take another checkpoint, or start from the beginning with checkpoint.resume=false, which removes this one"
        )
        raise RunError("a checkpoint is damaged", code="run.checkpoint-damaged", fix=fix, **details) from error
    return samples
