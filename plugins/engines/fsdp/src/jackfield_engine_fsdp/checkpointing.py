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
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from jackfield.errors import EngineError
from jackfield.sdk import replace_file
from jackfield_engine_fsdp.model import TokenModel, has_adapter, is_of_adapter
from jackfield_engine_fsdp.optimization import Optimization
from jackfield_engine_fsdp.parts import Part, own_parts, read_tensors, saved_parts, write_parts
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


class Checkpoints:
    """Native checkpoints of one engine. At most one is written in the background.

    All methods are collective, but :meth:`abandon`.
    """

    def __init__(
        self,
        model: TokenModel,
        optimization: Optimization | None,
        streams: RandomStreams,
        ranks: Ranks,
        seconds: float,
    ) -> None:
        self._model, self._optimization, self._streams, self._ranks = model, optimization, streams, ranks
        self._seconds = seconds  #: deadline of a save in the background
        self._writing: _Writing | None = None

    def save(self, folder: Path, *, background: bool) -> None:
        """Write a native checkpoint into an empty folder; if one rank cannot write, all raise.

        In the ``background``, return when the state is copied; :meth:`finish` waits for the files and raises.
        """
        optimization, ranks = self._optimization, self._ranks
        record = {
            "format": FORMAT,
            "world_size": ranks.size,
            "schedule_step": None if optimization is None else optimization.schedule_step,
        }
        self.finish()
        with _agreed(ranks, _UNWRITTEN, folder, _LOOK):
            parts = own_parts(_tensors(self._model, optimization))
            if background:
                parts = {name: part.copied() for name, part in parts.items()}
            self._writing = _Writing(folder, ranks.rank, parts, json.dumps(self._streams.state()), json.dumps(record))
            self._writing.thread.start()
        if not background:
            self.finish()

    def finish(self) -> None:
        """Wait for the files of the last save, and complete it. If one rank could not write, all raise."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        with _agreed(self._ranks, _UNWRITTEN, writing.folder, _LOOK):
            writing.wait(self._seconds)
        if self._ranks.rank == 0:  # engine.json is there only when all the rest is
            replace_file(writing.folder / "engine.json", writing.record)
        self._ranks.barrier()

    def abandon(self) -> None:
        """Wait for a writing thread and leave its checkpoint incomplete."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.thread.join(self._seconds)

    def load(self, folder: Path, *, model_only: bool) -> None:
        """Read what :meth:`save` wrote into the existing model and optimizer.

        A folder without a complete checkpoint, or with one of another model, is refused (``engine.failed``).
        """
        self.finish()
        load(folder, self._model, self._optimization, self._streams, self._ranks, model_only)


_UNWRITTEN, _LOOK = "the checkpoint could not be written", "look at the disk's room and permissions"


class _Writing:
    """The files of a rank, which a thread writes."""

    def __init__(self, folder: Path, rank: int, parts: Mapping[str, Part], streams: str, record: str) -> None:
        self.folder, self.record = folder, record
        self._rank, self._parts, self._streams = rank, parts, streams
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"checkpoint of rank {rank}", daemon=True)

    def _run(self) -> None:
        try:
            (self.folder / "tensors").mkdir(exist_ok=True)
            write_parts(self.folder / "tensors", self._rank, self._parts)
            replace_file(self.folder / f"random_{self._rank}.json", self._streams)
        except BaseException as caught:  # raised by wait
            self._error = caught
        finally:
            self._parts = {}

    def wait(self, seconds: float) -> None:
        """Wait for the thread, and raise its error."""
        self.thread.join(seconds)
        if self.thread.is_alive():
            where, expected = f"{self.folder}, rank {self._rank}", f"its files within {seconds:g} s"
            raise EngineError(
                "a checkpoint is not written in time", where=where, expected=expected, found="a thread that writes"
            )
        if self._error is not None:
            raise self._error


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
    """Read a native checkpoint of any number of ranks into the existing model and optimizer. A collective operation."""
    fix = "go on from another checkpoint, or give the settings of the run that wrote it"
    with _agreed(ranks, "the checkpoint cannot be read", folder, fix):
        record = _read_record(folder)
        whole = None if model_only or record["schedule_step"] is None else optimization
        size = int(record["world_size"])
        saved = saved_parts(folder / "tensors", size)
        tensors = _tensors(model, whole)
        if whole is None and optimization is not None and optimization.averages is not None:
            averages = {f"average.{name}": tensor for name, tensor in optimization.averaged().items()}
            tensors |= {name: tensor for name, tensor in averages.items() if name in saved}
        read_tensors(folder / "tensors", saved, tensors)
        if (
            whole is None
            and optimization is not None
            and optimization.averages is not None
            and not averages.keys() & saved
        ):
            optimization.averages.restart()
        if model_only:
            return
        if whole is not None:
            whole.set_schedule_step(int(record["schedule_step"]))
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
    averages = {} if optimization is None else optimization.averaged()
    return state | {f"average.{name}": tensor for name, tensor in averages.items()}


def _buffers(model: TokenModel) -> dict[str, torch.Tensor]:
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}
