"""Training engines with one fault each in value heads, adapters, gradient checkpointing, or ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from peft import PeftModel
from torch import nn

from jackfield.abc.engine import TokenOutput
from jackfield.errors import EngineError
from mutants.engine_register import Exporting, mutant
from mutants.plain_engine import Micro, PlainEngine

# -- value heads -----------------------------------------------------------------------------------------------------


@mutant("ENG-080", "ENG-081", only=("value_head",))
class ValuesOneTooEarly(PlainEngine):
    """Values are those of the token before."""

    def collect(self, results: Any, micro: Micro, output: TokenOutput) -> None:
        values = output.values
        if values is not None:
            values = torch.cat([values[:, :1], values[:, :-1]], 1)
        super().collect(results, micro, attrs.evolve(output, values=values))


@mutant("ENG-081", only=("value_head",))
class DetachedValues(PlainEngine):
    """Gradients of values stop at the head."""

    def forward(self, micro: Micro, want_entropy: bool) -> TokenOutput:
        if self.head is None:
            return super().forward(micro, want_entropy)
        hook = self.head.register_forward_pre_hook(lambda _, inputs: inputs[0].detach())
        try:
            return super().forward(micro, want_entropy)
        finally:
            hook.remove()


@mutant("ENG-082", only=("value_head",))
class UnseededHead(PlainEngine):
    """A value head is drawn from whatever the process draws from."""

    def made_head(self, hidden_size: int) -> nn.Linear:
        return nn.Linear(hidden_size, 1)


@mutant("ENG-083", only=("value_head",))
class CheckpointWithoutHead(PlainEngine):
    """A checkpoint does not hold the value head."""

    def restore(self, state: Any, facts: Any, request: Any) -> None:
        own = {f"model:{name}": parameter.detach().clone() for name, parameter in self.parameters().items()}
        super().restore(
            {name: own[name] if name.startswith("model:value_head.") else value for name, value in state.items()},
            facts,
            request,
        )


# -- adapters --------------------------------------------------------------------------------------------------------


@mutant("ENG-090", "ENG-092", only=("lora",))
class AdapterUnderModuleNames(Exporting):
    """Adapters are exported under the names of the modules in memory."""

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default."), tensor


@mutant("ENG-090", "ENG-091", "ENG-092", "ENG-095", only=("lora",))
class AdapterNotDelivered(PlainEngine):
    """The base model is exported, and the adapter is not."""

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not isinstance(self.model, PeftModel):
            yield from super().exported()
            return
        for name, parameter in self.model.named_parameters():
            if "lora_" not in name:
                yield name.removeprefix("base_model.model.").replace(".base_layer", ""), parameter.detach()

    def adapter_config(self) -> None:
        return None


@mutant("ENG-091", "ENG-092", "ENG-094", only=("lora",))
class StaleAdapter(Exporting):
    """The adapter is exported as it was at the beginning."""

    def load(self) -> None:
        super().load()
        self.loaded = {name: p.detach().clone() for name, p in self.model.named_parameters() if "lora_" in name}

    def changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        module = name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
        yield name, self.loaded.get(module, tensor)


@mutant("ENG-091", only=("lora",))
class WrongScale(PlainEngine):
    """The PEFT config that is exported has another alpha than the one that is trained."""

    def adapted(self, model: nn.Module) -> Any:
        made = super().adapted(model)
        for module in made.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling = {name: 2.0 * value for name, value in module.scaling.items()}
        return made


@mutant("ENG-091", "ENG-092", "ENG-093", "ENG-094", only=("lora",))
class BaseMoves(PlainEngine):
    """Training moves the base under the adapter, too."""

    def optimizer_step(self) -> float:
        norm = super().optimizer_step()
        if isinstance(self.model, PeftModel):
            with torch.no_grad():
                self.model.get_base_model().model.norm.weight.add_(1e-2)
        return norm


@mutant("ENG-092", "ENG-093", only=("lora",))
class AdapterStaysOn(PlainEngine):
    """disable_adapter has no effect."""

    def disable_adapter(self) -> Any:
        self.ready()
        return contextlib.nullcontext()


@mutant("ENG-093", only=("lora",))
class AdapterStaysOff(PlainEngine):
    """After disable_adapter the adapter is off."""

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        with super().disable_adapter():
            yield
        if isinstance(self.model, PeftModel):
            self.model.base_model.disable_adapter_layers()


@mutant("ENG-094", only=("lora",))
class CheckpointWithoutAdapter(PlainEngine):
    """A checkpoint does not hold the adapter."""

    def restore(self, state: Any, facts: Any, request: Any) -> None:
        own = {f"model:{name}": parameter.detach().clone() for name, parameter in self.parameters().items()}
        super().restore(
            {name: own[name] if "lora_" in name and name in own else value for name, value in state.items()},
            facts,
            request,
        )


@mutant("ENG-095", only=("lora",))
class UnseededAdapter(PlainEngine):
    """A fresh adapter is drawn from whatever the process draws from."""

    def adapted(self, model: nn.Module) -> Any:
        made = super().adapted(model)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_A" in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.1)
        return made


@mutant("ENG-100", only=("dropout", "gradient_checkpointing"))
class RecomputedWithOtherDropout(PlainEngine):
    """The recomputation of gradient checkpointing draws its dropout anew."""

    def load(self) -> None:
        super().load()
        if self.context.model.gradient_checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


# -- ranks -----------------------------------------------------------------------------------------------------------


@mutant("ENG-110", ranks=True)
class MeanOverRanks(PlainEngine):
    """Gradients are the mean over ranks."""

    def reduce(self, gradient: torch.Tensor) -> None:
        super().reduce(gradient)
        gradient.div_(self.context.world_size)


@mutant("ENG-111", ranks=True)
class SameNumberOfRanks(PlainEngine):
    """A checkpoint of another number of ranks is refused."""

    def restore(self, state: Any, facts: Any, request: Any) -> None:
        if facts["world_size"] != self.context.world_size:
            raise EngineError("a checkpoint of another number of ranks")
        super().restore(state, facts, request)
