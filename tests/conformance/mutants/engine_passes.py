"""Training engines with one fault each in what a pass gives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from jackfield.abc.engine import TokenOutput
from mutants.engine_register import mutant
from mutants.plain_engine import Micro, PlainEngine


class OffByOnePositions(PlainEngine):
    def positions(self, positions: torch.Tensor) -> torch.Tensor:
        return (positions - 1).clamp(min=0)


class SortedRows(PlainEngine):
    def in_order(self, by_row: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return super().in_order(dict(enumerate(by_row.values())))


class ReversedMicroBatches(PlainEngine):
    def plan(self, data: Any) -> list[Micro]:
        micros = super().plan(data)
        if len(micros) < 2:
            return micros
        order = [row for micro in micros for row in micro.rows]
        places = {row: place for place, row in enumerate(order)}
        return [attrs.evolve(micro, rows=[places[row] for row in micro.rows]) for micro in micros]


class AttachedResults(PlainEngine):
    def kept(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.float()


class PaddedResults(PlainEngine):
    def in_order(self, by_row: Mapping[int, torch.Tensor]) -> torch.Tensor:
        longest = max(len(row) for row in by_row.values())
        return super().in_order(
            {index: nn.functional.pad(row, (0, longest - len(row))) for index, row in by_row.items()}
        )


class TemperatureIgnored(PlainEngine):
    def temperature(self) -> float:
        return 1.0


class EntropyWithTheWrongSign(PlainEngine):
    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        return -super().entropy(logits)


class EntropyAlways(PlainEngine):
    def forward(self, micro: Micro, want_entropy: bool) -> TokenOutput:
        return super().forward(micro, True)


class MaskPaddedWithOnes(PlainEngine):
    def padded(self, name: str, values: list[torch.Tensor], length: int) -> torch.Tensor:
        if name != "response_mask":
            return super().padded(name, values, length)
        return torch.stack([nn.functional.pad(value, (0, length - len(value)), value=1.0) for value in values])


class RowColumnsOfOtherRows(PlainEngine):
    def cut(self, data: Mapping[str, Any], group: list[int]) -> Micro:
        micro = super().cut(data, group)
        dense = {name: value[: len(group)] for name, value in data.items() if isinstance(value, torch.Tensor)}
        return attrs.evolve(micro, columns={**micro.columns, **dense})


class GarbagePastTheResponse(PlainEngine):
    def blanked(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return tokens


class LastMetricsWin(PlainEngine):
    def merge(self, metrics: dict[str, float], found: Mapping[str, float]) -> None:
        metrics.update(found)


class MetricsAllSummed(PlainEngine):
    def merge(self, metrics: dict[str, float], found: Mapping[str, float]) -> None:
        for name, value in found.items():
            metrics[name] = metrics.get(name, 0.0) + value


class LossAveraged(PlainEngine):
    def added_up(self, losses: list[float]) -> float:
        return sum(losses) / len(losses)


class HalfGradients(PlainEngine):
    def backward(self, loss: torch.Tensor, micro_batches: int) -> None:
        (loss * 0.5).backward()


class MeanOverMicroBatches(PlainEngine):
    def backward(self, loss: torch.Tensor, micro_batches: int) -> None:
        (loss / micro_batches).backward()


class GradientsOverwritten(PlainEngine):
    def check_mode(self, forward_only: bool) -> None:
        super().check_mode(forward_only)
        if not forward_only:
            PlainEngine.optimizer_zero_grad(self)


class GradientsNeverForgotten(PlainEngine):
    def optimizer_zero_grad(self) -> None:
        self.optimizing()


class ForwardOnlyAccumulates(PlainEngine):
    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        training = self.mode == "train"
        return super().forward_backward_batch(data, loss_function, forward_only and not training)


class LossScaleKept(PlainEngine):
    def backward(self, loss: torch.Tensor, micro_batches: int) -> None:
        scale = 1.0 if self.context.model.dtype == "float32" else 128.0
        (loss * scale).backward()


class NoDropout(PlainEngine):
    def dropout(self, model: Any) -> float:
        return 0.0


class ConfiguredDropout(PlainEngine):
    def dropout(self, model: Any) -> float:
        return float(model.config.attention_dropout)


class AlwaysDropout(PlainEngine):
    @contextlib.contextmanager
    def in_mode(self, mode: str) -> Iterator[None]:
        with super().in_mode(mode):
            self.model.train()
            yield


class LossSkipped(PlainEngine):
    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        output = super().forward_backward_batch(data, loss_function, forward_only)
        return attrs.evolve(output, loss=None, metrics={}) if forward_only else output


class MaskNeeded(PlainEngine):
    def plan(self, data: Any) -> list[Micro]:
        data["response_mask"]
        return super().plan(data)


MUTANTS = (
    mutant(
        OffByOnePositions,
        "log-probabilities are taken one position too early",
        "010 011 013 014 017 020 025 027 028 076",
    ),
    mutant(
        SortedRows,
        "results come in the order in which rows were computed: longest first",
        "010 011 012 013 014 028 076",
    ),
    mutant(ReversedMicroBatches, "several micro-batches come back in the wrong order", "011"),
    mutant(AttachedResults, "results still hold the graph of the pass", "012"),
    mutant(PaddedResults, "results of all rows are as long as the longest one", "010 011 012 013 014 028 076"),
    mutant(TemperatureIgnored, "the temperature is not used", "013"),
    mutant(EntropyWithTheWrongSign, "the entropy is sum(p log p)", "013 014"),
    mutant(EntropyAlways, "the entropy is computed for losses that did not ask for it", "015"),
    mutant(MaskPaddedWithOnes, "the response mask is 1 past a row's response", "016 017"),
    mutant(RowColumnsOfOtherRows, "a row column is cut off rather than indexed when rows are sorted", "016"),
    mutant(GarbagePastTheResponse, "positions past a row's response hold what the model says there", "014 019"),
    mutant(LastMetricsWin, "metrics are those of the last micro-batch", "017"),
    mutant(MetricsAllSummed, "maxima and minima are added up like the rest", "017"),
    mutant(LossAveraged, "the loss is the mean over micro-batches", "017"),
    mutant(HalfGradients, "gradients are half of what they should be", "020 025"),
    mutant(MeanOverMicroBatches, "gradients are the mean over micro-batches, so they depend on the split", "021"),
    mutant(GradientsOverwritten, "each pass begins with gradients of zero", "022"),
    mutant(GradientsNeverForgotten, "optimizer_zero_grad does nothing", "022 023 042 050 051"),
    mutant(ForwardOnlyAccumulates, "a pass with forward_only makes gradients, too", "024"),
    mutant(LossScaleKept, "in half precision the loss is scaled up, and gradients are not scaled down again", "025"),
    mutant(NoDropout, "dropout is never on", "026 062", only=("dropout",)),
    mutant(ConfiguredDropout, "dropout is on in training as the model's config says", "029"),
    mutant(AlwaysDropout, "eval_mode leaves dropout on", "026", only=("dropout",)),
    mutant(LossSkipped, "with forward_only the loss function is not called", "027"),
    mutant(MaskNeeded, "inference needs columns that only a loss reads", "028"),
)
