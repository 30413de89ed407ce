"""Checkpoints of a run by its folder, and their models as folders that ``from_pretrained`` loads."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TypeVar

import attrs

from jackfield.abc.engine import BaseEngine, EngineContext, LoadCheckpointRequest, SaveCheckpointRequest
from jackfield.config import make_config
from jackfield.errors import EngineError, JackfieldError, RunError
from jackfield.plugins import Registry, discover
from jackfield.queue.store import STORE_FILE
from jackfield.runtime.engine_group import EngineGroup
from jackfield.trainer import Checkpoint, CheckpointStore, open_checkpoint

T = TypeVar("T")


def run_checkpoints(folder: Path) -> dict[int, Checkpoint | RunError]:
    """The checkpoints of a run's folder by their steps, the oldest first; the error in the place of a damaged one.

    Manifests and sizes are looked at, not contents.

    Raises:
        RunError: ``run.no-checkpoint``, ``run.checkpoint-format``.
    """
    return _found(CheckpointStore(folder / "checkpoints").checkpoints(), folder)


def find_checkpoint(folder: Path, part: str = "") -> Checkpoint:
    """A checkpoint by its own folder, or the newest whole one of a run by the run's folder, verified.

    Args:
        folder: of the checkpoint, or of the run.
        part: the folder in the checkpoint that is verified; all, where it is not given.

    Raises:
        RunError: ``run.no-checkpoint``, ``run.checkpoint-damaged``, ``run.checkpoint-format``.
    """
    if (folder / "manifest.json").is_file():
        return open_checkpoint(folder, part)
    return _found(CheckpointStore(folder / "checkpoints").newest(part), folder)


def find_queue(folder: Path) -> Path:
    """The folder of a checkpointed queue: itself, or that of a run's (newest whole) checkpoint."""
    return folder if (folder / STORE_FILE).is_file() else find_checkpoint(folder, "queue/").folder / "queue"


def _found(found: T | None, folder: Path) -> T:
    if found:
        return found
    raise RunError(
        "the folder holds no checkpoint",
        code="run.no-checkpoint",
        where=str(folder),
        expected="the folder of a run with checkpoints, or one of its checkpoints",
    )


def export_checkpoint(
    checkpoint: Checkpoint, out: Path, registry: Registry | None = None, *, merge: bool = False
) -> None:
    """Write the actor's weights, as they were at a verified ``checkpoint``, to the Hugging Face folder ``out``.

    The run's model folder is needed for the model's shape and the tokenizer; one process of this machine must hold the
    model.

    Args:
        checkpoint: of a run.
        out: an empty or absent folder.
        registry: of plugins; None: the installed ones.
        merge: write base model and adapter as one model; False: the adapter alone, where one was trained.

    Raises:
        RunError: ``run.no-adapter``: there is nothing to merge.
        EngineError: when ``out`` is not empty, or the engine cannot load or save.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise EngineError("the folder for the model is not empty", where=str(out), expected="an empty or absent folder")
    config = make_config(checkpoint.state()["config"])
    if merge and config.model.lora is None:
        raise RunError(
            "the run has not trained an adapter",
            code="run.no-adapter",
            where=str(checkpoint.folder),
            expected="a run with model.lora",
            fix="leave out --merge: the exported folder holds the whole model",
        )
    context = EngineContext(role="actor", model=attrs.evolve(config.model, gradient_checkpointing=False))
    plugin = (registry or discover()).load("engine", config.engine.name)
    engine: BaseEngine = plugin.build(config.engine.settings, context, "engine")
    try:
        engine.initialize()
        engine.load_checkpoint(LoadCheckpointRequest(folder=str(checkpoint.folder / "actor"), model_only=True))
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(out), format="huggingface", merge_adapter=merge))
        if merge and (out / "adapter_config.json").is_file():
            message = f"the engine {config.engine.name} does not merge adapters"
            raise EngineError(message, code="plugin.capability", where=str(out), fix="leave out --merge")
    except OSError as error:
        raise EngineError(f"the model could not be written: {error}", where=str(out)) from error
    finally:
        engine.close()


async def export_model(actor: EngineGroup, model: Path) -> None:
    """Write the model beside its place, then put it there: an earlier model is replaced by a whole one.

    Raises:
        RunError: ``run.checkpoint-write``.
    """
    partial = model.with_name(f"{model.name}.partial")
    try:
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
        await actor.save(str(partial), "huggingface")
        shutil.rmtree(model, ignore_errors=True)
        partial.replace(model)
    except (OSError, JackfieldError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(
            "the trained model could not be written",
            code="run.checkpoint-write",
            where=str(model),
            found=error.message if isinstance(error, JackfieldError) else f"{type(error).__name__}: {error}",
            fix="look at the disk's room and permissions, then give the same command: it goes on from its checkpoint",
        ) from error
