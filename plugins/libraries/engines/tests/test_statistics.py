"""Log-probabilities and entropies of tokens beside those of all logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jackfield_engines.output_layer import token_statistics


@pytest.mark.parametrize("chunk", [1, 30, 10_000])
@pytest.mark.parametrize("want_entropy", [True, False])
def test_token_statistics_are_those_of_all_logits(chunk: int, want_entropy: bool) -> None:
    """Values and gradients, in pieces of one token, of some, and of all."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, 6, generator=generator, dtype=torch.float64) for size in (7, 11))
    labels = torch.randint(0, 11, (7,), generator=generator)
    factors = torch.randn(2, 7, generator=generator, dtype=torch.float64)

    def graded(results: Any, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        log_probs, entropy = results
        total = (log_probs.double() * factors[0]).sum()
        if want_entropy:
            total = total + (entropy.double() * factors[1]).sum()
        return (log_probs.detach(), *torch.autograd.grad(total, inputs))

    exact = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    every = (exact[0] @ exact[1].mT / 1.7).log_softmax(-1)
    wanted = graded((every.gather(1, labels[:, None]).squeeze(1), -(every.exp() * every).sum(-1)), exact)
    single = [each.detach().float().requires_grad_() for each in exact]
    results = token_statistics(*single, labels, temperature=1.7, want_entropy=want_entropy, chunk=chunk)
    for one, other in zip(wanted, graded(results, single), strict=True):
        torch.testing.assert_close(one, other.double(), rtol=1e-4, atol=1e-5)
