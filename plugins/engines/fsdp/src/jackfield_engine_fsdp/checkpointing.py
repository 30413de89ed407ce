"""Native checkpoints: safetensors and JSON.

::

    engine.json        format, number of ranks, schedule step; written last
    random_<rank>.json states of the random generators of a rank
    tensors/           model and optimizer (any number of ranks can read it): see :mod:`.tensors`
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from jackfield.errors import EngineError
from jackfield.sdk import replace_file
from jackfield_engine_fsdp.model import TokenModel, has_adapter, is_of_adapter
from jackfield_engine_fsdp.optimization import Optimization
from jackfield_engine_fsdp.process_group import RandomStreams, Ranks
from jackfield_engine_fsdp.tensors import read_tensors, write_tensors

FORMAT = 2

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


def save(
    folder: Path, model: TokenModel, optimization: Optimization | None, streams: RandomStreams, ranks: Ranks
) -> None:
    """Write a native checkpoint into an empty folder. Collective; if one rank cannot write, all raise."""
    with _agreed(ranks, "the checkpoint could not be written", folder, "look at the disk's room and permissions"):
        (folder / "tensors").mkdir(exist_ok=True)
        write_tensors(folder / "tensors", ranks.rank, _tensors(model, optimization))
        replace_file(folder / f"random_{ranks.rank}.json", json.dumps(streams.state()))
    if ranks.rank == 0:  # engine.json is there only when all the rest is
        record = {
            "format": FORMAT,
            "world_size": ranks.size,
            "schedule_step": None if optimization is None else optimization.schedule_step,
        }
        replace_file(folder / "engine.json", json.dumps(record))


@contextmanager
def _agreed(ranks: Ranks, message: str, folder: Path, fix: str) -> Iterator[None]:
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


def load(
    folder: Path,
    model: TokenModel,
    optimization: Optimization | None,
    streams: RandomStreams,
    ranks: Ranks,
    model_only: bool,
) -> None:
    """Read what :func:`save` wrote into the existing model and optimizer. A collective operation.

    Raises:
        EngineError: ``engine.failed`` if the folder holds no complete checkpoint, or one of another model.
    """
    fix = "go on from another checkpoint"
    with _agreed(ranks, "the checkpoint cannot be read", folder, fix):
        record = _read_record(folder)
        if model_only or record["schedule_step"] is None:
            optimization = None
        size = int(record["world_size"])
        read_tensors(folder / "tensors", size, _tensors(model, optimization))
        if model_only:
            return
        if optimization is not None:
            optimization.set_schedule_step(int(record["schedule_step"]))
        if size == ranks.size:
            streams.load_state(json.loads((folder / f"random_{ranks.rank}.json").read_text(encoding="utf-8")))


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
        raise EngineError(
            "a checkpoint of another format", where=str(path), expected=f"format {FORMAT}", found=record["format"]
        )
    return record


def _tensors(model: TokenModel, optimization: Optimization | None) -> dict[str, torch.Tensor]:
    """Return the live tensors to save, by name: saving reads them, loading writes into them.

    With an adapter the base model is left out, because it never changes and is in the model folder.
    """
    adapter = has_adapter(model.language_model)
    kept = {
        name: tensor.detach()
        for name, tensor in model.named_parameters()
        if not adapter or is_of_adapter(name) or name.startswith("value_head.")
    }
    state = {f"model.{name}": tensor for name, tensor in {**kept, **({} if adapter else _buffers(model))}.items()}
    for name, tensors in ({} if optimization is None else optimization.state()).items():
        state |= {f"optimizer.{name}.{kind}": tensor for kind, tensor in tensors.items()}
    return state


def _buffers(model: TokenModel) -> dict[str, torch.Tensor]:
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}
