"""Mixtures of experts: the experts that generated each token, and the load-balancing loss.

Shapes: ``N`` tokens of a pass, ``l`` layers with experts, ``k`` experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from jackfield.abc.engine import ModelSpec
from jackfield.errors import EngineError
from jackfield_engine_fsdp.images import EXPERTS as NAME
from jackfield_huggingface.routers import Routers


class Experts:
    """The experts that a model's routers shall choose, and how even their load is."""

    def __init__(self, routers: Routers, *, replays: bool, factor: float) -> None:
        self.routers, self.replays, self.factor = routers, replays, factor

    @classmethod
    def of(cls, model: PreTrainedModel, spec: ModelSpec) -> Experts | None:
        """Return them if the settings need them; refuse a model without them (``config.invalid-value``)."""
        if not spec.router_replay and not spec.router_aux_loss:
            return None
        setting = "router_replay" if spec.router_replay else "router_aux_loss"
        routers = Routers.of(model)
        if routers is None or (spec.router_aux_loss and not routers.has_logits):
            known = "no routers that choose experts by topk" if routers is None else "routers without known logits"
            raise EngineError(
                f"{type(model).__name__} does not support model.{setting}",
                code="config.invalid-value",
                where=f"model.{setting}",
                expected="a mixture of experts whose routers the library records",
                found=known,
                fix=f"leave out model.{setting}",
            )
        return cls(routers, replays=spec.router_replay, factor=spec.router_aux_loss)

    def read(self, arrays: Sequence[dict[str, Any]], lengths: Sequence[int]) -> list[torch.Tensor | None]:
        """Return the experts of each row, int16 ``[tokens, l, k]``; None for a row that says nothing.

        ``lengths`` are those of prompt and response together. Experts that do not fit the model are refused
        (``engine.failed``).
        """
        found = [None if NAME not in each else torch.from_numpy(each[NAME].copy()) for each in arrays]
        for row, (experts, length) in enumerate(zip(found, lengths, strict=True)):
            if experts is None:
                continue
            shape = tuple(experts.shape)
            if experts.dtype.is_floating_point or len(shape) != 3 or shape[:2] != (length - 1, self.routers.layers):
                raise EngineError(
                    f"the experts of row {row} do not fit the model",
                    where=f"multi_modal_inputs, {NAME}",
                    expected=f"integers [{length - 1} tokens, {self.routers.layers} layers, experts per token]",
                    found=f"{experts.dtype} {list(shape)}",
                )
        return found

    def replay(self, rows: Sequence[torch.Tensor | None], owners: torch.Tensor, places: torch.Tensor) -> None:
        """Have the next passes use the experts of each token.

        ``owners`` int64 ``[N]`` are indices of ``rows``, -1 for padding; ``places`` int64 ``[N]`` are positions in a
        row. Tokens without known experts are routed freely.
        """
        sizes = {tuple(each.shape[1:]) for each in rows if each is not None}
        if not sizes or not self.replays:
            self.routers.replay(None)
            return
        if len(sizes) > 1:
            raise EngineError("rows have different numbers of experts per token", where=NAME, found=sorted(sizes))
        chosen = torch.full((len(owners), *sizes.pop()), -1, dtype=torch.int64, device=owners.device)
        for row, experts in enumerate(rows):
            if experts is not None:
                own = ((owners == row) & (places < len(experts))).nonzero().squeeze(1)
                chosen[own] = experts.to(owners.device).long()[places[own]]
        self.routers.replay(chosen)
