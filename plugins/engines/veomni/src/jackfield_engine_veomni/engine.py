"""The engine: one rank of a model that VeOmni shards."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig
from veomni.utils.device import get_device_type

from jackfield.abc.engine import (
    BaseEngine,
    Box,
    EngineContext,
    EngineLayout,
    EngineOutput,
    LoadCheckpointRequest,
    LoadCheckpointResult,
    LossFunction,
    SaveCheckpointRequest,
    SaveCheckpointResult,
)
from jackfield.errors import EngineError
from jackfield_engine_veomni import checkpointing
from jackfield_engine_veomni.config import Config
from jackfield_engine_veomni.model import TokenModel, refuse_settings
from jackfield_engine_veomni.optimization import Optimization
from jackfield_engine_veomni.parallel import Ranks
from jackfield_engine_veomni.passes import Pass
from jackfield_engine_veomni.rows import RowBatch
from jackfield_engines.failures import Watch, report_not_finite
from jackfield_huggingface.heads import HEAD_FILE

_misused = functools.partial(EngineError, code="engine.state")

#: Patterns of the files beside the weights that are needed to use them; copied unchanged.
_COMPANIONS = ["tokenizer*", "vocab.*", "merges.txt", "spiece.model", "chat_template.*", "added_tokens.json"]
_COMPANIONS += ["special_tokens_map.json", "generation_config.json"]


class VeOmniEngine(BaseEngine):
    """A causal language model of VeOmni on one rank: FSDP2 with sequence and expert parallelism."""

    config: Config

    def __init__(self, config: Config, context: EngineContext) -> None:
        super().__init__(config, context)
        self._ranks: Ranks | None = None
        self._model: TokenModel | None = None
        self._optimization: Optimization | None = None
        self._mode: str | None = None
        self._watch = Watch()
        self._damaged = False  # a pass failed and its leftovers cannot be cleared

    # ---- life

    def initialize(self) -> None:
        """Build the model, shard it and load its weights; create the optimizer."""
        if self._model is not None:
            raise _misused("the engine is initialized already")
        refuse_settings(self.context, self.config)
        device = _device(self.context)
        self._ranks = Ranks(self.context, self.config, device)
        try:
            model = TokenModel(self.context, self.config, self._ranks)
            if self.context.optimizer is not None:
                with self._ranks.entered():
                    self._optimization = Optimization(model.module, self.context.optimizer, model.sharding)
        except BaseException:
            self._ranks.leave()
            raise
        self._at = {"model": device, "optimizer": device, "grad": device}
        self._model = model

    @property
    def layout(self) -> EngineLayout:
        """Return this rank's place: ranks of one sequence have the same rows, and the first one's results count."""
        return self._ready()[1].layout

    def close(self) -> None:
        """Release model and optimizer, and leave the process group."""
        self._model = self._optimization = self._mode = None
        if self._ranks is not None:
            self._ranks.leave()
            self._ranks = None

    def _ready(self) -> tuple[TokenModel, Ranks]:
        if self._model is None or self._ranks is None:
            raise _misused("the engine is not initialized", fix="call initialize() first, and nothing after close()")
        return self._model, self._ranks

    def _optimizing(self) -> Optimization:
        self._ready()
        if self._optimization is None:
            message = f"this engine ({self.context.role}) has no optimizer"
            raise _misused(message, where="EngineContext.optimizer", expected="an OptimizerSpec")
        return self._optimization

    # ---- modes

    def train_mode(self) -> AbstractContextManager[None]:
        """Set up training passes, weights on the device; undo the moves at the end."""
        return self._in_mode("train")

    def eval_mode(self) -> AbstractContextManager[None]:
        """Set up inference passes, weights on the device."""
        return self._in_mode("eval")

    @contextmanager
    def _in_mode(self, mode: str) -> Iterator[None]:
        model, _ = self._ready()
        before, places = self._mode, dict(self._at)
        parts = places if mode == "train" else ("model",)
        self._move(dict.fromkeys(parts, _device(self.context)))
        self._mode = mode
        model.set_training(mode == "train")
        try:
            yield
        finally:
            self._mode = before
            model.set_training(before == "train")
            self._move({part: places[part] for part in parts})

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Do nothing: there is no adapter."""
        self._ready()
        return nullcontext()

    # ---- computing

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Compute a loss and add its gradients, as the contract describes.

        A rank with fewer micro-batches than another computes dummy ones, because gathering weights and reducing
        gradients are collective.
        """
        model, ranks = self._ready()
        self._check_pass(loss_function, forward_only)
        vocabulary = model.module.config.vocab_size
        batch = RowBatch(data, vocabulary, ranks.device, multiple=self.config.sequence_parallel)
        run = Pass(model, self.context, batch, loss_function, backward=not forward_only)
        micro_batches = batch.plan(self.context.micro_batch_tokens)
        try:
            with torch.set_grad_enabled(not forward_only), ranks.entered():
                count = ranks.maximum(len(micro_batches))
                for index in range(count):
                    if index < len(micro_batches):
                        run.micro_batch(batch.micro_batch(micro_batches[index]))
                    else:
                        run.idle(batch.idle_micro_batch())
        except BaseException:
            self._recover(model)
            raise
        if forward_only:
            for module in model.module.modules():  # without a backward pass FSDP keeps gathered weights
                if isinstance(module, FSDPModule):
                    module.reshard()
        output = run.output()
        if not forward_only:
            self._watch.add(data, output)
        return output

    def _check_pass(self, loss_function: object, forward_only: bool) -> None:
        if self._mode is None or (self._mode == "eval" and not forward_only):
            raise _misused(
                "a pass outside of its mode",
                expected="engine.train_mode(), or engine.eval_mode() with forward_only",
                found="no mode" if self._mode is None else f"eval_mode with forward_only={forward_only}",
                fix="with engine.train_mode(): engine.forward_backward_batch(...)",
            )
        if self._damaged:
            raise _misused("an earlier pass failed half-way", fix="make a new engine and load a checkpoint")
        if not forward_only:
            self._optimizing()
            if loss_function is None:
                raise EngineError("a backward pass needs a loss function", expected="a callable", found=None)

    def _recover(self, model: TokenModel) -> None:
        """Clear what a failed pass left, or refuse later passes: other ranks may wait in a collective operation."""
        if self.context.world_size == 1 and hasattr(model.module, "reset_iter_state"):
            model.module.reset_iter_state()
        else:
            self._damaged = True

    def optimizer_zero_grad(self) -> None:
        """Drop accumulated gradients."""
        self._optimizing().zero_grad()
        self._watch.clear()

    def optimizer_step(self) -> float:
        """Clip by the global norm, step, and return the norm before clipping.

        If it is not finite, do not step; name the samples, and skip the step or raise ``engine.not-finite``.
        """
        _, ranks = self._ready()
        with ranks.entered():
            norm = self._optimizing().step()
        watch, self._watch = self._watch, Watch()
        if not math.isfinite(norm):
            report_not_finite(norm, watch, self.context, ranks)
        return norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; return the learning rate of the next optimizer step."""
        optimization = self._optimizing()
        return optimization.set_schedule_step(optimization.schedule_step + 1)

    # ---- weights

    def get_per_tensor_param(self) -> tuple[Generator[tuple[str, torch.Tensor], None, None], Mapping[str, Any] | None]:
        """Return copies of the full tensors, in checkpoint form, on the engine's device; no value head."""
        model, _ = self._ready()

        def tensors() -> Generator[tuple[str, torch.Tensor], None, None]:
            yield from model.published()

        return tensors(), None

    def get_local_param(self) -> Generator[tuple[Box, torch.Tensor], None, None] | None:
        """Return this rank's rows of each tensor, in checkpoint form; None with stacked experts."""
        model, _ = self._ready()
        if not all(group.only_renamed for group in model.names.groups):
            return None
        tensors = dict(model.module.named_parameters(remove_duplicate=False))
        dtype = getattr(torch, self.context.model.dtype)

        def local() -> Generator[tuple[Box, torch.Tensor], None, None]:
            for group in model.names.groups:
                (name,), (part,) = group.shapes, group.parts
                own = model.sharding.part(part, tensors[part])
                if own.values.numel():  # there may be fewer rows than ranks
                    yield (
                        Box(name=name, shape=own.shape, start=own.start, length=tuple(own.values.shape)),
                        own.values.to(dtype),
                    )

        return local()

    def get_per_tensor_grad(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield full gradients in the order of the parameters; zeros if a parameter got none."""
        model, _ = self._ready()
        for name, parameter in self._optimizing().parameters.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield name, model.sharding.full(name, gradient)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the chosen state to the CPU or to the engine's own device."""
        self._ready()
        own = _device(self.context)
        target = {"cpu": torch.device("cpu"), own.type: own, str(own): own}.get(str(device))
        if target is None:
            expected, message = f"cpu or {own}", f"the engine cannot move to {device!r}"
            raise EngineError(message, code="config.invalid-value", where="device", expected=expected, found=device)
        chosen = {"model": model, "optimizer": optimizer, "grad": grad}
        self._move({part: target for part, wanted in chosen.items() if wanted})

    def _move(self, targets: Mapping[str, torch.device]) -> None:
        """Move state; gradients stay with the weights."""
        if "model" in targets and targets["model"] != self._at["model"]:
            self._ready()[0].module.to(targets["model"])
            if self._optimization is not None:
                self._optimization.follow()
        if "optimizer" in targets and targets["optimizer"] != self._at["optimizer"] and self._optimization is not None:
            self._optimization.move(targets["optimizer"])
        if targets.get("model", self._at["model"]) != self._at["model"] and self._at["model"].type == "cuda":
            torch.cuda.empty_cache()
        self._at |= targets

    # ---- checkpoints

    def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResult:
        """Save model, optimizer and schedule, or a Hugging Face folder of the weights."""
        model, ranks = self._ready()
        folder = checkpointing.make_folder(request.folder, ranks)
        if request.format == "huggingface":
            self._save_huggingface(folder)
        else:
            checkpointing.save(folder, model, self._optimization, ranks)
        ranks.barrier()
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return SaveCheckpointResult(folder=request.folder, files=tuple(files))

    def _save_huggingface(self, folder: Path) -> None:
        """Write a folder for ``from_pretrained``; ranks but the first only take part in the gathering."""
        model, ranks = self._ready()
        source, writes = Path(self.context.model.path), ranks.rank == 0
        tensors = {name: tensor.cpu() for name, tensor in model.published() if writes}
        head = dict(model.module.value_head.named_parameters()) if self.context.model.value_head else {}
        values = {name: model.sharding.full(name, each).cpu().contiguous() for name, each in head.items()}
        with checkpointing.agreed(ranks, "the folder could not be written", folder, "look at the disk's room"):
            if not writes:
                return
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            if values:
                save_file(values, folder / HEAD_FILE, metadata={"format": "pt"})
            config = AutoConfig.from_pretrained(str(source), local_files_only=True)
            config.dtype = getattr(torch, self.context.model.dtype)
            config.save_pretrained(str(folder))
            for path in (path for pattern in _COMPANIONS for path in source.glob(pattern) if path.is_file()):
                shutil.copyfile(path, folder / path.name)

    def load_checkpoint(self, request: LoadCheckpointRequest) -> LoadCheckpointResult:
        """Load a native checkpoint; nothing in this engine is random, so it has no random state."""
        model, ranks = self._ready()
        checkpointing.load(Path(request.folder), model, self._optimization, ranks, request.model_only)
        return LoadCheckpointResult(folder=request.folder)


def _device(context: EngineContext) -> torch.device:
    """Return this rank's device; ``cuda`` without a number means that of its local rank.

    VeOmni computes on one kind of device per process, the accelerator where there is one; another is refused.
    """
    device = torch.device(context.device)
    if device.type != get_device_type():
        raise EngineError(
            "VeOmni computes on another kind of device here",
            code="config.invalid-value",
            where="cluster.device",
            expected=get_device_type(),
            found=context.device,
            fix="choose that device, or hide it: CUDA_VISIBLE_DEVICES=",
        )
    if device.type == "cuda":
        device = torch.device("cuda", context.local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
        if context.memory_fraction is not None:  # it has a process of its own then
            torch.cuda.set_per_process_memory_fraction(context.memory_fraction, device)
    return device
