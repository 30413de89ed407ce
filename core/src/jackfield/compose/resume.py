"""The folder of a run: its lock, what an earlier start of the same run left in it, and the errors of its disk."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from jackfield.config import RunConfig, as_plain
from jackfield.errors import RunError
from jackfield.files import replace_file, seal, unseal
from jackfield.queue.store import STORE_FILE, check_ledger
from jackfield.sdk.archive import NAME_FILE
from jackfield.settings import flatten
from jackfield.trainer import Checkpoint, CheckpointStore

_FINISHED = "finished.json"

#: What a disk answers, rather than a connection or a program.
DISK_ERRORS = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS})

#: What may change between two starts of one run: nothing of it decides what is learnt. The data's paths may change
#: because its contents are compared.
_FREE = (
    "name folder observe deadlines checkpoint cluster environments checkpoint_engine log_prob_check schedule.steps "
    "evaluation.every queue.address queue.durable queue.host queue.max_bytes queue.max_samples queue.port "
    "queue.rewards data.train data.eval data.expert"
)


def storage_error(folder: Path, error: OSError) -> RunError:
    """Return the error of a disk that fails: ``run.storage``."""
    room = ""
    with suppress(OSError):
        room = f" ({shutil.disk_usage(folder).free >> 20} MB of the disk are free)"
    return RunError(
        "the run's folder cannot be written",
        code="run.storage",
        where=str(folder),
        expected="room on the disk, and permission to write",
        found=f"{error}{room}",
        fix="look at the disk's room and permissions, then give the same command: it goes on from the newest "
        "checkpoint; or choose another folder",
    )


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the system into ``run.storage``."""
    try:
        yield
    except OSError as error:
        raise storage_error(folder, error) from error


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the lock ends with the process, however it ends.

    Raises:
        RunError: ``run.folder-in-use``, naming the process that holds it.
    """
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunError(
                "another run is using this folder",
                code="run.folder-in-use",
                where=str(folder),
                found=file.read() or "a process that does not say who it is",
                fix="wait for it, end it, or give this run another folder",
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def checkpoint_store(config: RunConfig) -> CheckpointStore:
    """Return the store of the run's checkpoints."""
    return CheckpointStore(Path(config.folder) / "checkpoints", config.checkpoint.keep)


def starting_point(config: RunConfig, digests: Mapping[str, str] | None = None) -> Checkpoint | None:
    """Find the checkpoint to go on from: the newest whole one. What earlier starts left half done is removed.

    Without ``checkpoint.resume`` nothing is read of what is there. A refusal leaves the folder as it was.

    Args:
        config: of the run.
        digests: of the data, by the names of the files; None: it has been compared.

    Raises:
        RunError: ``run.changed`` when the folder's run is another one; ``run.checkpoint-damaged``,
            ``run.checkpoint-format``.
        QueueError: ``queue.ledger``.
    """
    folder, store, served = Path(config.folder), checkpoint_store(config), config.queue.address is not None
    if not config.checkpoint.resume:
        store.clean(everything=True)
        if not served:  # else a controller works there
            _clear_queue(folder / "queue")

    def check(found: Checkpoint) -> None:
        _check_same(found, config, digests or {})
        if not served:
            check_ledger(folder / "queue" / STORE_FILE, found.folder / "queue" / STORE_FILE)

    checkpoint = store.newest(check=check)
    store.clean()
    if not is_finished(config, checkpoint):
        for name in (_FINISHED, "error.txt"):
            (folder / name).unlink(missing_ok=True)
    return checkpoint


def _clear_queue(folder: Path) -> None:
    """Remove what an earlier run's queue kept here, damaged or not; its name stays, under which servers know it."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != NAME_FILE:
            path.unlink()


def mark_finished(folder: Path, steps: int) -> None:
    """Note that the model of the last step is in its place."""
    replace_file(folder / _FINISHED, seal(json.dumps({"steps": steps})))


def is_finished(config: RunConfig, checkpoint: Checkpoint | None) -> bool:
    """Return whether the run has done its last step, and its model is there."""
    marker, model = (Path(config.folder) / name for name in (_FINISHED, "model"))
    if checkpoint is None or not marker.is_file() or not model.is_dir():
        return False
    try:
        return checkpoint.step == unseal(marker.read_bytes()).get("steps") == config.schedule.steps
    except ValueError as error:
        logging.getLogger("jackfield").warning(
            "%s is damaged (%s); the run goes on from its newest checkpoint, and writes its model again", marker, error
        )
        return False


def _check_same(checkpoint: Checkpoint, config: RunConfig, digests: Mapping[str, str]) -> None:
    """Compare settings and data with those of the checkpoint's run."""
    state, steps = checkpoint.state(), config.schedule.steps
    before, now = flatten(state["config"]), flatten(as_plain(config))
    differ = [path for path in {**before, **now} if before.get(path) != now.get(path)]
    changed = [
        (path, repr(before.get(path)), repr(now.get(path)))
        for path in differ
        if not _is_free(path, before.get(path), now.get(path))
    ]
    if checkpoint.step > steps:
        changed.append(("schedule.steps", f"{checkpoint.step} or more: so many are done", f"{steps}"))
    data = {which: digest for which, digest in state["data"].items() if digest != digests.get(which, digest)}
    changed += [(f"data.{which}", f"records of digest {data[which]}", digests[which]) for which in data]
    for path, expected, found in changed[:1]:
        raise RunError(
            "the folder holds a run with other settings, and results of both would be mixed",
            code="run.changed",
            where=f"{path}, {checkpoint.folder}",
            expected=expected,
            found=found,
            fix="give the run another folder, or the settings it had; checkpoint.resume=false removes what is there "
            "and starts from the beginning",
        )


def _is_free(path: str, *values: object) -> bool:
    """Return whether a setting may change between two starts; ``correct`` decides on the correction."""
    if path == "log_prob_check.on_mismatch" and "correct" in values:
        return False
    return any(f"{path}.".startswith(f"{free}.") for free in _FREE.split())
