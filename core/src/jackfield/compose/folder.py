"""The folder of a run: its lock, earlier state, checkpoints and models."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs

from jackfield.abc.engine import BaseEngine, EngineContext, LoadCheckpointRequest, SaveCheckpointRequest
from jackfield.config import RunConfig, as_plain, make_config
from jackfield.data.tasks import TaskSet
from jackfield.errors import EngineError, RunError
from jackfield.files import replace_file, seal, unseal
from jackfield.plugins import discover
from jackfield.queue.store import STORE_FILE, check_ledger
from jackfield.sdk.archive import NAME_FILE
from jackfield.settings import flatten
from jackfield.trainer.checkpoint import Checkpoint, CheckpointStore, disk_error, open_checkpoint

_FINISHED = "finished.json"

#: Error numbers that come from a disk rather than from a connection or a program.
DISK_ERRORS = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS})

#: Settings that may change between two starts of a run, because they do not affect what is learnt. Paths of data may
#: change because the contents are compared.
_FREE = (
    "name folder observe deadlines checkpoint cluster environments checkpoint_engine log_prob_check schedule.steps "
    "evaluation.every queue.address queue.durable queue.host queue.max_bytes queue.max_samples queue.port "
    "queue.rewards data.train data.eval data.expert"
)


def storage_error(folder: Path, error: OSError) -> RunError:
    """Return the error ``run.storage`` for a disk that fails."""
    how = "goes on from the newest checkpoint; or choose another folder"
    return disk_error("the run's folder cannot be written", "run.storage", folder, error, how)


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn an ``OSError`` into ``run.storage``."""
    try:
        yield
    except OSError as error:
        raise storage_error(folder, error) from error


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock the folder for this process, or raise ``run.folder-in-use`` with the process that holds it.

    The lock ends with the process, even if it is killed.
    """
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "a process that does not say who it is"
            what, fix = "another run is using this folder", "wait for it, end it, or give this run another folder"
            raise RunError(what, code="run.folder-in-use", where=str(folder), found=holder, fix=fix) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def starting_point(config: RunConfig, tasks: Mapping[str, TaskSet]) -> Checkpoint | None:
    """Return the newest undamaged checkpoint to resume from; remove unfinished ones.

    Without ``checkpoint.resume``, earlier state is removed without being read. Errors leave the folder unchanged:
    ``run.changed`` if it belongs to a different run, ``queue.ledger`` if the ledger is not the one that the checkpoint
    knows, and those of :meth:`CheckpointStore.newest`.
    """
    folder, served = Path(config.folder), config.queue.address is not None
    store = CheckpointStore(folder / "checkpoints", config.checkpoint.keep)
    if not config.checkpoint.resume:
        store.clean(everything=True)
        if not served and (folder / "queue").is_dir():  # a served controller uses the folder
            for path in (folder / "queue").iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != NAME_FILE:  # servers know the queue by this name
                    path.unlink()

    def check(found: Checkpoint) -> None:
        _check_same(found, config, tasks)
        if not served:
            check_ledger(folder / "queue" / STORE_FILE, found.folder / "queue" / STORE_FILE)

    checkpoint = store.newest(check=check) if store.folders() else None
    store.clean()
    if not is_finished(config, checkpoint):
        for name in (_FINISHED, "error.txt"):
            (folder / name).unlink(missing_ok=True)
    return checkpoint


def _check_same(checkpoint: Checkpoint, config: RunConfig, tasks: Mapping[str, TaskSet]) -> None:
    """Raise if settings or data differ from those of the checkpoint's run."""
    state, steps, changed = checkpoint.state(), config.schedule.steps, list[tuple[str, str, str]]()
    before, now = flatten(state["config"]), flatten(as_plain(config))
    for path in {**before, **now}:
        old, new = before.get(path), now.get(path)
        corrects = path == "log_prob_check.on_mismatch" and "correct" in (old, new)  # this changes what is learnt
        free = not corrects and any(f"{path}.".startswith(f"{free}.") for free in _FREE.split())
        if old != new and not free:
            changed.append((path, repr(old), repr(new)))
    if checkpoint.step > steps:
        changed.append(("schedule.steps", f"{checkpoint.step} or more: so many are done", f"{steps}"))
    for which, digest in state["data"].items():
        if which in tasks and digest != tasks[which].digest:
            changed.append((f"data.{which}", f"records of digest {digest}", tasks[which].digest))
    for path, expected, found in changed[:1]:
        what = "the folder holds a run with other settings, and results of both would be mixed"
        where, fix = f"{path}, {checkpoint.folder}", "give the run another folder, or the settings it had; "
        fix += "checkpoint.resume=false removes what is there and starts from the beginning"
        raise RunError(what, code="run.changed", where=where, expected=expected, found=found, fix=fix)


def mark_finished(folder: Path, steps: int) -> None:
    """Record that the model of the last step has been written."""
    replace_file(folder / _FINISHED, seal(json.dumps({"steps": steps})))


def is_finished(config: RunConfig, checkpoint: Checkpoint | None) -> bool:
    """Return whether the run has completed its last step and its model exists."""
    marker, model = (Path(config.folder) / name for name in (_FINISHED, "model"))
    if checkpoint is None or not marker.is_file() or not model.is_dir():
        return False
    try:
        return checkpoint.step == unseal(marker.read_bytes()).get("steps") == config.schedule.steps
    except ValueError as error:
        what = "%s is damaged (%s); the run goes on from its newest checkpoint, and writes its model again"
        logging.getLogger("jackfield").warning(what, marker, error)
        return False


def find_checkpoint(folder: Path, part: str = "") -> Checkpoint:
    """Return the checkpoint in a folder, or the newest undamaged one if it is a run's folder.

    Only the folder ``part`` of the checkpoint is verified; by default, everything is. Raise ``run.no-checkpoint``,
    ``run.checkpoint-damaged`` or ``run.checkpoint-format``.
    """
    if (folder / "manifest.json").is_file():
        return open_checkpoint(folder, part)
    return CheckpointStore(folder / "checkpoints").newest(part)


def find_queue(folder: Path) -> Path:
    """Return the folder of a checkpointed queue, in a checkpoint's or run's folder."""
    return folder if (folder / STORE_FILE).is_file() else find_checkpoint(folder, "queue/").folder / "queue"


def export_checkpoint(checkpoint: Checkpoint, out: Path, *, merge: bool = False) -> None:
    """Write the actor's weights of a verified ``checkpoint`` to the empty or absent folder ``out``, for Hugging Face.

    The model must fit into one process on this machine. Its shape and the tokenizer are those of the run's model
    folder. ``merge`` writes base model and adapter as one model, or raises ``run.no-adapter``; without it only the
    adapter is written, if one was trained. An ``EngineError`` is raised if the engine cannot load or save.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise EngineError("the folder for the model is not empty", where=str(out), expected="an empty or absent folder")
    config, where = make_config(checkpoint.state()["config"]), str(checkpoint.folder)
    if merge and config.model.lora is None:
        what, fix = "the run has not trained an adapter", "leave out --merge: the exported folder holds the whole model"
        raise RunError(what, code="run.no-adapter", where=where, expected="a run with model.lora", fix=fix)
    context = EngineContext(role="actor", model=attrs.evolve(config.model, gradient_checkpointing=False))
    plugin = discover().load("engine", config.engine.name)
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
