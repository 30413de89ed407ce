"""Native checkpoints: safetensors and JSON. VeOmni's own checkpointer pickles, so it is not used.

::

    engine.json                 format, number of ranks, schedule step; written last
    tensors_<rank>.json         by tensor: the whole shape, and where this rank's part begins
    tensors_<rank>.safetensors  the parts of model and optimizer that no rank before has
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from jackfield.errors import EngineError
from jackfield.sdk import replace_file
from jackfield_engine_veomni.model import TokenModel
from jackfield_engine_veomni.optimization import Optimization
from jackfield_engine_veomni.parallel import Ranks
from jackfield_engine_veomni.tensors import Part

FORMAT = "veomni-1"

#: Exceptions from reading files that are damaged or not of the expected format.
_UNREADABLE = (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


def make_folder(folder: str, ranks: Ranks) -> Path:
    """Create a checkpoint's folder for all ranks; every rank raises if the folder is not empty."""
    path, problem = Path(folder), None
    if ranks.rank == 0:
        try:
            path.mkdir(parents=True, exist_ok=True)
            problem = "files" if any(path.iterdir()) else None
        except OSError as caught:
            problem = str(caught)
    if ranks.maximum(int(problem is not None)):
        raise EngineError(
            "the checkpoint folder cannot be used",
            where=folder,
            expected="an empty or absent folder",
            found=problem or "a problem on rank 0",
        )
    return path


def save(folder: Path, model: TokenModel, optimization: Optimization | None, ranks: Ranks) -> None:
    """Write a native checkpoint into an empty folder. Collective; if one rank cannot write, all raise."""
    with agreed(ranks, "the checkpoint could not be written", folder, "look at the disk's room and permissions"):
        parts = {name: part for name, part in _parts(model, optimization).items() if part.first and part.values.numel()}
        file = f"tensors_{ranks.rank}"
        save_file(
            {name: part.values.cpu().contiguous() for name, part in parts.items()}, folder / f"{file}.safetensors"
        )
        index = {name: {"shape": part.shape, "start": part.start} for name, part in parts.items()}
        replace_file(folder / f"{file}.json", json.dumps(index))
    if ranks.rank == 0:  # engine.json is there only when all the rest is
        step = None if optimization is None else optimization.schedule_step
        record = {"format": FORMAT, "world_size": ranks.size, "schedule_step": step}
        replace_file(folder / "engine.json", json.dumps(record))


def load(folder: Path, model: TokenModel, optimization: Optimization | None, ranks: Ranks, model_only: bool) -> None:
    """Read what :func:`save` wrote into the existing model and optimizer. A collective operation.

    A folder without a complete checkpoint, or with one of another model, is refused (``engine.failed``), and then
    nothing has changed.
    """
    with agreed(ranks, "the checkpoint cannot be read", folder, "go on from another checkpoint"):
        record = _read_record(folder)
        if model_only or record["schedule_step"] is None:
            optimization = None
        parts = _parts(model, optimization)
        read_parts(folder, int(record["world_size"]), parts)
        if optimization is not None:
            optimization.set_schedule_step(int(record["schedule_step"]))


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / "engine.json"
    if not path.is_file():
        raise EngineError(
            "no native checkpoint in the folder",
            where=str(folder),
            expected="engine.json, written last",
            found="no such folder" if not folder.is_dir() else "none: unfinished, or of another format",
        )
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record["format"] != FORMAT:
        message = "a checkpoint of another engine or format"
        raise EngineError(message, where=str(path), expected=f"format {FORMAT}", found=record["format"])
    return record


@contextmanager
def agreed(ranks: Ranks, message: str, folder: Path, fix: str) -> Iterator[None]:
    """Run the body on each rank; if one fails, every rank raises ``EngineError`` (``engine.failed``)."""
    error: EngineError | None = None
    try:
        yield
    except EngineError as caught:
        error = caught
    except _UNREADABLE as caught:
        found = f"{type(caught).__name__}: {caught}"
        error = EngineError(message, where=f"{folder}, rank {ranks.rank}", found=found, fix=fix)
        error.__cause__ = caught
    failed = ranks.maximum(0 if error is None else ranks.rank + 1)
    if error is not None:
        raise error
    if failed:
        raise EngineError(message, where=f"{folder}, rank {failed - 1}", found="see the error of that rank", fix=fix)


def _parts(model: TokenModel, optimization: Optimization | None) -> dict[str, Part]:
    """Return this rank's parts of all tensors to save: saving reads them, loading writes into them."""
    found = {f"model.{name}": model.sharding.part(name, each) for name, each in model.parameters().items()}
    for name, tensors in ({} if optimization is None else optimization.state()).items():
        found |= {f"optimizer.{name}.{kind}": part for kind, part in tensors.items()}
    return found


def read_parts(folder: Path, ranks: int, parts: Mapping[str, Part]) -> None:
    """Read what ``ranks`` ranks wrote into existing parts; if anything is missing or differs, change nothing."""
    saved: dict[str, list[tuple[Path, tuple[int, ...], tuple[int, ...]]]] = {}
    for rank in range(ranks):
        index = json.loads((folder / f"tensors_{rank}.json").read_text(encoding="utf-8"))
        for name, place in index.items():
            piece = (folder / f"tensors_{rank}.safetensors", tuple(place["shape"]), tuple(place["start"]))
            saved.setdefault(name, []).append(piece)
    for name in sorted({*parts, *(name for name in saved if name.startswith("model."))}):
        expected = parts[name].shape if name in parts else "no such tensor"
        found = saved[name][0][1] if name in saved else "no such tensor"
        if expected != found:
            raise EngineError(
                "the checkpoint does not fit this engine",
                where=f"{folder}, {name}",
                expected=f"a checkpoint of the same model and heads: {expected}",
                found=found,
            )
    read: dict[str, list[tuple[tuple[slice, ...], torch.Tensor]]] = {}
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for name, part in parts.items():
            left = part.values.numel()
            for file, _, start in saved[name]:
                if file not in files:
                    files[file] = stack.enter_context(safe_open(file, "pt"))
                stored = files[file].get_slice(name)
                theirs, ours = _common(start, stored.get_shape(), part.start, part.values.shape)
                count = math.prod(place.stop - place.start for place in ours)
                if count and left:
                    read.setdefault(name, []).append((ours, stored[theirs] if theirs else files[file].get_tensor(name)))
                    left -= count
            if left:
                raise ValueError(f"{left} elements of {name} are in no file")
    for name, pieces in read.items():
        for ours, tensor in pieces:
            parts[name].values[ours].copy_(tensor)


def _common(
    start: Sequence[int], shape: Sequence[int], our_start: Sequence[int], our_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return where the overlap of two parts lies in each of them."""
    theirs, ours = [], []
    for begin, length, our_begin, our_length in zip(start, shape, our_start, our_shape, strict=True):
        first = max(begin, our_begin)
        last = max(first, min(begin + length, our_begin + our_length))
        theirs.append(slice(first - begin, last - begin))
        ours.append(slice(first - our_begin, last - our_begin))
    return tuple(theirs), tuple(ours)
