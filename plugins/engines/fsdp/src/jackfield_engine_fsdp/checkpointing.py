"""Native checkpoints: safetensors and JSON. Nothing is unpickled.

::

    engine.json        format, number of ranks, schedule step; written last
    random_<rank>.json states of the random generators of a rank
    tensors/           model and optimizer: any number of ranks can read them, each takes what its own tensors need
        tensors_<rank>.json                   by file and tensor: the whole shape, and where this part begins
        tensors_<rank>_<number>.safetensors   the parts that the rank holds
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from jackfield.errors import EngineError
from jackfield.sdk import replace_file
from jackfield_engine_fsdp.model import TokenModel, has_adapter, is_of_adapter
from jackfield_engine_fsdp.optimization import Optimization
from jackfield_engine_fsdp.process_group import RandomStreams, Ranks

FORMAT = 2

#: Exceptions from reading files that are damaged or not of the expected format.
_UNREADABLE = (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


def make_folder(folder: str, ranks: Ranks) -> Path:
    """Create a checkpoint's folder for all ranks; every rank raises if the folder is not empty."""
    path, problem = Path(folder), None
    if ranks.rank == 0:
        try:
            path.mkdir(parents=True, exist_ok=True)
            problem = "files" if any(path.iterdir()) else None
        except OSError as caught:
            problem = str(caught)
    if ranks.maximum(int(problem is not None)):
        raise EngineError(
            "the checkpoint folder cannot be used",
            where=folder,
            expected="an empty or absent folder",
            found=problem or "a problem on rank 0",
        )
    return path


def save(
    folder: Path, model: TokenModel, optimization: Optimization | None, streams: RandomStreams, ranks: Ranks
) -> None:
    """Write a native checkpoint into an empty folder. Collective; if one rank cannot write, all raise."""
    with _agreed(ranks, "the checkpoint could not be written", folder, "look at the disk's room and permissions"):
        (folder / "tensors").mkdir(exist_ok=True)
        write_tensors(folder / "tensors", ranks.rank, _tensors(model, optimization))
        replace_file(folder / f"random_{ranks.rank}.json", json.dumps(streams.state()))
    if ranks.rank == 0:  # engine.json is there only when all the rest is
        record = {
            "format": FORMAT,
            "world_size": ranks.size,
            "schedule_step": None if optimization is None else optimization.schedule_step,
        }
        replace_file(folder / "engine.json", json.dumps(record))


@contextmanager
def _agreed(ranks: Ranks, message: str, folder: Path, fix: str) -> Iterator[None]:
    """Run the body on each rank; if one fails, every rank raises ``EngineError`` (``engine.failed``)."""
    error: EngineError | None = None
    try:
        yield
    except EngineError as caught:
        error = caught
    except _UNREADABLE as caught:
        found = f"{type(caught).__name__}: {caught}"
        error = EngineError(message, where=f"{folder}, rank {ranks.rank}", found=found, fix=fix)
        error.__cause__ = caught
    failed = ranks.maximum(0 if error is None else ranks.rank + 1)
    if error is not None:
        raise error
    if failed:
        raise EngineError(message, where=f"{folder}, rank {failed - 1}", found="see the error of that rank", fix=fix)


def load(
    folder: Path,
    model: TokenModel,
    optimization: Optimization | None,
    streams: RandomStreams,
    ranks: Ranks,
    model_only: bool,
) -> None:
    """Read what :func:`save` wrote into the existing model and optimizer. A collective operation.

    A folder without a complete checkpoint, or with one of another model, is refused (``engine.failed``).
    """
    fix = "go on from another checkpoint"
    with _agreed(ranks, "the checkpoint cannot be read", folder, fix):
        record = _read_record(folder)
        if model_only or record["schedule_step"] is None:
            optimization = None
        size = int(record["world_size"])
        read_tensors(folder / "tensors", size, _tensors(model, optimization))
        if model_only:
            return
        if optimization is not None:
            optimization.set_schedule_step(int(record["schedule_step"]))
        if size == ranks.size:
            streams.load_state(json.loads((folder / f"random_{ranks.rank}.json").read_text(encoding="utf-8")))


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / "engine.json"
    if not path.is_file():
        raise EngineError(
            "no native checkpoint in the folder",
            where=str(folder),
            expected="engine.json, written last",
            found="no such folder" if not folder.is_dir() else "none: unfinished, or of another format",
        )
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record["format"] != FORMAT:
        raise EngineError(
            "a checkpoint of another format", where=str(path), expected=f"format {FORMAT}", found=record["format"]
        )
    return record


def _tensors(model: TokenModel, optimization: Optimization | None) -> dict[str, torch.Tensor]:
    """Return the live tensors to save, by name: saving reads them, loading writes into them.

    With an adapter the base model is left out, because it never changes and is in the model folder.
    """
    adapter = has_adapter(model.language_model)
    kept = {
        name: tensor.detach()
        for name, tensor in model.named_parameters()
        if not adapter or is_of_adapter(name) or name.startswith("value_head.")
    }
    state = {f"model.{name}": tensor for name, tensor in {**kept, **({} if adapter else _buffers(model))}.items()}
    for name, tensors in ({} if optimization is None else optimization.state()).items():
        state |= {f"optimizer.{name}.{kind}": tensor for kind, tensor in tensors.items()}
    return state


def _buffers(model: TokenModel) -> dict[str, torch.Tensor]:
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


_FILE_BYTES = 1 << 30  #: size after which a rank begins another file; at most this much is copied to the CPU at once

Place = tuple[slice, ...]


@attrs.frozen(eq=False)
class Part:
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
    """Write this rank's parts; rank 0 also writes tensors that every rank has."""
    parts = {name: own_part(tensor) for name, tensor in tensors.items()}
    parts = {name: part for name, part in parts.items() if part.values.numel() and (rank == 0 or not part.replicated)}
    index: dict[str, dict[str, Any]] = {}
    for number, names in enumerate(_batches(parts)):
        file = f"tensors_{rank}_{number}.safetensors"
        save_file({name: parts[name].values.cpu().contiguous() for name in names}, folder / file)
        index[file] = {name: {"shape": parts[name].shape, "start": parts[name].start} for name in names}
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


def read_tensors(folder: Path, ranks: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read what ``ranks`` ranks wrote into existing tensors; if anything is missing or differs, change nothing.

    It raises an ``EngineError`` for tensors of another engine, and one of :data:`_UNREADABLE` for a damaged file.
    """
    saved = _saved(folder, ranks)
    parts = {name: own_part(tensor) for name, tensor in tensors.items()}
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


def own_part(tensor: torch.Tensor) -> Part:
    """Return this rank's part; shards lie on one mesh dimension, cut as by ``torch.chunk``."""
    start = [0] * tensor.dim()
    if not isinstance(tensor, DTensor):
        return Part(tensor.detach(), tuple(tensor.shape), tuple(start), replicated=True)
    (placement,) = tensor.placements
    if placement.is_shard():
        dimension = placement.dim  # type: ignore[attr-defined]
        length = tensor.shape[dimension]
        chunk = -(-length // tensor.device_mesh.size())
        start[dimension] = min(tensor.device_mesh.get_local_rank() * chunk, length)
    values = tensor.to_local().detach()
    return Part(values, tuple(tensor.shape), tuple(start), replicated=not placement.is_shard())
