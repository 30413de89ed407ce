"""Training engines with one fault each in freezing, optimizers, adapters, or checkpoints in the background."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from jackfield.errors import EngineError
from mutants.engine_register import mutant
from mutants.tuned_engine import TunedEngine


class FreezeIgnored(TunedEngine):
    def freeze(self, parameter: nn.Parameter) -> None:
        return


class FrozenNotPublished(TunedEngine):
    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        frozen = {name for name, each in self.model.named_parameters() if not each.requires_grad}
        yield from ((name, tensor) for name, tensor in super().exported() if name not in frozen)


class FreezePatternIgnored(TunedEngine):
    def refuse_pattern(self, pattern: str) -> None:
        return


class AnyOptimizer(TunedEngine):
    def check_optimizer(self) -> None:
        return


class DecayOfEverything(TunedEngine):
    def decay(self, name: str, parameter: nn.Parameter) -> float:
        return self.spec().weight_decay


class LastFactorCounts(TunedEngine):
    def factor(self, name: str) -> float:
        found = [factor for pattern, factor in self.spec().lr_factors.items() if re.search(pattern, name)]
        return found[-1] if found else 1.0


class AverageBeforeTheStep(TunedEngine):
    def optimizer_step(self) -> float:
        super().average()
        return super().optimizer_step()

    def average(self) -> None:
        return


class AverageNotSaved(TunedEngine):
    def restore(self, state: Any, facts: Any, request: Any) -> None:
        own = {f"average:{name}": value.clone() for name, value in self.averages.items()}
        super().restore({**state, **own}, facts, request)


class WeightsExportedForAverages(TunedEngine):
    def write_weights(self, values: Mapping[str, torch.Tensor]) -> None:
        return


class MomentsOfOptimizerNotSaved(TunedEngine):
    def restore(self, state: Any, facts: Any, request: Any) -> None:
        super().restore(
            {name: value for name, value in state.items() if not name.startswith(("step:", "exp_avg"))}, facts, request
        )


class NeverStops(TunedEngine):
    def bad(self) -> list[str]:
        return ["a sample"]


class PlainLora(TunedEngine):
    def adapted(self, model: nn.Module) -> Any:
        made = super().adapted(model)
        for module in made.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling = dict.fromkeys(module.scaling, self.plain_scale())
        return made

    def plain_scale(self) -> float:
        spec = self.context.model.lora
        assert spec is not None
        return spec.alpha / spec.rank


class AdapterPublishedForMerged(TunedEngine):
    def merges(self) -> bool:
        return False


class MergedIntoTheBase(TunedEngine):
    def put_back(self, before: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, each in self.model.named_parameters():
                each.copy_(before[name] + 0.01 if name.endswith("q_proj.base_layer.weight") else before[name])


class BackgroundWithoutCopy(TunedEngine):
    def copied(self) -> dict[str, torch.Tensor]:
        return {name: tensor.contiguous() for name, tensor in self.state().items()}


class FailureInTheBackgroundIsLost(TunedEngine):
    def finish_checkpoint(self) -> None:
        try:
            super().finish_checkpoint()
        except EngineError:
            return


_OPTIMIZERS = ("optimizers",)
MUTANTS = (
    mutant(FreezeIgnored, "frozen parameters are trained", "130", only=("freeze",)),
    mutant(FrozenNotPublished, "frozen parameters are not published", "130", only=("freeze",)),
    mutant(FreezePatternIgnored, "a pattern without effect is accepted", "131", only=("freeze",)),
    mutant(AnyOptimizer, "unknown optimizers, options and factors are accepted", "132", only=_OPTIMIZERS),
    mutant(DecayOfEverything, "norms and embeddings decay, too", "133", only=_OPTIMIZERS),
    mutant(LastFactorCounts, "the last pattern that is found counts", "133", only=_OPTIMIZERS),
    mutant(AverageBeforeTheStep, "the average is one step behind", "134", only=_OPTIMIZERS),
    mutant(AverageNotSaved, "a checkpoint does not hold the average", "134", only=_OPTIMIZERS),
    mutant(WeightsExportedForAverages, "the export of averages has the weights", "134", only=_OPTIMIZERS),
    mutant(MomentsOfOptimizerNotSaved, "a checkpoint does not hold the moments", "050 051 134 135", only=_OPTIMIZERS),
    mutant(NeverStops, "a gradient that is not finite names another sample", "136", only=_OPTIMIZERS),
    mutant(PlainLora, "rsLoRA has the scale of LoRA", "137", only=("lora_variants",)),
    mutant(AdapterPublishedForMerged, "the adapter is published where the merged model is due", "138",
           only=("lora_merged",)),
    mutant(MergedIntoTheBase, "publishing merged weights changes the base", "138", only=("lora_merged",)),
    mutant(BackgroundWithoutCopy, "a save in the background shares the memory of the weights", "139",
           only=("checkpoint_background",)),
    mutant(FailureInTheBackgroundIsLost, "a failure in the background is lost", "129",
           only=("checkpoint_background",)),
)  # fmt: skip
