"""Faster norms and linear layers compute what the library's do, and replace nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from jackfield_engine_fsdp.operators import _Linear, speed_up_norms, speed_up_products, token_statistics


def norm(kind: type[nn.Module], size: int = 24) -> nn.Module:
    made = kind(size, eps=1e-6)
    with torch.no_grad():
        made.weight.copy_(torch.linspace(0.2, 2.0, size))
    return made


def test_values_and_gradients_equal_the_library_in_float64() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 2, 24, generator=generator)
    upstream = torch.randn(3, 5, 2, 24, generator=generator)
    fast, exact = norm(Qwen3RMSNorm), norm(Qwen3RMSNorm).double()
    assert speed_up_norms(nn.Sequential(fast)) == 1
    inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]

    weight = exact.weight  # the library's forward computes in float32, so the reference is written out
    mean = inputs[1].pow(2).mean(-1, keepdim=True)
    expected = weight * inputs[1] * torch.rsqrt(mean + 1e-6)
    expected.backward(upstream.double())
    found = fast(inputs[0])
    found.backward(upstream)

    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(inputs[0].grad.double(), inputs[1].grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fast.weight.grad.double(), weight.grad, rtol=1e-5, atol=1e-5)


def test_the_trial_leaves_the_weight_as_it_was() -> None:
    made = norm(Qwen3RMSNorm)
    before = made.weight.detach().clone()
    speed_up_norms(nn.Sequential(made))
    assert torch.equal(before, made.weight)


def test_a_frozen_weight_gets_no_gradient() -> None:
    made = norm(Qwen3RMSNorm)
    speed_up_norms(nn.Sequential(made))
    made.weight.requires_grad_(False)
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(2), requires_grad=True)
    made(x).sum().backward()
    assert made.weight.grad is None
    assert x.grad is not None


def test_norms_of_other_kinds_stay() -> None:
    class CentredRMSNorm(nn.Module):
        """Looks like the library's and computes something else."""

        def __init__(self, size: int, eps: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size))
            self.variance_epsilon = eps

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x - x.mean(-1, keepdim=True)
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    others = [norm(GemmaRMSNorm), norm(CentredRMSNorm), norm(Qwen3RMSNorm).bfloat16(), nn.LayerNorm(24)]
    assert speed_up_norms(nn.Sequential(*others)) == 0
    assert all("forward" not in vars(other) for other in others)


@pytest.mark.parametrize("frozen", [False, True])
def test_products_equal_those_in_float64(frozen: bool) -> None:
    """Linear layers of the kind that is used on CPUs of AMD, on any CPU; an adapter's layer has a frozen weight."""
    generator = torch.Generator().manual_seed(3)
    x, weight, upstream = (torch.randn(*shape, generator=generator) for shape in ((2, 7, 24), (9, 24), (2, 7, 9)))
    inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
    found = _Linear.apply(*inputs)
    found.backward(upstream)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs[0].grad.double(), upstream.double() @ weight.double(), rtol=1e-5, atol=1e-5)
    expected = torch.einsum("abm,abk->mk", upstream.double(), x.double())
    assert frozen == (inputs[1].grad is None)
    if not frozen:
        torch.testing.assert_close(inputs[1].grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_products_of_amd_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers without a bias, in float32, and only where the CPU says that it is AMD's."""
    layers = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4, bias=False).bfloat16()]
    for vendor, expected in (("GenuineIntel", [False] * 3), ("AuthenticAMD", [True, False, False])):
        monkeypatch.setattr(Path, "read_text", lambda *_, name=vendor: f"vendor_id : {name}")
        speed_up_products(nn.Sequential(*layers))
        assert expected == ["forward" in vars(layer) for layer in layers]


def test_log_probs_and_gradients_equal_float64_where_probabilities_underflow() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 50, generator=generator) * 3
    labels = torch.tensor([0, 7, 49, 3, 3, 8])
    logits[1, 7], logits[2, 49], logits[3, :] = -300.0, 300.0, -80.0
    upstream = torch.randn(6, generator=generator)
    inputs = [logits.clone().requires_grad_(), logits.double().requires_grad_()]

    expected = inputs[1].log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    expected.backward(upstream.double())
    found, _ = token_statistics(inputs[0], labels, 1.0, False, 1 << 20)
    found.backward(upstream)

    assert float(expected.detach().min()) < -290  # exp of it is 0 in float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inputs[0].grad.double(), inputs[1].grad, rtol=1e-5, atol=1e-6)
