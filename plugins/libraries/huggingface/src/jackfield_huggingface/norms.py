"""Replace the forward of a loaded model's root-mean-square norms by an equivalent one."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn


def replace_norms(model: nn.Module, forward: Callable[[Any, torch.Tensor], torch.Tensor], tolerance: float) -> int:
    """Set ``forward`` on the norms of the model for which it computes the same; return how many.

    Both forwards are compared, to a relative and absolute tolerance; a norm of another kind (say, with an offset of
    its weight) is kept. Only norms in float32 are replaced: in other dtypes the library rounds in between.
    """
    chosen = [module for module in model.modules() if _is_candidate(module)]
    tried = {type(module): module for module in reversed(chosen)}
    alike = {kind: _agrees(module, forward, tolerance) for kind, module in tried.items()}
    replaced = [module for module in chosen if alike[type(module)]]
    for module in replaced:
        module.forward = MethodType(forward, module)
    return len(replaced)


def _is_candidate(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(getattr(module, "variance_epsilon", None), float)
        and isinstance(weight, torch.Tensor)
        and weight.ndim == 1
        and weight.dtype == torch.float32
        and len(list(module.parameters())) == 1
        and not list(module.buffers())
    )


@torch.no_grad()
def _agrees(module: nn.Module, forward: Callable[[Any, torch.Tensor], torch.Tensor], tolerance: float) -> bool:
    weight: Any = module.weight
    before = weight.clone()
    ramp = torch.linspace(-2.0, 3.0, 4 * len(weight), device=weight.device).view(4, -1)
    ramp *= torch.tensor([[1e-3], [0.1], [1.0], [30.0]], device=weight.device)
    try:
        weight.copy_(torch.linspace(0.5, 1.5, len(weight)))  # weights of 1 would hide an offset or an order
        return torch.allclose(module(ramp), forward(module, ramp), rtol=tolerance, atol=tolerance)
    finally:
        weight.copy_(before)
