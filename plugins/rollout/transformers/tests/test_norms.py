"""Norms by torch's operator: only where they are the library's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jackfield_rollout_transformers.model import use_operator


class RMSNorm(nn.Module):
    """As most models have it."""

    offset = 0.0

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 2.0, 16).to(dtype))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * normed.to(hidden_states.dtype)


class OffsetRMSNorm(RMSNorm):
    """As Gemma has it."""

    offset = 1.0


def test_a_model_is_the_same_with_the_operator(make_model: Any) -> None:
    model = make_model(0).eval()
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        before = model(tokens).logits
        assert use_operator(model) == sum(type(module).__name__.endswith("RMSNorm") for module in model.modules()) > 0
        torch.testing.assert_close(before, model(tokens).logits, rtol=0, atol=1e-6)


def test_the_operator_sees_weights_that_are_loaded_later() -> None:
    norm, x = RMSNorm(), torch.randn(3, 16)
    expected = 2 * norm(x)
    assert 1 == use_operator(norm)
    with torch.no_grad():
        norm.weight.mul_(2)
    torch.testing.assert_close(expected, norm(x))


def test_another_norm_stays_as_it_is() -> None:
    model = nn.Sequential(RMSNorm(), OffsetRMSNorm(), RMSNorm(torch.bfloat16))
    weights = [norm.weight.clone() for norm in model]
    assert 1 == use_operator(model)
    assert all(torch.equal(before, norm.weight) for before, norm in zip(weights, model, strict=True))
