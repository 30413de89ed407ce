"""The exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from jackfield_engine_fsdp.trained import local


class Averages:
    """Averages in float32, sharded like their parameters: ``average = decay * average + (1 - decay) * weights``."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters, self._decay = parameters, decay
        self.parts = {name: local(each).detach().float().clone() for name, each in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights of one more step."""
        for name, part in self.parts.items():
            part.lerp_(local(self._parameters[name]).to(part.device).float(), 1.0 - self._decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again from the weights."""
        for name, part in self.parts.items():
            part.copy_(local(self._parameters[name]))

    def move(self, device: torch.device) -> None:
        """Move the averages."""
        self.parts = {name: part.to(device) for name, part in self.parts.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the weights by their averages inside the block."""
        before = {name: local(each).detach().clone() for name, each in self._parameters.items()}
        try:
            self._write(self.parts)
            yield
        finally:
            self._write(before)

    @torch.no_grad()
    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            local(self._parameters[name]).copy_(value)
