"""The place of model, gradients and optimizer state, and their moves, by storage: views stay views."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from jackfield_engine_megatron.architecture import invalid
from jackfield_engine_megatron.optimization import Optimization

_PARTS = ("model", "optimizer", "grad")


class Placement:
    """What of the state is on the device, and what was moved to the CPU. On a CPU nothing moves."""

    def __init__(self, chunks: list[Any], optimization: Optimization | None, device: torch.device) -> None:
        self._chunks, self._optimization, self._device = chunks, optimization, device
        self._aside: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by part: device tensor, copy

    def move(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move the chosen state to the CPU or the engine's own device, without changing a bit."""
        own = {self._device.type, str(self._device)}
        if device not in {"cpu", *own}:
            expected = " or ".join(sorted({"cpu", str(self._device)}))
            raise invalid("a foreign device", where="device", expected=expected, found=device)
        for part, chosen in zip(_PARTS, (model, optimizer, grad), strict=True):
            if chosen and self._device.type != "cpu":
                (self._restore if device in own else self._put_aside)(part)

    @contextmanager
    def on_device(self, *, training: bool) -> Iterator[None]:
        """Have the model, and in training everything, on the device inside the block."""
        moved = [part for part in (_PARTS if training else _PARTS[:1]) if part in self._aside]
        for part in moved:
            self._restore(part)
        try:
            yield
        finally:
            for part in moved:
                self._put_aside(part)

    def _tensors(self, part: str) -> Iterator[torch.Tensor]:
        parameters = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        optimization = self._optimization
        if part == "model":
            yield from (parameter.data for parameter in parameters)
        elif optimization is not None and part == "grad":
            yield from optimization.gradient_buffers()
        elif optimization is not None:
            models = {parameter.data.untyped_storage().data_ptr() for parameter in parameters}
            for parameter in parameters:
                states = optimization.inner.state(parameter).values()
                yield from (each for each in states if each.untyped_storage().data_ptr() not in models)

    def _put_aside(self, part: str) -> None:
        if part in self._aside:
            return
        aside, seen = [], set[int]()
        for tensor in self._tensors(part):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                aside.append((whole, whole.cpu()))
        for whole, _ in aside:
            whole.untyped_storage().resize_(0)
        self._aside[part] = aside

    def _restore(self, part: str) -> None:
        for whole, copy in self._aside.pop(part, []):
            whole.untyped_storage().resize_(copy.nbytes)
            whole.copy_(copy)
