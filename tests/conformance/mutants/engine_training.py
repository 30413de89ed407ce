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


class WrappedNames(Exporting):
    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"module.{name}", tensor


class DroppedTensor(Exporting):
    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if name != "model.norm.weight":
            yield name, tensor


class TiedTwice(Exporting):
    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor
        if name == "model.embed_tokens.weight" and self.model.config.tie_word_embeddings:
            yield "lm_head.weight", tensor


class NamesInMemory(PlainEngine):
    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(self.model, PeftModel):
            yield from super().exported()
        else:
            yield from ((name, parameter.detach()) for name, parameter in self.model.named_parameters())


class DoubledTensor(Exporting):
    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor
        if name == "model.norm.weight":
            yield name, tensor


class ConfigWithoutAdapter(PlainEngine):
    def adapter_config(self) -> Mapping[str, Any] | None:
        return super().adapter_config() or {}


class ExportInFloat32(Exporting):
    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor.float()


class ExportThroughHalf(Exporting):
    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor.bfloat16().to(tensor.dtype)


class ExportFromOneBuffer(Exporting):
    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = self.__dict__.setdefault("buffer", torch.empty(1 << 20, dtype=torch.uint8))
        yield name, buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class StaleExport(Exporting):
    def load(self) -> None:
        super().load()
        self.loaded = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.ndim == 1}

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, self.loaded.get(name, tensor)


class FolderOfTheFirstModel(PlainEngine):
    def write_folder(self, folder: Path) -> None:
        shutil.copytree(self.context.model.path, folder, dirs_exist_ok=True)


class NoClipping(PlainEngine):
    def spec(self) -> Any:
        return attrs.evolve(super().spec(), clip_grad=None)


class NoWeightDecay(PlainEngine):
    def initialize(self) -> None:
        super().initialize()
        if self.optimizer is not None:
            self.optimizer.param_groups[0]["weight_decay"] = 0.0


class NormAfterClipping(PlainEngine):
    def optimizer_step(self) -> float:
        return min(super().optimizer_step(), self.spec().clip_grad or math.inf)


class StepOnNan(PlainEngine):
    def usable(self, norm: torch.Tensor) -> bool:
        return True


class DecayToZero(PlainEngine):
    def rate(self, step: int) -> float:
        spec, floor = self.spec(), self.spec().min_lr_ratio
        value = super().rate(step)
        if spec.scheduler == "constant" or step < spec.warmup_steps:
            return value
        return (value - floor * spec.lr) / (1.0 - floor)


class RateNotUsed(PlainEngine):
    def set_rate(self, rate: float) -> float:
        return rate


class _Saving(PlainEngine):
    def without(self, name: str) -> bool:
        raise NotImplementedError

    def restore(self, state: Any, facts: Any, request: Any) -> None:
        kept = {name: value for name, value in state.items() if not self.without(name)}
        super().restore(kept, facts, request)


class CheckpointWithoutMoments(_Saving):
    def without(self, name: str) -> bool:
        return name.startswith(("step:", "exp_avg"))


class CheckpointWithoutSchedule(PlainEngine):
    def restore(self, state: Any, facts: Any, request: Any) -> None:
        super().restore(state, {**facts, "schedule_step": self.schedule_step}, request)


class CheckpointWithoutRandom(PlainEngine):
    def restore(self, state: Any, facts: Any, request: Any) -> None:
        super().restore({**state, "random": self.random}, facts, request)


class ModelOnlyIgnored(PlainEngine):
    def restore(self, state: Any, facts: Any, request: Any) -> None:
        super().restore(state, facts, attrs.evolve(request, model_only=False))


class FilesThatAreNotThere(PlainEngine):
    def save_checkpoint(self, request: SaveCheckpointRequest) -> Any:
        result = super().save_checkpoint(request)
        return attrs.evolve(result, files=(*result.files, "optimizer.bin"))


class OffloadLosesMoments(PlainEngine):
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        if optimizer:
            self.optimizing().state.clear()


class OffloadLosesGradients(PlainEngine):
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        self.optimizing().zero_grad()


class SharedStream(PlainEngine):
    def initialize(self) -> None:
        super().initialize()
        torch.default_generator.manual_seed(self.seed())

    def drawing(self) -> Any:
        return contextlib.nullcontext()


class SeedIgnored(PlainEngine):
    def seed(self) -> int:
        return int(torch.randint(1 << 30, ()))


class SeedConstant(PlainEngine):
    def seed(self) -> int:
        return 0


class UnknownState(PlainEngine):
    def ready(self) -> Any:
        assert self.model.config
        return self.model


class PassesAnywhere(PlainEngine):
    def check_mode(self, forward_only: bool) -> None:
        return


