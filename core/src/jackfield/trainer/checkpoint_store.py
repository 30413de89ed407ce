"""The folder of a run's checkpoints: each is whole or absent, and the newest few are kept.

::

    step_00000040/           a checkpoint; it gets this name when everything in it is on the disk
        manifest.json        size and digest of every other file, and its own digest
        state.json           what is small: step, configuration, random state, position in the ledger
        actor/ critic/       the engines' native checkpoints
        queue/               controller and values of the TransferQueue
    step_00000050.partial/   one that is being written, or that a kill interrupted; the next start removes it
    step_00000060.damaged/   one that the next start found damaged, and set aside
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import RunError
from jackfield.files import digest_of, seal, sync, sync_tree, unseal

FORMAT = 2
_MANIFEST, _STATE = "manifest.json", "state.json"
_NAME = re.compile(r"step_(\d{8,})")


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A checkpoint that is complete."""

    folder: Path
    step: int  #: completed steps
    files: Mapping[str, tuple[int, str]]  #: size in bytes and xxh3_128 digest, by path in the folder

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(size for size, _ in self.files.values())

    def state(self) -> dict[str, Any]:
        """Read ``state.json``; :meth:`verify` comes first.

        Raises:
            RunError: ``run.checkpoint-damaged``.
        """
        try:
            found: dict[str, Any] = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise _damaged(self.folder / _STATE, "JSON", f"{type(error).__name__}: {error}") from error
        return found

    def verify(self, part: str = "", *, contents: bool = True) -> None:
        """Compare files with the manifest.

        Args:
            part: the folder in the checkpoint whose files are compared; by default all are.
            contents: compare digests too, not only sizes.

        Raises:
            RunError: ``run.checkpoint-damaged``, naming the first file that differs.
        """
        for name, (size, digest) in self.files.items():
            path = self.folder / name
            if not name.startswith(part):
                continue
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
            if found != f"{size} bytes":
                raise _damaged(path, f"{size} bytes", found)
            if contents and digest_of(path) != digest:
                raise _damaged(path, f"contents of digest {digest}", "other contents")


