"""Losses and metrics of a pass, added up over its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Sums:
    """The sums of losses and metrics, in float64 on their device: reading them earlier would wait for the device.

    Metrics whose name ends with ``/max`` or ``/min`` keep the largest or smallest value.
    """

    def __init__(self) -> None:
        self._loss: torch.Tensor | float = 0.0
        self._metrics: dict[str, Any] = {}

    def add(self, loss: Any, metrics: Mapping[str, Any]) -> None:
        """Add the results of one micro-batch."""
        self._loss = self._loss + _detached(loss)
        for name, value in metrics.items():
            value = _detached(value)
            if name not in self._metrics:
                self._metrics[name] = value
            elif name.endswith("/max"):
                self._metrics[name] = _larger(self._metrics[name], value)
            elif name.endswith("/min"):
                self._metrics[name] = -_larger(-self._metrics[name], -value)
            else:
                self._metrics[name] = self._metrics[name] + value

    def loss(self) -> float:
        """Return the sum of the losses."""
        return float(self._loss)

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name."""
        return {name: float(value) for name, value in self._metrics.items()}


def _detached(value: Any) -> Any:
    return value.detach().double() if isinstance(value, torch.Tensor) else value


def _larger(one: Any, other: Any) -> Any:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.maximum(torch.as_tensor(one, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64))
    return max(one, other)


def zero_of(*outputs: torch.Tensor | None) -> torch.Tensor:
    """Return a zero that depends on all outputs, so that every rank reduces the same gradients."""
    return torch.stack([output.sum() for output in outputs if output is not None]).sum() * 0.0