class FolderErrorsOfTheLibrary(PlainEngine):
    def load(self) -> None:
        try:
            super().load()
        except EngineError as error:
            raise OSError(str(error)) from error


class TwoRanksAlone(PlainEngine):
    @property
    def layout(self) -> EngineLayout:
        return attrs.evolve(super().layout, data_parallel_size=2)


class CloseOnce(PlainEngine):
    def close(self) -> None:
        if self.__dict__.get("closed"):
            raise RuntimeError("closed already")
        self.closed = True
        super().close()


class LeakedThread(PlainEngine):
    def initialize(self) -> None:
        super().initialize()
        self.end = threading.Event()
        threading.Thread(target=self.end.wait, args=(5.0,), daemon=True).start()


class LeakedProcess(PlainEngine):
    children: list[Any] = []  # noqa: RUF012

    def initialize(self) -> None:
        super().initialize()
        self.children.append(subprocess.Popen(["sleep", "5"]))


class NoAdapterNoContext(PlainEngine):
    def disable_adapter(self) -> Any:
        self.ready()
        return self.model.disable_adapter()


class OptimizerNeeded(PlainEngine):
    def initialize(self) -> None:
        self.rate(0)
        super().initialize()


MUTANTS = (
    mutant(WrappedNames, "names keep the prefix of a wrapper", "030 033 034 040 044"),
    mutant(DroppedTensor, "the last norm is not exported", "030 033 040"),
    mutant(TiedTwice, "tied embeddings are exported under both of their names", "030 033 040 044"),
    mutant(NamesInMemory, "experts are exported as they are stacked in memory", "034"),
    mutant(DoubledTensor, "a tensor is exported twice", "030"),
    mutant(ConfigWithoutAdapter, "a model without an adapter is exported with an empty PEFT config", "030"),
    mutant(ExportInFloat32, "weights are exported in float32, whatever the dtype of the model", "031"),
    mutant(ExportThroughHalf, "weights pass through bfloat16 on their way out", "031 033 040 044"),
    mutant(ExportFromOneBuffer, "every tensor is exported from the same memory", "031"),
    mutant(StaleExport, "the norms are exported as they were loaded", "032 033 040 044"),
    mutant(FolderOfTheFirstModel, "the Hugging Face folder holds the weights from which training began", "033"),
    mutant(NoClipping, "gradients are not clipped", "040"),
    mutant(NoWeightDecay, "the weight decay is not used", "040 044"),
    mutant(NormAfterClipping, "the norm that is returned is the one after clipping", "041"),
    mutant(StepOnNan, "a step is applied whatever its norm is", "042"),
    mutant(DecayToZero, "the schedule forgets min_lr_ratio", "043"),
    mutant(RateNotUsed, "the schedule's rates are returned, and the optimizer keeps its own", "044"),
    mutant(CheckpointWithoutMoments, "a checkpoint does not hold the optimizer's moments", "050 051"),
    mutant(CheckpointWithoutSchedule, "a checkpoint does not hold the place in the schedule", "050"),
    mutant(CheckpointWithoutRandom, "a checkpoint does not hold the random state", "051", only=("dropout",)),
    mutant(ModelOnlyIgnored, "model_only loads everything", "052"),
    mutant(FilesThatAreNotThere, "the result of a save names a file that was not written", "053"),
    mutant(OffloadLosesMoments, "offloading the optimizer drops its moments", "060"),
    mutant(OffloadLosesGradients, "offloading the weights drops the gradients", "060"),
    mutant(
        SharedStream,
        "dropout draws from the stream of the process, which the engine seeds at its beginning",
        "051 061",
        only=("dropout",),
    ),
    mutant(
        SeedIgnored,
        "the seed is drawn from whatever the process draws from",
        "061 062 082 095",
        only=("dropout", "lora", "value_head"),
    ),
    mutant(SeedConstant, "every engine has the same seed", "062 082 095", only=("dropout", "lora", "value_head")),
    mutant(UnknownState, "use before initialize fails with whatever Python says", "070"),
    mutant(PassesAnywhere, "passes run outside of a mode", "071"),
    mutant(FolderErrorsOfTheLibrary, "a folder without a model raises what transformers raises", "072"),
    mutant(TwoRanksAlone, "the layout of a single rank says that there are two", "073"),
    mutant(CloseOnce, "a second close raises", "074"),
    mutant(LeakedThread, "a thread outlives the engine", "074"),
    mutant(LeakedProcess, "a process outlives the engine", "074"),
    mutant(NoAdapterNoContext, "disable_adapter raises on a model without an adapter", "075"),
    mutant(OptimizerNeeded, "an engine without an optimizer cannot be made", "076"),
)
