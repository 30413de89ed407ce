"""Root-mean-square norms in few passes over memory, for CPUs.

The library's norm is a chain of operations, each with a pass over memory, a backward pass of its own and tensors that
are kept for it. This one makes three passes forward and keeps its input.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

_TOLERANCE = 1e-5


class _RMSNorm(torch.autograd.Function):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, in the dtype of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        result: torch.Tensor = (x * scale).mul_(weight)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (gradient,) = gradients
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        of_weight = of_x = None
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * normed).flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            of_normed = gradient * weight
            along = torch.linalg.vecdot(of_normed, normed).unsqueeze(-1).div_(x.shape[-1])
            of_x = of_normed.sub_(normed.mul_(along)).mul_(scale)
        return of_x, of_weight, None


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _RMSNorm.apply(  # type: ignore[no-untyped-call]
        hidden_states, self.weight, self.variance_epsilon
    )
    return result


def speed_up(model: nn.Module) -> int:
    """Give the model's norms a faster forward, where it computes what theirs does; return how many.

    A norm of another kind (with an offset of its weight, say) shows when both are tried, and stays as it is.
    """
    chosen = [module for module in model.modules() if _is_candidate(module)]
    alike = {kind: _agrees(next(m for m in chosen if type(m) is kind)) for kind in {type(m) for m in chosen}}
    replaced = [module for module in chosen if alike[type(module)]]
    for module in replaced:
        module.forward = MethodType(_forward, module)
    return len(replaced)


def _is_candidate(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(getattr(module, "variance_epsilon", None), float)
        and isinstance(weight, torch.Tensor)
        and weight.ndim == 1
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and len(list(module.parameters())) == 1
        and not list(module.buffers())
    )


@torch.no_grad()
def _agrees(module: nn.Module) -> bool:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    before = weight.clone()
    ramp = torch.linspace(-2.0, 3.0, 4 * len(weight)).view(4, len(weight)) * torch.tensor(
        [[1e-3], [0.1], [1.0], [30.0]]
    )
    try:
        weight.copy_(torch.linspace(0.5, 1.5, len(weight)))  # weights of one would hide an offset or an order
        return torch.allclose(module(ramp), _forward(module, ramp), rtol=_TOLERANCE, atol=_TOLERANCE)
    finally:
        weight.copy_(before)
