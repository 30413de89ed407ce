"""More threads for passes on the CPU while replicas of the same process are idle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from jackfield_huggingface.generating import generating


class Threads:
    """The number of torch's threads for passes, set before and after each decoder layer: replicas finish in between."""

    def __init__(self, extra: int, layers: list[nn.Module]) -> None:
        self._extra = extra
        self._usual = torch.get_num_threads()
        for layer in layers if extra else ():
            layer.register_forward_hook(self._after)

    @contextmanager
    def adapting(self) -> Iterator[None]:
        """Run a pass on this thread, and restore the number of threads."""
        self._usual = torch.get_num_threads()
        self._adapt()
        try:
            yield
        finally:
            torch.set_num_threads(self._usual)

    def _adapt(self) -> None:
        torch.set_num_threads(self._usual + (0 if generating else self._extra))

    def _after(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._adapt()
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._adapt())
