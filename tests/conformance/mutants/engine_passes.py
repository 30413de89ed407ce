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

# -- passes ----------------------------------------------------------------------------------------------------------


@mutant(
    "ENG-010",
    "ENG-011",
    "ENG-013",
    "ENG-014",
    "ENG-017",
    "ENG-020",
    "ENG-025",
    "ENG-027",
    "ENG-028",
    "ENG-076",
)
class OffByOnePositions(PlainEngine):
    """Log-probabilities are taken one position too early."""

    def positions(self, positions: torch.Tensor) -> torch.Tensor:
        return (positions - 1).clamp(min=0)


@mutant("ENG-010", "ENG-011", "ENG-012", "ENG-013", "ENG-014", "ENG-028", "ENG-076")
class SortedRows(PlainEngine):
    """Results come in the order in which rows were computed: longest first."""

    def in_order(self, by_row: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return super().in_order(dict(enumerate(by_row.values())))


@mutant("ENG-011")
class ReversedMicroBatches(PlainEngine):
    """Several micro-batches come back in the wrong order."""

    def plan(self, data: Any) -> list[Micro]:
        micros = super().plan(data)
        if len(micros) < 2:
            return micros
        order = [row for micro in micros for row in micro.rows]
        places = {row: place for place, row in enumerate(order)}
        return [attrs.evolve(micro, rows=[places[row] for row in micro.rows]) for micro in micros]


@mutant("ENG-012")
class AttachedResults(PlainEngine):
    """Results still hold the graph of the pass."""

    def kept(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.float()


@mutant("ENG-010", "ENG-011", "ENG-012", "ENG-013", "ENG-014", "ENG-028", "ENG-076")
class PaddedResults(PlainEngine):
    """Results of all rows are as long as the longest one."""

    def in_order(self, by_row: Mapping[int, torch.Tensor]) -> torch.Tensor:
        longest = max(len(row) for row in by_row.values())
        return super().in_order(
            {index: nn.functional.pad(row, (0, longest - len(row))) for index, row in by_row.items()}
        )


@mutant("ENG-013")
class TemperatureIgnored(PlainEngine):
    """The temperature is not used."""

    def temperature(self) -> float:
        return 1.0


@mutant("ENG-013", "ENG-014")
class EntropyWithTheWrongSign(PlainEngine):
    """The entropy is sum(p log p)."""

    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        return -super().entropy(logits)


@mutant("ENG-015")
class EntropyAlways(PlainEngine):
    """The entropy is computed for losses that did not ask for it."""

    def forward(self, micro: Micro, want_entropy: bool) -> TokenOutput:
        return super().forward(micro, True)


@mutant("ENG-016", "ENG-017")
class MaskPaddedWithOnes(PlainEngine):
    """The response mask is 1 past a row's response."""

    def padded(self, name: str, values: list[torch.Tensor], length: int) -> torch.Tensor:
        if name != "response_mask":
            return super().padded(name, values, length)
        return torch.stack([nn.functional.pad(value, (0, length - len(value)), value=1.0) for value in values])


@mutant("ENG-016")
class RowColumnsOfOtherRows(PlainEngine):
    """A row column is cut off rather than indexed when rows are sorted."""

    def cut(self, data: Mapping[str, Any], group: list[int]) -> Micro:
        micro = super().cut(data, group)
        dense = {name: value[: len(group)] for name, value in data.items() if isinstance(value, torch.Tensor)}
        return attrs.evolve(micro, columns={**micro.columns, **dense})


@mutant("ENG-014", "ENG-019")
class GarbagePastTheResponse(PlainEngine):
    """Positions past a row's response hold what the model says there."""

    def blanked(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return tokens


@mutant("ENG-017")
class LastMetricsWin(PlainEngine):
    """Metrics are those of the last micro-batch."""

    def merge(self, metrics: dict[str, float], found: Mapping[str, float]) -> None:
        metrics.update(found)


@mutant("ENG-017")
class MetricsAllSummed(PlainEngine):
    """Maxima and minima are added up like the rest."""

    def merge(self, metrics: dict[str, float], found: Mapping[str, float]) -> None:
        for name, value in found.items():
            metrics[name] = metrics.get(name, 0.0) + value


@mutant("ENG-017")
class LossAveraged(PlainEngine):
    """The loss is the mean over micro-batches."""

    def added_up(self, losses: list[float]) -> float:
        return sum(losses) / len(losses)


@mutant("ENG-020", "ENG-025")
class HalfGradients(PlainEngine):
    """Gradients are half of what they should be."""

    def backward(self, loss: torch.Tensor, micro_batches: int) -> None:
        (loss * 0.5).backward()


@mutant("ENG-021")
class MeanOverMicroBatches(PlainEngine):
    """Gradients are the mean over micro-batches, so they depend on the split."""

    def backward(self, loss: torch.Tensor, micro_batches: int) -> None:
        (loss / micro_batches).backward()


@mutant("ENG-022")
class GradientsOverwritten(PlainEngine):
    """Each pass begins with gradients of zero."""

    def check_mode(self, forward_only: bool) -> None:
        super().check_mode(forward_only)
        if not forward_only:
            PlainEngine.optimizer_zero_grad(self)


@mutant("ENG-022", "ENG-023", "ENG-042", "ENG-050", "ENG-051")
class GradientsNeverForgotten(PlainEngine):
    """optimizer_zero_grad does nothing."""

    def optimizer_zero_grad(self) -> None:
        self.optimizing()


@mutant("ENG-024")
class ForwardOnlyAccumulates(PlainEngine):
    """A pass with forward_only makes gradients, too."""

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        training = self.mode == "train"
        return super().forward_backward_batch(data, loss_function, forward_only and not training)


@mutant("ENG-025")
class LossScaleKept(PlainEngine):
    """In half precision the loss is scaled up, and gradients are not scaled down again."""

    def backward(self, loss: torch.Tensor, micro_batches: int) -> None:
        scale = 1.0 if self.context.model.dtype == "float32" else 128.0
        (loss * scale).backward()


@mutant("ENG-026", "ENG-062", only=("dropout",))
class NoDropout(PlainEngine):
    """Dropout is never on."""

    def dropout(self, model: Any) -> float:
        return 0.0


@mutant("ENG-029")
class ConfiguredDropout(PlainEngine):
    """Dropout is on in training as the model's config says."""

    def dropout(self, model: Any) -> float:
        return float(model.config.attention_dropout)


@mutant("ENG-026", only=("dropout",))
class AlwaysDropout(PlainEngine):
    """eval_mode leaves dropout on."""

    @contextlib.contextmanager
    def in_mode(self, mode: str) -> Iterator[None]:
        with super().in_mode(mode):
            self.model.train()
            yield


@mutant("ENG-027")
class LossSkipped(PlainEngine):
    """With forward_only the loss function is not called."""

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        output = super().forward_backward_batch(data, loss_function, forward_only)
        return attrs.evolve(output, loss=None, metrics={}) if forward_only else output


@mutant("ENG-028")
class MaskNeeded(PlainEngine):
    """Inference needs columns that only a loss reads."""

    def plan(self, data: Any) -> list[Micro]:
        data["response_mask"]
        return super().plan(data)
