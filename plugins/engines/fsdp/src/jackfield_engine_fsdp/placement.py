"""Where weights, gradients and optimizer state lie: on the engine's device, or on the CPU to make room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from jackfield.errors import EngineError
from jackfield_engine_fsdp.model import TokenModel
from jackfield_engine_fsdp.optimization import Optimization


class Placement:
    """Moves the sharded state and remembers where it is.

    Args:
        model: the sharded model.
        optimization: its optimizer, or None.
        device: the engine's own device.
        streamed: FSDP keeps the state on the CPU by itself, so nothing is to move.
    """

    def __init__(
        self, model: TokenModel, optimization: Optimization | None, device: torch.device, *, streamed: bool
    ) -> None:
        self._model = model
        self._optimization = optimization
        self._device = device
        self._streamed = streamed and device.type != "cpu"
        self._at = {"model": device, "optimizer": device, "grad": device}
        self._aside: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients that are not where their parameters are

    def move(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move the chosen state; every bit of it stays the same.

        Raises:
            EngineError: ``config.invalid-value`` for a device that is neither the CPU nor the engine's own.
        """
        try:
            target = torch.device(device)
        except RuntimeError:
            target = torch.device("meta")
        if target.type == self._device.type and target.index in (None, self._device.index):
            target = self._device
        elif target.type != "cpu":
            raise EngineError(
                f"the engine cannot move to {device!r}",
                code="config.invalid-value",
                where="device",
                expected=f"cpu or {self._device}",
                found=repr(device),
            )
        chosen = {"model": model, "optimizer": optimizer, "grad": grad}
        if not self._streamed:
            self._move({part: target for part, wanted in chosen.items() if wanted})

    @contextmanager
    def on_device(self, training: bool) -> Iterator[None]:
        """Inside, the weights (and, to train, the rest) are on the device; afterwards everything is where it was."""
        before = dict(self._at)
        parts = ("model", "optimizer", "grad") if training else ("model",)
        self._move(dict.fromkeys(parts, self._device))
        try:
            yield
        finally:
            self._move({part: before[part] for part in parts})

    def _move(self, targets: dict[str, torch.device]) -> None:
        targets = {part: device for part, device in targets.items() if device != self._at[part]}
        if not targets:
            return
        if "optimizer" in targets and self._optimization is not None:
            self._optimization.move(targets["optimizer"])
        if "model" in targets or "grad" in targets:
            self._move_model(targets)
        self._at |= targets
        if self._device.type == "cuda" and torch.device("cpu") in targets.values():
            torch.cuda.empty_cache()

    def _move_model(self, targets: dict[str, torch.device]) -> None:
        model_at = targets.get("model", self._at["model"])
        grad_at = targets.get("grad", self._at["grad"])
        gradients = self._aside + [(p, p.grad) for p in self._model.parameters() if p.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        if "model" in targets:
            self._model.to(model_at)
        moved = [(parameter, gradient.to(grad_at)) for parameter, gradient in gradients]
        self._aside = moved if model_at != grad_at else []
        if model_at == grad_at:
            for parameter, gradient in moved:
                parameter.grad = gradient
