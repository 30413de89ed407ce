"""A pass over a rank's micro-batches, whose losses, metrics and results are added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jackfield.abc.engine import EngineContext, EngineOutput, TokenOutput
from jackfield_engine_veomni.model import TokenModel
from jackfield_engine_veomni.rows import MicroBatch, RowBatch
from jackfield_engines.columns import TokenBuffer
from jackfield_engines.sums import Sums, zero_of


class Pass:
    """A pass that runs micro-batches of this rank's rows and sums their results."""

    def __init__(
        self,
        model: TokenModel,
        context: EngineContext,
        batch: RowBatch,
        function: Callable[..., Any] | None,
        *,
        backward: bool,
    ) -> None:
        self._model, self._function, self._backward = model, function, backward
        actor = context.role != "critic"
        self._want_entropy = bool(getattr(function, "needs_entropy", False)) and actor
        self._sums = Sums()
        lengths = torch.tensor([len(response) for response in batch.responses], dtype=torch.int64)
        kinds = {"log_probs": actor, "entropy": self._want_entropy, "values": context.model.value_head}
        self._buffers = {name: TokenBuffer(lengths) for name, wanted in kinds.items() if wanted}

    def micro_batch(self, micro: MicroBatch) -> None:
        """Run one micro-batch.

        Every output takes part in the backward pass, with a factor of 0 if the loss ignores it, so that all ranks
        reduce the same gradients.
        """
        results = self._model.results(micro, self._want_entropy)
        named = dict(zip(("log_probs", "entropy", "values"), results, strict=True))
        for name, tokens in named.items():
            if tokens is not None:
                self._buffers[name].add(torch.tensor(micro.rows), tokens)
        if self._function is None:
            return
        if named["log_probs"] is None:
            named["log_probs"] = torch.zeros_like(micro.labels, dtype=torch.float32)
        dense: dict[str, Any] = {
            name: None if tokens is None else micro.dense(tokens) for name, tokens in named.items()
        }
        loss, metrics = self._function(TokenOutput(**dense), micro.data())
        self._sums.add(loss, metrics)
        if self._backward:
            (loss + zero_of(*results)).backward()

    def idle(self, micro: MicroBatch) -> None:
        """Run the same collectives as the other ranks, with gradients of zero."""
        outputs = self._model.results(micro, self._want_entropy)
        if self._backward:
            zero_of(*outputs).backward()

    def output(self) -> EngineOutput:
        """Return all results in the order of the rows."""
        results = {name: buffer.nested() for name, buffer in self._buffers.items()}
        loss = None if self._function is None else self._sums.loss()
        return EngineOutput(loss=loss, metrics=self._sums.metrics(), **results)
