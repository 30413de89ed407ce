"""Weights as an FP8 server would have them: rounded through float8_e4m3fn with one scale per tensor, and back.

A simulation: the parameter stays in bfloat16, with the values that a quantised one stands for. It takes no less memory
and no less time; it shows what a run makes of the rounding, on any device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def rounded(tensor: Tensor) -> Tensor:
    """The nearest values of ``float8_e4m3fn`` times ``scale``, the largest magnitude over 448; float32, same shape."""
    values = tensor.detach().float()
    largest = values.abs().max() if values.numel() else values.new_zeros(())
    scale = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
    return (values / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float() * scale


def rounded_names(module: Any) -> frozenset[str]:
    """The weights that FP8 servers quantise: those of linear layers, but for the output layer."""
    head = module.get_output_embeddings()
    return frozenset(
        f"{name}.weight" for name, each in module.named_modules() if isinstance(each, nn.Linear) and each is not head
    )
