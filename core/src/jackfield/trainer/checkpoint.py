"""Checkpoints of a run: writing, restoring, the folder that stores them, and the mark of a finished run.

A checkpoint is complete or absent, and the newest few are kept::

    step_00000040/           a checkpoint; it gets this name when everything in it is on the disk
        manifest.json        size and digest of every other file, and its own digest
        state.json           step, configuration, random state, position in the ledger
        actor/ critic/       the engines' native checkpoints
        queue/               controller and values of the TransferQueue
    step_00000050.partial/   an unfinished checkpoint; if the process is killed, the next start removes it
    step_00000060.damaged/   a checkpoint that a start found damaged and set aside
"""

from __future__ import annotations

import asyncio
import json
import logging
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs

from jackfield import __version__
from jackfield.config import RunConfig, as_plain
from jackfield.errors import JackfieldError, RunError, WorkerLost
from jackfield.files import digest_of, replace_file, seal, sync, sync_tree, unseal
from jackfield.plugins.hooks import CheckpointSaved
from jackfield.queue.store import STORE_FILE
from jackfield.runtime.engine import EngineGroup
from jackfield.runtime.samples import TRAIN
from jackfield.trainer.random_state import random_state, restore_random_state
from jackfield.trainer.rewards import pipeline_states, restore_pipelines
from jackfield.trainer.role import Role

FORMAT = 2
_MANIFEST, _STATE = "manifest.json", "state.json"
FINISHED_FILE = "finished.json"  #: in the folder of a run
_NAME = re.compile(r"step_(\d{8,})")


@attrs.frozen
class _Open:
    """A checkpoint whose state has been copied; its files may not be there yet."""

    store: CheckpointStore
    steps: int
    state: Mapping[str, Any]
    how: str  #: what a new start does if it is not completed


_UNWRITTEN = "a checkpoint could not be written"


