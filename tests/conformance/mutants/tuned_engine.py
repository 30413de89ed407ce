"""The reference of training engines with frozen parameters, groups, averages, and background checkpoints."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from jackfield.abc.engine import EngineOutput, SaveCheckpointRequest, SaveCheckpointResult
from jackfield.errors import EngineError
from jackfield.sdk.samples import sample_name
from mutants.plain_engine import PlainEngine, published

Named = Iterator[tuple[str, torch.Tensor]]


class TunedEngine(PlainEngine):
    """All that ``OptimizerSpec``, ``LoraSpec`` and ``ModelSpec.freeze`` say."""

    def initialize(self) -> None:
        super().initialize()
        self.waiting: Callable[[], None] | None = None
        self.passes: list[tuple[Any, EngineOutput, list[str]]] = []
        self.averages: dict[str, torch.Tensor] = {}
        if self.context.optimizer is None:
            return
        spec = self.context.optimizer
        self.check_optimizer()
        groups = [
            {"params": [parameter], "weight_decay": self.decay(name, parameter), "factor": self.factor(name)}
            for name, parameter in self.parameters().items()
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate(0), betas=spec.betas, eps=spec.eps)
        self.set_rate(self.rate(0))
        if spec.ema_decay is not None:
            self.averages = {name: each.detach().clone() for name, each in self.parameters().items()}

    def load(self) -> None:
        super().load()
        trained = {published(name): each for name, each in self.model.named_parameters() if each.requires_grad}
        for pattern in self.context.model.freeze:
            chosen = [each for name, each in trained.items() if re.search(pattern, name)]
            if not chosen:
                self.refuse_pattern(pattern)
            for each in chosen:
                self.freeze(each)

    def refuse_pattern(self, pattern: str) -> None:
        raise EngineError(f"{pattern} has no effect", code="config.invalid-value")

    def freeze(self, parameter: nn.Parameter) -> None:
        parameter.requires_grad_(False)

    def close(self) -> None:
        self.finish_checkpoint()
        if self.model is not None:
            self.model.requires_grad_(True)  # the next engine may take the model
        super().close()

    def check_optimizer(self) -> None:
        spec = self.spec()
        if spec.name != "adamw":
            raise EngineError(f"no optimizer {spec.name}", code="config.invalid-value")
        for name in spec.options:
            raise EngineError(f"no option {name}", code="config.unknown-key")
        for pattern in spec.lr_factors:
            if not any(re.search(pattern, name) for name in self.parameters()):
                raise EngineError(f"{pattern} has no effect", code="config.invalid-value")

    def decay(self, name: str, parameter: nn.Parameter) -> float:
        kind = "biases" if name.endswith("bias") else "norms" if parameter.ndim < 2 else ""
        kind = "embeddings" if "embed_tokens" in name else kind
        return 0.0 if kind in self.spec().no_decay else self.spec().weight_decay

    def factor(self, name: str) -> float:
        factors = self.spec().lr_factors.items()
        return next((factor for pattern, factor in factors if re.search(pattern, name)), 1.0)

    def set_rate(self, rate: float) -> float:
        for group in self.optimizing().param_groups:
            group["lr"] = rate * group.get("factor", 1.0)
        return rate

    def optimizer_zero_grad(self) -> None:
        super().optimizer_zero_grad()
        self.passes.clear()

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> EngineOutput:
        output = super().forward_backward_batch(data, loss_function, forward_only)
        if not forward_only:
            self.passes.append((data, output, [sample_name(row) for row in range(len(data))]))
        return output

    def optimizer_step(self) -> float:
        norm = super().optimizer_step()
        if self.usable(torch.tensor(norm)):
            self.average()
        elif self.spec().on_nonfinite == "stop":
            raise EngineError("the gradients are not finite", code="engine.not-finite", where=", ".join(self.bad()))
        return norm

    def bad(self) -> list[str]:
        found = []
        for data, _, names in self.passes:
            advantages = data["advantages"].unbind()
            found += [name for name, row in zip(names, advantages, strict=True) if not row.isfinite().all()]
        return found

    def average(self) -> None:
        decay = self.spec().ema_decay
        for name, value in self.averages.items():
            assert decay is not None
            value.mul_(decay).add_(self.parameters()[name].detach(), alpha=1.0 - decay)

    def adapted(self, model: nn.Module) -> Any:
        spec = self.context.model.lora
        assert spec is not None
        if not spec.use_dora and not spec.use_rslora:
            return super().adapted(model)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=spec.rank,
            lora_alpha=spec.alpha,
            lora_dropout=spec.dropout,
            target_modules=list(spec.target_modules) or "all-linear",
            use_dora=spec.use_dora,
            use_rslora=spec.use_rslora,
        )
        with self.seeded(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            return get_peft_model(model, config)

    def merges(self) -> bool:
        spec = self.context.model.lora
        return spec is not None and spec.publish == "merged"

    def exported(self) -> Named:
        if not self.merges():
            for name, tensor in super().exported():
                yield name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name, tensor
            return
        held: dict[str, torch.Tensor] = {}
        with self.merged():
            for name, parameter in self.model.get_base_model().named_parameters():
                if "lora_" not in name:
                    held[name.replace(".base_layer", "")] = parameter.detach().clone()
        yield from held.items()

    @contextmanager
    def merged(self) -> Iterator[None]:
        before = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        self.model.merge_adapter()
        yield
        self.model.unmerge_adapter()
        self.put_back(before)

    def put_back(self, before: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, each in self.model.named_parameters():
                each.copy_(before[name])

    def adapter_config(self) -> Mapping[str, Any] | None:
        return None if self.merges() else super().adapter_config()

    def write_folder(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResult:
        self.finish_checkpoint()
        if request.averaged:
            with self.averaged():
                return super().save_checkpoint(request)
        if not request.background:
            try:
                return super().save_checkpoint(request)
            except OSError as error:
                raise EngineError(str(error)) from error
        state, facts = self.copied(), {"schedule_step": self.schedule_step, "world_size": self.context.world_size}

        def write() -> None:
            folder = Path(request.folder)
            folder.mkdir(parents=True, exist_ok=True)
            save_file(state, folder / "state.safetensors")
            (folder / "facts.json").write_text(json.dumps(facts))

        self.waiting = write
        return SaveCheckpointResult(folder=request.folder)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        before = {name: each.detach().clone() for name, each in self.parameters().items()}
        self.write_weights(self.averages)
        yield
        self.write_weights(before)

    def write_weights(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                parameter.copy_(values[name])

    def copied(self) -> dict[str, torch.Tensor]:
        return {name: tensor.contiguous().clone() for name, tensor in self.state().items()}

    def finish_checkpoint(self) -> None:
        waiting, self.waiting = getattr(self, "waiting", None), None
        if waiting is not None:
            try:
                waiting()
            except OSError as error:
                raise EngineError(str(error)) from error

    def state(self) -> dict[str, torch.Tensor]:
        averages = {f"average:{name}": value for name, value in self.averages.items()}
        return super().state() | averages

    def restore(self, state: Any, facts: Any, request: Any) -> None:
        super().restore(state, facts, request)
        for name, value in self.averages.items():
            value.copy_(state[f"average:{name}"])
