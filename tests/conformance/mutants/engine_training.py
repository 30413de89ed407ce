"""Training engines with one fault each in what leaves them, in their steps, or in their life."""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from peft import PeftModel

from jackfield.abc.engine import EngineLayout, SaveCheckpointRequest
from jackfield.errors import EngineError
from mutants.engine_register import Exporting, mutant
from mutants.plain_engine import PlainEngine

# -- weights ---------------------------------------------------------------------------------------------------------


@mutant("ENG-030", "ENG-033", "ENG-034", "ENG-040", "ENG-044")
class WrappedNames(Exporting):
    """Names keep the prefix of a wrapper."""

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"module.{name}", tensor


@mutant("ENG-030", "ENG-033", "ENG-040")
class DroppedTensor(Exporting):
    """The last norm is not exported."""

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if name != "model.norm.weight":
            yield name, tensor


@mutant("ENG-030", "ENG-033", "ENG-040", "ENG-044")
class TiedTwice(Exporting):
    """Tied embeddings are exported under both of their names."""

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor
        if name == "model.embed_tokens.weight" and self.model.config.tie_word_embeddings:
            yield "lm_head.weight", tensor


@mutant("ENG-034")
class NamesInMemory(PlainEngine):
    """Experts are exported as they are stacked in memory."""

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(self.model, PeftModel):
            yield from super().exported()
        else:
            yield from ((name, parameter.detach()) for name, parameter in self.model.named_parameters())


@mutant("ENG-030")
class DoubledTensor(Exporting):
    """A tensor is exported twice."""

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor
        if name == "model.norm.weight":
            yield name, tensor


@mutant("ENG-030")
class ConfigWithoutAdapter(PlainEngine):
    """A model without an adapter is exported with an empty PEFT config."""

    def adapter_config(self) -> Mapping[str, Any] | None:
        return super().adapter_config() or {}


@mutant("ENG-031")
class ExportInFloat32(Exporting):
    """Weights are exported in float32, whatever the dtype of the model."""

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor.float()


@mutant("ENG-031", "ENG-033", "ENG-040", "ENG-044")
class ExportThroughHalf(Exporting):
    """Weights pass through bfloat16 on their way out."""

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor.bfloat16().to(tensor.dtype)


@mutant("ENG-031")
class ExportFromOneBuffer(Exporting):
    """Every tensor is exported from the same memory."""

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = self.__dict__.setdefault("buffer", torch.empty(1 << 20, dtype=torch.uint8))
        yield name, buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


@mutant("ENG-032", "ENG-033", "ENG-040", "ENG-044")
class StaleExport(Exporting):
    """The norms are exported as they were loaded."""

    def load(self) -> None:
        super().load()
        self.loaded = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.ndim == 1}

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, self.loaded.get(name, tensor)


@mutant("ENG-033")
class FolderOfTheFirstModel(PlainEngine):
    """The Hugging Face folder holds the weights from which training began."""

    def write_folder(self, folder: Path) -> None:
        shutil.copytree(self.context.model.path, folder, dirs_exist_ok=True)


# -- training --------------------------------------------------------------------------------------------------------


@mutant("ENG-040")
class NoClipping(PlainEngine):
    """Gradients are not clipped."""

    def spec(self) -> Any:
        return attrs.evolve(super().spec(), clip_grad=None)


@mutant("ENG-040", "ENG-044")
class NoWeightDecay(PlainEngine):
    """The weight decay is not used."""

    def initialize(self) -> None:
        super().initialize()
        if self.optimizer is not None:
            self.optimizer.param_groups[0]["weight_decay"] = 0.0


@mutant("ENG-041")
class NormAfterClipping(PlainEngine):
    """The norm that is returned is the one after clipping."""

    def optimizer_step(self) -> float:
        return min(super().optimizer_step(), self.spec().clip_grad or math.inf)


@mutant("ENG-042")
class StepOnNan(PlainEngine):
    """A step is applied whatever its norm is."""

    def usable(self, norm: torch.Tensor) -> bool:
        return True


@mutant("ENG-043")
class DecayToZero(PlainEngine):
    """The schedule forgets min_lr_ratio."""

    def rate(self, step: int) -> float:
        spec, floor = self.spec(), self.spec().min_lr_ratio
        value = super().rate(step)
        if spec.scheduler == "constant" or step < spec.warmup_steps:
            return value
        return (value - floor * spec.lr) / (1.0 - floor)


@mutant("ENG-044")
class RateNotUsed(PlainEngine):
    """The schedule's rates are returned, and the optimizer keeps its own."""

    def set_rate(self, rate: float) -> float:
        return rate


class _Saving(PlainEngine):
    def without(self, name: str) -> bool:
        raise NotImplementedError

    def restore(self, state: Any, facts: Any, request: Any) -> None:
        kept = {name: value for name, value in state.items() if not self.without(name)}
        super().restore(kept, facts, request)