@attrs.define(kw_only=True, eq=False)
class Checkpointer:
    """Saves and restores the state of a run: engines, queue and random state."""

    role: Role
    engines: Mapping[str, EngineGroup]  #: the trained engines, by role
    saved: int = attrs.field(default=0, init=False)  #: completed steps in the newest checkpoint
    random: Mapping[str, Any] = attrs.field(factory=dict, init=False)  #: random state after the last step
    _open: _Open | None = attrs.field(default=None, init=False)

    def is_due(self, steps_done: int) -> bool:
        """Return whether a checkpoint is written after ``steps_done`` steps."""
        settings, schedule = self.role.config.checkpoint, self.role.schedule
        return schedule.is_due(settings.every, steps_done) or (settings.at_end and steps_done == schedule.steps)

    async def save(
        self, steps: int, trainer: Mapping[str, Any], *, again_from: int | None = None, background: bool = False
    ) -> None:
        """Write a durable checkpoint after ``steps`` steps, whose acks become final.

        ``trainer`` is the trainer's own state, as plain values. ``again_from`` is the first batch to save as not begun;
        the random state is then that after the last step. None saves everything as it is now. In the ``background``,
        return when the state is copied; :meth:`finish` does the rest. If writing fails, earlier checkpoints are not
        affected (``run.checkpoint-write``). The death of a rank, a storage unit or the queue's controller raises its
        own error.
        """
        await self.finish()
        config, background = self.role.config, background and bool(self.engines)
        store = CheckpointStore(Path(config.folder) / "checkpoints", config.checkpoint.keep)
        earlier = store.folders()
        how = f"goes on after step {max(earlier)}" if earlier else "starts again"
        async with self.role.measure("checkpoint", "trainer", steps - 1):
            with written(store.partial(steps), _UNWRITTEN, how):
                folder = await asyncio.to_thread(store.begin, steps)
                for role, engine in self.engines.items():
                    await engine.save(str(folder / role), "native", background=background)
                state = {
                    "step": steps,
                    "trainer": dict(trainer),
                    "versions": {"jackfield": __version__, "python": platform.python_version()},
                    "random": random_state() if again_from is None else self.random,
                    "config": as_plain(config),
                    "pipeline": await pipeline_states(self.role, steps),
                    "data": {which: tasks.digest for which, tasks in self.role.tasks.items()},
                }
                not_begun = {} if again_from is None else {TRAIN: again_from}
                await self.role.queue.checkpoint(folder / "queue", not_begun)
        self._open = _Open(store, steps, state, how)
        if not background:
            await self.finish()

    def is_finished_after(self, steps_done: int) -> bool:
        """Return whether a checkpoint in the background has had its steps, and :meth:`finish` completes it."""
        background = self.role.config.checkpoint.background
        return self._open is not None and steps_done >= self._open.steps + background

    async def finish(self) -> None:
        """Complete the checkpoint whose state has been copied, if there is one; errors are those of :meth:`save`."""
        opened, self._open = self._open, None
        if opened is None:
            return
        store, steps = opened.store, opened.steps
        async with self.role.measure("checkpoint_files", "trainer", steps - 1):
            with written(store.partial(steps), _UNWRITTEN, opened.how):
                for engine in self.engines.values():
                    await engine.finish_save()
                saved = await asyncio.to_thread(store.commit, steps, opened.state)
            if self.engines:  # otherwise nothing was acked
                await self.role.queue.commit(steps - 1)
        self.saved = steps
        self.role.hooks.emit(CheckpointSaved(step=steps, folder=str(saved.folder), bytes=saved.bytes))

    async def load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Restore engines, queue and random state; return the trainer's own state.

        The caller has verified the checkpoint (:meth:`CheckpointStore.newest`) and registered the queue's consumers,
        and no worker has started yet. Engines and queue raise their errors if they cannot read their parts.
        """
        state = checkpoint.state()
        for role, engine in self.engines.items():
            await engine.load(str(checkpoint.folder / role))
        await self.role.queue.restore(checkpoint.folder / "queue", checkpoint.step - 1)
        restore_random_state(state["random"])
        await restore_pipelines(self.role, state.get("pipeline", []))
        self.saved = checkpoint.step
        return dict(state["trainer"])


@contextmanager
def written(partial: Path, what: str, how: str) -> Iterator[None]:
    """Remove an unfinished folder if writing fails, and raise ``run.checkpoint-write``.

    ``how`` says what a new start does. The death of a rank, a storage unit or the queue's controller raises its own
    error, which names the process; the disk is not at fault then.
    """
    try:
        yield
    except (JackfieldError, OSError) as error:
        failure = disk_error(what, "run.checkpoint-write", partial.with_suffix(""), error, how)
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, WorkerLost) or getattr(error, "code", None) == "queue.session":
            raise
        raise failure from error


def disk_error(what: str, code: str, where: Path, error: JackfieldError | OSError, how: str) -> RunError:
    """Return the error for files that could not be written, with the disk's room. ``how``: what a new start does."""
    found = f"{type(error).__name__}: {error}"
    if isinstance(error, JackfieldError):
        found = error.message if error.found is None else f"{error.message}: {error.found}"
    with suppress(OSError):
        folder = next(each for each in (where, *where.parents) if each.exists())
        found += f" ({shutil.disk_usage(folder).free >> 20} MB of the disk were free)"
    expected = "room on the disk, and permission to write"
    fix = f"look at the disk's room and permissions, then give the same command: it {how}"
    return RunError(what, code=code, where=str(where), expected=expected, found=found, fix=fix)


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A complete checkpoint in a folder."""

    folder: Path
    step: int  #: completed steps
    files: Mapping[str, tuple[int, str]]  #: size in bytes and xxh3_128 digest, by path in the folder

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(size for size, _ in self.files.values())

    def state(self) -> dict[str, Any]:
        """Read the ``state.json`` of the checkpoint, or raise ``run.checkpoint-damaged``."""
        path = self.folder / _STATE
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise _damaged(path, "JSON", f"{type(error).__name__}: {error}") from error


def open_checkpoint(folder: Path, part: str = "", *, contents: bool = True) -> Checkpoint:
    """Open the checkpoint in a folder, and compare its files with its manifest.

    ``part`` limits the comparison to files below it. Without ``contents``, only sizes are compared, not digests. Errors
    are ``run.no-checkpoint``, ``run.checkpoint-damaged``, which names the first file that differs, and
    ``run.checkpoint-format`` if another version of Jackfield wrote it.
    """
    if not folder.is_dir():
        raise _absent(folder)
    path = folder / _MANIFEST
    try:
        content = path.read_bytes()
        manifest = json.loads(content)
        if b'"digest"' in content or manifest["format"] == FORMAT:  # older formats had no seal
            manifest = unseal(content)
        if manifest["format"] != FORMAT:
            details = {"where": str(folder), "expected": f"format {FORMAT}", "found": f"format {manifest['format']}"}
            what, fix = "a checkpoint is of another version of Jackfield", "go on with the version that wrote it, or "
            fix += "export the model with that version and begin a run with it in another folder"
            raise RunError(what, code="run.checkpoint-format", fix=fix, **details)
        files = {name: (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
        found = Checkpoint(folder=folder, step=int(manifest["step"]), files=files)
        named = _NAME.fullmatch(folder.name)
        if named and int(named[1]) != found.step:
            raise _damaged(path, f"the checkpoint of step {int(named[1])}", f"that of step {found.step}")
        for name in (name for name in files if name.startswith(part)):
            path, (size, digest) = folder / name, files[name]
            there = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
            if there != f"{size} bytes":
                raise _damaged(path, f"{size} bytes", there)
            if contents and digest_of(path) != digest:
                raise _damaged(path, f"contents of digest {digest}", "other contents")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, "what was written", str(error)) from error
    return found


@attrs.define
class CheckpointStore:
    """Writes, finds and removes checkpoints. Only one process may use a store at a time."""

    folder: Path  #: created with the first checkpoint
    keep: int = 2  #: how many of the newest checkpoints to keep

    def folders(self) -> dict[int, Path]:
        """Return the folders of all checkpoints, complete or damaged, by step, the oldest first."""
        named = [(_NAME.fullmatch(path.name), path) for path in self.folder.glob("step_*")]
        return dict(sorted((int(match[1]), path) for match, path in named if match))

    def checkpoints(self) -> dict[int, Checkpoint | RunError]:
        """Return checkpoints by step, oldest first, or the errors of damaged ones; contents are not read.

        Raise ``run.no-checkpoint`` if there are none, and ``run.checkpoint-format``.
        """
        found = {step: _attempt(path, contents=False) for step, path in self.folders().items()}
        if not found:
            raise _absent(self.folder)
        return found

    def newest(self, part: str = "", *, check: Callable[[Checkpoint], None] | None = None) -> Checkpoint:
        """Return the newest undamaged checkpoint, and log a warning for newer damaged ones.

        With ``part``, only that folder has to be undamaged. ``check`` may raise to refuse the checkpoint before
        anything is changed. If it accepts, newer damaged folders are renamed, which frees their names. Errors are
        ``run.no-checkpoint``, ``run.checkpoint-damaged`` if all are damaged, and ``run.checkpoint-format``.
        """
        damaged: dict[Path, RunError] = {}
        for step, path in reversed(self.folders().items()):
            found = _attempt(path, part)
            if isinstance(found, RunError):
                damaged[path] = found
                continue
            if check is not None:
                check(found)
            for worse, error in damaged.items():
                where, aside = f"{worse} is damaged ({error.where}", worse.with_name(f"{worse.name}.damaged")
                if check is not None:
                    _remove(aside)
                    worse.rename(aside)
                logging.getLogger("jackfield").warning(
                    "the checkpoint %s: expected %s, found %s)%s; the newest whole one is taken, of step %d",
                    *(where, error.expected, error.found, "" if check is None else f"; it is now {aside}", step),
                )
            return found
        if not damaged:
            raise _absent(self.folder)
        newest = next(iter(damaged.values()))
        newest.found = "; ".join(f"{error.where}: {error.found}" for error in damaged.values())
        raise newest

    def begin(self, step: int) -> Path:
        """Create an empty folder for the checkpoint of ``step``."""
        partial = self.partial(step)
        _remove(partial)
        partial.mkdir(parents=True)
        return partial

    def commit(self, step: int, state: Mapping[str, Any]) -> Checkpoint:
        """Complete a checkpoint, sync it to disk and rename it; remove old checkpoints."""
        partial, final = self.partial(step), self.folder / f"step_{step:08d}"
        (partial / _STATE).write_text(json.dumps(state, ensure_ascii=False, indent=1), encoding="utf-8")
        paths = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(partial)): (path.stat().st_size, digest_of(path)) for path in paths}
        manifest = json.dumps({"format": FORMAT, "step": step, "files": files}, ensure_ascii=False, indent=1)
        (partial / _MANIFEST).write_text(seal(manifest), encoding="utf-8")
        sync_tree(partial)
        _remove(final)
        partial.rename(final)
        sync(self.folder)
        for folder in list(self.folders().values())[: -self.keep]:
            _remove(folder)
        return Checkpoint(folder=final, step=step, files=files)

    def clean(self, *, everything: bool = False) -> None:
        """Remove unfinished folders of killed processes; with ``everything``, all checkpoints."""
        for path in sorted(self.folder.glob("step_*"), reverse=True):
            if everything or path.suffix == ".partial":
                _remove(path)

    def partial(self, step: int) -> Path:
        """Return the folder of an unfinished checkpoint."""
        return self.folder / f"step_{step:08d}.partial"


def mark_finished(config: RunConfig, steps: int) -> None:
    """Record that the model of the last step has been written, and which limits ended the run."""
    marker = {"steps": steps, "limits": config.schedule.limits}
    replace_file(Path(config.folder) / FINISHED_FILE, seal(json.dumps(marker)))


def is_finished(config: RunConfig, checkpoint: Checkpoint | None) -> bool:
    """Return whether the run has completed its last step and its model exists."""
    marker, model = (Path(config.folder) / name for name in (FINISHED_FILE, "model"))
    if checkpoint is None or not marker.is_file() or not (model.is_dir() or config.mode == "explore"):
        return False
    try:
        found = unseal(marker.read_bytes())
        limits = found.get("limits", {"steps": found["steps"]})
        return bool(checkpoint.step == found["steps"] and limits == config.schedule.limits)
    except (ValueError, KeyError) as error:
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


def _attempt(folder: Path, part: str = "", *, contents: bool = True) -> Checkpoint | RunError:
    """Open a checkpoint; return the error if it is damaged or missing."""
    try:
        return open_checkpoint(folder, part, contents=contents)
    except RunError as error:
        if error.code == "run.checkpoint-format":
            raise
        return error


def _remove(path: Path) -> None:
    """Remove a file or folder; it is renamed first, so that no partial one is found.

    A thread that was left when a recovery began may still be removing the same folder.
    """

    def failed(call: object, name: str, raised: tuple[type[BaseException], BaseException, Any]) -> None:
        if not isinstance(raised[1], FileNotFoundError):
            raise raised[1]

    doomed = path if path.suffix == ".partial" else path.with_name(f"{path.name}.removed.partial")
    if doomed != path and path.exists():
        _remove(doomed)
        path.rename(doomed)
    if doomed.is_dir() and not doomed.is_symlink():
        shutil.rmtree(doomed, onerror=failed)
    else:
        doomed.unlink(missing_ok=True)


def _absent(folder: Path) -> RunError:
    expected = "the folder of a run with checkpoints, or one of its checkpoints"
    return RunError("there is no checkpoint", code="run.no-checkpoint", where=str(folder), expected=expected)


def _damaged(path: Path, expected: str, found: str) -> RunError:
    what, code = "a checkpoint is damaged", "run.checkpoint-damaged"
    fix = "restore the file from a copy, or take another checkpoint: a run goes on from the newest whole one; where "
    fix += "none is, start from the beginning with checkpoint.resume=false, which removes what is there"
    return RunError(what, code=code, where=str(path), expected=expected, found=found, fix=fix)
