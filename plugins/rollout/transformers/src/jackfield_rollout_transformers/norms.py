"""Root-mean-square norms by torch's own operator: one call in the place of the library's chain of six."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def use_operator(model: nn.Module) -> int:
    """Give the model's norms torch's operator, where it computes what theirs does; return how many.

    A norm of another kind (with an offset of its weight, say) shows when both are tried, and stays as it is.
    """
    chosen = [module for module in model.modules() if _is_candidate(module)]
    alike = {kind: _agrees(next(one for one in chosen if type(one) is kind)) for kind in {type(one) for one in chosen}}
    replaced = [module for module in chosen if alike[type(module)]]
    for module in replaced:
        module.forward = MethodType(_forward, module)
    return len(replaced)


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    return torch.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def _is_candidate(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(getattr(module, "variance_epsilon", None), float)
        and isinstance(weight, Tensor)
        and weight.ndim == 1
        and weight.dtype == torch.float32  # in others the library rounds in between
        and len(list(module.parameters())) == 1
        and not list(module.buffers())
    )


@torch.no_grad()
def _agrees(module: nn.Module) -> bool:
    weight = module.weight
    assert isinstance(weight, Tensor)
    before = weight.clone()
    ramp = torch.linspace(-2.0, 3.0, 4 * len(weight), device=weight.device).view(4, -1)
    ramp *= torch.tensor([[1e-3], [0.1], [1.0], [30.0]], device=weight.device)
    try:
        weight.copy_(torch.linspace(0.5, 1.5, len(weight)))  # weights of one would hide an offset or an order
        return torch.allclose(module(ramp), _forward(module, ramp), rtol=1e-6, atol=1e-6)
    finally:
        weight.copy_(before)
