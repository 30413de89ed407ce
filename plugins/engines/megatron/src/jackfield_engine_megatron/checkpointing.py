"""Native checkpoints: safetensors and JSON, in the checkpoint names and shapes of Hugging Face.

Megatron-Core's own ``dist_checkpointing`` writes pickled objects, so it is not used. Whole tensors can be read at any
sizes of parallelism::

    engine.json                      format, schedule step, optimizer steps; written last
    tensors_<rank>_<number>.safetensors   model.NAME in the model's dtype; master, exp_avg, exp_avg_sq.NAME in float32
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from jackfield.errors import EngineError
from jackfield.sdk import replace_file
from jackfield_engine_megatron.optimization import KINDS, Optimization
from jackfield_engine_megatron.ranks import Ranks
from jackfield_engine_megatron.weights import Weights

FORMAT = 1
_FILE_BYTES = 1 << 30  #: size after which a rank begins another file
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


@contextmanager
def agreed(ranks: Ranks, message: str, folder: Path, fix: str) -> Iterator[None]:
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


class Files:
    """A rank's tensors, in files of about a gigabyte."""

    def __init__(self, folder: Path, stem: str) -> None:
        self._folder, self._stem, self._count = folder, stem, 0
        self._open: dict[str, torch.Tensor] = {}
        self.names: dict[str, str] = {}  #: of tensors, with their files

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor now or with later ones."""
        self._open[name] = tensor.detach().cpu().contiguous().clone()
        if sum(each.nbytes for each in self._open.values()) >= _FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was added."""
        if self._open:
            name = f"{self._stem}{self._count}.safetensors"
            save_file(self._open, self._folder / name, metadata={"format": "pt"})
            self.names |= dict.fromkeys(self._open, name)
            self._open, self._count = {}, self._count + 1


def save(folder: Path, weights: Weights, optimization: Optimization | None, ranks: Ranks) -> None:
    """Write a native checkpoint into an empty folder. Collective; if one rank cannot write, all raise."""
    with agreed(ranks, "the checkpoint could not be written", folder, "look at the disk's room and permissions"):
        files = Files(folder, f"tensors_{ranks.rank}_")
        for piece, tensors in weights.own(lambda parameter: parameter):
            _add(files, "model", tensors, writes=weights.counts(piece))
        for kind in KINDS if optimization is not None else ():
            assert optimization is not None, "checked"
            groups = {id(parameter): weights.replicas(piece) for piece, parameter in weights.named()}

            def state(parameter: nn.Parameter, kind: str = kind, groups: Any = groups) -> torch.Tensor:
                return optimization.whole_state(kind, parameter, groups[id(parameter)])

            for piece, tensors in weights.own(state):
                _add(files, kind, tensors, writes=weights.counts(piece))
        files.flush()
    steps = 0 if optimization is None else ranks.maximum(optimization.inner.steps())
    if ranks.rank == 0:  # engine.json is there only when all the rest is
        record = {
            "format": FORMAT,
            "schedule_step": None if optimization is None else optimization.schedule_step,
            "steps": steps,
        }
        replace_file(folder / "engine.json", json.dumps(record))


def _add(files: Files, kind: str, tensors: dict[str, torch.Tensor], *, writes: bool) -> None:
    for name, tensor in tensors.items() if writes else ():
        files.add(f"{kind}.{name}", tensor)


def load(folder: Path, weights: Weights, optimization: Optimization | None, ranks: Ranks, model_only: bool) -> None:
    """Read what :func:`save` wrote, at any sizes of parallelism. A collective operation.

    A folder without a complete checkpoint, or with one of another model, is refused (``engine.failed``).
    """
    with agreed(ranks, "the checkpoint cannot be read", folder, "go on from another checkpoint"), ExitStack() as stack:
        record = _read_record(folder)
        places: dict[str, Any] = {}
        for path in sorted(folder.glob("tensors_*.safetensors")):
            file = stack.enter_context(safe_open(path, "pt"))
            places |= dict.fromkeys(file.keys(), file)
        for name, shape in weights.shapes().items():
            found = places.get(f"model.{name}")
            if found is None or tuple(found.get_slice(f"model.{name}").get_shape()) != shape:
                raise EngineError(
                    "the checkpoint does not fit this engine",
                    where=f"{folder}, {name}",
                    expected=f"a checkpoint of the same model: {shape}",
                    found="no such tensor" if found is None else found.get_slice(f"model.{name}").get_shape(),
                )
        full = optimization is not None and not model_only and record["schedule_step"] is not None
        weights.load(lambda name: places[f"model.{name}"].get_tensor(f"model.{name}"), lambda parameter: parameter)
        if optimization is None:
            return
        for kind in KINDS if full else ("master",):
            stored = kind if f"{kind}.{next(iter(weights.shapes()))}" in places else "model"
            _load_state(weights, optimization, kind, stored, places)
        optimization.inner.loaded(int(record["steps"]) if full else optimization.inner.steps())
        if full:
            optimization.set_schedule_step(int(record["schedule_step"]))


@torch.no_grad()
def _load_state(weights: Weights, optimization: Optimization, kind: str, stored: str, places: dict[str, Any]) -> None:
    """Copy a kind of the optimizer's tensors into its ranges."""
    whole: dict[nn.Parameter, torch.Tensor] = {}

    def select(parameter: nn.Parameter) -> torch.Tensor:
        whole[parameter] = torch.empty(parameter.shape, dtype=torch.float32)
        return whole[parameter]

    def flush() -> None:
        for parameter, values in whole.items():
            start, end = optimization.inner.part(parameter)
            optimization.inner.state(parameter)[kind].copy_(values.view(-1)[start:end])
        whole.clear()

    def read(name: str) -> torch.Tensor:
        found: torch.Tensor = places[f"{stored}.{name}"].get_tensor(f"{stored}.{name}")
        return found.float()

    weights.load(read, select)
    flush()


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