@mutant("ENG-050", "ENG-051")
class CheckpointWithoutMoments(_Saving):
    """A checkpoint does not hold the optimizer's moments."""

    def without(self, name: str) -> bool:
        return name.startswith(("step:", "exp_avg"))


@mutant("ENG-050")
class CheckpointWithoutSchedule(PlainEngine):
    """A checkpoint does not hold the place in the schedule."""

    def restore(self, state: Any, facts: Any, request: Any) -> None:
        super().restore(state, {**facts, "schedule_step": self.schedule_step}, request)


@mutant("ENG-051", only=("dropout",))
class CheckpointWithoutRandom(PlainEngine):
    """A checkpoint does not hold the random state."""

    def restore(self, state: Any, facts: Any, request: Any) -> None:
        super().restore({**state, "random": self.random}, facts, request)


@mutant("ENG-052")
class ModelOnlyIgnored(PlainEngine):
    """model_only loads everything."""

    def restore(self, state: Any, facts: Any, request: Any) -> None:
        super().restore(state, facts, attrs.evolve(request, model_only=False))


@mutant("ENG-053")
class FilesThatAreNotThere(PlainEngine):
    """The result of a save names a file that was not written."""

    def save_checkpoint(self, request: SaveCheckpointRequest) -> Any:
        result = super().save_checkpoint(request)
        return attrs.evolve(result, files=(*result.files, "optimizer.bin"))


@mutant("ENG-060")
class OffloadLosesMoments(PlainEngine):
    """Offloading the optimizer drops its moments."""

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        if optimizer:
            self.optimizing().state.clear()


@mutant("ENG-060")
class OffloadLosesGradients(PlainEngine):
    """Offloading the weights drops the gradients."""

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        self.optimizing().zero_grad()


@mutant("ENG-051", "ENG-061", only=("dropout",))
class SharedStream(PlainEngine):
    """Dropout draws from the stream of the process, which the engine seeds at its beginning."""

    def initialize(self) -> None:
        super().initialize()
        torch.default_generator.manual_seed(self.seed())

    def drawing(self) -> Any:
        return contextlib.nullcontext()


@mutant("ENG-061", "ENG-062", "ENG-082", "ENG-095", only=("dropout", "lora", "value_head"))
class SeedIgnored(PlainEngine):
    """The seed is drawn from whatever the process draws from."""

    def seed(self) -> int:
        return int(torch.randint(1 << 30, ()))


@mutant("ENG-062", "ENG-082", "ENG-095", only=("dropout", "lora", "value_head"))
class SeedConstant(PlainEngine):
    """Every engine has the same seed."""

    def seed(self) -> int:
        return 0


# -- life ------------------------------------------------------------------------------------------------------------


@mutant("ENG-070")
class UnknownState(PlainEngine):
    """Use before initialize fails with whatever Python says."""

    def ready(self) -> Any:
        assert self.model.config
        return self.model


@mutant("ENG-071")
class PassesAnywhere(PlainEngine):
    """Passes run outside of a mode."""

    def check_mode(self, forward_only: bool) -> None:
        return


@mutant("ENG-072")
class FolderErrorsOfTheLibrary(PlainEngine):
    """A folder without a model raises what transformers raises."""

    def load(self) -> None:
        try:
            super().load()
        except EngineError as error:
            raise OSError(str(error)) from error


@mutant("ENG-073")
class TwoRanksAlone(PlainEngine):
    """The layout of a single rank says that there are two."""

    @property
    def layout(self) -> EngineLayout:
        return attrs.evolve(super().layout, data_parallel_size=2)


@mutant("ENG-074")
class CloseOnce(PlainEngine):
    """A second close raises."""

    def close(self) -> None:
        if self.__dict__.get("closed"):
            raise RuntimeError("closed already")
        self.closed = True
        super().close()


@mutant("ENG-074")
class LeakedThread(PlainEngine):
    """A thread outlives the engine."""

    def initialize(self) -> None:
        super().initialize()
        self.end = threading.Event()
        threading.Thread(target=self.end.wait, args=(5.0,), daemon=True).start()


@mutant("ENG-074")
class LeakedProcess(PlainEngine):
    """A process outlives the engine."""

    children: list[Any] = []  # noqa: RUF012

    def initialize(self) -> None:
        super().initialize()
        self.children.append(subprocess.Popen(["sleep", "5"]))


@mutant("ENG-075")
class NoAdapterNoContext(PlainEngine):
    """disable_adapter raises on a model without an adapter."""

    def disable_adapter(self) -> Any:
        self.ready()
        return self.model.disable_adapter()


@mutant("ENG-076")
class OptimizerNeeded(PlainEngine):
    """An engine without an optimizer cannot be made."""

    def initialize(self) -> None:
        self.rate(0)
        super().initialize()
