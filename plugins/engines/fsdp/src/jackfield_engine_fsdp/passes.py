"""A forward (and backward) pass over a rank's rows, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from jackfield.abc.engine import EngineOutput, TokenOutput
from jackfield_engine_fsdp.batching import MicroBatch, RowBatch, TokenBuffer
from jackfield_engine_fsdp.model import TokenModel


class Pass:
    """A pass that runs micro-batches of this rank's rows and sums their results."""

    def __init__(
        self, model: TokenModel, batch: RowBatch, function: Callable[..., Any] | None, *, backward: bool
    ) -> None:
        self._model = model
        self._batch = batch
        self._function = function
        self._backward = backward
        self._want_entropy = bool(getattr(function, "needs_entropy", False)) and model.with_log_probs
        self._loss: torch.Tensor | float = 0.0
        self._sums: dict[str, Any] = {}
        kinds = {
            "log_probs": model.with_log_probs,
            "entropy": self._want_entropy,
            "values": model.value_head is not None,
        }
        self._buffers = {name: TokenBuffer(batch.responses) for name, wanted in kinds.items() if wanted}

    def micro_batch(self, micro: MicroBatch, tie: bool) -> None:
        """Run one micro-batch.

        With ``tie`` every output takes part in the backward pass, with a factor of 0 if the loss ignores it, so that
        all ranks reduce the same gradients.
        """
        log_probs, entropy, values = self._forward(micro)
        for name, tokens in (("log_probs", log_probs), ("entropy", entropy), ("values", values)):
            if tokens is not None:
                self._buffers[name].add(micro.rows, tokens)
        if self._function is None:
            return
        token_output = TokenOutput(
            log_probs=micro.dense(
                torch.zeros_like(micro.labels, dtype=torch.float32) if log_probs is None else log_probs
            ),
            entropy=None if entropy is None else micro.dense(entropy),
            values=None if values is None else micro.dense(values),
        )
        loss, metrics = self._function(token_output, micro.data())
        self._add(loss, metrics)
        if self._backward:
            if tie or not loss.requires_grad:
                loss = loss + _nothing(log_probs, entropy, values)
            loss.backward()

    def idle(self, micro: MicroBatch) -> None:
        """Run the same collectives as the other ranks, with gradients of zero."""
        outputs = self._forward(micro)
        if self._backward:
            _nothing(*outputs).backward()

    def _forward(self, micro: MicroBatch) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        result = self._model(micro.input_ids, micro.positions, micro.labels, self._want_entropy)
        return result  # type: ignore[no-any-return]

    def _add(self, loss: Any, metrics: Any) -> None:
        """Add loss and metrics on the device; reading them here would wait for the device."""
        self._loss = self._loss + _detached(loss)
        for name, value in metrics.items():
            value = _detached(value)
            if name not in self._sums:
                self._sums[name] = value
            elif name.endswith("/max"):
                self._sums[name] = _larger(self._sums[name], value)
            elif name.endswith("/min"):
                self._sums[name] = -_larger(-self._sums[name], -value)
            else:
                self._sums[name] = self._sums[name] + value

    def output(self) -> EngineOutput:
        """Return all results in the order of the rows."""
        results = {name: buffer.nested() for name, buffer in self._buffers.items()}
        metrics = {name: float(value) for name, value in self._sums.items()}
        loss = None if self._function is None else float(self._loss)
        return EngineOutput(loss=loss, metrics=metrics, **results)


def _detached(value: Any) -> Any:
    return value.detach().double() if isinstance(value, torch.Tensor) else value


def _larger(one: Any, other: Any) -> Any:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.maximum(torch.as_tensor(one, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64))
    return max(one, other)


def _nothing(*outputs: torch.Tensor | None) -> torch.Tensor:
    """Return a zero that depends on all outputs."""
    return torch.stack([output.sum() for output in outputs if output is not None]).sum() * 0.0


def reshard(model: TokenModel) -> None:
    """Free gathered weights: without a backward pass FSDP keeps them even when the shards change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