@attrs.define
class CheckpointStore:
    """Writes, finds and removes checkpoints. One process at a time uses a store."""

    folder: Path  #: is made with the first checkpoint
    keep: int = 2  #: how many of the newest stay

    def folders(self) -> dict[int, Path]:
        """List the folders of checkpoints, whole or damaged, by their steps, the oldest first."""
        named = [(_NAME.fullmatch(path.name), path) for path in self._children()]
        return dict(sorted((int(match[1]), path) for match, path in named if match))

    def checkpoints(self) -> dict[int, Checkpoint | RunError]:
        """List checkpoints by their steps, the oldest first, with the error of each that is visibly damaged.

        Raises:
            RunError: ``run.checkpoint-format``.
        """
        return {step: _attempt(step, path, contents=False) for step, path in self.folders().items()}

    def newest(self, part: str = "", *, check: Callable[[Checkpoint], None] | None = None) -> Checkpoint | None:
        """Find the newest whole checkpoint; a warning names those that are newer and damaged.

        Args:
            part: the folder in the checkpoint that has to be whole.
            check: may refuse what was found, while everything is as it was; then damaged ones are renamed, so that
                later ones of the same steps can take their places. None: nothing is renamed.

        Raises:
            RunError: ``run.checkpoint-damaged`` where there are checkpoints and none is whole;
                ``run.checkpoint-format``.
        """
        damaged: dict[Path, RunError] = {}
        for step, path in reversed(self.folders().items()):
            found = _attempt(step, path, part)
            if isinstance(found, RunError):
                damaged[path] = found
                continue
            if check is not None:
                check(found)
            for worse, error in damaged.items():
                _report_damaged(worse, error, step, sets_aside=check is not None)
            return found
        if not damaged:
            return None
        errors = list(damaged.values())
        raise RunError(
            "every checkpoint of the run is damaged",
            code="run.checkpoint-damaged",
            where=str(self.folder),
            expected=f"{errors[0].expected} in {errors[0].where}",
            found="; ".join(f"{error.where}: {error.found}" for error in errors),
            fix="restore the files of one of them from a copy, or start from the beginning with "
            "checkpoint.resume=false, which removes what is there",
        )

    def begin(self, step: int) -> Path:
        """Make an empty folder to write the checkpoint of ``step`` into."""
        self.discard(step)
        self._partial(step).mkdir(parents=True)
        return self._partial(step)

    def commit(self, step: int, state: Mapping[str, Any]) -> Checkpoint:
        """Add state and manifest, bring everything to the disk, and give the folder its name."""
        partial, final = self._partial(step), self.folder / f"step_{step:08d}"
        (partial / _STATE).write_text(json.dumps(state, ensure_ascii=False, indent=1), encoding="utf-8")
        paths = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(partial)): (path.stat().st_size, digest_of(path)) for path in paths}
        manifest = json.dumps({"format": FORMAT, "step": step, "files": files}, ensure_ascii=False, indent=1)
        (partial / _MANIFEST).write_text(seal(manifest), encoding="utf-8")
        sync_tree(partial)
        _take_away(final)
        partial.rename(final)
        sync(self.folder)
        return Checkpoint(folder=final, step=step, files=files)

    def discard(self, step: int) -> None:
        """Remove what was written of a checkpoint that could not be completed."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def prune(self) -> None:
        """Remove all but the newest ``keep``."""
        for folder in list(self.folders().values())[: -self.keep]:
            _take_away(folder)

    def clean(self) -> None:
        """Remove what a killed process left half written or half removed."""
        for path in self._children():
            if path.suffix == ".partial":
                _remove(path)

    def clear(self) -> None:
        """Remove everything, damaged or not."""
        for path in reversed(self._children()):
            _take_away(path)

    def _partial(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.partial"

    def _children(self) -> list[Path]:
        return sorted(self.folder.glob("step_*"))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a complete checkpoint by its folder.

    Raises:
        RunError: ``run.no-checkpoint`` when there is none; ``run.checkpoint-damaged`` for an unreadable manifest;
            ``run.checkpoint-format``.
    """
    if not folder.is_dir():
        raise RunError("there is no checkpoint", code="run.no-checkpoint", where=str(folder))
    try:
        content = (folder / _MANIFEST).read_bytes()
        manifest = unseal(content) if b'"digest"' in content else json.loads(content)
        if manifest["format"] != FORMAT:
            raise _other_format(folder, manifest["format"])
        manifest = unseal(content)
        files = {name: (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
        return Checkpoint(folder=folder, step=int(manifest["step"]), files=files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(folder / _MANIFEST, "the sizes and digests of all files", str(error)) from error


def _attempt(step: int, folder: Path, part: str = "", *, contents: bool = True) -> Checkpoint | RunError:
    """Open and compare the checkpoint of a step; return the error where it is damaged."""
    try:
        found = open_checkpoint(folder)
        if found.step != step:
            return _damaged(folder / _MANIFEST, f"the checkpoint of step {step}", f"that of step {found.step}")
        found.verify(part, contents=contents)
    except RunError as error:
        if error.code == "run.checkpoint-format":
            raise
        return error
    except OSError as error:
        return _damaged(folder, "files that can be read", f"{type(error).__name__}: {error}")
    return found


def _report_damaged(folder: Path, error: RunError, step: int, *, sets_aside: bool) -> None:
    done = ""
    if sets_aside:
        aside = folder.with_name(f"{folder.name}.damaged")
        _remove(aside)
        folder.rename(aside)
        done = f"; it is now {aside}"
    logging.getLogger("jackfield").warning(
        "the checkpoint %s is damaged (%s: %s)%s; the newest whole one is taken, of step %d",
        *(folder, error.where, _difference(error), done, step),
    )


def _take_away(folder: Path) -> None:
    """Remove a folder, its name first: no half of it is ever found."""
    if folder.exists():
        doomed = folder.with_name(f"{folder.name}.removed.partial")
        _remove(doomed)
        folder.rename(doomed)
        _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _other_format(folder: Path, found: object) -> RunError:
    return RunError(
        "a checkpoint is of another version of Jackfield",
        code="run.checkpoint-format",
        where=str(folder),
        expected=f"format {FORMAT}",
        found=f"format {found}",
        fix="go on with the version that wrote it, or export the model with that version and begin a run with it in "
        "another folder",
    )


def _damaged(path: Path, expected: str, found: str) -> RunError:
    return RunError(
        "a checkpoint is damaged",
        code="run.checkpoint-damaged",
        where=str(path),
        expected=expected,
        found=found,
        fix="restore the file from a copy, or take another checkpoint: a run goes on from the newest whole one",
    )


def _difference(error: RunError) -> str:
    return error.message if error.expected is None else f"expected {error.expected}, found {error.found}"
