"""Parts of sharded tensors in safetensors files, which any number of ranks can read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from jackfield.errors import EngineError
from jackfield_engine_fsdp.mesh import is_first_copy

_SHOWN_DIFFERENCES = 5  #: in a message
_FILE_BYTES = 1 << 30  #: size after which a rank begins another file; at most this much is copied to the CPU at once

Place: TypeAlias = tuple[slice, ...]


@attrs.frozen(eq=False)
class Part:
    """A rank's part of a tensor. ``values`` may be of 8 bits, in blocks that share a scale (torchao)."""

    values: torch.Tensor  #: shares the tensor's memory
    shape: tuple[int, ...]  #: of the whole
    start: tuple[int, ...]  #: the part's first element in the whole
    writes: bool  #: whether this is the first rank that has it

    def copied(self) -> Part:
        """Return the part with values of its own on the CPU."""
        values: Any = self.values
        if _is_quantized(values):
            values = type(values)(_copied(values.codes), _copied(values.scale), values.qmap, values.signed)
        else:
            values = _copied(values)
        return attrs.evolve(self, values=values)

    def files(self, name: str) -> dict[str, torch.Tensor]:
        """Return what is written of a part, by name."""
        if not _is_quantized(self.values):
            return {name: self.values.cpu().contiguous()}
        values: Any = self.values
        return {name: values.codes.cpu().contiguous(), _scale_name(name, self.start): values.scale.cpu().contiguous()}


def _copied(values: torch.Tensor) -> torch.Tensor:
    return values.clone() if values.device.type == "cpu" else values.cpu()


def _is_quantized(values: torch.Tensor) -> bool:
    return hasattr(values, "codes") and hasattr(values, "scale")


def _scale_name(name: str, start: Sequence[int]) -> str:
    return f"{name}.scale.{'.'.join(map(str, start))}"


@attrs.frozen(eq=False)
class Saved:
    """A part in a file."""

    file: Path
    shape: tuple[int, ...]
    start: tuple[int, ...]
    signed: bool | None = None  #: of numbers of 8 bits; None: they are not


def own_parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
    """Return the parts that this rank writes."""
    parts = {name: own_part(tensor) for name, tensor in tensors.items()}
    return {name: part for name, part in parts.items() if part.values.numel() and part.writes}


def write_parts(folder: Path, rank: int, parts: Mapping[str, Part]) -> None:
    """Write a rank's parts, and an index of them."""
    index: dict[str, dict[str, Any]] = {}
    for number, names in enumerate(_batches(parts)):
        file = f"tensors_{rank}_{number}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors |= parts[name].files(name)
        save_file(tensors, folder / file)
        places = {name: {"shape": parts[name].shape, "start": parts[name].start} for name in names}
        for name, place in places.items():
            if _is_quantized(parts[name].values):
                place["signed"] = parts[name].values.signed  # type: ignore[attr-defined]
        index[file] = places
    (folder / f"tensors_{rank}.json").write_text(json.dumps(index), encoding="utf-8")


def _batches(parts: Mapping[str, Part]) -> Iterator[list[str]]:
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


