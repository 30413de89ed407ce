"""A small correct training engine of mixtures of experts, and its mutants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from jackfield.abc.engine import EngineOutput, LossFunction, TokenOutput
from jackfield.sdk.arrays import unpack
from jackfield.sdk.jagged import rows as split_rows
from jackfield_huggingface.routers import Routers
from mutants.engine_register import mutant
from mutants.plain_engine import Micro, PlainEngine

_REPLAY, _BALANCE = ("router_replay",), ("router_aux_loss",)


class MixingEngine(PlainEngine):
    """Each row's experts, in the order of a micro-batch's rows."""

    routers: Routers | None = None
    given: list[torch.Tensor | None]
    count = 1
    balance: torch.Tensor | None = None

    def load(self) -> None:
        super().load()
        spec = self.context.model
        if spec.router_replay or spec.router_aux_loss:
            self.routers = Routers.of(self.model)

    def close(self) -> None:
        if self.routers is not None:  # another engine gets the model
            self.routers.replay(None)
        super().close()

    def plan(self, data: TensorDict) -> list[Micro]:
        self.given, self.count = [], int(data.batch_size[0])
        if "multi_modal_inputs" in data.keys():  # noqa: SIM118, it is not a mapping
            arrays = [unpack(row.numpy().tobytes()) for row in split_rows(data["multi_modal_inputs"])]
            self.given = [self.experts(each) for each in arrays]
            data = data.exclude("multi_modal_inputs")
        return super().plan(data)

    def experts(self, arrays: Mapping[str, Any]) -> torch.Tensor | None:
        return torch.from_numpy(arrays["routed_experts"].copy()) if arrays else None

    def forward(self, micro: Micro, want_entropy: bool) -> TokenOutput:
        if self.routers is None:
            return super().forward(micro, want_entropy)
        shape = micro.input_ids.shape
        lengths = [int(row[mask].max()) + 1 for row, mask in zip(micro.positions, micro.mask, strict=True)]
        self.routers.replay(self.replayed(micro, shape))
        if not self.context.model.router_aux_loss:
            return super().forward(micro, want_entropy)
        rows = torch.full(shape, -1)
        for row, length in enumerate(lengths):
            rows[row, :length] = row
        with self.routers.keeping_logits():
            output = super().forward(micro, want_entropy)
            self.balance = self.share(self.routers.balance(rows.flatten(), shape[0]))
        return output

    def replayed(self, micro: Micro, shape: Any) -> torch.Tensor | None:
        found = [self.given[row] if self.given else None for row in micro.rows]
        known = [each for each in found if each is not None]
        if not known:
            return None
        chosen = torch.full((*shape, *known[0].shape[1:]), -1, dtype=torch.int64)
        for row, each in enumerate(found):
            if each is not None:
                chosen[row, : len(each)] = each.long()
        return chosen.flatten(0, 1)

    def share(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.sum() / self.count

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        factor = self.context.model.router_aux_loss
        if loss_function is None or not factor:
            return super().forward_backward_batch(data, loss_function, forward_only)

        def with_balance(output: TokenOutput, columns: Any) -> tuple[Any, Mapping[str, Any]]:
            loss, metrics = loss_function(output, columns)
            assert self.balance is not None, "the pass has kept it"
            return loss + factor * self.balance, {**metrics, "router_aux_loss": float(self.balance)}

        return super().forward_backward_batch(data, with_balance, forward_only)


class TrainsOnItsOwnChoice(MixingEngine):
    def replayed(self, micro: Micro, shape: Any) -> torch.Tensor | None:
        return None


class KeepsEarlierExperts(MixingEngine):
    last: list[torch.Tensor | None] | None = None

    def plan(self, data: TensorDict) -> list[Micro]:
        micros = super().plan(data)
        self.given = self.last = self.given or self.last or []
        return micros


class SwapsRows(MixingEngine):
    def plan(self, data: TensorDict) -> list[Micro]:
        micros = super().plan(data)
        self.given[:2] = self.given[:2][::-1]
        return micros


class SkipsTheFirstLayer(MixingEngine):
    def experts(self, arrays: Mapping[str, Any]) -> torch.Tensor | None:
        found = super().experts(arrays)
        if found is not None:
            found[:, 0] = -1
        return found


class BalancesEachMicroBatch(MixingEngine):
    def share(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.mean()


class BalancesWithoutGradients(MixingEngine):
    def share(self, losses: torch.Tensor) -> torch.Tensor:
        return super().share(losses).detach()


MUTANTS = [
    mutant(TrainsOnItsOwnChoice, "experts that were given are not used", "140", only=_REPLAY),
    mutant(KeepsEarlierExperts, "the next batch uses the experts of the last one", "140", only=_REPLAY),
    mutant(SwapsRows, "rows have the experts of other rows", "140", only=_REPLAY),
    mutant(SkipsTheFirstLayer, "the first layer chooses its experts itself", "140", only=_REPLAY),
    mutant(BalancesEachMicroBatch, "each micro-batch has a whole load-balancing loss", "141", only=_BALANCE),
    mutant(BalancesWithoutGradients, "the load-balancing loss has no gradients", "141", only=_BALANCE),
]
