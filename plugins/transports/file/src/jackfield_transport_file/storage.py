"""The folder of weights: a folder per transfer, and a marker of the newest complete one.

``LATEST.json`` names the newest, ``TRANSFER/index.json`` lists its tensors in their order,
``TRANSFER/weights-*.safetensors`` hold them. Marker and index are replaced by renaming, so a reader sees the
old one or the new one. The sender keeps ``TRANSFER/sender`` locked while it lives, so a later sender removes only what
others have left. On a file system whose locks do not work between machines, nothing of a killed sender is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from jackfield.errors import WeightsError
from jackfield.sdk import replace_file
from jackfield.sdk.buckets import Entry, digest, views

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Convert errors of the file system to ``WeightsError`` (``weights.storage``)."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = any(getattr(error, "errno", None) == code or f"(os error {code})" in str(error) for code in _FULL)
        what = "there is no room for the weights" if full else "the folder of the weights cannot be used"
        raise WeightsError(
            f"{what}: {error}",
            code="weights.storage",
            where=str(folder),
            expected=_room(folder) if full else None,
            fix="make room, or lower keep" if full else "check that trainer and explorers may write there",
        ) from error


def _room(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return f"more than the {shutil.disk_usage(folder).free} bytes that are free"
    return "a folder that can be written to"


def locked(path: Path) -> IO[bytes]:
    """Create a file that is locked while its process lives and keeps it open."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = partial.open("xb")
    fcntl.flock(file, fcntl.LOCK_EX)
    partial.rename(path)  # only now: it must not be found without its lock
    return file


def abandoned(path: Path) -> bool:
    """Return whether no process holds an existing file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is locked or gone, or there are no locks here
        return False
    return True


MARKER = "LATEST.json"
INDEX = "index.json"
SENDER = "sender"


def write_shard(path: Path, content: torch.Tensor, entries: Sequence[Entry]) -> list[Any]:
    """Write the tensors of a bucket to a file; return its name, and ``[name, digest]`` of each tensor in order."""
    tensors = {name: tensor.clone() for name, tensor in views(content, entries)}  # safetensors refuses shared memory
    with guarded(path.parent):
        save_file(tensors, path)
    return [path.name, [[name, digest(tensor)] for name, tensor in tensors.items()]]


def read_shard(path: Path, entries: Sequence[Sequence[Any]]) -> list[tuple[str, torch.Tensor]]:
    """Read the tensors of a file in order; ``weights.digest`` for one that has changed."""
    found = []
    with guarded(path.parent), safe_open(path, framework="pt") as file:
        for name, wanted in entries:
            tensor = file.get_tensor(name)
            have = digest(tensor)
            if have != wanted:
                raise WeightsError(
                    f"tensor {name!r} is not what was written",
                    code="weights.digest",
                    where=str(path),
                    expected=wanted,
                    found=have,
                )
            found.append((name, tensor))
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a small file; None if there is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found


def publish(transfer: Path, version: int, shards: Sequence[Sequence[Any]]) -> None:
    """Mark a transfer as complete and the newest."""
    with guarded(transfer.parent):
        index, newest = {"version": version, "shards": list(shards)}, {"version": version, "transfer": transfer.name}
        replace_file(transfer / INDEX, json.dumps(index), durable=False)
        replace_file(transfer.parent / MARKER, json.dumps(newest), durable=False)


def clean(folder: Path, keep: int) -> None:
    """Remove transfers that are not in use: all but the newest whole ones."""
    marked = (read_json(folder / MARKER) or {}).get("transfer")
    whole: list[Path] = []
    broken: list[Path] = []
    for transfer in folder.iterdir():
        if transfer.is_dir() and transfer.name != marked and abandoned(transfer / SENDER):
            (whole if (transfer / INDEX).exists() else broken).append(transfer)
    whole.sort(key=lambda transfer: (transfer / INDEX).stat().st_mtime, reverse=True)
    for transfer in (*broken, *whole[keep - 1 if marked else keep :]):
        with contextlib.suppress(OSError), _alone(transfer):
            shutil.rmtree(transfer)


@contextlib.contextmanager
def _alone(transfer: Path) -> Iterator[None]:
    """Lock the transfer while no process reads it; ``BlockingIOError`` if one does."""
    if not (transfer / INDEX).exists():
        yield
        return
    with (transfer / INDEX).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