def read_tensors(folder: Path, saved: Mapping[str, list[Saved]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Read ``saved`` parts into existing tensors; if anything is missing or differs, change nothing.

    It raises an ``EngineError`` for tensors of another engine, and another error for a damaged file.
    """
    parts = {name: own_part(tensor) for name, tensor in tensors.items()}
    _refuse_differences(folder, parts, saved)
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for name, part in parts.items():
            left = part.values.numel()
            same = _is_quantized(part.values)
            target = torch.empty(part.values.shape) if same else part.values
            for piece in saved.get(name, ()):
                if piece.file not in files:
                    files[piece.file] = stack.enter_context(safe_open(piece.file, "pt"))
                left -= _read_piece(files[piece.file], name, piece, part, target)
            if left:
                raise ValueError(f"{left} elements of {name} are in no file")
            if same:
                part.values.copy_(target.to(part.values.device))
                _read_exactly(files, name, saved.get(name, ()), part)


def _read_piece(file: Any, name: str, piece: Saved, part: Part, target: torch.Tensor) -> int:
    """Copy what a saved piece and ``part`` have in common into ``target``; return the number of elements."""
    stored = file.get_slice(name)
    theirs, ours = _common(piece.start, stored.get_shape(), part.start, part.values.shape)
    into = target[ours]
    if not into.numel():
        return 0
    if piece.signed is not None:
        into.copy_(_dequantized(file, name, piece)[theirs])
    else:
        into.copy_(stored[theirs] if theirs else file.get_tensor(name))
    return into.numel()


def _dequantized(file: Any, name: str, piece: Saved) -> torch.Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    codes, scale = file.get_tensor(name), file.get_tensor(_scale_name(name, piece.start))
    state = OptimState8bit.zeros(codes.shape, piece.signed, codes.numel() // scale.numel())
    state.codes.copy_(codes)
    state.scale.copy_(scale)
    values: torch.Tensor = state.dequantize()
    return values


def _read_exactly(files: Mapping[Path, Any], name: str, pieces: Sequence[Saved], part: Part) -> None:
    """Replace numbers of 8 bits by the saved ones, if the same part was saved: a second rounding may differ."""
    values: Any = part.values
    for piece in pieces:
        if piece.signed is None or piece.start != part.start:
            continue
        codes, scale = files[piece.file].get_tensor(name), files[piece.file].get_tensor(_scale_name(name, piece.start))
        if codes.shape == values.codes.shape and scale.shape == values.scale.shape:
            values.codes.copy_(codes)
            values.scale.copy_(scale)


def _refuse_differences(folder: Path, parts: Mapping[str, Part], saved: Mapping[str, Sequence[Saved]]) -> None:
    """Refuse a checkpoint of other tensors, and list the differences."""
    none = "no such tensor"
    different: list[tuple[str, object, object]] = []
    for name in sorted({*parts, *(name for name in saved if name.startswith("model."))}):
        expected = parts[name].shape if name in parts else none
        found = saved[name][0].shape if name in saved else none
        if expected != found and (name in saved or parts[name].values.numel()):
            different.append((name, expected, found))
    if different:
        shown = different[:_SHOWN_DIFFERENCES]
        rest = f"; and {len(different) - len(shown)} more" if len(different) > len(shown) else ""
        raise EngineError(
            f"the checkpoint does not fit this engine: {len(different)} tensors differ",
            where=f"{folder}, {different[0][0]}",
            expected="; ".join(f"{name}: {expected}" for name, expected, _ in shown) + rest,
            found="; ".join(f"{name}: {found}" for name, _, found in shown) + rest,
            fix="go on with the same model, adapter, heads, frozen parameters and optimizer",
        )


def saved_parts(folder: Path, ranks: int) -> dict[str, list[Saved]]:
    """Return every part in the folder, by the tensor's name."""
    found: dict[str, dict[tuple[int, ...], Saved]] = {}
    for rank in range(ranks):
        index = json.loads((folder / f"tensors_{rank}.json").read_text(encoding="utf-8"))
        for file, tensors in index.items():
            for name, place in tensors.items():
                shape, start = tuple(place["shape"]), tuple(place["start"])
                part = Saved(folder / Path(file).name, shape, start, place.get("signed"))
                found.setdefault(name, {}).setdefault(start, part)  # ranks may have the same part
    return {name: list(parts.values()) for name, parts in found.items()}


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


def own_part(tensor: torch.Tensor) -> Part:
    """Return this rank's part of a tensor that is sharded over any mesh, or that every rank has whole."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Part(tensor.detach(), shape, (0,) * len(shape), writes=not dist.is_initialized() or dist.get_rank() == 0)
    values = tensor.to_local().detach()
    _, start = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return Part(values, shape, tuple(start), writes=is_first_copy(tensor))
