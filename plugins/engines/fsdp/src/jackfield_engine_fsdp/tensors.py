"""Sharded tensors in a folder: safetensors for the values, JSON for their places. Nothing is unpickled.

::

    tensors_<rank>.json                   by file and tensor: the whole shape, and where this part begins
    tensors_<rank>_<number>.safetensors   the parts that the rank holds

Any number of ranks can read: each takes from the parts what its own tensors need.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from jackfield.errors import EngineError

_FILE_BYTES = 1 << 30  #: size after which a rank begins another file; at most this much is copied to the CPU at once

Place = tuple[slice, ...]


@attrs.frozen(eq=False)
class _Part:
    """A rank's part of a tensor."""

    values: torch.Tensor  #: shares the tensor's memory
    shape: tuple[int, ...]  #: of the whole
    start: tuple[int, ...]  #: the part's first element in the whole
    replicated: bool


@attrs.frozen(eq=False)
class _Saved:
    """A part in a file."""

    file: Path
    shape: tuple[int, ...]
    start: tuple[int, ...]


def write_tensors(folder: Path, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write this rank's parts; rank 0 also writes tensors that every rank has.

    Raises:
        OSError, SafetensorError: If a file cannot be written.
    """
    parts = {name: _part(tensor) for name, tensor in tensors.items()}
    parts = {name: part for name, part in parts.items() if part.values.numel() and (rank == 0 or not part.replicated)}
    index: dict[str, dict[str, Any]] = {}
    for number, names in enumerate(_batches(parts)):
        file = f"tensors_{rank}_{number}.safetensors"
        save_file({name: parts[name].values.cpu().contiguous() for name in names}, folder / file)
        index[file] = {name: {"shape": parts[name].shape, "start": parts[name].start} for name in names}
    (folder / f"tensors_{rank}.json").write_text(json.dumps(index), encoding="utf-8")


def _batches(parts: Mapping[str, _Part]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name, part in parts.items():
        batch.append(name)
        size += part.values.nbytes
        if size >= _FILE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def read_tensors(folder: Path, ranks: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read what ``ranks`` ranks wrote into existing tensors; if anything is missing, change nothing.

    Raises:
        EngineError: ``engine.failed`` if the saved tensors do not match the existing ones.
        OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError: If a file is damaged.
    """
    saved = _saved(folder, ranks)
    parts = {name: _part(tensor) for name, tensor in tensors.items()}
    for name in sorted({*parts, *(name for name in saved if name.startswith("model."))}):
        expected = parts[name].shape if name in parts else "no such tensor"
        found = saved[name][0].shape if name in saved else "no such tensor"
        if expected != found and (name in saved or parts[name].values.numel()):
            raise EngineError(
                "the checkpoint does not fit this engine",
                where=f"{folder}, {name}",
                expected=f"a checkpoint of the same model, adapter and heads: {expected}",
                found=found,
            )
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for name, part in parts.items():
            left = part.values.numel()
            for piece in saved.get(name, ()):
                if piece.file not in files:
                    files[piece.file] = stack.enter_context(safe_open(piece.file, "pt"))
                stored = files[piece.file].get_slice(name)
                theirs, ours = _common(piece.start, stored.get_shape(), part.start, part.values.shape)
                target = part.values[ours]
                if target.numel():
                    target.copy_(stored[theirs] if theirs else files[piece.file].get_tensor(name))
                left -= target.numel()
            if left:
                raise ValueError(f"{left} elements of {name} are in no file")


def _saved(folder: Path, ranks: int) -> dict[str, list[_Saved]]:
    """Return every part in the folder, by the tensor's name."""
    found: dict[str, list[_Saved]] = {}
    for rank in range(ranks):
        index = json.loads((folder / f"tensors_{rank}.json").read_text(encoding="utf-8"))
        for file, tensors in index.items():
            for name, place in tensors.items():
                part = _Saved(folder / Path(file).name, tuple(place["shape"]), tuple(place["start"]))
                found.setdefault(name, []).append(part)
    return found


def _common(
    start: Sequence[int], shape: Sequence[int], our_start: Sequence[int], our_shape: Sequence[int]
) -> tuple[Place, Place]:
    """Return where the overlap of two parts lies in each of them."""
    theirs, ours = [], []
    for begin, length, our_begin, our_length in zip(start, shape, our_start, our_shape, strict=True):
        first = max(begin, our_begin)
        last = max(first, min(begin + length, our_begin + our_length))
        theirs.append(slice(first - begin, last - begin))
        ours.append(slice(first - our_begin, last - our_begin))
    return tuple(theirs), tuple(ours)


def _part(tensor: torch.Tensor) -> _Part:
    """Return this rank's part; shards lie on one mesh dimension, cut as by ``torch.chunk``."""
    start = [0] * tensor.dim()
    if not isinstance(tensor, DTensor):
        return _Part(tensor.detach(), tuple(tensor.shape), tuple(start), replicated=True)
    (placement,) = tensor.placements
    if placement.is_shard():
        dimension = placement.dim  # type: ignore[attr-defined]
        length = tensor.shape[dimension]
        chunk = -(-length // tensor.device_mesh.size())
        start[dimension] = min(tensor.device_mesh.get_local_rank() * chunk, length)
    values = tensor.to_local().detach()
    return _Part(values, tuple(tensor.shape), tuple(start), replicated=not placement.is_shard())
