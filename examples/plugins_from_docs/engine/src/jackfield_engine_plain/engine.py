"""A training engine in plain PyTorch: one process, one CPU, every method of the contract."""

from __future__ import annotations

import math
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from jackfield.abc.engine import (
    BaseEngine,
    EngineContext,
    EngineLayout,
    EngineOutput,
    LoadCheckpointRequest,
    LoadCheckpointResult,
    LossFunction,
    SaveCheckpointRequest,
    SaveCheckpointResult,
)
from jackfield.errors import EngineError, PluginError
from jackfield_engine_plain.config import Config
from jackfield_engine_plain.passes import Pass, micro_batches
from jackfield_engine_plain.schedule import learning_rate
from jackfield_huggingface.names import CheckpointNames

_COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class PlainEngine(BaseEngine):
    """A Hugging Face causal language model and AdamW."""

    def __init__(self, config: Config, context: EngineContext) -> None:
        super().__init__(config, context)
        self._model: Any = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule_step = 0
        self._mode: str | None = None

    # ---- life

    def initialize(self) -> None:
        """Load the model; refuse what the context asks for and this engine cannot do."""
        context, spec = self.context, self.context.model
        asked = {
            "dropout": spec.dropout > 0,
            "lora": spec.lora is not None,
            "value_head": spec.value_head,
            "gradient_checkpointing": spec.gradient_checkpointing,
            "multi_rank": context.world_size > 1,
            "gpu": context.device != "cpu",
        }
        for capability in (name for name, wanted in asked.items() if wanted):
            raise PluginError(f"the engine 'plain' does not have '{capability}'", code="plugin.capability")
        try:
            self._model = AutoModelForCausalLM.from_pretrained(
                spec.path,
                dtype=getattr(torch, spec.dtype),
                attn_implementation=self.config.attention,
                trust_remote_code=spec.trust_remote_code,
                local_files_only=True,
            )
        except Exception as error:  # whatever transformers raises for a folder that it cannot load
            raise EngineError(
                f"the model cannot be loaded: {error}", code="engine.model", where=f"model.path = {spec.path}"
            ) from error
        self._model.eval()  # for good: training passes have no dropout, whatever the model's config says
        self._model.requires_grad_(context.optimizer is not None)
        if context.optimizer is not None:
            self._optimizer = torch.optim.AdamW(
                self._model.parameters(),
                lr=learning_rate(context.optimizer, 0),
                betas=context.optimizer.betas,
                eps=context.optimizer.eps,
                weight_decay=context.optimizer.weight_decay,
            )

    @property
    def layout(self) -> EngineLayout:
        """The only rank: all rows are for it, and all results are its."""
        self._loaded()
        return EngineLayout()

    def close(self) -> None:
        """Forget the model."""
        self._model = self._optimizer = self._mode = None

    def _loaded(self) -> Any:
        if self._model is None:
            raise EngineError("the engine is not initialized", code="engine.state", fix="call initialize() first")
        return self._model

    def _training(self) -> torch.optim.Optimizer:
        self._loaded()
        if self._optimizer is None:
            raise EngineError("this engine has no optimizer", code="engine.state", where=self.context.role)
        return self._optimizer

    # ---- modes

    def train_mode(self) -> AbstractContextManager[None]:
        """Training passes."""
        return self._in_mode("train")

    def eval_mode(self) -> AbstractContextManager[None]:
        """Inference passes."""
        return self._in_mode("eval")

    @contextmanager
    def _in_mode(self, mode: str) -> Iterator[None]:
        self._loaded()
        before, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = before

    def disable_adapter(self) -> AbstractContextManager[None]:
        """There is no adapter."""
        return nullcontext()

    # ---- computing

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Every micro-batch adds its share of the loss to the gradients; nothing is divided here."""
        model = self._loaded()
        if self._mode is None or (self._mode == "eval" and not forward_only):
            raise EngineError(
                "a pass outside of its mode",
                code="engine.state",
                expected="train_mode(), or eval_mode() with forward_only",
                found=f"{self._mode or 'no'} mode, forward_only={forward_only}",
            )
        if not forward_only:
            self._training()
            if loss_function is None:
                raise EngineError("a backward pass needs a loss function")
        run = Pass(model, data, loss_function, temperature=self.context.temperature, backward=not forward_only)
        with torch.set_grad_enabled(not forward_only):
            for rows in micro_batches(run.lengths, self.context.micro_batch_tokens):
                run.micro_batch(rows)
        return run.output()

    def optimizer_zero_grad(self) -> None:
        """Forget gradients."""
        self._training().zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        """Clip, step, return the norm before clipping. A norm that is not finite skips the step."""
        optimizer, spec = self._training(), self.context.optimizer
        assert spec is not None, "there is an optimizer"
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack([g.double().norm() for g in gradients])))
        if math.isfinite(norm):
            if spec.clip_grad is not None and norm > spec.clip_grad:
                for gradient in gradients:
                    gradient.mul_(spec.clip_grad / norm)
            optimizer.step()
        return norm

    def lr_scheduler_step(self) -> float:
        """The learning rate of the next step."""
        optimizer, spec = self._training(), self.context.optimizer
        assert spec is not None, "there is an optimizer"
        self._schedule_step += 1
        rate = learning_rate(spec, self._schedule_step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    # ---- weights

    def get_per_tensor_param(
        self,
    ) -> tuple[Generator[tuple[str, torch.Tensor], None, None], Mapping[str, Any] | None]:
        """All that the checkpoint has (tied tensors once), under its names; no adapter, so None."""
        model = self._loaded()
        names = CheckpointNames(model, Path(self.context.model.path))

        def tensors() -> Generator[tuple[str, torch.Tensor], None, None]:
            held = model.state_dict()
            for group in names.groups:
                yield from names.to_checkpoint(group, [held[part].clone() for part in group.parts]).items()

        return tensors(), None

    def get_per_tensor_grad(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Accumulated gradients; zeros where a parameter got none."""
        self._training()
        for name, parameter in self._model.named_parameters():
            yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Everything is on the CPU and stays there."""
        if device != "cpu":
            raise PluginError("the engine 'plain' does not have 'gpu'", code="plugin.capability", found=device)

    # ---- checkpoints

    def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResult:
        """``state.pt``, or a folder for ``from_pretrained`` with the tokenizer's files beside the weights."""
        model, folder = self._loaded(), Path(request.folder)
        folder.mkdir(parents=True, exist_ok=True)
        if request.format == "huggingface":
            model.save_pretrained(folder)
            for companion in (Path(self.context.model.path) / name for name in _COMPANIONS):
                if companion.is_file():
                    shutil.copyfile(companion, folder / companion.name)
        else:
            state = {"model": model.state_dict(), "schedule_step": self._schedule_step}
            if self._optimizer is not None:
                state["optimizer"] = self._optimizer.state_dict()
            torch.save(state, folder / "state.pt")
        return SaveCheckpointResult(folder=request.folder, files=tuple(sorted(f.name for f in folder.iterdir())))

    def load_checkpoint(self, request: LoadCheckpointRequest) -> LoadCheckpointResult:
        """Read ``state.pt``; ``weights_only`` keeps code in a file from running."""
        model, file = self._loaded(), Path(request.folder) / "state.pt"
        if not file.is_file():
            raise EngineError("the folder holds no checkpoint of this engine", where=request.folder, expected=file.name)
        state = torch.load(file, weights_only=True)  # noqa: TID251, it admits data only
        model.load_state_dict(state["model"])
        if not request.model_only:
            self._schedule_step = state["schedule_step"]
            if self._optimizer is not None:
                self._optimizer.load_state_dict(state["optimizer"])
        return LoadCheckpointResult(folder=request.folder)
