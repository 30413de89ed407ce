"""Where a run begins: a locked folder, and what an earlier start of the same run left in it."""

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
from typing import Any

import attrs

from jackfield.config import RunConfig, as_plain
from jackfield.errors import RunError
from jackfield.files import replace_file, seal, unseal
from jackfield.queue.restoring import Checkpoint as QueueCheckpoint
from jackfield.queue.store import STORE_FILE, check_ledger
from jackfield.sdk.archive import NAME_FILE
from jackfield.settings import flatten
from jackfield.trainer import Checkpoint, CheckpointStore

_LOCK, _FINISHED = ".lock", "finished.json"

#: What a disk answers, rather than a connection or a program.
DISK_ERRORS = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS})

#: What may change between two starts of one run: nothing of it decides what is learnt. The data's paths may change
#: because its contents are compared.
FREE = (
    "name",
    "folder",
    "observe",
    "deadlines",
    "checkpoint",
    "cluster",
    "environments",
    "checkpoint_engine",
    "log_prob_check",
    "schedule.steps",
    "evaluation.every",
    "queue.address",
    "queue.durable",
    "queue.host",
    "queue.max_bytes",
    "queue.max_samples",
    "queue.port",
    "queue.rewards",
    "data.train",
    "data.eval",
    "data.expert",
)


@attrs.frozen(kw_only=True)
class StartingPoint:
    """What a run finds in its folder."""

    store: CheckpointStore
    checkpoint: Checkpoint | None  #: to go on from
    finished: bool  #: nothing is left to do

    @property
    def step(self) -> int:
        """Return the number of completed steps."""
        return 0 if self.checkpoint is None else self.checkpoint.step


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
    """Whatever the system refuses here is about the folder.

    Raises:
        RunError: ``run.storage``.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(folder, error) from error


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the lock ends with the process, however it ends.

    Raises:
        RunError: ``run.folder-in-use``, naming who holds it.
    """
    with (folder / _LOCK).open("a+", encoding="utf-8") as file:
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


def starting_point(config: RunConfig, folder: Path, digests: Mapping[str, str] | None = None) -> StartingPoint:
    """Find the checkpoint to go on from: the newest whole one. What earlier starts left half done is removed.

    Without ``checkpoint.resume`` nothing is read of what is there. A refusal leaves the folder as it was.

    Args:
        config: of the run.
        folder: of the run.
        digests: of the data; None: it has been compared.

    Raises:
        RunError: ``run.changed`` when the folder's run is another one; ``run.checkpoint-damaged``,
            ``run.checkpoint-format``.
        QueueError: ``queue.ledger``.
    """
    store = CheckpointStore(folder / "checkpoints", config.checkpoint.keep)
    if not config.checkpoint.resume:
        store.clear()
        if config.queue.address is None:  # else a controller works there
            _clear_queue(folder / "queue")

    def check(found: Checkpoint) -> None:
        _check_config(found, config)
        check_data(found, digests or {})
        if config.queue.address is None:
            _check_ledger(found, folder / "queue" / STORE_FILE)

    checkpoint = store.newest(check=check)
    store.clean()
    steps = _finished_steps(folder) if checkpoint is not None else None
    finished = checkpoint is not None and checkpoint.step == steps == config.schedule.steps
    if not finished:
        (folder / _FINISHED).unlink(missing_ok=True)
        (folder / "error.txt").unlink(missing_ok=True)
    return StartingPoint(store=store, checkpoint=checkpoint, finished=finished)


def _check_ledger(checkpoint: Checkpoint, ledger: Path) -> None:
    known = QueueCheckpoint.read(checkpoint.folder / "queue" / STORE_FILE).ledger
    if known is not None:
        check_ledger(ledger, known)


def _clear_queue(folder: Path) -> None:
    """Remove what an earlier run's queue kept here, damaged or not; its name stays, under which servers know it."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != NAME_FILE:
            path.unlink()


def mark_finished(folder: Path, steps: int) -> None:
    """The model of the last step is in its place."""
    replace_file(folder / _FINISHED, seal(json.dumps({"steps": steps})))


def _finished_steps(folder: Path) -> object:
    """What :func:`mark_finished` noted; None where it did not, or where that is damaged, or the model is gone."""
    marker = folder / _FINISHED
    if not marker.is_file() or not (folder / "model").is_dir():
        return None
    try:
        return unseal(marker.read_bytes()).get("steps")
    except ValueError as error:
        logging.getLogger("jackfield").warning(
            "%s is damaged (%s); the run goes on from its newest checkpoint, and writes its model again", marker, error
        )
        return None


def check_data(checkpoint: Checkpoint, digests: Mapping[str, str]) -> None:
    """Compare the data with what the run had.

    Raises:
        RunError: ``run.changed``.
    """
    before = checkpoint.state()["data"]
    for which in digests.keys() & before.keys():
        if digests[which] != before[which]:
            raise _changed(checkpoint, f"data.{which}", f"records of digest {before[which]}", digests[which])


def _check_config(checkpoint: Checkpoint, config: RunConfig) -> None:
    before, now = (flatten(values) for values in (checkpoint.state()["config"], as_plain(config)))
    for path in dict.fromkeys([*before, *now]):
        if before.get(path) != now.get(path) and not _is_free(path, before.get(path), now.get(path)):
            raise _changed(checkpoint, path, repr(before.get(path)), repr(now.get(path)))
    if checkpoint.step > config.schedule.steps:
        found = f"{config.schedule.steps}"
        raise _changed(checkpoint, "schedule.steps", f"{checkpoint.step} or more: so many are done", found)


def _is_free(path: str, before: Any, now: Any) -> bool:
    """Whether a setting may change between two starts."""
    if path == "log_prob_check.on_mismatch" and "correct" in (before, now):  # it decides on the correction
        return False
    return any(path == each or path.startswith(f"{each}.") for each in FREE)


def _changed(checkpoint: Checkpoint, path: str, expected: str, found: str) -> RunError:
    return RunError(
        "the folder holds a run with other settings, and results of both would be mixed",
        code="run.changed",
        where=f"{path}, {checkpoint.folder}",
        expected=expected,
        found=found,
        fix="give the run another folder, or the settings it had; checkpoint.resume=false removes what is there and "
        "starts from the beginning",
    )
