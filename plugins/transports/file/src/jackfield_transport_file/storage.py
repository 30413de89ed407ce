"""The folder: one folder for each transfer, and a marker of the newest one that is whole.

``LATEST.json`` names it, ``TRANSFER/index.json`` lists its tensors in their order, ``TRANSFER/weights-*.safetensors``
hold them. Marker and index are put in place by renaming, so that a reader sees the old one or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from jackfield.errors import WeightsError
from jackfield.sdk import replace_file
from jackfield.sdk.buckets import digest
from jackfield_transport_file.failures import guarded
from jackfield_transport_file.parties import abandoned

MARKER = "LATEST.json"
INDEX = "index.json"
SENDER = "sender"


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """Write tensors to a file; returns their entries ``[name, digest]``, in their order.

    Raises:
        WeightsError: ``weights.storage``.
    """
    entries = [[name, digest(tensor)] for name, tensor in tensors.items()]
    with guarded(path.parent):
        save_file(dict(tensors), path)
    return entries


def read_shard(path: Path, entries: Sequence[Sequence[Any]]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a file, in their order.

    Raises:
        WeightsError: ``weights.digest`` for one that is not what was written; ``weights.storage``.
    """
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
    """A small file; None where there is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Put a small file in place, at once."""
    replace_file(path, json.dumps(dict(content)), durable=False)


def publish(transfer: Path, version: int, shards: Sequence[Sequence[Any]]) -> None:
    """Declare a transfer whole, and the newest."""
    with guarded(transfer.parent):
        write_json(transfer / INDEX, {"version": version, "shards": list(shards)})
        write_json(transfer.parent / MARKER, {"version": version, "transfer": transfer.name})


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
    """Hold the transfer while no process reads it.

    Raises:
        BlockingIOError: one does.
    """
    if not (transfer / INDEX).exists():
        yield
        return
    with (transfer / INDEX).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
