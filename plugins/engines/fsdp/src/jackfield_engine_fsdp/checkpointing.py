"""Native checkpoints: sharded tensors by torch.distributed.checkpoint, everything small as JSON beside them.

::

    engine.json        format, number of ranks, schedule step
    random_<rank>.json states of the random generators of a rank
    tensors/           model and optimizer (DCP; any number of ranks can read it)
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from jackfield.errors import EngineError
from jackfield_engine_fsdp.model import TokenModel, has_adapter, is_of_adapter
from jackfield_engine_fsdp.optimization import Optimization
from jackfield_engine_fsdp.process_group import Ranks
from jackfield_engine_fsdp.random_state import RandomStreams

__all__ = ["load", "make_folder", "save"]

FORMAT = 1


def make_folder(folder: str, ranks: Ranks) -> Path:
    """Make the folder of a checkpoint, on every rank's behalf.

    Raises:
        EngineError: ``engine.failed``, on every rank, when it holds something already or cannot be made.
    """
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
    """Write a native checkpoint into an empty folder. A collective operation.

    Raises:
        EngineError: ``engine.failed``, on every rank, when a rank could not write.
    """
    state = _tensors(model, optimization)
    try:
        save_tensors(state, checkpoint_id=folder / "tensors")
    except CheckpointException as caught:  # no Exception: nobody else would take it for a failure
        rank, (cause, _) = next(iter(caught.failures.items()))
        raise EngineError(
            "the checkpoint could not be written",
            where=f"{folder}, rank {rank}",
            found=f"{type(cause).__name__}: {cause}",
            fix="look at the disk's room and permissions",
        ) from caught
    _write_json(folder / f"random_{ranks.rank}.json", streams.state())
    ranks.barrier()  # engine.json is there only when all the rest is
    if ranks.rank == 0:
        record = {
            "format": FORMAT,
            "world_size": ranks.size,
            "schedule_step": None if optimization is None else optimization.schedule_step,
        }
        _write_json(folder / "engine.json", record)


def load(
    folder: Path,
    model: TokenModel,
    optimization: Optimization | None,
    streams: RandomStreams,
    ranks: Ranks,
    model_only: bool,
) -> None:
    """Read what :func:`save` wrote, into the model and optimizer that are there. A collective operation.

    Raises:
        EngineError: ``engine.failed`` when the folder holds no complete checkpoint or one of another model.
    """
    record = _read_record(folder)
    if model_only or record["schedule_step"] is None:
        optimization = None
    state = _tensors(model, optimization)
    try:
        load_tensors(state, checkpoint_id=folder / "tensors")
    except CheckpointException as caught:
        raise EngineError(
            "the checkpoint does not fit this engine",
            where=str(folder),
            expected="a checkpoint of the same model, adapter and heads",
            found=str(caught).strip().splitlines()[-1],
        ) from caught
    if model_only:
        return
    if optimization is not None:
        optimization.set_schedule_step(record["schedule_step"])
    if record["world_size"] == ranks.size:
        streams.load_state(json.loads((folder / f"random_{ranks.rank}.json").read_text()))


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / "engine.json"
    if not path.is_file():
        raise EngineError(
            "no native checkpoint in the folder",
            where=str(folder),
            expected="engine.json, written last",
            found="no such folder" if not folder.is_dir() else "none: unfinished, or of another format",
        )
    record: dict[str, Any] = json.loads(path.read_text())
    if record.get("format") != FORMAT:
        raise EngineError(
            "a checkpoint of another format", where=str(path), expected=f"format {FORMAT}", found=record.get("format")
        )
    return record


def _tensors(model: TokenModel, optimization: Optimization | None) -> dict[str, Any]:
    """What is saved, by name, as the live tensors: saving reads them, loading writes into them.

    With an adapter the base model is left out: it never changes, and the model folder has it.
    """
    adapter = has_adapter(model.language_model)
    kept = {
        name: tensor.detach()
        for name, tensor in model.named_parameters()
        if not adapter or is_of_adapter(name) or name.startswith("value_head.")
    }
    state: dict[str, Any] = {"model": kept | ({} if adapter else _buffers(model))}
    if optimization is not None:
        state["optimizer"] = optimization.state()
    return state


def _buffers(model: TokenModel) -> dict[str, torch.Tensor]:
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def _write_json(path: Path, value: Any) -> None:
    draft = path.with_suffix(".part")
    with draft.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
