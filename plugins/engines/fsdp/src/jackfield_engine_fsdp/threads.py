"""More threads for passes while replicas of the same process are idle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from jackfield_huggingface.generating import is_idle


class Threads:
    """The number of torch's threads that passes of an engine use on the CPU.

    It is set before and after each decoder layer, forward and backward, because the replicas often finish in the middle
    of a pass that began when they did. Autograd computes on the calling thread, whose number this is.
    """

    def __init__(self, extra: int) -> None:
        self._extra = extra
        self._usual: int | None = None  #: None outside of passes

    def watch(self, layers: list[nn.Module]) -> None:
        """Have passes through ``layers`` adapt."""
        for layer in layers if self._extra else ():
            layer.register_forward_hook(self._after)

    @contextmanager
    def adapting(self) -> Iterator[None]:
        """Run a pass on this thread, and restore the number of threads."""
        if not self._extra:
            yield
            return
        self._usual = torch.get_num_threads()
        self._adapt()
        try:
            yield
        finally:
            torch.set_num_threads(self._usual)
            self._usual = None

    def _adapt(self) -> None:
        if self._usual is not None:
            torch.set_num_threads(self._usual + (self._extra if is_idle() else 0))

    def _after(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._adapt()
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._adapt())
