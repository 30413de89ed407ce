"""The folder of a run's checkpoints: each whole or not there, the newest few kept.

::

    step_00000040/           a checkpoint; it gets this name when everything in it is on the disk
        manifest.json        size and digest of every other file
        state.json           what is small: step, configuration, random state, position in the ledger
        actor/ critic/       the engines' native checkpoints
        queue/               controller and values of the TransferQueue
    step_00000050.partial/   one that is being written, or that a kill interrupted; the next start removes it
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import xxhash

from jackfield.errors import RunError

__all__ = ["Checkpoint", "CheckpointStore", "open_checkpoint"]

FORMAT = 1
_MANIFEST, _STATE = "manifest.json", "state.json"
_NAME = re.compile(r"step_(\d{8,})")
_CHUNK = 1 << 22


@attrs.frozen(kw_only=True)
class Checkpoint:
    """One that is complete."""

    folder: Path
    step: int  #: completed steps
    files: Mapping[str, tuple[int, str]]  #: size in bytes and xxh3_128 digest, by path in the folder

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(size for size, _ in self.files.values())

    def state(self) -> dict[str, Any]:
        """What ``state.json`` holds."""
        found: dict[str, Any] = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
        return found

    def verify(self) -> None:
        """Compare every file with the manifest.

        Raises:
            RunError: ``run.checkpoint-damaged``, naming the first file that differs.
        """
        for name, (size, digest) in self.files.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                raise _damaged(self.folder, name, f"{size} bytes", "no file" if found is None else f"{found} bytes")
            if _digest(path) != digest:
                raise _damaged(self.folder, name, f"contents of digest {digest}", "other contents")


class CheckpointStore:
    """Writes, finds and removes checkpoints. One process at a time uses a store."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        """
        Args:
            folder: of the checkpoints; made with the first one.
            keep: how many of the newest stay.
        """
        self.folder = folder
        self.keep = keep

    def checkpoints(self) -> list[Checkpoint]:
        """All complete ones, the oldest first.

        Raises:
            RunError: ``run.checkpoint-damaged`` for a manifest that is missing or cannot be read.
        """
        names = sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
        return sorted(
            (open_checkpoint(self.folder / name) for name in names if _NAME.fullmatch(name)), key=lambda each: each.step
        )

    def newest(self) -> Checkpoint | None:
        """The one to go on from, if there is any."""
        return next(reversed(self.checkpoints()), None)

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of ``step`` into."""
        partial = self._partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, step: int, state: Mapping[str, Any]) -> Checkpoint:
        """Add state and manifest, bring everything to the disk, and give the folder its name."""
        partial, final = self._partial(step), self.folder / f"step_{step:08d}"
        _write_json(partial / _STATE, state)
        files = {str(path.relative_to(partial)): path for path in _files(partial)}
        record = {name: (path.stat().st_size, _digest(path)) for name, path in files.items()}
        _write_json(partial / _MANIFEST, {"format": FORMAT, "step": step, "files": record})
        for path in (*files.values(), partial / _MANIFEST, *_folders(partial)):
            _sync(path)
        if final.exists():
            self._remove(final)
        partial.rename(final)
        _sync(self.folder)
        return Checkpoint(folder=final, step=step, files=record)

    def discard(self, step: int) -> None:
        """Remove what was written of a checkpoint that could not be completed."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def prune(self) -> None:
        """Remove all but the newest ``keep``."""
        for checkpoint in self.checkpoints()[: -self.keep]:
            self._remove(checkpoint.folder)

    def clean(self) -> None:
        """Remove what a killed process left half written or half removed."""
        for path in self.folder.glob("step_*.partial") if self.folder.is_dir() else ():
            shutil.rmtree(path)

    def clear(self) -> None:
        """Remove everything."""
        for checkpoint in reversed(self.checkpoints()):
            self._remove(checkpoint.folder)

    def _partial(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.partial"

    @staticmethod
    def _remove(folder: Path) -> None:
        """Take the name away first: no half of it is ever found."""
        doomed = folder.with_name(f"{folder.name}.partial")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def open_checkpoint(folder: Path) -> Checkpoint:
    """A complete checkpoint by its folder.

    Raises:
        RunError: ``run.no-checkpoint`` when there is none; ``run.checkpoint-damaged`` for an unreadable manifest.
    """
    if not folder.is_dir():
        raise RunError("there is no checkpoint", code="run.no-checkpoint", where=str(folder))
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files = {name: (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
        step, found = int(manifest["step"]), manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(
            folder, _MANIFEST, "the sizes and digests of all files", f"{type(error).__name__}: {error}"
        ) from error
    if found != FORMAT:
        raise _damaged(folder, _MANIFEST, f"format {FORMAT}", f"format {found}")
    return Checkpoint(folder=folder, step=step, files=files)


def _damaged(folder: Path, name: str, expected: str, found: str) -> RunError:
    return RunError(
        "a checkpoint is damaged",
        code="run.checkpoint-damaged",
        where=str(folder / name),
        expected=expected,
        found=found,
        fix="restore the file, or remove the checkpoint's folder: the run then goes on from the one before",
    )


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _folders(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.rglob("*"), reverse=True) if path.is_dir())
    yield folder


def _digest(path: Path) -> str:
    hashed = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
