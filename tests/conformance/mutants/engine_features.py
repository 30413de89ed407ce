"""Training engines with one fault each in value heads, adapters, gradient checkpointing, or ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import attrs
import torch
from peft import PeftModel
from torch import nn

from jackfield.abc.engine import Box, TokenOutput
from jackfield.errors import EngineError
from mutants.engine_register import Exporting, mutant
from mutants.plain_engine import Micro, PlainEngine


class ValuesOneTooEarly(PlainEngine):
    def collect(self, results: Any, micro: Micro, output: TokenOutput) -> None:
        values = output.values
        if values is not None:
            values = torch.cat([values[:, :1], values[:, :-1]], 1)
        super().collect(results, micro, attrs.evolve(output, values=values))


class DetachedValues(PlainEngine):
    def forward(self, micro: Micro, want_entropy: bool) -> TokenOutput:
        if self.head is None:
            return super().forward(micro, want_entropy)
        hook = self.head.register_forward_pre_hook(lambda _, inputs: inputs[0].detach())
        try:
            return super().forward(micro, want_entropy)
        finally:
            hook.remove()


class UnseededHead(PlainEngine):
    def made_head(self, hidden_size: int) -> nn.Linear:
        return nn.Linear(hidden_size, 1)


class CheckpointWithoutHead(PlainEngine):
    def restore(self, state: Any, facts: Any, request: Any) -> None:
        own = {f"model:{name}": parameter.detach().clone() for name, parameter in self.parameters().items()}
        super().restore(
            {name: own[name] if name.startswith("model:value_head.") else value for name, value in state.items()},
            facts,
            request,
        )


class AdapterUnderModuleNames(Exporting):
    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default."), tensor


class AdapterNotDelivered(PlainEngine):
    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not isinstance(self.model, PeftModel):
            yield from super().exported()
            return
        for name, parameter in self.model.named_parameters():
            if "lora_" not in name:
                yield name.removeprefix("base_model.model.").replace(".base_layer", ""), parameter.detach()

    def adapter_config(self) -> None:
        return None


class StaleAdapter(Exporting):
    def load(self) -> None:
        super().load()
        self.loaded = {name: p.detach().clone() for name, p in self.model.named_parameters() if "lora_" in name}

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        module = name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
        yield name, self.loaded.get(module, tensor)


class WrongScale(PlainEngine):
    def adapted(self, model: nn.Module) -> Any:
        made = super().adapted(model)
        for module in made.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling = {name: 2.0 * value for name, value in module.scaling.items()}
        return made


class BaseMoves(PlainEngine):
    def optimizer_step(self) -> float:
        norm = super().optimizer_step()
        if isinstance(self.model, PeftModel):
            with torch.no_grad():
                self.model.get_base_model().model.norm.weight.add_(1e-2)
        return norm


class AdapterStaysOn(PlainEngine):
    def disable_adapter(self) -> Any:
        self.ready()
        return contextlib.nullcontext()


class AdapterStaysOff(PlainEngine):
    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        with super().disable_adapter():
            yield
        if isinstance(self.model, PeftModel):
            self.model.base_model.disable_adapter_layers()


class CheckpointWithoutAdapter(PlainEngine):
    def restore(self, state: Any, facts: Any, request: Any) -> None:
        own = {f"model:{name}": parameter.detach().clone() for name, parameter in self.parameters().items()}
        super().restore(
            {name: own[name] if "lora_" in name and name in own else value for name, value in state.items()},
            facts,
            request,
        )


class UnseededAdapter(PlainEngine):
    def adapted(self, model: nn.Module) -> Any:
        made = super().adapted(model)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_A" in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.1)
        return made


class RecomputedWithOtherDropout(PlainEngine):
    def load(self) -> None:
        super().load()
        if self.context.model.gradient_checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


class MeanOverRanks(PlainEngine):
    def reduce(self, gradient: torch.Tensor) -> None:
        super().reduce(gradient)
        gradient.div_(self.context.world_size)


class SameNumberOfRanks(PlainEngine):
    def restore(self, state: Any, facts: Any, request: Any) -> None:
        if facts["world_size"] != self.context.world_size:
            raise EngineError("a checkpoint of another number of ranks")
        super().restore(state, facts, request)


class _Rows(PlainEngine):
    """Each rank has half of the rows, or so it says."""

    def rows(self, count: int) -> tuple[int, int]:
        half = -(-count // self.context.world_size)
        return min(self.context.rank * half, count), min((self.context.rank + 1) * half, count)

    def part(self, tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
        return tensor[start:end]

    def get_local_param(self) -> Generator[tuple[Box, torch.Tensor], None, None] | None:
        for name, tensor in self.exported():
            shape = tuple(tensor.shape)
            start, end = self.rows(shape[0])
            first = (start, *[0] * (len(shape) - 1))
            box = Box(name=name, shape=shape, start=first, length=(end - start, *shape[1:]))
            yield box, self.part(tensor, start, end)


class RowLeftOut(_Rows):
    def rows(self, count: int) -> tuple[int, int]:
        start, end = super().rows(count)
        return start, end - (end == count)


class RowsOfBefore(_Rows):
    def part(self, tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
        return tensor.roll(1, 0)[start:end]


MUTANTS = (
    mutant(ValuesOneTooEarly, "values are those of the token before", "080 081", only=("value_head",)),
    mutant(DetachedValues, "gradients of values stop at the head", "081", only=("value_head",)),
    mutant(UnseededHead, "a value head is drawn from whatever the process draws from", "082", only=("value_head",)),
    mutant(CheckpointWithoutHead, "a checkpoint does not hold the value head", "083", only=("value_head",)),
    mutant(
        AdapterUnderModuleNames,
        "adapters are exported under the names of the modules in memory",
        "090 092",
        only=("lora",),
    ),
    mutant(
        AdapterNotDelivered, "the base model is exported, and the adapter is not", "090 091 092 095", only=("lora",)
    ),
    mutant(StaleAdapter, "the adapter is exported as it was at the beginning", "091 092 094", only=("lora",)),
    mutant(
        WrongScale,
        "the PEFT config that is exported has another alpha than the one that is trained",
        "091",
        only=("lora",),
    ),
    mutant(BaseMoves, "training moves the base under the adapter, too", "091 092 093 094", only=("lora",)),
    mutant(AdapterStaysOn, "disable_adapter has no effect", "092 093", only=("lora",)),
    mutant(AdapterStaysOff, "after disable_adapter the adapter is off", "093", only=("lora",)),
    mutant(CheckpointWithoutAdapter, "a checkpoint does not hold the adapter", "094", only=("lora",)),
    mutant(UnseededAdapter, "a fresh adapter is drawn from whatever the process draws from", "095", only=("lora",)),
    mutant(
        RecomputedWithOtherDropout,
        "the recomputation of gradient checkpointing draws another dropout mask",
        "100",
        only=("dropout", "gradient_checkpointing"),
    ),
    mutant(MeanOverRanks, "gradients are the mean over ranks", "110", only=("multi_rank",)),
    mutant(RowLeftOut, "no rank says that it has the last row of a tensor", "112", only=("multi_rank",)),
    mutant(RowsOfBefore, "ranks say that they have other rows than they have", "112", only=("multi_rank",)),
    mutant(SameNumberOfRanks, "a checkpoint of another number of ranks is refused", "111", only=("multi_rank",)),
)
